"""Which implementation reads a group's sealed pages, and the way to it.

Chosen once, when a cache is made, because it decides what a page is: the TPU kernel wants a page of
one int32 array (`pallas_kernels/pages.py`), plain XLA and the GPU kernel want the codec's own
leaves. What is chosen is static, is shown by `cache_report`, and never changes silently later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax import codecs
from kvjax.cache.gpu_leaf import gpu_leaf
from kvjax.cache.packed import in_own_space, page_format
from kvjax.cache.spec import GroupSpec
from kvjax.config import TPU_GENERATIONS, ModelConfig, RopeConfig, need
from kvjax.layers.rope import attention_factor, inverse_frequencies
from pallas_kernels.devices import on_tpu
from pallas_kernels.paged_attention import gpu, paged_attention, unturnable
from pallas_kernels.softmax import Partial
from pallas_kernels.turn import Turn

if TYPE_CHECKING:
    from kvjax.cache.attend import Chunk, LayerView

#: Queries of all KV heads of a row up to which the kernels are called; a longer chunk is bound by
#: its products, and plain XLA takes it tile by tile.
MOST_QUERIES = 1024


def with_kernel(spec: GroupSpec, model: ModelConfig, wanted: str) -> GroupSpec:
    """The spec with its implementation chosen. A TPU's name makes that TPU's pages, also where no
    TPU is: there plain XLA reads them. Raises ValueError, with the reason, where the implementation
    asked for by name does not take the group."""
    if not spec.pages_per_row:
        return spec
    if wanted == "auto":
        return _auto(spec, model)
    try:
        if wanted in TPU_GENERATIONS:
            return _tpu(spec, model, TPU_GENERATIONS[wanted])
        return _gpu(spec) if wanted == "gpu" else spec
    except NotImplementedError as error:
        need(
            False,
            "kernel",
            f"codecs and shapes that the {wanted} kernel takes",
            f"layers {spec.layers[0]}-{spec.layers[-1]}: {error}",
            "Take kernel='auto', or another codec.",
        )
        raise


def without_kernel(spec: GroupSpec, why: str) -> GroupSpec:
    """The spec read by plain XLA, for a reason that is not its own."""
    if not spec.pages_per_row:
        return spec
    return dataclasses.replace(spec, kernel="xla", packed=None, why_xla=why)


def _auto(spec: GroupSpec, model: ModelConfig) -> GroupSpec:
    platform = jax.default_backend()
    if platform == "tpu":
        try:
            _need(spec.dtype == jnp.bfloat16, f"dtype: it multiplies bfloat16, got {spec.dtype}.")
            return _tpu(spec, model, _generation())
        except NotImplementedError as error:
            return without_kernel(spec, str(error))
    if platform == "gpu":
        return without_kernel(spec, "the GPU kernel is taken when asked for by name")
    return without_kernel(spec, f"no kernel for {platform}")


def _generation() -> int:
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.get_tpu_info().generation


def _tpu(spec: GroupSpec, model: ModelConfig, generation: int) -> GroupSpec:
    _check(spec)
    if spec.turns:
        _check_turning(spec, model)
    packed = page_format(spec, generation=generation)
    if spec.turns:
        reason = unturnable(packed, spec.head_dim // 2)
        _need(not reason, reason)
    return dataclasses.replace(spec, kernel="tpu", packed=packed)


def _check_turning(spec: GroupSpec, model: ModelConfig) -> None:
    """Raises NotImplementedError where the TPU kernel cannot turn a group's keys."""
    _need(
        in_own_space(spec.k_codec),
        f"turned keys: {codecs.name_of(spec.k_codec)} has them in a basis of its own.",
    )
    _need(
        spec.kept is None,
        "turned keys: each head of an evicted prompt has positions of its own, not page by page.",
    )
    _need(not model.rope_interleave, "turned keys: the kernel turns halves, not neighbours.")
    ropes = [model.rope_of(layer) for layer in range(model.num_layers)]
    _need(
        all(rope is None or rope.type != "dynamic" for rope in ropes),
        "turned keys: frequencies of rope.type='dynamic' differ by row.",
    )


