"""Making a cache: which layers share a group, what each group holds, and what is refused.

`group_specs` is the shape of a cache without its arrays: `init_cache` allocates by it, and the size
formula (`kvjax.plan`) counts by it.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kvjax import codecs
from kvjax.cache.kernel import with_kernel, without_kernel
from kvjax.cache.kv_cache import KVCache, LayerGroup
from kvjax.cache.latent import latent_codecs
from kvjax.cache.pool import init_pool
from kvjax.cache.report import bits_of
from kvjax.cache.size import bytes_of
from kvjax.cache.spec import GroupSpec
from kvjax.codecs.base import Codec, Params
from kvjax.config import CacheConfig, ModelConfig, need
from kvjax.eviction import Policy

#: params of each layer's key codec and value codec
Calibration = Sequence[tuple[Params, Params]]

#: bits of a key's codes below which a cache warns: without calibrated arrays, with them
KEY_BIT_FLOORS = (3.0, 2.0)


#: slots of a page of single tokens: the fewest that fill words of any width
SLOT_PAGE = 32


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
    devices: int = 1,
) -> KVCache:
    """An empty cache for `batch` rows of up to `max_len` tokens.

    apart: each layer's pages are arrays of their own, for decoders that name layers by ints.
    devices: over which the model lies; for several "auto" takes no kernel, as none is partitioned.
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
    policy = fitted_policy(model, max_len=max_len, config=config, dtype=dtype)
    specs = _specs(model, policy, max_len=max_len, config=config, dtype=dtype)
    if devices > 1 and config.kernel == "auto":
        specs = tuple(
            without_kernel(spec, f"the model lies on {devices} devices") for spec in specs
        )
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
        policy=policy,
        pending=policy is not None,
        states=jnp.zeros(state, jnp.float32) if model.retaining else None,
    )


def group_specs(
    model: ModelConfig, *, max_len: int, config: CacheConfig, dtype: Any
) -> tuple[GroupSpec, ...]:
    """The groups of layers that share shapes, codecs and windows, in the order of their first
    layers. Only owners of keys and values are in them."""
    policy = fitted_policy(model, max_len=max_len, config=config, dtype=dtype)
    return _specs(model, policy, max_len=max_len, config=config, dtype=dtype)


def fitted_policy(
    model: ModelConfig, *, max_len: int, config: CacheConfig, dtype: Any
) -> Policy | None:
    """The config's policy with its budget in tokens, where it is not a share of the prompt.

    Of a budget in bytes: the most tokens with which the whole cache of one row (all layers,
    `max_new` tokens after the prompt, tables, calibrated arrays) is no larger. Of a policy that
    evicts while decoding, a share is one of `max_len`. Raises ValueError when even the fewest
    tokens are too many.
    """
    policy = config.policy
    if policy is not None and policy.decodes and policy.budget.share is not None:
        return policy.of_tokens(max(policy.least, math.ceil(policy.budget.share * max_len)))
    if policy is None or policy.budget.bytes is None:
        return policy

    def size(tokens: int) -> int:
        fitted = policy.of_tokens(tokens)
        specs = _specs(model, fitted, max_len=max_len, config=config, dtype=dtype)
        return sum(bytes_of(specs, batch=1).values())

    low, high, most = policy.least, max(policy.least, max_len), policy.budget.bytes
    need(
        size(low) <= most,
        f"evict {policy.name} budget",
        f"at least {size(low)}B a row: {low} tokens of a prompt, {config.max_new} after it"
        " (max_new), and the exact tokens",
        str(policy.budget),
        "Raise it, or take a smaller max_new, page_size or recent, or fewer bits.",
    )
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if size(middle) <= most else (low, middle - 1)
    return policy.of_tokens(low)


