"""The gated feed-forward layer (GLU Variants Improve Transformer, 2002.05202)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from kvjax.config import ModelConfig
from kvjax.layers.linear import Linear

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


class GatedMLP(nnx.Module):
    """down(act(gate(x)) * up(x)). width: of the hidden layer, None for the config's."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        width: int | None = None,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        D, F = config.hidden_size, width or config.intermediate_size
        linear = functools.partial(
            Linear, bias=config.mlp_bias, std=config.initializer_range, dtype=dtype, rngs=rngs
        )
        self.gate_proj = linear(D, F)
        self.up_proj = linear(D, F)
        self.down_proj = linear(F, D)
        self.act = ACTIVATIONS[config.hidden_act]

    def __call__(self, x: Float[Array, "*lead D"]) -> Float[Array, "*lead D"]:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
