"""KeyDiff: keys unlike the others stay. https://arxiv.org/abs/2504.15364, section 3.

score = -cos(k, mean of the normalised keys). Looks at keys only: no query, no second pass, and the
cache serves any question.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.eviction.base import Policy, Prompt


@dataclasses.dataclass(frozen=True)
class KeyDiff(Policy):
    name: ClassVar[str] = "keydiff"

    def scores(self, prompt: Prompt) -> Float[Array, "B K T"]:
        k = jnp.moveaxis(prompt.k, 1, 2).astype(jnp.float32)  # B K T H
        unit = k / jnp.maximum(jnp.linalg.norm(k, axis=-1, keepdims=True), 1e-12)
        real = prompt.real[:, None, :, None]
        centre = jnp.sum(jnp.where(real, unit, 0.0), axis=2, keepdims=True)
        centre = centre / jnp.maximum(jnp.linalg.norm(centre, axis=-1, keepdims=True), 1e-12)
        return -jnp.sum(unit * centre, axis=-1)
