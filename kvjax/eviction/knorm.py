"""Key norm: keys of small norm stay. https://arxiv.org/abs/2406.11430: they tend to be attended.

The cheapest policy that is not random; a floor for the others.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.eviction.base import Policy, Prompt


@dataclasses.dataclass(frozen=True)
class KeyNorm(Policy):
    name: ClassVar[str] = "knorm"

    def scores(self, prompt: Prompt) -> Float[Array, "B K T"]:
        return -jnp.moveaxis(jnp.linalg.norm(prompt.k.astype(jnp.float32), axis=-1), 1, 2)
