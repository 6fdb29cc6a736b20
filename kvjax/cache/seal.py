"""Seal: which pages a call completes, where their tokens are, and how they come into the pool.

A page is sealed when it lies wholly before the recent tokens. Its tokens are taken from the exact
ring, from the chunk, or from both, in a loop over the pages that there are. On a TPU the kernel
quantises, and all pages that lie wholly in the chunk go in one call of it; where it does not take a
codec, they are cut out of the chunk at once, as XLA would lay out the whole chunk for each of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache.packed import pack_page
from kvjax.cache.pool import Pool, put_codes
from kvjax.cache.quantisers import quantisers
from kvjax.cache.spec import GroupSpec
from kvjax.codecs.base import Codes
from pallas_kernels.devices import on_tpu
from pallas_kernels.seal import seal

if TYPE_CHECKING:
    from kvjax.cache.kv_cache import LayerGroup

#: keys `[slots, S, K, H]` and values `[slots, S, K, R]` of one row's page
PageOf = Callable[[Int[Array, ""], Int[Array, ""]], tuple[Array, Array]]


def seal_group(
    group: LayerGroup,
    k: Float[Array, "slots B T K H"],
    v: Float[Array, "slots B T K R"],
    *,
    length: Int[Array, "B"],
    new: Int[Array, "B"],
) -> LayerGroup:
    """The group with the pages sealed that each row's first `new[b]` tokens of the chunk complete.
    The ring must not have them yet."""
    spec = group.spec
    first, last = spec.sealed_pages(length), spec.sealed_pages(length + new)  # B
    if spec.window is None:
        last = jnp.minimum(last, spec.pages_per_row)
    else:  # pages that this call itself leaves behind the window are not written
        first = jnp.maximum(first, last - spec.pages_per_row)
    within = k.shape[2] // spec.page_size  # pages that may lie wholly in the chunk
    if spec.window is not None:
        within = min(within, spec.pages_per_row)
    fresh = last
    if within:
        fresh = jnp.clip(-((spec.sinks - length) // spec.page_size), first, last)

    k_rows = jnp.swapaxes(group.k_exact, 3, 4)
    # where a page begins in the ring it ends within a page of the chunk's tokens; the whole chunk
    # in a loop would be laid out for it
    both = ((k_rows, k[:, :, : spec.page_size]), (group.v_exact, v[:, :, : spec.page_size]))

    def from_both(row: Array, page: Array) -> tuple[Array, Array]:
        token = spec.sinks + page * spec.page_size + jnp.arange(spec.page_size)
        k_page, v_page = (_tokens(spec, *x, row, token, length[row]) for x in both)
        return k_page, v_page

    pool = _one_by_one(group, group.pool, first, fresh, from_both)
    if within:
        start = spec.sinks + fresh * spec.page_size - length
        pool = _seal_fresh(group, pool, fresh, last, k, v, start, within)
    return dataclasses.replace(group, pool=pool)


def _seal_fresh(
    group: LayerGroup,
    pool: Pool,
    first: Int[Array, "B"],
    last: Int[Array, "B"],
    k: Float[Array, "slots B T K H"],
    v: Float[Array, "slots B T K R"],
    start: Int[Array, "B"],
    most: int,
) -> Pool:
    """Pages first[b] to last[b] of each row, `most` or fewer, made of the chunk from its token
    start[b] on."""
    spec = group.spec

    def one_by_one(pool: Pool) -> Pool:
        def page_of(row: Array, page: Array) -> tuple[Array, Array]:
            at = (0, row, start[row] + (page - first[row]) * spec.page_size, 0, 0)
            sizes = [(x.shape[0], 1, spec.page_size, *x.shape[3:]) for x in (k, v)]
            k_page, v_page = (
                jax.lax.dynamic_slice(x, at, size)[:, 0]
                for x, size in zip((k, v), sizes, strict=True)
            )
            return k_page, v_page

        return _one_by_one(group, pool, first, last, page_of)

    def cut_first(pool: Pool) -> Pool:
        k_pages, v_pages = (_cut(x, start, most, spec) for x in (k, v))

        def page_of(row: Array, page: Array) -> tuple[Array, Array]:
            at = page - first[row]
            return k_pages[:, row, at], v_pages[:, row, at]

        return _one_by_one(group, pool, first, last, page_of)

    def at_once(pool: Pool) -> Pool:
        page = first[:, None] + jnp.arange(most)[None]  # B n
        row = jnp.arange(page.shape[0])[:, None]
        ids = jnp.where(page < last[:, None], group.table[:, row, page % spec.pages_per_row], -1)

        def write(k_block: Codes, v_block: Codes, at: Array, slots: slice) -> tuple[Codes, Codes]:
            own_k, own_v = (x[slots].reshape(-1, *x.shape[2:]) for x in (k, v))
            starts = jnp.tile(start, at.shape[0])
            return _by_kernel(spec, k_block, at.reshape(-1, most), own_k, own_v, starts), v_block

        return pool.put(ids, write)

    by_kernel = quantisers(spec) is not None
    return on_tpu(at_once if by_kernel else cut_first, one_by_one, pool)


def _one_by_one(
    group: LayerGroup, pool: Pool, first: Int[Array, "B"], last: Int[Array, "B"], page_of: PageOf
) -> Pool:
    """Pages first[b] to last[b] of each row written, in a loop over those that there are."""
    spec, ends = group.spec, jnp.cumsum(last - first)

    def one(i: Array, pool: Pool) -> Pool:
        row = jnp.searchsorted(ends, i, side="right")
        page = first[row] + i - jnp.where(row > 0, ends[row - 1], 0)
        ids = group.table[:, row, page % spec.pages_per_row]  # slots
        k, v = page_of(row, page)

        def write(k_block: Codes, v_block: Codes, at: Array, slots: slice) -> tuple[Codes, Codes]:
            own = jax.tree.map(lambda x: x[slots], (k, v, group.k_params, group.v_params))
            return _write(spec, k_block, v_block, at, *own)

        return pool.put(ids, write)

    return jax.lax.fori_loop(0, ends[-1], one, pool)


def _write(spec: GroupSpec, k_block, v_block, at, k, v, k_params, v_params) -> tuple[Codes, Codes]:
    """A block with pages `at` made of tokens `[n, S, K, H]` of as many layers."""

    def by_xla(k_block: Codes, v_block: Codes, k: Array, v: Array) -> tuple[Codes, Codes]:
        k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
        if spec.packed is None:
            k_codes = jax.vmap(spec.k_codec.encode)(k, k_params)
            v_codes = jax.vmap(spec.v_codec.encode)(v, v_params)
            return put_codes(k_block, at, k_codes), put_codes(v_block, at, v_codes)
        k_codes = jax.vmap(spec.k_codec.quantise)(k, k_params)
        v_codes = jax.vmap(spec.v_codec.quantise)(v, v_params)
        page = pack_page(spec.packed, spec, k_codes, v_codes)
        return put_codes(k_block, at, {"page": page}), v_block

    def by_kernel(k_block: Codes, v_block: Codes, k: Array, v: Array) -> tuple[Codes, Codes]:
        return _by_kernel(spec, k_block, at[:, None], k, v), v_block

    operands = k_block, v_block, k, v
    if quantisers(spec) is None:
        return by_xla(*operands)
    return on_tpu(by_kernel, by_xla, *operands)


def _by_kernel(
    spec: GroupSpec, block: Codes, ids: Array, k: Array, v: Array, start: Array | None = None
) -> Codes:
    fmt, made = spec.packed, quantisers(spec)
    assert fmt is not None
    assert made is not None
    page = block["page"]
    options: dict[str, Any] = {"fmt": fmt, "quantisers": made, "implementation": "tpu"}
    return {"page": seal(page, ids, k, v, start=start, **options)}


def _cut(
    chunk: Float[Array, "slots B T K H"], start: Int[Array, "B"], pages: int, spec: GroupSpec
) -> Float[Array, "slots B n S K H"]:
    """Whole pages of each row's tokens, from `start` on; past the chunk's end anything."""
    size = pages * spec.page_size
    # so that no start is moved: a page that begins in the chunk, or the first behind the sinks
    beyond = max(spec.page_size, spec.sinks) if spec.window is None else size
    padded = jnp.pad(chunk, [(0, 0), (0, 0), (0, beyond), (0, 0), (0, 0)])

    def of_row(x: Array, start: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)

    cut = jax.vmap(of_row, in_axes=(1, 0), out_axes=1)(padded, start)
    return cut.reshape(*cut.shape[:2], pages, spec.page_size, *cut.shape[3:])


def _tokens(
    spec: GroupSpec, exact: Array, chunk: Array, row: Array, token: Array, length: Array
) -> Float[Array, "slots S K H"]:
    """The exact keys or values of consecutive tokens of one row, from the ring and the chunk."""
    ring = jax.lax.dynamic_index_in_dim(exact, row, axis=1, keepdims=False)  # slots K E H
    fresh = jax.lax.dynamic_index_in_dim(chunk, row, axis=1, keepdims=False)  # slots T K H
    old = jnp.swapaxes(jnp.take(ring, spec.exact_slot(token), axis=2), 1, 2)
    at = jnp.clip(token - length, 0, chunk.shape[2] - 1)
    now = jnp.take(fresh, at, axis=1)
    return jnp.where((token < length)[None, :, None, None], old, now)
