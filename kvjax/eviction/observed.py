"""Observed attention: what all of the prompt's queries paid a token, per query that could see it.

The heavy hitters of H2O (https://arxiv.org/abs/2306.14048, section 4) at the end of prefill;
without `normalise`, its plain sum, which favours early tokens. Accumulated block by block in a
second pass: memory grows with the length, time with its square.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.eviction.attention import column_mass
from kvjax.eviction.base import Policy, Prompt


@dataclasses.dataclass(frozen=True)
class Observed(Policy):
    """normalise: divide by the number of queries that could see the token."""

    name: ClassVar[str] = "observed"
    normalise: bool = True

    def scores(self, prompt: Prompt) -> Float[Array, "B K T"]:
        mass = jnp.sum(column_mass(prompt), axis=2)
        if not self.normalise:
            return mass
        seen_by = prompt.lengths[:, None] - jnp.arange(mass.shape[2])[None]
        return mass / jnp.maximum(seen_by, 1)[:, None].astype(jnp.float32)
