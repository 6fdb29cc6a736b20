"""`bench --attention`: what one layer's attention to sealed pages costs by codec, beside raw.

Every codec reads as many tokens through the same loop over pages (`paged_partial`). They take
turns, so that a turn saw the same state of a machine that others use too, and a ratio is one of a
turn. Pages hold codes of random numbers; calibrated codecs are fitted to random numbers, as their
speed does not hang on them.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.attend import Chunk, How, LayerView, attend_layer
from kvjax.cache.build import group_specs
from kvjax.cache.spec import GroupSpec
from kvjax.codecs.base import Codec, Codes, Params
from kvjax.config import CacheConfig, need

if TYPE_CHECKING:
    from kvjax.model import Transformer

#: pages of codes that differ; more repeat them, as a trellis search takes its time
_OWN_PAGES = 4
_SAMPLES = 1024


def attention_record(
    model: Transformer,
    names: list[str],
    *,
    config: CacheConfig,
    batch: int,
    context: int,
    turns: int,
    seed: int,
) -> dict[str, Any]:
    """Milliseconds, ratio to raw, bytes of pages and of temporaries of each codec, raw first.

    names: codecs, or KEYS+VALUES; config: of the cache, but for its codecs. Raises ValueError for
    models with latent attention or with windows alone, and on a context of broken pages.
    """
    need(model.config.mla is None, "attention", "a model without latent attention", "mla")
    calls, out = {}, {}
    for name in dict.fromkeys(["raw", *names]):
        one = CacheConfig.parse(
            name, page_size=config.page_size, sinks=config.sinks, recent=config.recent
        )
        view, chunk = _layer(model, one, batch=batch, context=context, seed=seed)
        run = jax.jit(attend_layer).lower(view, chunk).compile()
        calls[name] = _timed(run, view, chunk)
        pages, memory = (view.k_pages, view.v_pages), run.memory_analysis()
        out[name] = {
            "page_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(pages)),
            "temporary_bytes": None if memory is None else memory.temp_size_in_bytes,
        }
    taken = [{name: call() for name, call in calls.items()} for _ in range(turns + 1)][1:]
    for name, record in out.items():
        ratios = [turn[name] / turn["raw"] for turn in taken]
        record["ms"] = 1e3 * statistics.median(turn[name] for turn in taken)
        record["ratio"] = statistics.median(ratios)
    return out


def _timed(run: Callable[..., Any], view: LayerView, chunk: Chunk) -> Callable[[], float]:
    def call() -> float:
        began = time.perf_counter()
        jax.block_until_ready(run(view, chunk))
        return time.perf_counter() - began

    return call


def _layer(
    model: Transformer, config: CacheConfig, *, batch: int, context: int, seed: int
) -> tuple[LayerView, Chunk]:
    """A layer with `context` tokens in sealed pages, and one query token of each row."""
    specs = group_specs(model.config, max_len=context, config=config, dtype=model.dtype)
    spec = next((spec for spec in specs if spec.window is None), specs[0])
    need(spec.window is None, "attention", "a model with layers that see all tokens", "windows")
    spec = dataclasses.replace(spec, layers=(), max_len=context + spec.sinks + spec.recent)
    size = spec.page_size
    need(context % size == 0, "context", f"whole pages of {size} tokens (--page-size)", context)
    rng = np.random.default_rng(seed)
    k_params, v_params = (
        _params(codec, spec, dim, rng)
        for codec, dim in ((spec.k_codec, spec.head_dim), (spec.v_codec, spec.v_head_dim))
    )
    B, K, H, R, M = batch, spec.num_kv_heads, spec.head_dim, spec.v_head_dim, spec.pages_per_row
    G = model.config.num_heads // K
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), spec.dtype)  # noqa: E731
    order = rng.permutation(B * M).reshape(B, M)
    view = LayerView(
        k_pages=_pages(spec.k_codec, k_params, normal(_OWN_PAGES, K, spec.page_size, H), B * M),
        v_pages=_pages(spec.v_codec, v_params, normal(_OWN_PAGES, K, spec.page_size, R), B * M),
        k_exact=normal(B, K, H, spec.exact_slots),
        v_exact=normal(B, K, spec.exact_slots, R),
        # a column more than there are pages: raw is not read in place then, but as the others are
        table=jnp.asarray(np.pad(order, ((0, 0), (0, 1))), jnp.int32),
        k_params=k_params,
        v_params=v_params,
        spec=spec,
    )
    length = jnp.full((B,), spec.max_len, jnp.int32)
    scale = H**-0.5
    softcap = model.config.attn_logit_softcap
    how = How(scale, model.config.rope, model.config.rope_interleave, softcap)
    q, k, v = normal(B, 1, K, G, H), normal(B, 1, K, H), normal(B, 1, K, R)
    return view, Chunk(q, k, v, length, jnp.ones((B,), jnp.int32), None, None, how)


def _params(codec: Codec, spec: GroupSpec, dim: int, rng: np.random.Generator) -> Params:
    if not codec.param_shapes(num_kv_heads=spec.num_kv_heads, head_dim=dim):
        return {}
    return codec.calibrate(rng.normal(size=(spec.num_kv_heads, _SAMPLES, dim)).astype(np.float32))


def _pages(codec: Codec, params: Params, x: jax.Array, pages: int) -> Codes:
    codes = jax.jit(codec.encode)(x, params)
    times = -(-pages // x.shape[0])
    return {n: jnp.tile(c, (times,) + (1,) * (c.ndim - 1))[:pages] for n, c in codes.items()}
