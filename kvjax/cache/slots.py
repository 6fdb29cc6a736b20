"""Coded slots: H2O with a codec that codes each token by itself.

A KV head has an exact ring of its newest tokens, which always stay, and pages whose places are
slots of single heavy tokens. A token is judged on its score when it leaves the ring: it is then
encoded, once, into an empty slot or over the lightest token, or it is gone. The codes of the others
stay where they are: a word holds several tokens, and only the bits of one are changed.

`positions` and `scores` have the ring first, then the slots. Slots fill in order, in all heads
alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.pool import Pool
from kvjax.codecs import packing
from kvjax.codecs.base import Codec, Codes, Params

if TYPE_CHECKING:
    from kvjax.cache.attend import LayerView
    from kvjax.cache.kv_cache import LayerGroup

# Shapes: n layers of the group, M pages of S slots a row, Z slots that the budget has, E ring.


def slot_keys(layer: LayerView, dtype: Any) -> Float[Array, "B K R Z"]:
    """Keys of the slots, in their codec's space."""
    pages = jax.tree.map(lambda x: x[layer.table], layer.k_pages)
    k_t = jnp.moveaxis(layer.spec.k_codec.decode_t(pages, layer.k_params, dtype), 1, 3)
    return k_t.reshape(*k_t.shape[:3], -1)[..., : layer.spec.heavy_slots]


def slot_values(layer: LayerView, dtype: Any) -> Float[Array, "B K Z R"]:
    """Values of the slots, likewise; zeros in empty ones."""
    assert layer.positions is not None
    pages = jax.tree.map(lambda x: x[layer.table], layer.v_pages)
    v = jnp.moveaxis(layer.spec.v_codec.decode(pages, layer.v_params, dtype), 1, 2)
    v = v.reshape(*v.shape[:2], -1, v.shape[-1])[:, :, : layer.spec.heavy_slots]
    there = layer.positions[..., layer.spec.ring :] >= 0
    return jnp.where(there[..., None], v, 0)


def append_coded(
    group: LayerGroup,
    sinks: int,
    k: Float[Array, "n B 1 K H"],
    v: Float[Array, "n B 1 K R"],
    scores: Float[Array, "n B K E+Z"],
    own: Float[Array, "n B K 1"],
    *,
    length: Int[Array, "B"],
    real: Bool[Array, "B"],
) -> LayerGroup:
    """The group with one token of each real row in its ring, and the one it takes the place of in a
    slot, if it is worth more than the lightest there. scores: with this step's attention; own: the
    new token's."""
    spec, at = group.spec, group.positions
    assert at is not None
    E = spec.ring
    here = (jnp.arange(E)[None] == length[:, None] % E) & real[:, None]  # B E
    ring = here[None, :, None]  # 1 B 1 E
    worth = jnp.where(at[..., E:] < sinks, jnp.inf, scores[..., E:])
    worth = jnp.where(at[..., E:] < 0, -1.0, worth)
    left = jnp.sum(jnp.where(ring, scores[..., :E], 0.0), axis=-1)  # n B K
    first = ((length - E) < sinks)[None, :, None]
    slot = jnp.argmin(worth, axis=-1)
    write = first | (left >= jnp.min(worth, axis=-1))
    write &= (real & (length >= E))[None, :, None]
    k_old = jnp.sum(jnp.where(ring[..., None, :], group.k_exact, 0), axis=-1)  # n B K H
    v_old = jnp.sum(jnp.where(ring[..., None], group.v_exact, 0), axis=-2)
    chosen = (jnp.arange(worth.shape[-1])[None, None, None] == slot[..., None]) & write[..., None]
    slot_at = jnp.where(chosen, (length - E)[None, :, None, None], at[..., E:])
    slot_scores = jnp.where(chosen, left[..., None], scores[..., E:])
    ring_at = jnp.where(ring, length[None, :, None, None], at[..., :E])
    ring_scores = jnp.where(ring, own, scores[..., :E])
    k_new = jnp.moveaxis(k, 2, 4).astype(group.k_exact.dtype)
    v_new = jnp.moveaxis(v, 2, 3).astype(group.v_exact.dtype)
    return dataclasses.replace(
        group,
        pool=_write(group, k_old, v_old, slot, write),
        k_exact=jnp.where(ring[..., None, :], k_new, group.k_exact),
        v_exact=jnp.where(ring[..., None], v_new, group.v_exact),
        positions=jnp.concatenate([ring_at, slot_at], axis=-1),
        scores=jnp.concatenate([ring_scores, slot_scores], axis=-1),
    )


