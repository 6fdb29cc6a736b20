"""RMSNorm (1910.07467), and LayerNorm (1607.06450) without a bias."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from kvjax.config import ModelConfig


def over_last(p: Float[Array, "D"], x: Float[Array, "*lead D"]) -> Float[Array, "*ones D"]:
    """A vector at the rank of x, along its last axis."""
    return p.reshape((1,) * (x.ndim - 1) + p.shape)


class RMSNorm(nnx.Module):
    """x / rms(x) * weight, the statistics in float32.

    offset: added to the weight in float32 before use: 1 in Gemma, whose weights are stored around
    0. center: subtract the mean first (LayerNorm).
    """

    def __init__(
        self, dim: int, eps: float, *, dtype: jnp.dtype, offset: int = 0, center: bool = False
    ):
        self.weight = nnx.Param(jnp.full((dim,), 1 - offset, dtype))
        self.eps, self.offset, self.center = eps, offset, center

    def __call__(self, x: Float[Array, "*lead D"]) -> Float[Array, "*lead D"]:
        wide = x.astype(jnp.float32)
        if self.center:
            wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        if self.offset or self.center:  # as Gemma and Cohere: the weight in float32 too
            weight = self.weight[...].astype(jnp.float32) + self.offset
            return (wide * scale * over_last(weight, x)).astype(x.dtype)
        return (wide * scale).astype(x.dtype) * over_last(self.weight[...], x)


def norm_of(config: ModelConfig, dim: int, *, dtype: jnp.dtype) -> RMSNorm:
    """A norm over `dim` channels, of the config's kind."""
    offset, center = int(config.norm_type == "rms_offset"), config.norm_type == "layer"
    return RMSNorm(dim, config.rms_norm_eps, dtype=dtype, offset=offset, center=center)
