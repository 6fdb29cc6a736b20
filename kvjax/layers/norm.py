"""RMSNorm (1910.07467)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


def over_last(p: Float[Array, "D"], x: Float[Array, "*lead D"]) -> Float[Array, "*ones D"]:
    """A vector at the rank of x, along its last axis."""
    return p.reshape((1,) * (x.ndim - 1) + p.shape)


class RMSNorm(nnx.Module):
    """x / rms(x) * weight, the statistics in float32."""

    def __init__(self, dim: int, eps: float, *, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.ones((dim,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*lead D"]) -> Float[Array, "*lead D"]:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * scale).astype(x.dtype) * over_last(self.weight[...], x)