def fill_coded(
    group: LayerGroup,
    k: Float[Array, "n B C K H"],
    at: Int[Array, "n B K C"],
    scores: Float[Array, "n B K C"],
    v: Float[Array, "n B C K R"],
    *,
    lengths: Int[Array, "B"],
    padded: int,
) -> LayerGroup:
    """The group with what stayed of prompts of these lengths, in the order of the text; places of
    `padded` and beyond hold nothing."""
    spec, C = group.spec, at.shape[-1]
    E, Z = spec.ring, spec.heavy_slots
    count = jnp.sum(at[0, :, 0] < padded, axis=-1)[:, None]  # B 1, of all layers and heads
    slot = jnp.arange(E)[None]
    token = lengths[:, None] - 1 - (lengths[:, None] - 1 - slot) % E  # B E, the ring's
    ring = jnp.where(token >= 0, count - lengths[:, None] + token, C)
    heavy = jnp.arange(Z)[None]
    heavy = jnp.where(heavy < count - jnp.minimum(lengths[:, None], E), heavy, C)
    index = jnp.concatenate([ring, heavy], axis=1)  # B E+Z, C for none
    there, index = (index < C)[None, :, None], jnp.minimum(index, C - 1)[None, :, None]

    def of(x: Float[Array, "n B C K H"]) -> Float[Array, "n B K E+Z H"]:
        x = jnp.take_along_axis(jnp.moveaxis(x, 2, 3), index[..., None], axis=3)
        return jnp.where(there[..., None], x, 0).astype(spec.dtype)

    k, v = of(k), of(v)
    return dataclasses.replace(
        group,
        pool=_filled(group, k[..., E:, :], v[..., E:, :]),
        k_exact=jnp.swapaxes(k[..., :E, :], 3, 4),
        v_exact=v[..., :E, :],
        positions=jnp.where(there, jnp.take_along_axis(at, index, axis=-1), -1),
        scores=jnp.where(there, jnp.take_along_axis(scores, index, axis=-1), 0.0),
    )


def _filled(group: LayerGroup, k: Float[Array, "n B K Z H"], v: Float[Array, "n B K Z R"]) -> Pool:
    """The pool with all slots encoded."""
    spec = group.spec

    def codes(codec: Codec, params: Params, x: Array) -> Codes:
        room = spec.pages_per_row * spec.page_size - x.shape[3]
        x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, room), (0, 0)))
        x = jnp.moveaxis(x.reshape(*x.shape[:3], -1, spec.page_size, x.shape[-1]), 3, 2)
        return jax.vmap(codec.encode)(x, params)  # n B M K ...

    def put(name: str, pages: Array, new: Array, own: slice) -> Array:
        layer = jnp.arange(pages.shape[0])[:, None, None]
        return pages.at[layer, group.table[own]].set(new)

    fresh = codes(spec.k_codec, group.k_params, k), codes(spec.v_codec, group.v_params, v)
    return _each_leaf(group.pool, *fresh, put)


def _write(
    group: LayerGroup,
    k: Float[Array, "n B K H"],
    v: Float[Array, "n B K R"],
    slot: Int[Array, "n B K"],
    write: Bool[Array, "n B K"],
) -> Pool:
    """The pool with one slot of each row and head encoded anew, where `write`."""
    spec = group.spec
    S, heads = spec.page_size, jnp.arange(spec.num_kv_heads)[None, None]
    hit = jnp.arange(S)[None, None, None] == (slot % S)[..., None]
    hit &= write[..., None]  # n B K S
    page = jnp.take_along_axis(group.table, slot // S, axis=2)  # n B K

    def codes(codec: Codec, params: Params, x: Array) -> Codes:
        x = jnp.broadcast_to(x[..., None, :], (*x.shape[:3], S, x.shape[-1]))
        return jax.vmap(codec.encode)(x, params)  # n B K ...

    def put(name: str, pages: Array, new: Array, own: slice) -> Array:
        where = (jnp.arange(pages.shape[0])[:, None, None], page[own], heads)
        return pages.at[where].set(one_token(name, pages[where], new, hit[own]))

    fresh = codes(spec.k_codec, group.k_params, k), codes(spec.v_codec, group.v_params, v)
    return _each_leaf(group.pool, *fresh, put)


def _each_leaf(pool: Pool, k: Codes, v: Codes, put: Callable[..., Array]) -> Pool:
    """The pool with every leaf, as `[layers of its block, P, K, ...]`, replaced by
    `put(name, leaf, codes of these layers, which layers)`."""
    per = pool.slots // len(pool.k)

    def block(i: int, old: Codes, fresh: Codes) -> Codes:
        own, out = slice(i * per, (i + 1) * per), {}
        for name, leaf in old.items():
            pages = leaf.reshape(per, pool.pages, *leaf.shape[1:])
            new = fresh[name][own].astype(leaf.dtype)
            out[name] = put(name, pages, new, own).reshape(leaf.shape)
        return out

    return dataclasses.replace(
        pool,
        k=tuple(block(i, old, k) for i, old in enumerate(pool.k)),
        v=tuple(block(i, old, v) for i, old in enumerate(pool.v)),
    )


def one_token(name: str, old: Array, new: Array, hit: Bool[Array, "*lead S"]) -> Array:
    """The old codes with one token's from the new, by the layouts of `kvjax.codecs.base`."""
    if name.startswith("words"):
        bits = old.shape[-2] * 32 // hit.shape[-1]
        full = jnp.where(hit[..., None], jnp.uint32(2**bits - 1), jnp.uint32(0))
        mask = packing.pack(full, bits)
        return (old & ~mask) | (new & mask)
    if name == "x":
        return jnp.where(hit[..., None], new, old)
    return jnp.where(hit if old.ndim == hit.ndim else hit[..., None, :], new, old)
