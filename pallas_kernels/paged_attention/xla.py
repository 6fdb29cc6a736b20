"""Paged attention in plain XLA, tile by tile (PagedAttention 2309.06180).

A tile is a few pages of every row. Its codes are gathered and decoded, used, and gone: no dense
copy of the cache exists, and the temporary memory is that of one tile. The number of tiles is a
traced value, so short rows cost little and no length compiles anything new.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.softmax import MASKED, Partial, attend_tile, merge

# Shapes: B batch, K KV heads, Q queries of a KV head (all of its group's tokens), H head dim,
# P pool pages, M pages in a row's table, S tokens of a page, n pages of a tile.


def paged_partial(
    q: Float[Array, "B K Q H"],
    k_pages: Any,
    v_pages: Any,
    table: Int[Array, "B M"],
    used: Int[Array, "B"],
    *,
    decode_k: Callable[[Any, Array], Array],
    decode_v: Callable[[Any, Array], Array],
    page_size: int,
    scale: float,
    tile_tokens: int = 128,
    start: Partial | None = None,
    softcap: float | None = None,
    mask: Callable[[Array], Array] | None = None,
) -> Partial:
    """Attention of every query to the first `used[b]` pages of its row; `acc [B, K, Q, R]`.

    k_pages, v_pages: pytrees of arrays `[P, K, ...]`. decode_k turns gathered codes
    `[B, n, K, ...]`, and the numbers of their tokens among the row's paged tokens `[n S]`, into
    keys `[B, n, K, H, S]`; decode_v into values `[B, n, K, S, R]`. Page 0 of the pool is the null
    page: all zeros, read in place of any page past `used`, so whatever unused pages hold is never
    touched. start: attention to other keys, in the same space of values, to merge into.
    softcap: see `attend_tile`. mask: which of a tile's tokens `[n S]` each query may see, as
    `[B, 1, Q, n S]`.
    """
    B, K, Q, _ = q.shape
    tile = max(1, min(tile_tokens // page_size, table.shape[1]))
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % tile)))
    table = jnp.where(jnp.arange(table.shape[1])[None] < used[:, None], table, 0)

    def body(i, part):
        k_t, v, tokens = load(i)
        seen = (tokens[None] < used[:, None] * page_size)[:, None, None, :]
        seen = seen if mask is None else seen & mask(tokens)
        return merge(part, attend_tile(q, k_t, v, seen, scale=scale, softcap=softcap))

    def load(i):
        ids = jax.lax.dynamic_slice_in_dim(table, i * tile, tile, axis=1)  # B n
        tokens = i * tile * page_size + jnp.arange(tile * page_size)
        k_t = jnp.moveaxis(decode_k(_gather(k_pages, ids), tokens), 1, 3)  # B K H n S
        v = jnp.moveaxis(decode_v(_gather(v_pages, ids), tokens), 1, 2)  # B K n S R
        v = v.reshape(B, K, tile * page_size, v.shape[-1])
        return k_t.reshape(B, K, k_t.shape[2], tile * page_size), v, tokens

    shape = (B, K, Q)
    out_dim = jax.eval_shape(load, 0)[1].shape[-1]
    if start is None:
        start = Partial(jnp.zeros((*shape, out_dim)), jnp.full(shape, MASKED), jnp.zeros(shape))
    tiles = (jnp.max(used) + tile - 1) // tile
    return jax.lax.fori_loop(0, tiles, body, start)


def _gather(pages: Any, ids: Array) -> Any:
    if ids.size == 1:  # a slice: XLA's CPU backend copies it faster than it gathers
        page = ids.reshape(())
        return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, page, 1)[None], pages)
    return jax.tree.map(lambda leaf: leaf.at[ids].get(mode="promise_in_bounds"), pages)
