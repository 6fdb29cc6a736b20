"""Token batches. The batch of a step is a pure function of the data, the seed and the step."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import Any

import numpy as np
from jaxtyping import Int

from kvjax.checkpoints.tokenizer import Tokenizer
from kvjax.config import ModelConfig, need
from kvjax.training.config import DataConfig
from kvjax.training.text import File, get_tokenizer, read_corpus

# Shapes: B batch, T context.


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """The two token streams of a corpus, and the tokenizer that made them."""

    train: np.ndarray
    heldout: np.ndarray
    tokenizer: Tokenizer
    files: tuple[int, int]  # how many, training and held-out

    def facts(self) -> dict[str, Any]:
        """What a resumed run must find unchanged."""
        digest = hashlib.sha256(self.train.tobytes() + self.heldout.tobytes())
        return {
            "files": list(self.files),
            "train_tokens": len(self.train),
            "heldout_tokens": len(self.heldout),
            "sha256": digest.hexdigest(),
        }


def load_dataset(config: DataConfig, model: ModelConfig) -> Dataset:
    """Reads the corpus and tokenizes it with a tokenizer of the model's vocabulary size."""
    corpus = read_corpus(config)
    tokenizer = get_tokenizer(corpus.train, model.vocab_size)
    ids = (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id)
    need(
        (model.bos_token_id, model.eos_token_ids, model.pad_token_id) == ids,
        "model.bos_token_id, model.eos_token_ids, model.pad_token_id",
        f"the tokenizer's {ids}",
        (model.bos_token_id, model.eos_token_ids, model.pad_token_id),
    )
    train, heldout = (pack(files, tokenizer) for files in (corpus.train, corpus.heldout))
    return Dataset(train, heldout, tokenizer, (len(corpus.train), len(corpus.heldout)))


def pack(files: list[File], tokenizer: Tokenizer) -> np.ndarray:
    """The files one after another, each between bos and eos."""
    bos, eos = tokenizer.bos_id, tokenizer.eos_ids[0]
    assert bos is not None
    ids: list[int] = []
    for file in files:
        ids += [bos, *tokenizer.encode(file.text), eos]
    return np.asarray(ids, np.int32)


class Batches:
    """Batches of training windows: `batches(step)` is `[B, T+1]`, the inputs and their targets.

    Each epoch cuts the stream into windows at a shift of its own and takes them in an order of its
    own. An epoch may end inside a batch.
    """

    def __init__(self, tokens: np.ndarray, *, batch_size: int, context: int, seed: int):
        self.tokens, self.batch_size, self.context, self.seed = tokens, batch_size, context, seed
        # one window less than fits, so that every shift gives the same number
        self.windows = len(tokens) // context - 1
        need(self.windows > 0, "data", f"over {2 * context} training tokens", len(tokens))
        self._epoch = functools.lru_cache(maxsize=2)(self._starts)

    def __call__(self, step: int) -> Int[np.ndarray, "B T1"]:
        order = range(step * self.batch_size, (step + 1) * self.batch_size)
        starts = [self._epoch(i // self.windows)[i % self.windows] for i in order]
        return _windows(self.tokens, np.asarray(starts), self.context)

    def _starts(self, epoch: int) -> np.ndarray:
        # RandomState, whose streams NumPy has frozen (NEP 19): a resume after an upgrade is exact
        random = np.random.RandomState([self.seed, epoch])
        shift = random.randint(self.context)
        return random.permutation(self.windows) * self.context + shift


def heldout_batches(
    tokens: np.ndarray, *, batch_size: int, context: int, count: int
) -> list[Int[np.ndarray, "B T1"]]:
    """Up to `count` batches of windows spread evenly over the held-out stream."""
    windows = (len(tokens) - 1) // context
    need(
        windows >= batch_size,
        "data",
        f"over {batch_size * context} held-out tokens, one batch",
        len(tokens),
        "Raise data.heldout or lower data.batch_size.",
    )
    count = min(count, windows // batch_size)
    starts = np.linspace(0, windows - 1, count * batch_size).astype(int) * context
    return [_windows(tokens, part, context) for part in np.split(starts, count)]


def _windows(tokens: np.ndarray, starts: np.ndarray, context: int) -> Int[np.ndarray, "B T1"]:
    return tokens[starts[:, None] + np.arange(context + 1)]
