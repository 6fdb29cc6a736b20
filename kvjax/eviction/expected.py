"""Expected attention: how much the queries to come will attend to a key, from their distribution.

NVIDIA kvpress's ExpectedAttention (https://arxiv.org/abs/2510.00636): future queries are taken as
Gaussian with the prompt's mean and covariance before RoPE, turned by the mean rotation of the next
`future` positions. The expected weight of key k is then exp(k.mu / sqrt(H) + k' Sigma k / (2 H)),
normalised over keys, times the norm of the value. Needs no question: the cache serves any. With
latent attention only the first channels of a query are turned, those that have angles.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.checks import need
from kvjax.eviction.base import Policy, Prompt


@dataclasses.dataclass(frozen=True)
class Expected(Policy):
    """future: positions after the prompt over which the rotation is averaged."""

    name: ClassVar[str] = "expected"
    future: int = 512

    def __post_init__(self):
        super().__post_init__()
        need(self.future > 0, "evict future", "an int > 0", self.future)

    def scores(self, prompt: Prompt) -> Float[Array, "B K T"]:
        mean, cov = query_statistics(prompt, skip=self.sinks)
        if prompt.rope is not None:
            turn = self._turn(prompt)  # B H H
            mean = jnp.einsum("bhi,bkgi->bkgh", turn, mean)
            cov = jnp.einsum("bhi,bkgij,blj->bkghl", turn, cov, turn)
        k = prompt.k.astype(jnp.float32)
        z = jnp.einsum("btkh,bkgh->bkgt", k, mean) * prompt.scale
        z = z + jnp.einsum("btkh,bkghl,btkl->bkgt", k, cov, k) * (prompt.scale**2 / 2)
        real = prompt.real[:, None, None]
        weights = jax.nn.softmax(jnp.where(real, z, -1e30), axis=-1)
        norms = jnp.linalg.norm(prompt.v.astype(jnp.float32), axis=-1)  # B T K
        return jnp.mean(weights, axis=2) * jnp.moveaxis(norms, 1, 2)

    def _turn(self, prompt: Prompt) -> Float[Array, "B H H"]:
        """The mean rotation matrix of the `future` positions after each row's end; channels
        without angles stay."""
        assert prompt.rope is not None
        cos, sin = prompt.rope
        # angles are linear in the position: cos and sin of one step turn the last token's onwards
        last = jnp.maximum(prompt.lengths - 1, 0)[:, None, None]
        end = (jnp.take_along_axis(cos, last, 1)[:, 0], jnp.take_along_axis(sin, last, 1)[:, 0])
        scale = jnp.sqrt(cos[:, 0] ** 2 + sin[:, 0] ** 2)  # YaRN's factor; 1 otherwise
        step = jnp.arctan2(sin[:, 1], cos[:, 1]) - jnp.arctan2(sin[:, 0], cos[:, 0])
        ahead = jnp.arange(1, self.future + 1, dtype=jnp.float32)
        angle = jnp.arctan2(end[1], end[0])[:, None] + ahead[None, :, None] * step[:, None]
        c = jnp.mean(jnp.cos(angle), axis=1) * scale  # B half
        s = jnp.mean(jnp.sin(angle), axis=1) * scale
        diagonal = jax.vmap(jnp.diag)
        top = jnp.concatenate([diagonal(c), -diagonal(s)], axis=2)
        turn = jnp.concatenate([top, jnp.concatenate([diagonal(s), diagonal(c)], axis=2)], axis=1)
        still = prompt.k.shape[-1] - turn.shape[-1]
        turn = jnp.pad(turn, ((0, 0), (0, still), (0, still)))
        kept = jnp.arange(turn.shape[-1]) >= turn.shape[-1] - still
        return turn + jnp.diag(kept.astype(turn.dtype))[None]


def query_statistics(
    prompt: Prompt, *, skip: int
) -> tuple[Float[Array, "B K G H"], Float[Array, "B K G H H"]]:
    """Mean and covariance of the queries before RoPE, without the first `skip` tokens."""
    q = prompt.q.astype(jnp.float32)
    if prompt.rope is not None:
        cos, sin = (x[:, :, None, None] for x in prompt.rope)
        size = cos**2 + sin**2
        half = cos.shape[-1]
        a, b, still = jnp.split(q, [half, 2 * half], axis=-1)
        turned = [(a * cos + b * sin) / size, (b * cos - a * sin) / size]
        q = jnp.concatenate([*turned, still], axis=-1)
    counted = prompt.real & (jnp.arange(q.shape[1])[None] >= skip)
    weight = counted.astype(jnp.float32)[:, :, None, None, None]
    n = jnp.maximum(jnp.sum(weight, axis=1), 1.0)
    mean = jnp.sum(q * weight, axis=1) / n
    off = (q - mean[:, None]) * weight
    return mean, jnp.einsum("btkgh,btkgl->bkghl", off, off) / n[..., None]
