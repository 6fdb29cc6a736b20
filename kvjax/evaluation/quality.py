"""One row of the quality table: a method's losses, passkey accuracy, bits and bytes."""

from __future__ import annotations

import dataclasses
import math
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from kvjax import calibration, presets
from kvjax.cache import LowBitKeysWarning, cache_report
from kvjax.cache.build import group_specs
from kvjax.cache.report import mean_bits
from kvjax.config import CacheConfig
from kvjax.evaluation import passkey
from kvjax.evaluation.reading import Losses, cached_states, compare, dense_states, mean
from kvjax.model import Transformer
from kvjax.plan import cache_bytes


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """What every method of a table reads, and how. tokens `[B, S]`: scored from position `first`.

    calibration_rows: the text that methods are calibrated on; files: a folder to keep them in, or
    None for a temporary one. page_size, sinks, recent: of the cache; chunk: tokens of a call.
    """

    tokens: np.ndarray
    first: int
    chunk: int
    page_size: int
    sinks: int
    recent: int
    cases: list[passkey.Case]
    calibration_rows: np.ndarray
    files: Path | None = None

    @property
    def max_len(self) -> int:
        """One capacity, so that text and passkeys share a program."""
        longest = max([self.tokens.shape[1], *(case.length for case in self.cases)])
        return -(-longest // self.chunk) * self.chunk


class Bench:
    """A model on a task: `row(name)` measures one method against the dense model."""

    def __init__(self, model: Transformer, task: Task):
        self.model, self.task = model, task
        self.dense = dense_states(model, task.tokens)
        self.collected: list[calibration.Samples] | None = None  # for presets

    def row(self, name: str) -> dict[str, Any]:
        """The method's row; its seconds are those of the whole row, compiling included."""
        began = time.perf_counter()
        task = self.task
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore", LowBitKeysWarning)  # the table is the warning
            config, calibrated = self._config(name, task.files or Path(folder))
            states, cache = cached_states(
                self.model, task.tokens, config=config, chunk=task.chunk, max_len=task.max_len
            )
            losses = compare(self.model, task.tokens, self.dense, states, first=task.first)
            right = passkey.score(
                self.model,
                task.cases,
                config=config,
                chunk=task.chunk,
                max_len=task.max_len,
                batch=task.tokens.shape[0],
            )
        row = {"method": name, "calibrated": calibrated} | quality(losses)
        row["passkey"] = share(right)
        row["passkey_cells"] = passkey.by_cell(task.cases, right)
        row |= self._sizes(config)
        row["run_report"] = cache_report(cache)
        return row | {"seconds": time.perf_counter() - began}

    def _config(self, name: str, folder: Path) -> tuple[CacheConfig, bool]:
        """The cache of a method, and whether it was calibrated."""
        task = self.task
        shape: dict[str, Any] = {
            "page_size": task.page_size,
            "sinks": task.sinks,
            "recent": task.recent,
        }
        if name not in presets.PRESETS:
            return self._calibrated(CacheConfig.parse(name, **shape), folder)
        if self.collected is None:
            self.collected = presets.collect(self.model, task.calibration_rows)
        path = folder / f"{name}.safetensors"
        config = presets.make(self.model, self.collected, presets.PRESETS[name], path)
        return dataclasses.replace(config, calibration=str(path), **shape), True

    def _calibrated(self, config: CacheConfig, folder: Path) -> tuple[CacheConfig, bool]:
        if not calibration.needs_calibration(self.model.config, config):
            return config, False
        path = folder / f"{config.k}+{config.v}.safetensors".replace("/", "_")
        made = calibration.calibrate(self.model, self.task.calibration_rows, config)
        calibration.save(path, self.model, config, made)
        return dataclasses.replace(config, calibration=str(path)), True

    def _sizes(self, config: CacheConfig) -> dict[str, Any]:
        """Of a bfloat16 model with this cache, one row at the task's capacity, by the formula."""
        model, length = self.model.config, self.task.max_len
        shape: dict[str, Any] = {"max_len": length, "config": config, "dtype": "bfloat16"}
        specs = group_specs(model, **shape)
        total = sum(cache_bytes(model, batch=1, **shape).values())
        heads, k_dim, v_dim = model.cache_shape
        numbers = len(model.owners) * heads * (k_dim + v_dim)
        bits = mean_bits(list(specs), dtype="bfloat16")
        return {
            "effective_bits": bits,
            "sealed_bytes_per_token": bits["mean"] * numbers / 8,
            "bf16_bytes_per_token": 2 * numbers,
            "total_bytes": total,
            "capacity": length,
            "sealed_ratio": 16 / bits["mean"],
            "total_ratio": 2 * numbers * length / total,
        }


def quality(losses: Losses) -> dict[str, Any]:
    """Perplexity, KL and agreement with n and standard errors over tokens."""
    nll, worse = mean(losses.nll), mean(losses.nll - losses.dense_nll)
    kl, agree = mean(losses.kl), mean(losses.agree)
    perplexity = math.exp(nll.mean)
    return {
        "tokens": nll.n,
        "perplexity": perplexity,
        "perplexity_se": perplexity * nll.se,
        "dense_perplexity": math.exp(float(losses.dense_nll.mean())),
        "nll_increase": worse.mean,
        "nll_increase_se": worse.se,
        "kl": kl.mean,
        "kl_se": kl.se,
        "top1": agree.mean,
        "top1_se": agree.se,
    }


def share(right: list[bool]) -> dict[str, Any]:
    """Accuracy with the binomial standard error."""
    n = len(right)
    if not n:
        return {"accuracy": None, "se": None, "n": 0}
    p = sum(right) / n
    return {"accuracy": p, "se": math.sqrt(p * (1 - p) / n), "n": n}
