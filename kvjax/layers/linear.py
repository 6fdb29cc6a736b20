"""A dense layer whose kernel is stored `[in, out]`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from kvjax.layers.norm import over_last


class Linear(nnx.Module):
    """y = x W + b, W `[in, out]` from a normal distribution of deviation `std`."""

    def __init__(
        self,
        d_in: int,
        d_out: int,
        *,
        bias: bool,
        std: float,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        kernel = jax.random.normal(rngs.params(), (d_in, d_out), jnp.float32) * std
        self.kernel = nnx.Param(kernel.astype(dtype))
        self.bias = nnx.Param(jnp.zeros((d_out,), dtype)) if bias else None

    def __call__(self, x: Float[Array, "*lead d_in"]) -> Float[Array, "*lead d_out"]:
        y = x @ self.kernel[...]
        return y if self.bias is None else y + over_last(self.bias[...], y)
