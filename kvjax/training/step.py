"""One update, and one evaluation, compiled: the model's graph is static, its state is donated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from kvjax.training.config import TrainConfig
from kvjax.training.loss import next_token_loss
from kvjax.training.optimizer import make_optimizer
from kvjax.training.state import TrainState, graphdef_of

Tokens = Array | np.ndarray
TrainStep = Callable[[TrainState, Tokens], tuple[TrainState, dict[str, Array]]]
EvalStep = Callable[[Any, Tokens], Array]


def make_train_step(config: TrainConfig) -> TrainStep:
    """`step(state, tokens) -> (state, metrics)`; the state given is donated.

    metrics, of before the update: loss (cross-entropy, nats a token), grad_norm (before clipping),
    and lr.
    """
    optimizer, schedule = make_optimizer(config.optimizer, decay_steps=config.decay_steps)
    loss = _loss(config)

    def step(state: TrainState, tokens: Int[Array, "B T1"]):
        (_, nll), grads = jax.value_and_grad(loss, has_aux=True)(state.params, tokens)
        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        metrics = {"loss": nll, "grad_norm": optax.tree.norm(grads), "lr": schedule(state.step)}
        return TrainState(state.step + 1, params, opt_state), metrics

    return jax.jit(step, donate_argnums=0)


def make_eval_step(config: TrainConfig) -> EvalStep:
    """`evaluate(params, tokens)`: mean cross-entropy, nats a token."""
    loss = _loss(config)
    return jax.jit(lambda params, tokens: loss(params, tokens)[1])


def _loss(config: TrainConfig):
    graphdef, options = graphdef_of(config.model), config.training

    def loss(params, tokens: Int[Array, "B T1"]) -> tuple[Float[Array, ""], Float[Array, ""]]:
        # the cast is inside the gradient, which therefore arrives in float32
        params = jax.tree.map(lambda p: p.astype(jnp.dtype(options.dtype)), params)
        model = nnx.merge(graphdef, params)
        return next_token_loss(
            model, tokens, chunk=options.loss_chunk, z_loss=options.z_loss, remat=options.remat
        )

    return loss
