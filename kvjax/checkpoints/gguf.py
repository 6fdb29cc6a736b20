"""GGUF files, llama.cpp's format, as if they were Hugging Face folders.

Metadata becomes a Hugging Face config (then `families.model_config` judges it), tensor names become
Hugging Face names, quantised blocks become float32. llama.cpp stores the rows of a head's q and k
so that RoPE turns neighbours (0, 1), (2, 3); Hugging Face turns halves (0, H/2), so the rows are
put back.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.checkpoints.families import model_config
from kvjax.checkpoints.fields import ANY, Fields
from kvjax.checkpoints.gguf_architectures import ARCHITECTURES
from kvjax.checkpoints.gguf_file import StoredTensor, read_gguf
from kvjax.checkpoints.gguf_tokenizer import end_ids, tokenizer_from_gguf
from kvjax.checkpoints.tensors import Checkpoint, LazyTensor

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_ROPE_FREQS = "rope_freqs.weight"
# Under the architecture's name: keys that change no logits, for any value or for the values listed.
HARMLESS: dict[str, Any] = {
    "rope.scaling.finetuned": ANY,
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
    "expert_count": (0,),
    "expert_used_count": (0,),
}


def open_gguf(path: Path) -> Checkpoint:
    """Opens a GGUF file. Reads metadata; weights are read one by one, later."""
    path = Path(path)
    file = read_gguf(path)
    _check_whole(path, file.metadata)
    raw = hf_config_from_gguf(file.metadata, file.tensors, where=str(path))
    config = model_config(raw, where=str(path))
    kind = ARCHITECTURES[file.metadata["general.architecture"]]
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    heads = heads if kind.interleaved else {}
    tensors = {}
    for name, tensor in file.tensors.items():
        if name == _ROPE_FREQS:  # understood by hf_config_from_gguf
            continue
        hf = hf_name(name, kind.block, where=str(path))
        turned = next((n for part, n in heads.items() if f".{part}." in hf), None)
        offset = kind.norm_offset if "norm" in hf.split(".")[-2] else 0
        tensors[hf] = _lazy(tensor, turned, offset)
    return Checkpoint(path, config, raw, tensors, tokenizer_from_gguf(file.metadata))


def _check_whole(path: Path, metadata: Mapping[str, Any]) -> None:
    kind, parts = metadata.get("general.type", "model"), metadata.get("split.count", 1)
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"{path}: general.architecture: expected one of {tuple(ARCHITECTURES)}, got"
            f" {architecture!r}. Use a model of a supported family."
        )
    if kind != "model":
        raise ValueError(
            f"{path}: general.type: expected 'model', got {kind!r}. Give the model's file."
        )
    if parts > 1:
        raise ValueError(
            f"{path}: split.count: expected a whole model, got one of {parts} parts. Merge them"
            " with llama.cpp's llama-gguf-split --merge."
        )


def hf_name(name: str, parts: Mapping[str, str], *, where: str = "GGUF") -> str:
    """The Hugging Face name of a tensor: output_norm.weight -> model.norm.weight.

    parts: names inside a block.
    """
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if block and block[2] in parts:
        return f"model.layers.{block[1]}.{parts[block[2]]}.{block[3]}"
    top = re.fullmatch(r"(\w+)\.(weight|bias)", name)
    if top and top[1] in _TOP:
        return f"{_TOP[top[1]]}.{top[2]}"
    raise ValueError(
        f"{where}: expected tensors of the model's family, got {name!r}, which kvjax has no place"
        " for."
    )


def _lazy(tensor: StoredTensor, heads: int | None, offset: int) -> LazyTensor:
    def load() -> np.ndarray:
        values = tensor.read()
        values = values - np.float32(offset) if offset else values
        return values if heads is None else half_split_rows(values, heads)

    return LazyTensor(tensor.shape, np.dtype(np.float32), load)


def half_split_rows(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k, weight or bias: llama.cpp's 0, H/2, 1, H/2+1, ... of a head to 0, 1, 2."""
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def interleave_rows(values: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `half_split_rows`: Hugging Face's order to llama.cpp's."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def hf_config_from_gguf(
    metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor], *, where: str = "GGUF"
) -> dict[str, Any]:
    """A Hugging Face config of a GGUF. Unknown keys under the architecture's name are errors."""
    name = metadata.get("general.architecture", "llama")
    kind, prefix = ARCHITECTURES[name], f"{name}."
    own = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    fields = Fields({k: _decimal(v) for k, v in own.items()}, where=f"{where}: {name}.*")
    if "token_embd.weight" not in tensors:
        raise ValueError(f"{where}: token_embd.weight: expected the embedding tensor, got none.")
    hidden, heads = fields.take("embedding_length", int), fields.take("attention.head_count", int)
    head_dim = fields.take("attention.key_length", int, hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        _expect(fields, key, fields.take(key, int, head_dim), head_dim)
    rows = tensors["token_embd.weight"].shape[0]
    _expect(fields, "vocab_size", fields.take("vocab_size", int, rows), rows)
    eos = list(end_ids(metadata))
    config = {
        "model_type": kind.model_type,
        "architectures": [kind.hf],
        "vocab_size": rows,
        "hidden_size": hidden,
        "intermediate_size": fields.take("feed_forward_length", int),
        "num_hidden_layers": fields.take("block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.take("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.take("context_length", int),
        "rms_norm_eps": fields.take("attention.layer_norm_rms_epsilon", float),
        "rope_theta": fields.take("rope.freq_base", float, 10000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    config |= kind.own(fields, config, tensors)
    config["rope_scaling"] = _rope_scaling(fields, config, tensors.get(_ROPE_FREQS))
    fields.drop(HARMLESS)
    fields.finish(HARMLESS)
    return config


def _decimal(value: Any) -> Any:
    """A float32 as the decimal number that was meant: 1e-05, not 9.999999747378752e-06. A list of
    equal numbers (one a layer) as that number."""
    if isinstance(value, list) and value and all(v == value[0] for v in value):
        value = value[0]
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _expect(fields: Fields, key: str, got: int, expected: int) -> None:
    if got != expected:
        raise ValueError(
            f"{fields.where}: {key}: expected {expected}, as the other sizes say, got {got}."
        )


def _rope_scaling(
    fields: Fields, config: Mapping[str, Any], freqs: StoredTensor | None
) -> dict[str, Any] | None:
    """rope_scaling from rope.scaling.* or, as Llama 3 has it, from a tensor of factors."""
    legacy = fields.take("rope.scale_linear", float, None)  # before rope.scaling.* was there
    kind = fields.take("rope.scaling.type", str, "none" if legacy is None else "linear")
    factor = fields.take("rope.scaling.factor", float, 1.0 if legacy is None else legacy)
    original = fields.take("rope.scaling.original_context_length", int, None)
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(
            f"{fields.where}: rope.scaling.type: expected none, linear or yarn, got {kind!r}."
        )
    if freqs is not None:
        if kind != "none":
            raise ValueError(
                f"{fields.where}: rope.scaling.type: expected 'none' beside {_ROPE_FREQS},"
                f" got {kind!r}."
            )
        return _llama3_from_factors(freqs.read(), config, original)
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    betas = {
        hf: fields.take(f"rope.scaling.yarn_{hf}", float, default)
        for hf, default in (("beta_fast", 32.0), ("beta_slow", 1.0))
    }
    length = original or config["max_position_embeddings"]
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": length,
        **betas,
    }


def llama3_factors(
    *,
    head_dim: int,
    theta: float,
    factor: float,
    original: int,
    low: float = 1.0,
    high: float = 4.0,
) -> np.ndarray:
    """What Llama 3.1's RoPE divides each frequency by (llama.cpp stores these in rope_freqs)."""
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def _llama3_from_factors(
    factors: np.ndarray, config: Mapping[str, Any], original: int | None
) -> dict[str, Any] | None:
    """The llama3 parameters that give exactly these factors, or ValueError."""
    factors = np.asarray(factors, np.float32).reshape(-1)
    if np.all(factors == 1.0):
        return None
    length = original or 8192  # of every Llama 3 model
    for factor in (8.0, 32.0, float(str(factors.max()))):
        computed = llama3_factors(
            head_dim=config["head_dim"], theta=config["rope_theta"], factor=factor, original=length
        )
        if computed.shape == factors.shape and np.allclose(computed, factors, rtol=1e-5, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": length,
            }
    raise ValueError(
        f"{_ROPE_FREQS}: expected the factors of Llama 3's RoPE, trained length {length}, got"
        f" {np.array2string(factors, threshold=8)}. They change the results, so they are not"
        " ignored; use the model's Hugging Face folder."
    )
