"""Hugging Face folders: config.json, generation_config.json, and safetensors, whole or sharded.

The safetensors format (github.com/huggingface/safetensors): 8 bytes of header length, a JSON header
of dtype, shape and byte range by name, then the data. It is read here directly, since the library's
NumPy door has no bfloat16 before 0.6 and keeps files open.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kvjax.checkpoints.families import model_config
from kvjax.checkpoints.family_table import FAMILIES
from kvjax.checkpoints.tensors import Checkpoint, LazyTensor, check_names
from kvjax.checkpoints.tokenizer import Tokenizer
from kvjax.config import ModelConfig

__all__ = ["check_names", "open_hf", "read_json", "read_safetensors", "read_tensors"]

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
HEADER_LIMIT = 100_000_000  # bytes; the format's own limit


def open_hf(folder: Path) -> Checkpoint:
    """Opens a Hugging Face folder. Reads configs and headers, no weights."""
    folder = Path(folder)
    raw = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    config = model_config(
        raw,
        read_json(generation) if generation.exists() else None,
        where=str(folder / "config.json"),
    )
    tensors = read_tensors(folder)
    family = FAMILIES.get(raw.get("model_type", ""))
    if family is not None and family.fused:
        tensors = unfused(tensors, config)
    tokenizer = Tokenizer.from_folder(folder, extra_eos_ids=config.eos_token_ids)
    return Checkpoint(folder, config, raw, tensors, tokenizer)


def unfused(tensors: Mapping[str, LazyTensor], config: ModelConfig) -> dict[str, LazyTensor]:
    """Tensors that are several in one (Phi-3), apart: each is a range of its rows."""
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    heads["v_proj"] = config.num_kv_heads
    parts = {
        "qkv_proj": {name: n * config.head_dim for name, n in heads.items()},
        "gate_up_proj": dict.fromkeys(("gate_proj", "up_proj"), config.intermediate_size),
    }
    out: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        stem, _, last = module.rpartition(".")
        rows = parts.get(last)
        if rows is None:
            out[name] = tensor
            continue
        if sum(rows.values()) != tensor.shape[0]:
            raise ValueError(
                f"{name}: expected {sum(rows.values())} rows, those of {', '.join(rows)}, got"
                f" {tensor.shape[0]}. The checkpoint and its config do not belong together."
            )
        at = 0
        for part, count in rows.items():
            out[f"{stem}.{part}.{leaf}"] = _rows(tensor, at, at + count)
            at += count
    return out


def _rows(tensor: LazyTensor, first: int, end: int) -> LazyTensor:
    shape = (end - first, *tensor.shape[1:])
    return LazyTensor(shape, tensor.dtype, lambda: tensor.read()[first:end].copy())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    if not path.is_file():
        there = ", ".join(sorted(p.name for p in path.parent.glob("*"))[:20]) or "nothing"
        raise ValueError(
            f"{path}: expected a file, got none; the folder holds {there}. A Hugging Face folder"
            " has config.json and *.safetensors; for a .gguf give the file itself."
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected JSON, got {error}. Download the file again.") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(data).__name__}.")
    return data


def read_tensors(folder: Path) -> dict[str, LazyTensor]:
    """The tensors of model.safetensors, or of the shards of model.safetensors.index.json."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return read_safetensors(single)
    if index.is_file():
        return _read_shards(folder, read_json(index), index)
    weights = sorted(
        p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".safetensors")
    )
    fix = "Give a folder that has them."
    if any(not name.endswith(".safetensors") for name in weights):
        fix = (
            "PyTorch pickles can run code when read, so kvjax does not: convert them with"
            " transformers (model.save_pretrained(folder, safe_serialization=True))."
        )
    raise ValueError(
        f"{folder}: expected model.safetensors or model.safetensors.index.json, got"
        f" {', '.join(weights[:10]) or 'no weights'}. {fix}"
    )


def _read_shards(folder: Path, index: Mapping[str, Any], path: Path) -> dict[str, LazyTensor]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(
            f"{path}: weight_map: expected a mapping of names to files, got {weight_map!r}."
        )
    files = sorted(set(weight_map.values()))
    for name in files:
        if Path(name).name != name:
            raise ValueError(f"{path}: weight_map: expected plain file names, got {name!r}.")
    absent = [name for name in files if not (folder / name).is_file()]
    if absent:
        raise ValueError(
            f"{folder}: expected {len(files)} shards, got all but {', '.join(absent)}."
            " Download the missing files."
        )
    tensors: dict[str, LazyTensor] = {}
    for file in files:
        shard = read_safetensors(folder / file)
        lost = sorted(n for n, f in weight_map.items() if f == file and n not in shard)
        twice = sorted(set(shard) & set(tensors))
        if lost or twice:
            what = (
                f"no {', '.join(lost[:10])}" if lost else f"{', '.join(twice[:10])} a second time"
            )
            raise ValueError(f"{folder / file}: expected what {path.name} says, got {what}.")
        tensors.update(shard)
    return tensors


def read_safetensors(path: Path) -> dict[str, LazyTensor]:
    """The tensors of one safetensors file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, HEADER_LIMIT):
            raise _broken(path, f"a header of {length} bytes in a file of {size}")
        header_bytes = file.read(length)
    try:
        header = json.loads(header_bytes)
    except ValueError as error:
        raise _broken(path, "a header that is not JSON") from error
    header.pop("__metadata__", None)
    return {name: _entry(path, name, entry, 8 + length, size) for name, entry in header.items()}


def _entry(path: Path, name: str, entry: Mapping[str, Any], start: int, size: int) -> LazyTensor:
    if entry["dtype"] not in DTYPES:
        raise ValueError(
            f"{path}: {name}: expected a dtype among {', '.join(DTYPES)}, got {entry['dtype']}."
            " Use the unquantised weights."
        )
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if end - begin != math.prod(shape) * dtype.itemsize or begin < 0 or start + end > size:
        raise _broken(path, f"{name} at bytes {begin} to {end} of {size - start}")
    count = math.prod(shape)

    def load() -> np.ndarray:
        return np.fromfile(path, dtype, count, offset=start + begin).reshape(shape)

    return LazyTensor(shape, dtype, load)


def _broken(path: Path, got: str) -> ValueError:
    return ValueError(
        f"{path}: expected a complete safetensors file, got {got}. Download the file again."
    )
