"""Attention to the TPU's packed pages in plain XLA: the kernel's reference, and its stand-in.

One page of every row at a time: temporary memory does not grow with the length.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.codes.base import LANES
from pallas_kernels.pages import PageFormat, Params
from pallas_kernels.softmax import MASKED, Partial, merge
from pallas_kernels.turn import Turn, cos_sin, turned


def paged_attention_xla(
    q: Float[Array, "B K Q D"],
    pages: Int[Array, "P rows 128"],
    table: Int[Array, "B M"],
    lengths: Int[Array, "B"],
    *,
    fmt: PageFormat,
    scale: float,
    positions: Int[Array, "B"] | None = None,
    queries: int = 1,
    window: int | None = None,
    softcap: float | None = None,
    turn: Turn | None = None,
    params: Params = ({}, {}),
    logits: bool = False,
) -> tuple[Partial, Float[Array, "B K Q S"] | None]:
    """See `paged_attention` and `paged_attention_logits`; scores only if asked for."""
    B, K, Q, _ = q.shape
    q = q.astype(jnp.bfloat16).astype(jnp.float32)
    lengths = jnp.minimum(lengths, table.shape[1] * LANES)

    def body(m, carry):
        part, scores = carry
        ids = jax.lax.dynamic_index_in_dim(table, m, axis=1, keepdims=False)
        inside = (ids >= 0) & (ids < pages.shape[0]) & (m * LANES < lengths)
        k, v = fmt.keys_values(pages[jnp.where(inside, ids, 0)], params)  # B K S D, B K S H
        token = m * LANES + jnp.arange(LANES)
        if turn is not None:
            angles = cos_sin(turn, turn.start[:, None] + token[None])
            k = turned(k, *(x[:, None] * turn.factor for x in angles), axis=-1)
        v = jnp.where((token[None] < lengths[:, None])[:, None, :, None], v, 0)
        s = jnp.einsum("bkqd,bksd->bkqs", q, k, precision="highest") * scale
        s = s if softcap is None else softcap * jnp.tanh(s / softcap)
        mask = seen_tokens(token, lengths, positions, Q, queries, window)
        s = jnp.where(mask, s, MASKED)
        if scores is not None:
            scores = jax.lax.dynamic_update_slice_in_dim(scores, s, m * LANES, axis=3)
        top = jnp.max(s, axis=-1)
        p = jnp.where(mask, jnp.exp(s - top[..., None]), 0.0)
        acc = jnp.einsum("bkqs,bksh->bkqh", p, v, precision="highest")
        return merge(part, Partial(acc, top, jnp.sum(p, axis=-1))), scores

    shape = (B, K, Q)
    empty = Partial(jnp.zeros((*shape, fmt.head_dim)), jnp.full(shape, MASKED), jnp.zeros(shape))
    scores = jnp.full((*shape, table.shape[1] * LANES), MASKED) if logits else None
    pages_used = (jnp.max(lengths) + LANES - 1) // LANES
    return jax.lax.fori_loop(0, pages_used, body, (empty, scores))


def seen_tokens(token, lengths, positions, Q, queries, window) -> Bool[Array, "B 1 Q S"]:
    """Which tokens of a row, of those at `token [S]`, each of its queries sees."""
    seen = (token[None] < lengths[:, None])[:, None, None, :]
    if positions is None:
        return jnp.broadcast_to(seen, (seen.shape[0], 1, Q, token.shape[0]))
    own = positions[:, None] + jnp.arange(Q)[None] % queries  # B Q
    own = own[:, None, :, None]
    seen = seen & (token[None, None, None] <= own)
    return seen if window is None else seen & (token[None, None, None] > own - window)
