"""Presets: caches by a bit budget, fitted to a model once and kept.

    config = kvjax.presets.prepare(model, tokenizer, "recommended")
    cache = model.init_cache(batch=1, max_len=4096, config=config)

`prepare` collects keys, values and their gradients on a text that every machine has, spends the
budget over layers, keys and values where it costs least (`kvjax.codecs.klt.plan`), and keeps the
result in the user's cache folder under the model's fingerprint.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax import calibration
from kvjax.checkpoints.download import cache_dir
from kvjax.codecs import klt
from kvjax.config import CacheConfig, near, need

if TYPE_CHECKING:
    from kvjax.model import Transformer

#: name -> (bits of a cached number on average, fewest and most of a layer), before scales and
#: outliers, which are 0.095 bits at head dim 64. Three levels make at most three groups of layers.
PRESETS = {"recommended": (3.9, 3, 5), "aggressive": (2.15, 1, 3)}
TEXT, ROWS, ROW_TOKENS = "docstrings+licences", 4, 1024
_FORMAT = 2  # of the kept files; raise it when what they mean changes


def prepare(
    model: Transformer,
    tokenizer: Any,
    name: str,
    *,
    folder: str | Path | None = None,
    **fields: Any,
) -> CacheConfig:
    """The cache config of a preset for this model; calibrates (minutes on a CPU) if none is kept.

    folder: where calibrations are kept; None for the user's cache folder. fields: others of
    CacheConfig (page_size, sinks, recent). Raises ValueError on an unknown name.
    """
    path = kept(model, name, folder)
    need(
        model.config.mla is None,
        "preset",
        "a model without latent attention: presets are fitted to heads of keys and of values",
        f"{name} with mla",
        "Take --kv-cache-dtype turboquant4 or int8, which need no fitting.",
    )
    if not path.with_suffix(".json").is_file():
        from kvjax.evaluation import texts

        rows = texts.windows(tokenizer, TEXT, count=ROWS, length=ROW_TOKENS)
        make(model, collect(model, rows), PRESETS[name], path)
    record = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    return CacheConfig(**record["config"], calibration=str(path), **fields)


def kept(model: Transformer, name: str, folder: str | Path | None = None) -> Path:
    """Where the calibration of a preset for this model is, or would be, kept."""
    need(name in PRESETS, "preset", f"one of {', '.join(PRESETS)}", name, near(name, PRESETS))
    where = cache_dir() / "calibrations" if folder is None else Path(folder).expanduser()
    mark = calibration.model_fingerprint(model)
    return where / f"{mark}.{name}.{_FORMAT}.safetensors"


def collect(model: Transformer, tokens: np.ndarray) -> list[calibration.Samples]:
    """Every layer's samples of `[rows, T]` tokens, each row a text of its own."""
    return calibration.collect(model, tokens, CacheConfig(k="klt4", v="klt4"))


def make(
    model: Transformer,
    collected: list[calibration.Samples],
    budget: tuple[float, int, int],
    path: Path,
) -> CacheConfig:
    """Fits transform coding within a budget as in `PRESETS` and writes it to `path`.

    Beside the file a `.json` holds the config; it is written last, so that an interrupted run
    leaves nothing that looks whole.
    """
    keys, values = (np.stack([_spectrum(part, role) for part in collected]) for role in (0, 1))
    bits, low, high = budget
    plan = klt.plan(keys, values, bits, low=low, high=high, paired=True)
    layers = klt.layers_option(plan)
    config = CacheConfig(k="klt4", v="klt4", layers=layers)
    path.parent.mkdir(parents=True, exist_ok=True)
    calibration.save(path, model, config, calibration.fit(model, config, collected))
    record = {"config": {"k": "klt4", "v": "klt4", "layers": layers}, "bits": bits, "text": TEXT}
    part = path.with_suffix(f".json.{os.getpid()}")
    part.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path.with_suffix(".json"))
    return config


def _spectrum(part: calibration.Samples, role: int) -> np.ndarray:
    assert part.gradients is not None
    return klt.axes(part.entries[role], calibration.metric(part.gradients[role]))[2]  # K H
