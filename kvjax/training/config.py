"""What a training run is: frozen dataclasses, a Python file that holds one, and typed overrides."""

from __future__ import annotations

import dataclasses
import difflib
import runpy
from collections.abc import Sequence
from pathlib import Path

from kvjax.config import DTYPES, ModelConfig, need
from kvjax.training.overrides import override

# Folders of the standard library that are no ordinary code: its tests, tables, and other packages.
_EXCLUDE = (
    *("test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"),
    *("site-packages", "dist-packages", "__pycache__"),
)


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Text and how it is cut into batches.

    corpus: "stdlib" (the running Python's own source) or a folder. pattern: file names in it.
    exclude: folder names left out. max_bytes: files are taken in a fixed pseudo-random order up to
    this size. heldout: the share of files kept out of training and of the tokenizer. context:
    tokens that a row predicts. Documents are packed; attention may cross their borders.
    """

    corpus: str = "stdlib"
    pattern: str = "*.py"
    exclude: tuple[str, ...] = _EXCLUDE
    max_bytes: int = 4_000_000
    heldout: float = 0.05
    context: int = 256
    batch_size: int = 8

    def __post_init__(self):
        for field in ("max_bytes", "context", "batch_size"):
            need(getattr(self, field) > 0, f"data.{field}", "a positive int", getattr(self, field))
        need(0 < self.heldout < 1, "data.heldout", "a share between 0 and 1", self.heldout)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (1711.05101) with a linear warm-up and a cosine decay.

    decay_steps: the step at which the rate reaches final_lr; None for training.steps. Give it to
    train in pieces: it keeps the schedule the same whatever training.steps says. weight_decay is
    for matrices and the embedding, not for norms and biases.
    """

    lr: float = 1e-3
    final_lr: float = 1e-4
    warmup_steps: int = 50
    decay_steps: int | None = None
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 1.0

    def __post_init__(self):
        for field in ("lr", "eps", "clip_norm"):
            value = getattr(self, field)
            need(value > 0, f"optimizer.{field}", "a positive number", value)
        for field in ("final_lr", "warmup_steps", "weight_decay"):
            value = getattr(self, field)
            need(value >= 0, f"optimizer.{field}", "a number >= 0", value)


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """The loop.

    seed: of the initial weights and the data order. eval_batches: held-out batches of an
    evaluation. dtype: of the computation; parameters, gradients and optimiser stay float32. remat:
    recompute layers in the backward pass. loss_chunk: tokens of each row whose logits live at once.
    """

    steps: int = 600
    seed: int = 0
    log_every: int = 10
    eval_every: int = 100
    eval_batches: int = 8
    save_every: int = 100
    dtype: str = "float32"
    remat: bool = False
    loss_chunk: int | None = None
    z_loss: float = 0.0

    def __post_init__(self):
        for field in ("steps", "log_every", "eval_every", "eval_batches", "save_every"):
            value = getattr(self, field)
            need(value > 0, f"training.{field}", "a positive int", value)
        need(self.dtype in DTYPES, "training.dtype", f"one of {DTYPES}", self.dtype)
        need(
            self.loss_chunk is None or self.loss_chunk > 0,
            "training.loss_chunk",
            "a positive int or none",
            self.loss_chunk,
        )
        need(self.z_loss >= 0, "training.z_loss", "a number >= 0", self.z_loss)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """A whole run, in four parts."""

    model: ModelConfig
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()

    def __post_init__(self):
        need(
            self.data.context <= self.model.max_position_embeddings,
            "data.context",
            f"at most model.max_position_embeddings={self.model.max_position_embeddings}",
            self.data.context,
        )
        need(
            self.optimizer.warmup_steps < self.decay_steps,
            "optimizer.warmup_steps",
            f"less than the {self.decay_steps} steps of the schedule",
            self.optimizer.warmup_steps,
            "Lower it, or raise training.steps or optimizer.decay_steps.",
        )

    @property
    def decay_steps(self) -> int:
        """Steps of the learning-rate schedule."""
        return self.optimizer.decay_steps or self.training.steps


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The `config` of a Python file, with `--a.b=c` overrides applied."""
    path = Path(path)
    if not path.is_file():
        there = sorted(p.name for p in path.parent.glob("*.py"))
        hits = difflib.get_close_matches(path.name, there, n=3, cutoff=0.3) or there[:5]
        hint = f" Its folder has {', '.join(hits)}." if hits else ""
        raise ValueError(f"config: expected a Python file, got {str(path)!r}.{hint}")
    config = runpy.run_path(str(path)).get("config")
    if not isinstance(config, TrainConfig):
        kind = type(config).__name__
        raise ValueError(f"{path}: config: expected `config = TrainConfig(...)`, got {kind!r}.")
    return override(config, overrides)
