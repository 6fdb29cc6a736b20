"""Training: next-token pretraining of a Transformer, with exact resume."""

from kvjax.training.config import (
    DataConfig,
    OptimizerConfig,
    TrainConfig,
    TrainingConfig,
    load_config,
)
from kvjax.training.loop import train
from kvjax.training.loss import next_token_loss
from kvjax.training.optimizer import make_optimizer
from kvjax.training.state import TrainState, init_state
from kvjax.training.step import make_eval_step, make_train_step

__all__ = [
    "DataConfig",
    "OptimizerConfig",
    "TrainConfig",
    "TrainState",
    "TrainingConfig",
    "init_state",
    "load_config",
    "make_eval_step",
    "make_optimizer",
    "make_train_step",
    "next_token_loss",
    "train",
]
