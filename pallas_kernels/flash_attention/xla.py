"""Blockwise causal attention in plain XLA (FlashAttention 2205.14135; Rabe & Staats 2112.05682).

Queries go in blocks; each block sees key blocks up to its own. Under `jax.grad` a query block is
recomputed, so training memory also stays linear in the length.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.flash_attention.documents import check, in_blocks
from pallas_kernels.softmax import MASKED, Partial, attend_tile, merge

# Shapes: B batch, A tokens that attend, T tokens that are seen, K KV heads, G query heads per KV
# head, H head dim, C block.


def causal_partial(
    q: Float[Array, "B A K G H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K R"],
    *,
    lengths: Int[Array, "B"],
    scale: float,
    block: int = 512,
    softcap: float | None = None,
    window: int | None = None,
    at: Int[Array, "B A"] | None = None,
    offset: int = 0,
    documents: Int[Array, "B T"] | None = None,
) -> Partial:
    """Attention of tokens to those at or before them. `acc [B,K,G,A,R]`, `top`, `mass [B,K,G,A]`.

    lengths: how many of the T tokens of each row are real (right-padded); the others are not seen,
    whatever they hold, and their own output is that of no particular key. at: which of the T tokens
    attend, a few of each row; None: A in a row, from `offset` on. window: how many tokens back a
    token sees, itself included. softcap: see `attend_tile`. documents: ids; a token sees those of
    its own id only, and whole blocks of others are left out (`documents.py`).

    Raises ValueError on documents of another shape, or with queries that are none of the T tokens.
    """
    if documents is not None:
        check(documents, q, k, offset=offset, placed=at is not None)
    A, T = q.shape[1], k.shape[1]
    real = jnp.arange(T)[None] < lengths[:, None]
    q = jnp.moveaxis(q, 1, 3)  # B K G A H
    # B K T H and R; a NaN past the end would reach the gradients
    k, v = (jnp.where(real[:, None, :, None], jnp.moveaxis(x, 1, 2), 0) for x in (k, v))
    how = {"scale": scale, "softcap": softcap, "window": window}
    if at is None and block < max(A, T):
        return _blockwise(q, k, v, real, documents, block=block, offset=offset, **how)
    at = offset + jnp.arange(A)[None] if at is None else at
    ids = None
    if documents is not None:
        own = jnp.broadcast_to(at, q.shape[:1] + at.shape[1:])
        ids = jnp.take_along_axis(documents, own, axis=1), documents
    return _block(q, k, v, at, jnp.arange(T), real, ids, **how)


def _blockwise(q, k, v, real, documents, *, block, offset, window, **how) -> Partial:
    """Blocks of queries, each over the blocks of keys that it may see."""
    B, K, G, A, _ = q.shape
    rows, keys = min(block, A), min(block, k.shape[2])
    q = _blocks(q, rows, axis=3)  # n B K G C H
    k, v, real = (_blocks(x, keys, axis=axis) for x, axis in ((k, 2), (v, 2), (real, 1)))
    q_ids = k_ids = None
    if documents is not None:
        packed = in_blocks(documents, A, offset, rows, keys)
        q_ids, k_ids = (
            _blocks(x[:, 0], n, axis=1) for x, n in ((packed.q, rows), (packed.k, keys))
        )

    @jax.checkpoint
    def one_query_block(i, q_i, ids_i):
        first = offset + i * rows

        def one_key_block(part, j):
            seen = j * keys < first + rows
            if window is not None:  # the last key of the block within the first query's window
                seen &= (j + 1) * keys + window > first + 1
            if documents is not None:
                seen &= jnp.any((j >= packed.first[:, i]) & (i <= packed.last[:, j]))
            return jax.lax.cond(seen, lambda p: see(p, j), lambda p: p, part), None

        def see(part, j):
            at, to = first + jnp.arange(rows), j * keys + jnp.arange(keys)
            ids = None if k_ids is None else (ids_i, k_ids[j])
            new = _block(q_i, k[j], v[j], at[None], to, real[j], ids, window=window, **how)
            return merge(part, new)

        def full(value, *width):  # as q in a `shard_map`: on each device another
            return jnp.full_like(q_i, value, dtype=jnp.float32, shape=(B, K, G, rows, *width))

        empty = Partial(full(0, v.shape[-1]), full(MASKED), full(0))
        return jax.lax.scan(one_key_block, empty, jnp.arange(k.shape[0]))[0]

    parts = jax.lax.map(lambda x: one_query_block(*x), (jnp.arange(q.shape[0]), q, q_ids))
    return jax.tree.map(
        lambda x: jnp.moveaxis(x, 0, 3).reshape(B, K, G, -1, *x.shape[5:])[:, :, :, :A], parts
    )


def _block(q, k, v, at, to, real, ids, *, scale, softcap, window) -> Partial:
    """at `[B or 1, A]`, to `[S]`: positions of queries and keys. ids: None, or their documents."""
    B, K, G, A, H = q.shape
    back = at[:, :, None] - to[None, None]  # B A S
    seen = (back >= 0) if window is None else (back >= 0) & (back < window)
    if ids is not None:
        seen = seen & (ids[0][:, :, None] == ids[1][:, None])
    mask = jnp.broadcast_to((seen & real[:, None])[:, None, None], (B, 1, G, *back.shape[1:]))
    mask = mask.reshape(B, 1, G * A, -1)
    q = q.reshape(B, K, G * A, H)
    part = attend_tile(q, jnp.swapaxes(k, 2, 3), v, mask, scale=scale, softcap=softcap)
    return jax.tree.map(lambda x: x.reshape(B, K, G, A, *x.shape[3:]), part)


def _blocks(x: Array, block: int, *, axis: int) -> Array:
    """`[n, ...]`: whole blocks along an axis, the last one padded with zeros."""
    widths = [(0, -x.shape[axis] % block if a == axis else 0) for a in range(x.ndim)]
    x = jnp.pad(x, widths)
    x = x.reshape(*x.shape[:axis], -1, block, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)
