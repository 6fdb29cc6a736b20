"""Choosing the next token: greedy, temperature, top-k, top-p (1904.09751), min-p (2407.01082).

Every setting is an array with one entry a row, so no setting compiles anything new. A row's
randomness depends on its seed and the token's position only, never on its neighbours.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.config import need


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off. Applied in that order."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self):
        t, p, m = self.temperature, self.top_p, self.min_p
        need(t >= 0 and np.isfinite(t), "temperature", "a finite number >= 0", t)
        need(isinstance(self.top_k, int) and self.top_k >= 0, "top_k", "an int >= 0", self.top_k)
        need(0 < p <= 1, "top_p", "a number in (0, 1]", p)
        need(0 <= m <= 1, "min_p", "a number in [0, 1]", m)
        need(
            isinstance(self.seed, int) and 0 <= self.seed < 2**32,
            "seed",
            "an int in [0, 2**32)",
            self.seed,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """SamplingParams of a batch, one entry a row."""

    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]
    min_p: Float[Array, "B"]
    seed: Int[Array, "B"]

    @classmethod
    def of(cls, rows: list[SamplingParams]) -> Sampling:
        def column(name: str, dtype) -> Array:
            return jnp.asarray([getattr(row, name) for row in rows], dtype)

        return cls(
            temperature=column("temperature", jnp.float32),
            top_k=column("top_k", jnp.int32),
            top_p=column("top_p", jnp.float32),
            min_p=column("min_p", jnp.float32),
            seed=column("seed", jnp.uint32),
        )


def sample(
    logits: Float[Array, "B V"], sampling: Sampling, position: Int[Array, "B"]
) -> Int[Array, "B"]:
    """The next token of each row. position: of the token to be chosen, part of its random key."""
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    draw = jax.lax.cond(
        jnp.any(sampling.temperature > 0),
        lambda: jax.vmap(_draw)(logits, sampling, position),
        lambda: greedy,
    )
    return jnp.where(sampling.temperature > 0, draw, greedy)


def _draw(logits: Float[Array, "V"], s: Sampling, position: Int[Array, ""]) -> Int[Array, ""]:
    order = jnp.argsort(-logits)
    ranked = logits[order] / jnp.maximum(s.temperature, 1e-6)
    rank = jnp.arange(logits.shape[0])
    ranked = jnp.where((s.top_k == 0) | (rank < s.top_k), ranked, -jnp.inf)
    probs = jax.nn.softmax(ranked)
    before = jnp.cumsum(probs) - probs  # mass of the better tokens: the first is always kept
    keep = (before < s.top_p) & (probs >= s.min_p * probs[0])
    key = jax.random.fold_in(jax.random.key(s.seed), position)
    noise = jax.random.gumbel(key, logits.shape)
    return order[jnp.argmax(jnp.where(keep, ranked + noise, -jnp.inf))].astype(jnp.int32)
