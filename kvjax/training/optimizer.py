"""AdamW with warm-up, cosine decay and clipping, from Optax."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import optax

from kvjax.training.config import OptimizerConfig

DECAYED = ("kernel", "embedding")


def make_optimizer(
    config: OptimizerConfig, *, decay_steps: int
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """(the optimiser, its learning rate by step). The first step's rate is not 0."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=config.lr / max(1, config.warmup_steps),
        peak_value=config.lr,
        warmup_steps=config.warmup_steps,
        decay_steps=decay_steps,
        end_value=config.final_lr,
    )
    adamw = optax.adamw(
        schedule,
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=decayed,
    )
    chain = optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)
    return optax.GradientTransformation(_lenient(chain.init), _lenient(chain.update)), _lenient(
        schedule
    )


def _lenient(function: Callable) -> Callable:
    """Optax mixes an integer step count with floats, which strict promotion refuses."""

    @functools.wraps(function)
    def call(*args):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return function(*args)

    return call


def decayed(params: Any) -> Any:
    """Which parameters decay. By name: a stack of norms is 2-D, as a matrix is."""
    return jax.tree.map_with_path(lambda path, _: path[-1].key in DECAYED, params)
