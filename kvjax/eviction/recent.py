"""Sinks and recent tokens only: what StreamingLLM (https://arxiv.org/abs/2309.17453) keeps of a
prompt, positions as in the text. Prompt-time only: later tokens are all kept.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.eviction.base import Policy, Prompt


@dataclasses.dataclass(frozen=True)
class Recent(Policy):
    name: ClassVar[str] = "recent"

    def scores(self, prompt: Prompt) -> Float[Array, "B K T"]:
        B, T, K, _ = prompt.k.shape
        return jnp.broadcast_to(jnp.arange(T, dtype=jnp.float32), (B, K, T))