def _gpu(spec: GroupSpec) -> GroupSpec:
    _check(spec)
    _need(not spec.turns, "turned keys: the GPU kernel does not turn them.")
    _need(not spec.latent, "latent attention: the GPU kernel does not read it.")
    _need(spec.window is None, "window: the GPU kernel has none.")
    _need(gpu.available(), "it needs jax-triton: pip install kvjax[cuda].")
    leaves = (gpu_leaf(spec.k_codec, spec.head_dim), gpu_leaf(spec.v_codec, spec.v_head_dim))
    reason = gpu.unsupported(*leaves, page_size=spec.page_size)
    _need(not reason, reason)
    return dataclasses.replace(spec, kernel="gpu")


def _check(spec: GroupSpec) -> None:
    """Raises NotImplementedError on what no kernel takes."""
    _need(not spec.heavy, "evict: no kernel reads slots of single tokens.")


def _need(ok: bool, reason: str) -> None:
    if not ok:
        raise NotImplementedError(reason)


def takes(spec: GroupSpec, chunk: Chunk) -> bool:
    """Whether this call's queries go to the group's kernel."""
    _, A, K, G, _ = chunk.q.shape
    if spec.kernel == "xla" or K * G * A > MOST_QUERIES:
        return False
    if chunk.how.softcap is not None and spec.kernel == "gpu":
        return False
    return spec.window is None or chunk.at is None or A == 1  # else queries are not consecutive


def kernel_part(
    layer: LayerView,
    chunk: Chunk,
    q: Float[Array, "B K Q R"],
    tiles: Callable[[Array, None], Partial] | None = None,
) -> Partial:
    """Attention to the sealed pages by the kernel of the device that this is compiled for, or by
    what stands in for it elsewhere; `acc` in the space of the values' codec.

    q: prepared by the keys' codec. tiles: the same in plain XLA, for the GPU kernel.
    """
    spec, fmt = layer.spec, layer.spec.packed
    if fmt is None:
        return _gpu_part(layer, chunk, q, tiles)
    used, positions, table = spec.used_pages(chunk.length), chunk.length, layer.table
    first = spec.sealed_pages(chunk.length) - used
    if spec.window is not None:  # pages in the tokens' order, and where the chunk begins among them
        order = (first[:, None] + jnp.arange(spec.pages_per_row)[None]) % spec.pages_per_row
        table = jnp.take_along_axis(table, order, axis=1)
        positions = chunk.tokens[:, 0] - spec.sinks - first * spec.page_size
    oldest = spec.sinks + first * spec.page_size
    start = layer.position(oldest[:, None], chunk.length)[:, 0]
    rope = chunk.how.rope if spec.turns else None

    def by(implementation: str) -> Callable[..., Partial]:
        return lambda q, pages, table, lengths, positions, start, params: paged_attention(
            q,
            pages,
            table,
            lengths,
            positions=None if spec.window is None else positions,
            fmt=fmt,
            scale=chunk.how.scale,
            queries=chunk.q.shape[1],
            window=spec.window,
            softcap=chunk.how.softcap,
            turn=None if rope is None else _turn(rope, spec.head_dim, start),
            params=params,
            implementation=implementation,
        )

    params = (layer.k_params, layer.v_params)
    operands = (q, layer.k_pages["page"], table, used * spec.page_size, positions, start, params)
    return on_tpu(by("tpu"), by("xla"), *operands)


def _turn(rope: RopeConfig, head_dim: int, start: Int[Array, "B"]) -> Turn:
    frequencies = jnp.asarray(inverse_frequencies(rope, head_dim), jnp.float32)
    return Turn(start, frequencies, attention_factor(rope))


def _gpu_part(layer: LayerView, chunk: Chunk, q: Array, tiles: Callable | None) -> Partial:
    assert tiles is not None
    spec, used = layer.spec, layer.spec.used_pages(chunk.length)

    def kernel(q: Array) -> Partial:
        return gpu.paged_attention_gpu(
            q,
            layer.k_pages,
            layer.v_pages,
            layer.table,
            used,
            k=gpu_leaf(spec.k_codec, spec.head_dim),
            v=gpu_leaf(spec.v_codec, spec.v_head_dim),
            page_size=spec.page_size,
            scale=chunk.how.scale,
        )

    return jax.lax.platform_dependent(q, cuda=kernel, default=lambda q: tiles(q, None))
