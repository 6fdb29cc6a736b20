"""Blockwise causal attention in plain XLA (FlashAttention 2205.14135; Rabe & Staats 2112.05682).

Queries go in blocks; each block sees key blocks up to its own. Under `jax.grad` a query block is
recomputed, so training memory also stays linear in the length.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

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
) -> Partial:
    """Attention of tokens to those at or before them. `acc [B,K,G,A,R]`, `top`, `mass [B,K,G,A]`.

    lengths: how many of the T tokens of each row are real (right-padded); the others are not seen,
    whatever they hold, and their own output is that of no particular key. at: which of the T tokens
    attend, a few of each row; None: A in a row, from `offset` on. window: how many tokens back a
    token sees, itself included. softcap: see `attend_tile`.
    """
    A, T = q.shape[1], k.shape[1]
    real = jnp.arange(T)[None] < lengths[:, None]
    q = jnp.moveaxis(q, 1, 3)  # B K G A H
    # B K T H and R; a NaN past the end would reach the gradients
    k, v = (jnp.where(real[:, None, :, None], jnp.moveaxis(x, 1, 2), 0) for x in (k, v))
    how = {"scale": scale, "softcap": softcap, "window": window}
    if at is None and block < max(A, T):
        return _blockwise(q, k, v, real, block=block, offset=offset, **how)
    at = offset + jnp.arange(A)[None] if at is None else at
    return _block(q, k, v, at, jnp.arange(T), real, **how)


def _blockwise(q, k, v, real, *, block, offset, window, **how) -> Partial:
    """Blocks of queries, each over the blocks of keys that it may see."""
    B, K, G, A, _ = q.shape
    rows, keys = min(block, A), min(block, k.shape[2])
    q = _blocks(q, rows, axis=3)  # n B K G C H
    k, v, real = (_blocks(x, keys, axis=axis) for x, axis in ((k, 2), (v, 2), (real, 1)))

    @jax.checkpoint
    def one_query_block(i, q_i):
        first = offset + i * rows

        def one_key_block(part, j):
            seen = j * keys < first + rows
            if window is not None:  # the last key of the block within the first query's window
                seen &= (j + 1) * keys + window > first + 1
            return jax.lax.cond(seen, lambda p: see(p, j), lambda p: p, part), None

        def see(part, j):
            at, to = first + jnp.arange(rows), j * keys + jnp.arange(keys)
            new = _block(q_i, k[j], v[j], at[None], to, real[j], window=window, **how)
            return merge(part, new)

        shape = (B, K, G, rows)
        empty = Partial(jnp.zeros((*shape, v.shape[-1])), jnp.full(shape, MASKED), jnp.zeros(shape))
        return jax.lax.scan(one_key_block, empty, jnp.arange(k.shape[0]))[0]

    parts = jax.lax.map(lambda iq: one_query_block(*iq), (jnp.arange(q.shape[0]), q))
    return jax.tree.map(
        lambda x: jnp.moveaxis(x, 0, 3).reshape(B, K, G, -1, *x.shape[5:])[:, :, :, :A], parts
    )


def _block(q, k, v, at, to, real, *, scale, softcap, window) -> Partial:
    """at `[B or 1, A]`, to `[S]`: positions of queries and keys."""
    B, K, G, A, H = q.shape
    back = at[:, :, None] - to[None, None]  # B A S
    seen = (back >= 0) if window is None else (back >= 0) & (back < window)
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
