"""What training changes: step, parameters, optimiser state."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Int

from kvjax.config import ModelConfig
from kvjax.model import Transformer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Arrays only. params: nested dicts of float32, layer parameters stacked over layers."""

    step: Int[Array, ""]  # updates done
    params: dict[str, Any]
    opt_state: Any


def init_state(
    config: ModelConfig, optimizer: optax.GradientTransformation, *, seed: int
) -> TrainState:
    """A new model's state. Works under `jax.eval_shape` and under `jit` with output shardings."""
    model = Transformer(config, rngs=nnx.Rngs(seed), dtype="float32", form="stacked")
    params = nnx.to_pure_dict(nnx.state(model))
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def graphdef_of(config: ModelConfig) -> Any:
    """The static half of the model: `nnx.merge(graphdef, state.params)` is the model."""

    def build():
        return Transformer(config, rngs=nnx.Rngs(0), dtype="float32", form="stacked")

    return nnx.split(nnx.eval_shape(build))[0]
