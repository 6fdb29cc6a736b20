"""Softmax in parts: attention over disjoint sets of keys, merged exactly.

A `Partial` is attention over some of the keys before the division: it can be computed for the exact
tokens, for packed pages and for the current chunk apart, and merged with the log-sum-exp rule
(online softmax, Milakov & Gimelshein 1805.02867; FlashAttention 2205.14135, section 3.1).
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

#: Score of a masked key. Finite, so that a row without any key gives 0 and never NaN.
MASKED = -1e30


class Partial(NamedTuple):
    """Un-normalised attention over a set of keys, float32. `[...]` are batch, head, query axes."""

    acc: Array  # [..., H]  sum of exp(score - top) * value
    top: Array  # [...]     largest score, MASKED when there is no key
    mass: Array  # [...]    sum of exp(score - top)


def attend_tile(
    q: Float[Array, "*lead T H"],
    k_t: Float[Array, "*lead H S"],
    v: Float[Array, "*lead S R"],
    mask: Bool[Array, ...],
    *,
    scale: float,
    softcap: float | None = None,
) -> Partial:
    """Attention of T queries to S keys; k_t has tokens last. mask broadcasts to `[..., T, S]`.

    softcap: scores s become softcap * tanh(s / softcap) (Gemma 2, 2408.00118, section 2). Values of
    keys that every query masks must be finite: 0 * NaN is NaN.
    """
    scores = jnp.matmul(q, k_t, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(mask, soft_cap(scores, softcap), MASKED)
    top = jnp.max(scores, axis=-1)
    weights = jnp.where(mask, jnp.exp(scores - top[..., None]), 0.0)
    acc = jnp.matmul(weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return Partial(acc, top, jnp.sum(weights, axis=-1))


def soft_cap(scores: Float[Array, "*s"], cap: float | None) -> Float[Array, "*s"]:
    """cap * tanh(scores / cap), or the scores themselves."""
    return scores if cap is None else cap * jnp.tanh(scores / cap)


def with_sinks(part: Partial, sinks: Float[Array, "*lead"]) -> Partial:
    """The partial with one more key, of logit `sinks` and value zero (gpt-oss's sinks)."""
    sinks = jnp.broadcast_to(sinks.astype(jnp.float32), part.top.shape)
    return merge(part, Partial(jnp.zeros_like(part.acc), sinks, jnp.ones_like(part.mass)))


def merge(first: Partial, *others: Partial) -> Partial:
    """The partial over the union of disjoint sets of keys."""
    top = first.top
    for part in others:
        top = jnp.maximum(top, part.top)
    acc = first.acc * jnp.exp(first.top - top)[..., None]
    mass = first.mass * jnp.exp(first.top - top)
    for part in others:
        share = jnp.exp(part.top - top)
        acc = acc + part.acc * share[..., None]
        mass = mass + part.mass * share
    return Partial(acc, top, mass)


def log_sum_exp(part: Partial) -> Float[Array, "*lead"]:
    """Logarithm of the sum of exp(score) over the keys; MASKED for a query that saw none."""
    some = part.mass > 0
    return jnp.where(some, part.top + jnp.log(jnp.where(some, part.mass, 1.0)), MASKED)


def attention_mass(
    logits: Float[Array, "B K Q S"], lse: Float[Array, "B K Q"]
) -> Float[Array, "B K S"]:
    """What each key gets of its head's attention, summed over the Q queries.

    logits: scores in natural units, MASKED where not seen. lse: the `log_sum_exp` of all that a
    query attends to, so of merged parts; then the masses of the parts' keys sum to Q together. A
    query that shall not count has lse = inf. Raises ValueError on shapes that do not fit.
    """
    if lse.shape != logits.shape[:-1]:
        raise ValueError(f"lse: expected {logits.shape[:-1]}, a number a query, got {lse.shape}.")
    seen = logits > MASKED / 2
    return jnp.sum(jnp.where(seen, jnp.exp(logits - lse[..., None]), 0.0), axis=2)


def finish(part: Partial) -> Float[Array, "*lead H"]:
    """The attention output; zero for a query that saw no key."""
    return part.acc / jnp.where(part.mass == 0.0, 1.0, part.mass)[..., None]