def _specs(
    model: ModelConfig, policy: Policy | None, *, max_len: int, config: CacheConfig, dtype: Any
) -> tuple[GroupSpec, ...]:
    pairs = config.codecs(model.num_layers)
    need(
        config.mla_rope_bits is None or model.mla is not None,
        "mla_rope_bits",
        "None: this model has no latent attention",
        config.mla_rope_bits,
    )
    _check_states(model, config, pairs)
    owners, judged = model.owners, judged_layers(model, max_len)
    need(
        policy is None or bool(judged),
        "evict",
        "none, as windows bound all layers of this model already (or streaming:SINKS+RECENT)",
        config.evict,
    )
    factors = () if policy is None else policy.factors(len(judged))
    layers: dict[tuple[Codec, Codec, int | None, bool, int | None], list[int]] = {}
    for layer, pair in enumerate(pairs):
        owner = model.source_of(layer)
        fix = f"Layer {layer} reads layer {owner}'s cache: give both one codec."
        names = "+".join(codecs.name_of(codec) for codec in pair)
        need(pair == pairs[owner], "layers", f"layer {layer} as layer {owner}", names, fix)
        if layer not in owners:
            continue
        window, own = _window(model, layer, config, judged)
        codec_pair = pair if model.mla is None else latent_codecs(pair, config.mla_rope_bits)
        kept = None
        if policy is not None and layer in judged:
            kept = policy.kept(max_len, factors[judged.index(layer)])
        layers.setdefault((*codec_pair, window, own, kept), []).append(layer)

    def spec(k: Codec, v: Codec, window: int | None, own: bool, kept: int | None, members):
        heavy = kept is not None and policy is not None and policy.decodes
        room = 0 if heavy else config.max_new
        rows = max_len if kept is None else min(max_len, kept + room)
        made = _spec(
            model,
            dataclasses.replace(config, page_size=SLOT_PAGE) if heavy else config,
            *(k, v, window, own, members, rows, dtype),
        )
        if heavy:
            assert policy is not None
            made = _heavy(made, policy, config)  # its pages are of single tokens
        return with_kernel(dataclasses.replace(made, kept=kept), model, config.kernel)

    return tuple(spec(*key, members) for key, members in layers.items())


def _check_states(
    model: ModelConfig, config: CacheConfig, pairs: Sequence[tuple[Codec, Codec]]
) -> None:
    """Raises ValueError where a codec is named, or an eviction, for layers that have no keys and
    values."""
    usual = dataclasses.replace(config, layers=None).codecs(1)[0]
    for layer in model.retaining:
        need(
            pairs[layer] == usual,
            "layers",
            "layers that keep keys and values",
            f"{'+'.join(codecs.name_of(codec) for codec in pairs[layer])} for layer {layer}",
            "Leave it out: gated retention keeps an exact state.",
        )
    need(
        config.evict is None or not model.retaining,
        "evict",
        "none with gated retention, whose layers keep a state and no tokens",
        f"{config.evict} and gated retention in layers {list(model.retaining[:4])}",
        "Leave evict out for this model.",
    )


def _heavy(spec: GroupSpec, policy: Policy, config: CacheConfig) -> GroupSpec:
    """The group with slots of single tokens: exact, or coded beyond the newest `window`."""
    spec = dataclasses.replace(spec, heavy=True, sinks=0)
    if not spec.coded:
        return spec
    named = f"{config.evict} with {codecs.name_of(spec.k_codec)}+{codecs.name_of(spec.v_codec)}"
    need(
        spec.k_codec.single and spec.v_codec.single,
        "evict",
        "raw, or keys and values whose tokens are coded one by one after RoPE (int8, int4, fp8,"
        " turboquant), as single tokens leave its slots at every step",
        named,
        "Take snapkv, expected or observed with this codec.",
    )
    fix = "Take raw, or snapkv, expected or observed with this codec."
    need(not spec.latent, "evict", "raw for latents whose tokens leave one by one", named, fix)
    need(policy.window > 0, "evict h2o window", "an int > 0 with a codec", policy.window)
    return dataclasses.replace(spec, recent=policy.window)


def judged_layers(model: ModelConfig, max_len: int) -> tuple[int, ...]:
    """Owners whose tokens an eviction policy judges: those without a window that bounds them."""
    windows = {layer: model.window_of(layer) for layer in model.owners}
    return tuple(n for n, window in windows.items() if window is None or window >= max_len)


def _window(
    model: ModelConfig, layer: int, config: CacheConfig, judged: tuple[int, ...]
) -> tuple[int | None, bool]:
    """(tokens back that a layer sees, whether that is the model's own window). A stream bounds the
    layers that see further than it does."""
    own, stream = None if layer in judged else model.window_of(layer), config.stream
    if stream is None:
        return own, own is not None
    if own is None or own > stream.sinks + stream.recent:
        return stream.recent + 1, False
    return min(own, stream.recent + 1), True


def _spec(
    model: ModelConfig,
    config: CacheConfig,
    k_codec: Codec,
    v_codec: Codec,
    window: int | None,
    own: bool,
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
    stream = config.stream
    if own:
        sinks = 0  # a window leaves the first tokens behind
    elif stream is not None:
        sinks = min(stream.sinks, max_len)
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
        own_window=own,
        stream=stream,
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
        positions = jnp.full((*rows, spec.places), -1, jnp.int32)
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
        scores=jnp.zeros((*rows, spec.places), jnp.float32) if spec.heavy else None,
        positions=positions,
    )
