"""Append and seal: the one place that writes a cache.

A page is sealed when it lies wholly before the recent tokens: its tokens are taken from the exact
ring or, when the chunk is long, from the chunk itself, encoded once and written to the pool. Rows
seal independently, in a loop over the pages that this call completes: none, nearly always, when
decoding.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache.packed import pack_page
from kvjax.cache.spec import GroupSpec

if TYPE_CHECKING:
    from kvjax.cache.kv_cache import LayerGroup


def append_group(
    group: LayerGroup,
    k: Float[Array, "slots B T K H"],
    v: Float[Array, "slots B T K R"],
    *,
    length: Int[Array, "B"],
    new: Int[Array, "B"],
) -> LayerGroup:
    """The group with each row's first `new[b]` tokens of the chunk appended to `length[b]`."""
    k, v = k.astype(group.spec.dtype), v.astype(group.spec.dtype)
    if group.spec.pages_per_row:
        group = _seal(group, k, v, length, new)
    write = _write_token if k.shape[2] == 1 else _write_chunk
    return dataclasses.replace(
        group,
        k_exact=write(group.spec, group.k_exact, k, length, new, tokens_last=True),
        v_exact=write(group.spec, group.v_exact, v, length, new, tokens_last=False),
    )


def _seal(group: LayerGroup, k: Array, v: Array, length: Array, new: Array) -> LayerGroup:
    spec = group.spec
    first, last = spec.sealed_pages(length), spec.sealed_pages(length + new)  # B
    if spec.window is None:
        last = jnp.minimum(last, spec.pages_per_row)
    else:  # pages that this call itself leaves behind the window are not written
        first = jnp.maximum(first, last - spec.pages_per_row)
    ends = jnp.cumsum(last - first)

    def seal_one(i, pool):
        row = jnp.searchsorted(ends, i, side="right")
        page = first[row] + i - jnp.where(row > 0, ends[row - 1], 0)
        ids = group.table[:, row, page % spec.pages_per_row]  # slots
        token = spec.sinks + page * spec.page_size + jnp.arange(spec.page_size)

        def encode(codec, params, exact, chunk):
            x = _tokens(spec, exact, chunk, row, token, length[row])  # slots K S H
            return jax.vmap(codec.encode if spec.packed is None else codec.quantise)(x, params)

        k_rows = jnp.swapaxes(group.k_exact, 3, 4)
        k_codes = encode(spec.k_codec, group.k_params, k_rows, k)
        v_codes = encode(spec.v_codec, group.v_params, group.v_exact, v)
        if spec.packed is not None:
            k_codes, v_codes = {"page": pack_page(spec.packed, spec, k_codes, v_codes)}, {}
        return pool.put(ids, k_codes, v_codes)

    return dataclasses.replace(group, pool=jax.lax.fori_loop(0, ends[-1], seal_one, group.pool))


def _tokens(
    spec: GroupSpec, exact: Array, chunk: Array, row: Array, token: Array, length: Array
) -> Float[Array, "slots K S H"]:
    """The exact keys or values of consecutive tokens of one row, from the ring or the chunk."""
    T, S = chunk.shape[2], token.shape[0]
    fresh = jax.lax.dynamic_index_in_dim(chunk, row, axis=1, keepdims=False)  # slots T K H

    def from_both() -> Array:
        ring = jax.lax.dynamic_index_in_dim(exact, row, axis=1, keepdims=False)  # slots K E H
        old = jnp.take(ring, spec.exact_slot(token), axis=2)
        now = jnp.moveaxis(jnp.take(fresh, jnp.clip(token - length, 0, T - 1), axis=1), 1, 2)
        return jnp.where((token < length)[None, None, :, None], old, now)

    if T < S:
        return from_both()

    def from_chunk() -> Array:
        now = jax.lax.dynamic_slice_in_dim(fresh, token[0] - length, S, axis=1)
        return jnp.moveaxis(now, 1, 2)

    return jax.lax.cond(token[0] >= length, from_chunk, from_both)


def _write_token(spec, exact, x, length, new, *, tokens_last: bool) -> Array:
    slot = jnp.where(new > 0, spec.exact_slot(length), spec.exact_slots)  # past the end: dropped
    rows = jnp.arange(exact.shape[1])
    update = jnp.moveaxis(x[:, :, 0], 1, 0)  # B slots K H: indexed axes go first
    where = (slice(None), rows, slice(None), slice(None), slot)
    at = exact.at[where] if tokens_last else exact.at[(*where[:3], slot)]
    return at.set(update, mode="drop", unique_indices=True)


def _write_chunk(spec, exact, x, length, new, *, tokens_last: bool) -> Array:
    token = spec.token_in_slot(length + new)  # B E
    at = token - length[:, None]
    index = jnp.clip(at, 0, x.shape[2] - 1)[None, :, :, None, None]
    fresh = jnp.take_along_axis(x, index, axis=2)  # slots B E K H
    fresh = jnp.moveaxis(fresh, 2, 4 if tokens_last else 3)
    shape = (1, -1, 1, 1, at.shape[1]) if tokens_last else (1, -1, 1, at.shape[1], 1)
    return jnp.where((at >= 0).reshape(1, at.shape[0], 1, *shape[3:]), fresh, exact)
