"""The cache pytree: allocation, and what the model calls: `attend` per layer, `append` once.

Layers only read the cache; their new keys and values come back stacked and are appended in one
place after the last layer. So layers that share KV need no special case, the pool is written in
place, and one function owns quantise-and-write.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache.append import append_group
from kvjax.cache.attend import Chunk, How, LayerView, attend_layer
from kvjax.cache.latent import LatentChunk, attend_latent, latent_codecs
from kvjax.cache.pool import Pool, init_pool
from kvjax.cache.report import bits_of
from kvjax.cache.spec import GroupSpec
from kvjax.codecs.base import Codec, Params
from kvjax.config import CacheConfig, ModelConfig, need
from kvjax.eviction import Policy

#: params of each layer's key codec and value codec
Calibration = Sequence[tuple[Params, Params]]

#: bits of a key's codes below which a cache warns: without calibrated arrays, with them
KEY_BIT_FLOORS = (3.0, 2.0)


class LowBitKeysWarning(UserWarning):
    """Keys have fewer bits than the floor below which models with few KV heads lose the thread."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """Cache of the layers in `spec.layers`."""

    pool: Pool
    k_exact: Float[Array, "slots B K H E"]  # tokens last: a score is a plain product
    v_exact: Float[Array, "slots B K E R"]
    table: Int[Array, "slots B M"]  # ids among the layer's pages
    k_params: Params  # calibrated arrays of the codecs, leaves [slots, K, ...]
    v_params: Params
    spec: GroupSpec = dataclasses.field(metadata={"static": True})
    evicted: Int[Array, "B"] | None = None  # tokens of each row that eviction took
    positions: Int[Array, "slots B K C"] | None = None  # for keys that are turned when read

    def rows(self, length: Int[Array, "B"]) -> Int[Array, "B"]:
        """Tokens that rows of this true length have here."""
        return length if self.evicted is None else length - self.evicted

    def layer(self, slot: int | Int[Array, ""]) -> LayerView:
        """What one layer reads. slot: an int where the pool is unrolled."""

        def of(x: Array) -> Array:
            return jax.lax.dynamic_index_in_dim(x, slot, keepdims=False)

        k_pages, v_pages, offset = self.pool.at(slot)
        return LayerView(
            k_pages=k_pages,
            v_pages=v_pages,
            k_exact=of(self.k_exact),
            v_exact=of(self.v_exact),
            table=of(self.table) + offset,
            k_params=jax.tree.map(of, self.k_params),
            v_params=jax.tree.map(of, self.v_params),
            spec=dataclasses.replace(self.spec, layers=()),  # one trace serves every layer
            evicted=self.evicted,
            positions=None if self.positions is None else of(self.positions),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """All layers' cache. `length [B]`: true tokens of each row so far.

    layer_map[l] = (group, slot) of the layer whose keys and values layer l reads. pending: a prompt
    is still to come, whose tokens the policy judges; its call takes the whole prompt.
    """

    groups: tuple[LayerGroup, ...]
    length: Int[Array, "B"]
    layer_map: tuple[tuple[int, int], ...] = dataclasses.field(metadata={"static": True})
    max_len: int = dataclasses.field(metadata={"static": True})
    policy: Policy | None = dataclasses.field(default=None, metadata={"static": True})
    pending: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def batch(self) -> int:
        return self.length.shape[0]

    @property
    def start(self) -> Int[Array, "B"]:
        """The position, as RoPE sees it, of each row's next token."""
        return self.length - self.groups[0].spec.shift(self.length)

    @property
    def longest_call(self) -> int | None:
        """Tokens that one call may bring at most; None: no bound."""
        stream = self.groups[0].spec.stream
        return None if stream is None else stream.recent

    def attend(
        self,
        layer: int | Int[Array, ""],
        q: Float[Array, "B A K G H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        *,
        new: Int[Array, "B"],
        how: How,
        among: Sequence[int] | None = None,
        at: Int[Array, "B A"] | None = None,
        sinks: Float[Array, "K G"] | None = None,
    ) -> Float[Array, "B A K G H"]:
        """Attention of a chunk to the cached tokens and, causally, to itself.

        layer: any layer, a reader too; it may be traced (a scan over layers), and is then one of
        `among` (None: any). k, v: the chunk's own keys and values, not yet appended; new: its real
        tokens per row; at: which of its tokens attend, None for all. sinks: see `Chunk`.
        """
        chunk = Chunk(q, k, v, self.length, new, at, sinks, how)
        return self._of(layer, among, lambda view: attend_layer(view, chunk))

    def attend_latent(
        self,
        layer: int | Int[Array, ""],
        q: Float[Array, "B A N U"],
        q_rope: Float[Array, "B A N R"],
        k: Float[Array, "B T 1 C"],
        v: Float[Array, "B T 1 R"],
        *,
        up: tuple[Float[Array, "C N U"], Float[Array, "C N W"]],
        new: Int[Array, "B"],
        how: How,
        among: Sequence[int] | None = None,
        at: Int[Array, "B A"] | None = None,
    ) -> Float[Array, "B A N W"]:
        """`attend` where the cache holds latents `k` and rotated keys `v`; see `LatentChunk`."""
        chunk = LatentChunk(q, q_rope, k, v, up[0], up[1], self.length, new, at, how)
        return self._of(layer, among, lambda view: attend_latent(view, chunk))

    def _of(
        self,
        layer: int | Int[Array, ""],
        among: Sequence[int] | None,
        read: Callable[[LayerView], Array],
    ) -> Array:
        """`read` of what the layer's owner has."""
        if isinstance(layer, int):
            g, slot = self.layer_map[layer]
            return read(self.groups[g].layer(slot))
        among = range(len(self.layer_map)) if among is None else among
        used = sorted({self.layer_map[member][0] for member in among})
        groups, slots = (jnp.asarray(x)[layer] for x in zip(*self.layer_map, strict=True))
        if len(used) == 1:
            return read(self.groups[used[0]].layer(slots))
        branches = [lambda slot, g=g: read(self.groups[g].layer(slot)) for g in used]
        return jax.lax.switch(jnp.searchsorted(jnp.asarray(used), groups), branches, slots)

    def stored_keys(
        self,
        layer: int | Int[Array, ""],
        roped: Float[Array, "B T K H"],
        plain: Float[Array, "B T K H"],
    ) -> Float[Array, "B T K H"]:
        """What `append` wants of a layer's keys: after RoPE, or before it as its codec needs."""
        before = [self.groups[g].spec.turns for g, _ in self.layer_map]
        if len(set(before)) == 1:
            return plain if before[0] else roped
        if isinstance(layer, int):
            return plain if before[layer] else roped
        return jnp.where(jnp.asarray(before)[layer], plain, roped)

    def append(
        self,
        k: Float[Array, "O B T K H"],
        v: Float[Array, "O B T K R"],
        *,
        new: Int[Array, "B"],
    ) -> KVCache:
        """The cache with each row's first `new[b]` tokens of the chunk appended.

        k, v: of the O layers that own keys and values, in order. A row must not grow past
        `max_len`: callers check that, what would lie past it is dropped.
        """
        owners = sorted(layer for group in self.groups for layer in group.spec.layers)

        def appended(group: LayerGroup) -> LayerGroup:
            mine = tuple(owners.index(layer) for layer in group.spec.layers)
            rows = group.rows(self.length)
            return append_group(group, _take(k, mine), _take(v, mine), length=rows, new=new)

        groups = tuple(appended(group) for group in self.groups)
        return dataclasses.replace(self, groups=groups, length=self.length + new)

    def fill(
        self, kept: Kept, v: Float[Array, "O B C K R"], *, lengths: Int[Array, "B"]
    ) -> KVCache:
        """The cache of prompts of these lengths, of which the owners kept some tokens."""
        assert self.policy is not None
        owners = sorted(layer for group in self.groups for layer in group.spec.layers)
        factors = self.policy.factors(len(owners))

        def filled(group: LayerGroup) -> LayerGroup:
            mine = tuple(owners.index(layer) for layer in group.spec.layers)
            keep = keep_of(self.policy, factors[mine[0]], lengths, kept.length)
            C = min(group.spec.kept or 0, kept.k.shape[2])
            own = _take(kept.k, mine)[:, :, :C], _take(v, mine)[:, :, :C]
            zero = jnp.zeros_like(lengths)
            group = append_group(group, *own, length=zero, new=keep)
            evicted = lengths - keep
            positions = group.positions
            if positions is not None:
                at = _take(kept.at, mine)[..., :C]
                place = jnp.arange(C)[None, None, None]
                later = place + evicted[None, :, None, None]
                at = jnp.where(place < keep[None, :, None, None], at, later)
                positions = positions.at[..., :C].set(at)
            return dataclasses.replace(group, evicted=evicted, positions=positions)

        groups = tuple(filled(group) for group in self.groups)
        return dataclasses.replace(self, groups=groups, length=lengths, pending=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Kept:
    """Keys that stay of a prompt, with their places in it."""

    k: Float[Array, "*O B C K H"]
    at: Int[Array, "*O B K C"]
    length: int = dataclasses.field(metadata={"static": True})  # of the call, padding included


def keep_of(
    policy: Policy | None, factor: float, lengths: Int[Array, "B"], longest: int
) -> Int[Array, "B"]:
    """How many tokens of each row stay, from a table of all lengths up to `longest`."""
    assert policy is not None
    table = np.asarray([policy.kept(n, factor) for n in range(longest + 1)], np.int32)
    return jnp.asarray(table)[lengths]


def _take(x: Array, index: tuple[int, ...]) -> Array:
    return x if index == tuple(range(x.shape[0])) else x[np.asarray(index)]


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
    return KVCache(
        groups=tuple(_init_group(spec, batch, calibration, apart) for spec in specs),
        length=jnp.zeros((batch,), jnp.int32),
        layer_map=tuple(slot_of[model.source_of(layer)] for layer in range(model.num_layers)),
        max_len=max_len,
        policy=config.policy,
        pending=config.policy is not None,
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
        _check_evictable(model, max_len)
    factors = (1.0,) * len(owners) if policy is None else policy.factors(len(owners))
    layers: dict[tuple[Codec, Codec, int | None, int | None], list[int]] = {}
    for layer, pair in enumerate(pairs):
        owner = model.source_of(layer)
        fix = f"Layer {layer} reads layer {owner}'s cache: give both one codec."
        need(pair == pairs[owner], "layers", f"layer {layer} as layer {owner}", pair, fix)
        if owner != layer:
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
        rows = max_len if kept is None else min(max_len, kept + config.max_new)
        made = _spec(model, config, k, v, window, members, rows, dtype)
        return dataclasses.replace(made, kept=kept)

    return tuple(spec(*key, members) for key, members in layers.items())


def _check_evictable(model: ModelConfig, max_len: int) -> None:
    need(
        model.mla is None,
        "evict",
        "none with latent attention, whose scores are not there yet",
        "a policy",
        "Leave evict out, or take a model without MLA.",
    )
    windows = [n for n in model.owners if model.window_of(n) is not None]
    need(
        all(model.window_of(n) >= max_len for n in windows),  # type: ignore[operator]
        "evict",
        "none with sliding windows, which bound their layers already",
        f"windows in layers {windows[:4]}",
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
    return GroupSpec(
        layers=tuple(members),
        num_kv_heads=heads,
        head_dim=k_dim,
        k_codec=k_codec,
        v_codec=v_codec,
        page_size=config.page_size,
        # a window leaves the first tokens behind, a stream does not
        sinks=config.stream.sinks if config.stream else sinks if window is None else 0,
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
    if spec.kept is not None and spec.k_codec.pre_rope:
        positions = jnp.zeros((*rows, spec.kept), jnp.int32)
    return LayerGroup(
        pool=init_pool(spec, batch=batch, apart=apart),
        k_exact=jnp.zeros((*rows, H, E), spec.dtype),
        v_exact=jnp.zeros((*rows, E, R), spec.dtype),
        table=jnp.repeat(table, slots, axis=0),
        k_params=params_of(spec.k_codec, H, 0),
        v_params=params_of(spec.v_codec, R, 1),
        spec=spec,
        evicted=None if spec.kept is None else jnp.zeros((batch,), jnp.int32),
        positions=positions,
    )
