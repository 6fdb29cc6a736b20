"""H2O: heavy hitters and recent tokens, at the end of prefill and at every decode step.

https://arxiv.org/abs/2306.14048, section 4. A token's score is the attention it has been paid,
summed over queries and over the KV head's query group (the original keeps one set per query head).
Half of the budget is recent tokens, half the heaviest others. While decoding, every step adds its
attention to the scores; once the budget is full, the new token takes the place of the lightest that
is neither first nor recent. Survivors keep their scores.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.eviction.attention import column_mass
from kvjax.eviction.base import Policy, Prompt


@dataclasses.dataclass(frozen=True)
class H2O(Policy):
    """window: recent tokens; None takes half of the budget. A share is one of the cache's
    `max_len`, prompt and answer, as the budget holds at every step. The paper has no sinks
    (`sinks=0`)."""

    name: ClassVar[str] = "h2o"
    window: int | None = None  # type: ignore[assignment]

    def __post_init__(self):
        if self.window is None and self.budget.tokens is not None:
            object.__setattr__(self, "window", self.budget.tokens // 2)
        if self.window is not None:
            super().__post_init__()

    @property
    def least(self) -> int:
        return 2 * self.sinks + 2 if self.window is None else super().least

    @property
    def decodes(self) -> bool:
        return True

    def scores(self, prompt: Prompt) -> Float[Array, "B K T"]:
        return jnp.sum(column_mass(prompt), axis=2)
