"""The gated feed-forward layer (GLU Variants Improve Transformer, 2002.05202)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from kvjax.config import ModelConfig
from kvjax.layers.linear import Linear

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


class GatedMLP(nnx.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        D, F = config.hidden_size, config.intermediate_size
        options = {
            "bias": config.mlp_bias,
            "std": config.initializer_range,
            "dtype": dtype,
            "rngs": rngs,
        }
        self.gate_proj = Linear(D, F, **options)
        self.up_proj = Linear(D, F, **options)
        self.down_proj = Linear(F, D, **options)
        self.act = ACTIVATIONS[config.hidden_act]

    def __call__(self, x: Float[Array, "*lead D"]) -> Float[Array, "*lead D"]:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
