"""What a checkpoint is, whatever it came from: a config, tensors read on demand, a tokenizer."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.checkpoints.tokenizer import Tokenizer
from kvjax.config import ModelConfig, near

# Tensors that old exports carry although they are computed, not learned.
IGNORABLE = (r"(^|\.)rotary_emb\.inv_freq$",)
TIED = {"lm_head.weight": "model.embed_tokens.weight"}


@dataclasses.dataclass(frozen=True)
class LazyTensor:
    """A tensor on disk. `shape` and `dtype` cost nothing; `read()` reads this tensor alone.

    Each `read()` returns a fresh array that the caller owns: nothing is cached, so a loader that
    handles one tensor at a time holds the model once.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    load: Callable[[], np.ndarray] = dataclasses.field(repr=False)

    def read(self) -> np.ndarray:
        return self.load()


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. `tensors` has Hugging Face names and orientation ([out, in])."""

    path: Path
    config: ModelConfig
    hf_config: dict[str, Any]
    tensors: Mapping[str, LazyTensor]
    tokenizer: Tokenizer | None = None


def check_names(
    expected: set[str],
    found: Mapping[str, LazyTensor],
    *,
    ignorable: Sequence[str] = IGNORABLE,
    tied: Mapping[str, str] = TIED,
) -> None:
    """Raises ValueError that lists every missing and every unexpected tensor.

    ignorable: regular expressions of names that may be there and are not read.
    tied: copy -> original. A copy that is not expected (the model ties it) may be there only with
        the original's values.
    """
    copies = {c: o for c, o in tied.items() if c in found and o in found}
    missing = sorted(expected - set(found))
    unexpected = sorted(
        name
        for name in set(found) - expected - set(copies)
        if not any(re.search(pattern, name) for pattern in ignorable)
    )
    if missing or unexpected:
        raise ValueError(
            f"checkpoint tensors: expected the {len(expected)} of the model, got {len(found)}:"
            f" {_listing('missing', missing, found)};"
            f" {_listing('unexpected', unexpected, expected)}."
            " The config and the weights do not belong together, or the model has parts that kvjax"
            " does not have."
        )
    for copy, original in copies.items():
        if copy not in expected:
            _check_equal(copy, original, found)


def _listing(what: str, names: list[str], others: Any) -> str:
    if not names:
        return f"none {what}"
    shown = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    return f"{what} {len(names)}: {shown}{near(names[0], others)}"


def _check_equal(copy: str, original: str, found: Mapping[str, LazyTensor]) -> None:
    a, b = found[copy], found[original]
    if a.shape == b.shape and a.dtype == b.dtype and np.array_equal(a.read(), b.read()):
        return
    raise ValueError(
        f"{copy}: expected the same values as {original}, since tie_word_embeddings is true, got"
        " different ones. Set tie_word_embeddings to false in config.json to use both."
    )
