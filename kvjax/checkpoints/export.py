"""A model to a Hugging Face folder: the inverse of `kvjax.load`."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from jax import Array

from kvjax.checkpoints.families import hf_config
from kvjax.checkpoints.hf import DTYPES
from kvjax.checkpoints.params import slots
from kvjax.checkpoints.tokenizer import Tokenizer
from kvjax.model import Transformer

# What `load` would read beside, or instead of, what is written here.
_FOREIGN = ("model.safetensors.index.json", "chat_template.jinja", "chat_template.json")


def export(model: Transformer, folder: str | Path, tokenizer: Tokenizer | None = None) -> None:
    """Writes config.json, generation_config.json, model.safetensors and the tokenizer's files.

    In the model's dtype, with Hugging Face's names and orientation, one tensor in memory at a time.
    A folder that has config.json is always whole: an earlier export is replaced file by file, each
    by a rename, and where the config changes it goes first and comes back last.
    Raises ValueError when the folder holds another kind of model.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    foreign = [name for name in _FOREIGN if (folder / name).exists()]
    if foreign:
        raise ValueError(
            f"{folder}: expected an empty folder or an earlier export, got {', '.join(foreign)}."
            " Export to another folder."
        )
    config = {**hf_config(model.config), "torch_dtype": model.dtype}
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    scratch = Path(tempfile.mkdtemp(prefix=".export-", dir=folder))
    try:
        write_safetensors(scratch / "model.safetensors", model)
        _write_json(scratch / "generation_config.json", {key: config[key] for key in special})
        if tokenizer is not None:
            tokenizer.save(scratch)
        _write_json(scratch / "config.json", config)
        _move(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _move(scratch: Path, folder: Path) -> None:
    old = folder / "config.json"
    if old.exists() and old.read_bytes() != (scratch / "config.json").read_bytes():
        old.unlink()
    names = sorted(p.name for p in scratch.iterdir() if p.name != "config.json")
    for name in [*names, "config.json"]:
        os.replace(scratch / name, folder / name)


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def write_safetensors(path: Path, model: Transformer) -> None:
    """The model's tensors as one safetensors file, in the order of their names, flushed to disk."""
    sources = _sources(model)
    codes = {dtype: code for code, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (array, index, transpose) in sources.items():
        shape = array.shape[len(index) :]
        size = math.prod(shape) * array.dtype.itemsize
        header[name] = {
            "dtype": codes[np.dtype(array.dtype)],
            "shape": list(shape[::-1] if transpose else shape),
            "data_offsets": [end, end + size],
        }
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array, index, transpose in sources.values():
            data = np.asarray(array[index] if index else array)
            file.write(np.ascontiguousarray(data.T if transpose else data).tobytes())
        file.flush()
        os.fsync(file.fileno())


def _sources(model: Transformer) -> dict[str, tuple[Array, tuple[int, ...], bool]]:
    """HF name -> (parameter, index into its leading axes, whether it is transposed)."""
    flat = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    found = {
        name: (flat[slot.path][...], index, slot.transpose)
        for slot in slots(model)
        for index, name in zip(np.ndindex(slot.lead), slot.names, strict=True)
    }
    return dict(sorted(found.items()))
