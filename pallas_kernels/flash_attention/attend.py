"""Attention with a backward pass, as the TPU's kernels and as plain XLA, behind one `custom_vjp`.

Which of the two runs may be known only when a program is lowered. The choice is therefore made
inside of the `custom_vjp`, once forward and once backward, and what the one leaves to the other
(output and log-sum-exp, of which plain XLA makes no use) has the same shapes in both.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.devices import on_one_device, on_tpu
from pallas_kernels.flash_attention import tpu, tpu_backward
from pallas_kernels.flash_attention.documents import Documents, in_blocks
from pallas_kernels.flash_attention.tpu import Flash
from pallas_kernels.flash_attention.xla import causal_partial
from pallas_kernels.softmax import MASKED, Partial

Gradients = tuple[Array, Array, Array]


class Choice(Protocol):
    """Calls one of two functions of the same operands and results."""

    def __call__(self, kernel: Any, plain: Any, *operands: Any) -> Any: ...


def by_program(kernel: Any, plain: Any, *operands: Any) -> Any:
    """The kernel in a program for one TPU, plain XLA in any other."""
    return on_tpu(
        functools.partial(on_one_device, "flash attention", kernel, plain), plain, *operands
    )


def kernel_only(kernel: Any, plain: Any, *operands: Any) -> Any:
    return kernel(*operands)


@functools.partial(jax.jit, static_argnums=(5, 6))  # traced once for all layers that are alike
def attend(
    q: Float[Array, "B T K G H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K R"],
    lengths: Int[Array, "B"],
    documents: Int[Array, "B S"] | None,
    f: Flash,
    choice: Choice,
) -> Partial:
    """See `flash_attention`. f: its blocks are chosen here."""
    f = dataclasses.replace(
        f,
        rows=_block(q.shape[1], 256),
        keys=_block(k.shape[1], 512),
        documents=documents is not None,
    )
    return _attend(q, k, v, lengths, documents, f, choice)


def _block(tokens: int, most: int) -> int:
    """Blocks of whole lanes, no longer than the tokens need."""
    return min(most, -(-tokens // 128) * 128)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attend(q, k, v, lengths, documents, f: Flash, choice: Choice) -> Partial:
    kernel, plain = (functools.partial(form, f=f) for form in (_kernel, plain_xla))
    return choice(kernel, plain, q, k, v, lengths, documents)


def _attend_forward(q, k, v, lengths, documents, f: Flash, choice: Choice):
    part = _attend(q, k, v, lengths, documents, f, choice)
    return part, (q, k, v, lengths, documents, part.acc, part.top)


def _attend_backward(f: Flash, choice: Choice, kept, by_part: Partial):
    forms = (functools.partial(form, f=f) for form in (_kernel_backward, _plain_backward))
    return *choice(*forms, *kept, by_part), None, None


_attend.defvjp(_attend_forward, _attend_backward)


def plain_xla(q, k, v, lengths, documents, *, f: Flash, at: Any = None) -> Partial:
    how: dict[str, Any] = {"scale": f.scale, "offset": f.offset, "window": f.window}
    how |= {"softcap": f.softcap, "documents": documents, "at": at}
    return causal_partial(q, k, v, lengths=lengths, **how)


def _plain_backward(q, k, v, lengths, documents, _out, _lse, by_part, *, f: Flash) -> Gradients:
    def forward(q, k, v):
        return plain_xla(q, k, v, lengths, documents, f=f)

    return jax.vjp(forward, q, k, v)[1](by_part)


def _kernel(q, k, v, lengths, documents, *, f: Flash) -> Partial:
    T = q.shape[1]
    out, lse = tpu.forward(*_laid_out(q, k, v, f), *_seen(q, k, lengths, documents, f), f)
    out, lse = out[..., :T, :], lse[..., :T]
    return Partial(out, lse, jnp.where(lse == MASKED, 0.0, 1.0))


def _kernel_backward(q, k, v, lengths, documents, out, lse, by_part, *, f: Flash) -> Gradients:
    """The mass is constant. Queries that only fill a block have no weights: exp(-inf) is 0."""
    T, S = q.shape[1], k.shape[1]
    delta = jnp.sum(out * by_part.acc, axis=-1) - by_part.top
    rest = [(0, 0)] * 3 + [(0, -T % f.rows)]
    lse, delta = jnp.pad(lse, rest, constant_values=jnp.inf), jnp.pad(delta, rest)
    by_out = jnp.pad(by_part.acc.astype(jnp.bfloat16), [*rest, (0, 0)])
    seen = _seen(q, k, lengths, documents, f)
    dq, dk, dv = tpu_backward.backward(*_laid_out(q, k, v, f), *seen, lse, delta, by_out, f)
    dq = jnp.moveaxis(dq[..., :T, :], 3, 1)
    dk, dv = (jnp.moveaxis(x[:, :, :S], 2, 1) for x in (dk, dv))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def _laid_out(
    q, k, v, f: Flash
) -> tuple[Float[Array, "B K G T H"], Float[Array, "B K S H"], Float[Array, "B K S R"]]:
    """bfloat16, heads first, in whole blocks of tokens."""
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    q = jnp.pad(jnp.moveaxis(q, 1, 3), [(0, 0)] * 3 + [(0, -q.shape[1] % f.rows), (0, 0)])
    rest = [(0, 0), (0, 0), (0, -k.shape[1] % f.keys), (0, 0)]
    k, v = (jnp.pad(jnp.moveaxis(x, 1, 2), rest) for x in (k, v))
    return q, k, v


def _seen(q, k, lengths, documents, f: Flash) -> tuple[Int[Array, "B"], Documents | None]:
    T, S = q.shape[1], k.shape[1]
    ids = None if documents is None else in_blocks(documents, T, f.offset, f.rows, f.keys)
    return jnp.minimum(lengths.astype(jnp.int32), S), ids
