"""Paged attention in plain XLA, tile by tile (PagedAttention 2309.06180).

A tile is a few pages of every row. Its codes are gathered and decoded, used, and gone: no dense
copy of the cache exists, and the temporary memory is that of one tile. The number of tiles is a
traced value, so short rows cost little and no length compiles anything new.

A page that a row does not use may hold anything, NaN too: its part is masked out as a whole, by
pages, after the products.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.softmax import MASKED, Partial, merge, soft_cap

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
    tokens_last: bool = False,
    queries: Callable[[Array], tuple[Array, ...]] | None = None,
) -> Partial:
    """Attention of every query to the first `used[b]` pages of its row; `acc [B, K, Q, R]`.

    k_pages, v_pages: pytrees of arrays `[P, K, ...]`. decode_k turns gathered codes
    `[B, n, K, ...]`, and the numbers of their tokens among the row's paged tokens `[n S]`, into
    keys `[B, n, K, S, H]` (tokens_last: `[B, n, K, H, S]`, where that is how they lie); decode_v
    into values `[B, n, K, S, R]`. start: attention to other keys, in the same space of values, to
    merge into. softcap: see `attend_tile`. mask: which of a tile's tokens `[n S]` each query may
    see, as `[B, 1, Q, n S]`; they hold real tokens. queries: what meets a tile instead of q, where
    keys are parts (decode_k gives a tuple) whose products add up to a score: of `tokens` too, as
    many `[B, n, K, Q, H]`.
    """
    B, K, Q, _ = q.shape
    tile = max(1, min(tile_tokens // page_size, table.shape[1]))
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % tile)))

    def body(i, carry):
        part, codes = carry
        page = i * tile + jnp.arange(tile)
        k, v = decode(i, codes)
        valid, within = page[None] < used[:, None], None
        if mask is not None:
            seen = mask(numbers(i))  # B 1 Q n S
            within = jnp.moveaxis(seen.reshape(*seen.shape[:3], tile, page_size), 3, 1)
        how: dict[str, Any] = {"scale": scale, "softcap": softcap, "within": within}
        qs = (q[:, None],) if queries is None else queries(numbers(i))
        ks = (k,) if queries is None else k
        found = _pages(qs, ks, v, valid, tokens_last=tokens_last, **how)
        return merge(part, found), load(i + 1)

    # The next tile's codes are carried: decoding then reads an array of its own. Fused with the
    # slice of the pool it is several times slower on CPU, where codes have two planes.
    def load(i):
        ids = jax.lax.dynamic_slice_in_dim(table, i * tile, tile, axis=1)  # B n
        k = _gather(k_pages, ids)
        return k, k if v_pages is k_pages else _gather(v_pages, ids)

    def numbers(i):
        return i * tile * page_size + jnp.arange(tile * page_size)

    def decode(i, codes):
        return decode_k(codes[0], numbers(i)), decode_v(codes[1], numbers(i))

    shape = (B, K, Q)
    out_dim = jax.eval_shape(lambda: decode(0, load(0)))[1].shape[-1]
    if start is None:
        start = Partial(jnp.zeros((*shape, out_dim)), jnp.full(shape, MASKED), jnp.zeros(shape))
    tiles = (jnp.max(used) + tile - 1) // tile
    return jax.lax.fori_loop(0, tiles, body, (start, load(0)))[0]


def pool_partial(
    q: Float[Array, "1 K Q H"],
    k_t: Float[Array, "P K H S"],
    v: Float[Array, "P K S R"],
    table: Int[Array, "1 P"],
    used: Int[Array, "1"],
    *,
    scale: float,
    softcap: float | None = None,
) -> Partial:
    """`paged_partial` where one row owns the whole pool, as it lies: nothing is copied.

    table: a permutation. The sums go in its order, so where a page lies changes no bit.
    """
    order = table[0]
    in_use = jnp.arange(order.size) < used[0]
    valid = jnp.any((order[:, None] == jnp.arange(order.size)[None]) & in_use[:, None], axis=0)
    how: dict[str, Any] = {"scale": scale, "softcap": softcap, "order": order}
    return _pages((q[:, None],), (k_t[None],), v[None], valid[None], tokens_last=True, **how)


def _pages(
    qs: tuple[Float[Array, "B n|1 K Q H"], ...],
    ks: tuple[Float[Array, "B n K *S_H"], ...],
    v: Float[Array, "B n K S R"],
    valid: Bool[Array, "B n"],
    *,
    tokens_last: bool,
    scale: float,
    softcap: float | None = None,
    order: Int[Array, "n"] | None = None,
    within: Bool[Array, "B n 1 Q S"] | None = None,
) -> Partial:
    """Attention to whole pages: each page's products alone, then their sum, in `order`.

    within: the tokens that each query may see, if not all of a valid page.
    """
    seen = valid[:, :, None, None]
    dims = (((4,), (3 if tokens_last else 4,)), ((0, 1, 2), (0, 1, 2)))

    def product(q: Array, k: Array) -> Array:
        rows = jnp.broadcast_to(q, (*valid.shape, *q.shape[2:]))
        return jax.lax.dot_general(rows, k, dims, preferred_element_type=jnp.float32)

    scores = functools.reduce(operator.add, map(product, qs, ks)) * scale
    scores = jnp.where(seen[..., None], soft_cap(scores, softcap), MASKED)
    scores = scores if within is None else jnp.where(within, scores, MASKED)
    top = jnp.max(scores, axis=(1, 4))  # B K Q
    weights = jnp.exp(scores - top[:, None, :, :, None])
    weights = weights if within is None else jnp.where(within, weights, 0.0)
    acc = jnp.matmul(weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    acc = jnp.where(seen[..., None], acc, 0.0)  # B n K Q R
    mass = jnp.where(seen, jnp.sum(weights, axis=-1), 0.0)  # B n K Q
    if order is not None:
        acc, mass = acc[:, order], mass[:, order]
    return Partial(jnp.sum(acc, axis=1), top, jnp.sum(mass, axis=1))


def _gather(pages: Any, ids: Array) -> Any:
    if ids.size == 1:  # a slice: XLA's CPU backend copies it faster than it gathers
        page = ids.reshape(())
        return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, page, 1)[None], pages)
    return jax.tree.map(lambda leaf: leaf.at[ids].get(mode="promise_in_bounds"), pages)
