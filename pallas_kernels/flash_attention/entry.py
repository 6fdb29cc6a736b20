"""`flash_attention`: one signature, its kernels behind it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.devices import tpu_generation
from pallas_kernels.flash_attention.attend import attend, by_program, kernel_only, plain_xla
from pallas_kernels.flash_attention.documents import check as check_documents
from pallas_kernels.flash_attention.tpu import Flash
from pallas_kernels.softmax import Partial

IMPLEMENTATIONS = ("xla", "tpu", "gpu")

#: The first generation of TPUs whose memory on chip its blocks fit.
OLDEST = 5
#: Fewest queries of a row that a block of the kernel is full of.
FEWEST = 128
#: Most query heads of a KV head, and most channels of a head, at which it is known to compile.
MOST_GROUPS, MOST_CHANNELS = 16, 256


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
    at: Int[Array, "B T"] | None = None,
    documents: Int[Array, "B S"] | None = None,
    implementation: str | None = None,
    interpret: Any = False,
) -> Partial:
    """Attention of T tokens to those at or before them among S, differentiable by q, k and v.

    offset: the first query's place among the keys. lengths: real keys of each row; the others are
    not seen, whatever they hold. window: how many keys a query sees, its own included. softcap: c
    of c tanh(s / c). at: the queries' places, where they are not in a row. documents: an id for
    each key; tokens of equal id are one document, and a query, which is key `offset` + t itself,
    sees keys of its own only (packed batches).

    implementation: None is plain XLA where `unsupported` has a reason, and where neither this
    process nor the mesh has TPUs (of v5 or later); else the TPU's kernel in a program for one TPU
    and plain XLA in any other (`on_one_device`), also in the backward pass. The kernel has neither
    forward-mode nor second derivatives.

    In XLA the result is `causal_partial`'s, `acc [B,K,G,T,R]`. The kernel's is already divided:
    `top` is the log-sum-exp and `mass` 1 (0 without keys), which merges and finishes alike; it
    multiplies bfloat16.

    Raises NotImplementedError on "gpu" and on places with "tpu", and ValueError on what has no
    meaning.
    """
    _check(q, k, v, lengths, offset=offset, window=window)
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(
            f"implementation: expected one of {IMPLEMENTATIONS}, got {implementation!r}."
        )
    if implementation == "gpu":
        raise NotImplementedError("flash_attention: no GPU kernel yet; use implementation='xla'.")
    if implementation == "tpu" and at is not None:
        raise NotImplementedError("flash_attention: at: the kernel takes queries in a row only.")
    if documents is not None:
        check_documents(documents, q, k, offset=offset, placed=at is not None)
    f = Flash(scale, offset, window, softcap, interpret=interpret)
    kernel_of_any = (tpu_generation() or 0) >= OLDEST and not unsupported(q, v, at=at)
    if implementation == "xla" or (implementation is None and not kernel_of_any):
        return plain_xla(q, k, v, lengths, documents, f=f, at=at)
    choice = by_program if implementation is None else kernel_only
    return attend(q, k, v, lengths, documents, f, choice)


def unsupported(q: Any, v: Any, *, at: Any = None) -> str:
    """Why the TPU's kernel is not taken unless asked for by name, on any TPU; "" where it is.

    q, v, at: `flash_attention`'s, or their `jax.ShapeDtypeStruct`s.
    """
    (_, T, _, G, H), R = q.shape, v.shape[3]
    if q.dtype != jnp.bfloat16:
        return f"it multiplies bfloat16, and the arrays are {q.dtype}"
    if at is not None:
        return "it takes queries in a row, and these are named by their places"
    if T < FEWEST:
        return f"it pads queries to {FEWEST} a row, and there are {T}"
    if G > MOST_GROUPS or max(H, R) > MOST_CHANNELS:
        most = f"{MOST_GROUPS} query heads of a KV head and {MOST_CHANNELS} channels of a head"
        return f"it takes at most {most}, and there are {G} and {max(H, R)}"
    return ""


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
