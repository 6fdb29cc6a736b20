"""SnapKV: the prompt's last tokens vote on what the rest of it is worth.

https://arxiv.org/abs/2404.14469, section 4. Votes are summed over the observation window, averaged
over the KV head's query group (the original keeps one cache per query head instead), and pooled
along tokens, so that neighbours of an important token stay too. Query-aware: what the answer needs
is judged by the question at the end of the prompt.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.checks import need
from kvjax.eviction.attention import window_mass
from kvjax.eviction.base import Policy, Prompt

POOLS = ("avg", "max")


@dataclasses.dataclass(frozen=True)
class SnapKV(Policy):
    """window: the observation window, whose tokens stay. kernel, pool: as in the released code."""

    name: ClassVar[str] = "snapkv"
    query_aware: ClassVar[bool] = True
    window: int = 32
    kernel: int = 5
    pool: str = "avg"

    def __post_init__(self):
        super().__post_init__()
        odd = isinstance(self.kernel, int) and self.kernel > 0 and self.kernel % 2 == 1
        need(odd, "evict kernel", "an odd int > 0", self.kernel)
        need(self.pool in POOLS, "evict pool", f"one of {POOLS}", self.pool)
        need(self.window > 0, "evict window", "an int > 0: its tokens vote", self.window)

    def scores(self, prompt: Prompt) -> Float[Array, "B K T"]:
        mass = jnp.mean(window_mass(prompt, self.window), axis=2)  # B K T
        voters = jnp.arange(mass.shape[2])[None] >= prompt.lengths[:, None] - self.window
        return pooled(jnp.where(voters[:, None], 0.0, mass), self.kernel, self.pool)


def pooled(scores: Float[Array, "B K T"], kernel: int, pool: str) -> Float[Array, "B K T"]:
    """Average (divisor always `kernel`) or maximum over `kernel` neighbours, same length."""
    half = kernel // 2
    padding = ((0, 0), (0, 0), (half, half))
    if pool == "max":
        return jax.lax.reduce_window(
            scores, -jnp.inf, jax.lax.max, (1, 1, kernel), (1, 1, 1), padding
        )
    total = jax.lax.reduce_window(scores, 0.0, jax.lax.add, (1, 1, kernel), (1, 1, 1), padding)
    return total / kernel
