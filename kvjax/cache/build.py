"""Making a cache: which layers share a group, what each group holds, and what is refused.

`group_specs` is the shape of a cache without its arrays: `init_cache` allocates by it, and the size
formula (`kvjax.plan`) counts by it.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kvjax import codecs
from kvjax.cache.kernel import with_kernel
from kvjax.cache.kv_cache import KVCache, LayerGroup
from kvjax.cache.latent import latent_codecs
from kvjax.cache.pool import init_pool
from kvjax.cache.report import bits_of
from kvjax.cache.spec import GroupSpec
from kvjax.codecs.base import Codec, Params
from kvjax.config import CacheConfig, ModelConfig, need

#: params of each layer's key codec and value codec
Calibration = Sequence[tuple[Params, Params]]

#: bits of a key's codes below which a cache warns: without calibrated arrays, with them
KEY_BIT_FLOORS = (3.0, 2.0)


class LowBitKeysWarning(UserWarning):
    """Keys have fewer bits than the floor below which models with few KV heads lose the thread."""


def init_cache(
    model: ModelConfig,
    *,
    batch: int,
    max_len: int,
    config: CacheConfig,
    dtype: Any,
    calibration: Calibration | None = None,
    apart: bool = False,
) -> KVCache:
    """An empty cache for `batch` rows of up to `max_len` tokens.

    apart: each layer's pages are arrays of their own, for decoders that name layers by ints.
    calibration: per layer the params of its key and its value codec; needed by codecs without
    defaults. Raises ValueError on bad sizes and on codecs that do not fit the model.
    """
    need(isinstance(batch, int) and batch > 0, "batch", "a positive int", batch)
    need(isinstance(max_len, int) and max_len > 0, "max_len", "a positive int", max_len)
    need(
        config.calibration is None or calibration is not None,
        "calibration",
        "the arrays of config.calibration",
        None,
        "Make the cache with model.init_cache, which reads the file.",
    )
    specs = group_specs(model, max_len=max_len, config=config, dtype=dtype)
    for spec in specs:
        _warn_low_bits(spec)
    slot_of = {
        layer: (g, slot) for g, spec in enumerate(specs) for slot, layer in enumerate(spec.layers)
    }
    slot_of |= {layer: (-1, slot) for slot, layer in enumerate(model.retaining)}
    state = (len(model.retaining), batch, model.num_heads, model.head_dim, model.head_dim)
    return KVCache(
        groups=tuple(_init_group(spec, batch, calibration, apart) for spec in specs),
        length=jnp.zeros((batch,), jnp.int32),
        layer_map=tuple(slot_of[model.source_of(layer)] for layer in range(model.num_layers)),
        max_len=max_len,
        policy=config.policy,
        pending=config.policy is not None,
        states=jnp.zeros(state, jnp.float32) if model.retaining else None,
    )


def group_specs(
    model: ModelConfig, *, max_len: int, config: CacheConfig, dtype: Any
) -> tuple[GroupSpec, ...]:
    """The groups of layers that share shapes, codecs and windows, in the order of their first
    layers. Only owners of keys and values are in them."""
    pairs = config.codecs(model.num_layers)
    need(
        config.mla_rope_bits is None or model.mla is not None,
        "mla_rope_bits",
        "None: this model has no latent attention",
        config.mla_rope_bits,
    )
    policy, owners = config.policy, model.owners
    if policy is not None or config.stream is not None:
        _check_evictable(model, max_len, config.evict)
    factors = (1.0,) * len(owners) if policy is None else policy.factors(len(owners))
    _check_states(model, config, pairs)
    layers: dict[tuple[Codec, Codec, int | None, int | None], list[int]] = {}
    for layer, pair in enumerate(pairs):
        owner = model.source_of(layer)
        fix = f"Layer {layer} reads layer {owner}'s cache: give both one codec."
        names = "+".join(codecs.name_of(codec) for codec in pair)
        need(pair == pairs[owner], "layers", f"layer {layer} as layer {owner}", names, fix)
        if layer not in owners:
            continue
        window = model.window_of(layer)
        window = None if window is None or window >= max_len else window
        if config.stream is not None:
            window = config.stream.recent + 1
        codec_pair = pair if model.mla is None else latent_codecs(pair, config.mla_rope_bits)
        factor = factors[owners.index(layer)]
        kept = None if policy is None else policy.kept(max_len, factor)
        layers.setdefault((*codec_pair, window, kept), []).append(layer)

    def spec(k: Codec, v: Codec, window: int | None, kept: int | None, members: list[int]):
        heavy = policy is not None and policy.decodes
        room = 0 if heavy else config.max_new
        rows = max_len if kept is None else min(max_len, kept + room)
        made = _spec(model, config, k, v, window, members, rows, dtype)
        if heavy:
            need(
                k.name == v.name == "raw",
                "evict",
                "raw keys and values, as single tokens leave its slots at every step",
                f"{config.evict} with {codecs.name_of(k)}+{codecs.name_of(v)}",
                "Take snapkv, expected or observed with this codec, or h2o with raw.",
            )
            made = dataclasses.replace(made, heavy=True, sinks=0)
        return with_kernel(dataclasses.replace(made, kept=kept), config.kernel)

    return tuple(spec(*key, members) for key, members in layers.items())


def _check_states(
    model: ModelConfig, config: CacheConfig, pairs: Sequence[tuple[Codec, Codec]]
) -> None:
    """Raises ValueError where a codec is named for a layer that has no keys and values."""
    usual = dataclasses.replace(config, layers=None).codecs(1)[0]
    for layer in model.retaining:
        need(
            pairs[layer] == usual,
            "layers",
            "layers that keep keys and values",
            f"{'+'.join(codecs.name_of(codec) for codec in pairs[layer])} for layer {layer}",
            "Leave it out: gated retention keeps an exact state.",
        )


def _check_evictable(model: ModelConfig, max_len: int, evict: str | None) -> None:
    need(
        model.mla is None,
        "evict",
        "none with latent attention, whose scores are not there yet",
        evict,
        "Leave evict out, or take a model without MLA.",
    )
    need(
        not model.retaining,
        "evict",
        "none with gated retention, whose layers keep a state and no tokens",
        f"{evict} and gated retention in layers {list(model.retaining[:4])}",
        "Leave evict out for this model.",
    )
    windows = [n for n in model.owners if model.window_of(n) is not None]
    need(
        all(model.window_of(n) >= max_len for n in windows),  # type: ignore[operator]
        "evict",
        "none with sliding windows, which bound their layers already",
        f"{evict} and windows in layers {windows[:4]}",
        "Leave evict out for this model.",
    )


def _spec(
    model: ModelConfig,
    config: CacheConfig,
    k_codec: Codec,
    v_codec: Codec,
    window: int | None,
    members: list[int],
    max_len: int,
    dtype: Any,
) -> GroupSpec:
    heads, k_dim, v_dim = model.cache_shape
    k_codec.check(
        head_dim=k_dim, page_size=config.page_size, role="k" if model.mla is None else "v"
    )
    v_codec.check(head_dim=v_dim, page_size=config.page_size, role="v")
    raw = k_codec.name == v_codec.name == "raw"
    sinks = (0 if raw else 4) if config.sinks is None else config.sinks
    if config.stream is not None:
        sinks = min(config.stream.sinks, max_len)
    elif window is not None:
        sinks = 0  # a window leaves the first tokens behind
    return GroupSpec(
        layers=tuple(members),
        num_kv_heads=heads,
        head_dim=k_dim,
        k_codec=k_codec,
        v_codec=v_codec,
        page_size=config.page_size,
        sinks=sinks,
        recent=(0 if raw else 64) if config.recent is None else config.recent,
        max_len=max_len,
        dtype=jnp.dtype(dtype),
        v_head_dim=v_dim,
        window=window,
        stream=config.stream,
        latent=model.mla is not None,
    )


def _warn_low_bits(spec: GroupSpec) -> None:
    """Keys suffer first: an error in a score is multiplied by exp, and on grouped-query models by
    every query head that reads the key (measured: tests/cache/test_oracles_codecs.py)."""
    if spec.k_codec.uses_metric:  # bits go where the loss allows them: there is no floor by number
        return
    shape = {"num_kv_heads": spec.num_kv_heads, "head_dim": spec.head_dim}
    floor = KEY_BIT_FLOORS[bool(spec.k_codec.param_shapes(**shape))]
    bits = bits_of(spec.k_codec, spec)[0]
    if bits < floor:
        warnings.warn(
            f"keys of layers {spec.layers[0]}-{spec.layers[-1]} have {bits:.3g} bits with"
            f" {spec.k_codec!r}, under the floor of {floor:g}: expect visible damage. Use 3 bits or"
            " more for keys (for example --kv-k turboquant3) or a calibrated codec such as pca2.",
            LowBitKeysWarning,
            stacklevel=4,
        )


def _init_group(
    spec: GroupSpec, batch: int, calibration: Calibration | None, apart: bool
) -> LayerGroup:
    slots, pages = len(spec.layers), spec.pages_per_row

    def params_of(codec: Codec, dim: int, role: int) -> Params:
        def one(layer: int) -> Params:
            if calibration is not None and calibration[layer][role]:
                return calibration[layer][role]
            return codec.init_params(num_kv_heads=spec.num_kv_heads, head_dim=dim)

        return jax.tree.map(lambda *a: jnp.stack(a), *[one(layer) for layer in spec.layers])

    H, R, E = spec.head_dim, spec.v_head_dim, spec.exact_slots
    rows = (slots, batch, spec.num_kv_heads)
    table = jnp.arange(batch * pages, dtype=jnp.int32).reshape(1, batch, pages)
    positions = None
    if spec.heavy:
        positions = jnp.full((*rows, E), -1, jnp.int32)
    elif spec.kept is not None and spec.k_codec.pre_rope:
        positions = jnp.zeros((*rows, spec.kept), jnp.int32)
    return LayerGroup(
        pool=init_pool(spec, batch=batch, apart=apart),
        k_exact=jnp.zeros((*rows, H, E), spec.dtype),
        v_exact=jnp.zeros((*rows, E, R), spec.dtype),
        table=jnp.repeat(table, slots, axis=0),
        k_params=params_of(spec.k_codec, H, 0),
        v_params=params_of(spec.v_codec, R, 1),
        spec=spec,
        evicted=None if spec.kept is None or spec.heavy else jnp.zeros((batch,), jnp.int32),
        scores=jnp.zeros((*rows, E), jnp.float32) if spec.heavy else None,
        positions=positions,
    )
