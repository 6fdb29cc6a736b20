"""`flash_attention`: one signature, its kernels behind it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.flash_attention.documents import check as check_documents
from pallas_kernels.flash_attention.documents import in_blocks
from pallas_kernels.flash_attention.tpu import Flash, forward
from pallas_kernels.flash_attention.tpu_backward import backward
from pallas_kernels.flash_attention.xla import causal_partial
from pallas_kernels.softmax import MASKED, Partial

IMPLEMENTATIONS = ("xla", "tpu", "gpu")


def flash_attention(
    q: Float[Array, "B T K G H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K R"],
    *,
    lengths: Int[Array, "B"],
    scale: float,
    offset: int = 0,
    window: int | None = None,
    softcap: float | None = None,
    documents: Int[Array, "B S"] | None = None,
    implementation: str | None = None,
    interpret: Any = False,
) -> Partial:
    """Attention of T tokens to those at or before them among S, differentiable by q, k and v.

    offset: the first query's place among the keys. lengths: real keys of each row; the others are
    not seen, whatever they hold. window: how many keys a query sees, its own included. softcap: c
    of c tanh(s / c). documents: an id for each key; tokens of equal id are one document, and a
    query, which is key `offset` + t itself, sees keys of its own only (packed batches).

    In XLA the result is `causal_partial`'s, `acc [B,K,G,T,R]`. The kernel's is already divided:
    `top` is the log-sum-exp and `mass` 1 (0 without keys), which merges and finishes alike; it
    multiplies bfloat16.

    Raises NotImplementedError on "gpu", and ValueError on what has no meaning.
    """
    _check(q, k, v, lengths, offset=offset, window=window)
    chosen = implementation or ("tpu" if jax.default_backend() == "tpu" else "xla")
    if chosen not in IMPLEMENTATIONS:
        raise ValueError(f"implementation: expected one of {IMPLEMENTATIONS}, got {chosen!r}.")
    if chosen == "gpu":
        raise NotImplementedError("flash_attention: no GPU kernel yet; use implementation='xla'.")
    if chosen == "xla":
        how: dict[str, Any] = {"offset": offset, "window": window, "softcap": softcap}
        return causal_partial(q, k, v, lengths=lengths, scale=scale, documents=documents, **how)
    f = Flash(scale, offset, window, softcap, interpret=interpret)
    return _on_tpu(q, k, v, lengths, documents, f)


def _check(q, k, v, lengths, *, offset, window) -> None:
    (B, _, K, _, H), S = q.shape, k.shape[1]
    _need(k.shape == (B, S, K, H), "k", (B, "S", K, H), k.shape)
    _need(v.shape[:3] == (B, S, K), "v", (B, S, K, "R"), v.shape)
    _need(lengths.shape == (B,), "lengths", (B,), lengths.shape)
    _need(offset >= 0, "offset", "0 or more", offset)
    _need(window is None or window > 0, "window", "None or a positive int", window)


def _need(ok: bool, field: str, expected: object, got: object) -> None:
    if not ok:
        raise ValueError(f"flash_attention: {field}: expected {expected}, got {got}.")


def _on_tpu(q, k, v, lengths, documents, f: Flash) -> Partial:
    T, S = q.shape[1], k.shape[1]
    f = dataclasses.replace(f, rows=_block(T, 256), keys=_block(S, 512))
    if documents is not None:
        check_documents(documents, q, k, offset=f.offset)
        f = dataclasses.replace(f, documents=True)
        documents = in_blocks(documents, T, f.offset, f.rows, f.keys)
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    q = jnp.pad(jnp.moveaxis(q, 1, 3), [(0, 0)] * 3 + [(0, -T % f.rows), (0, 0)])
    k, v = (
        jnp.pad(jnp.moveaxis(x, 1, 2), [(0, 0), (0, 0), (0, -S % f.keys), (0, 0)]) for x in (k, v)
    )
    out, lse = _attend(q, k, v, jnp.minimum(lengths.astype(jnp.int32), S), documents, f)
    out, lse = out[..., :T, :], lse[..., :T]
    return Partial(out, lse, jnp.where(lse == MASKED, 0.0, 1.0))


def _block(tokens: int, most: int) -> int:
    """Blocks of whole lanes, no longer than the tokens need."""
    return min(most, -(-tokens // 128) * 128)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(q, k, v, lengths, documents, f: Flash):
    return forward(q, k, v, lengths, documents, f)


def _attend_forward(q, k, v, lengths, documents, f: Flash):
    out, lse = forward(q, k, v, lengths, documents, f)
    return (out, lse), (q, k, v, lengths, documents, out, lse)


def _attend_backward(f: Flash, kept, cotangents):
    q, k, v, lengths, documents, out, lse = kept
    d_out, d_lse = cotangents
    delta = jnp.sum(out * d_out, axis=-1) - d_lse
    grads = backward(q, k, v, lengths, documents, lse, delta, d_out.astype(q.dtype), f)
    dq, dk, dv = (g.astype(q.dtype) for g in grads)
    return dq, dk, dv, None, None


_attend.defvjp(_attend_forward, _attend_backward)
