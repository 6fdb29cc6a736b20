"""Keys that say which layers are bounded by a window, and with which RoPE."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvjax.checkpoints.fields import Fields
from kvjax.checkpoints.rope import rope_from_hf, rope_to_hf
from kvjax.config import ModelConfig

FULL, SLIDING = "full_attention", "sliding_attention"
#: theta of Gemma 3's two kinds of layers, where absent
GEMMA_THETA = {FULL: 1e6, SLIDING: 1e4}


def every(period: int) -> Callable[[int], str]:
    """The last layer of each period is full, the others are sliding."""
    return lambda layer: SLIDING if (layer + 1) % period else FULL


def read_layer_types(fields: Fields, n: int, default: Callable[[int], str]) -> tuple[str, ...]:
    """layer_types, of which kvjax has two."""
    types = fields.take("layer_types", list, [default(i) for i in range(n)])
    other = sorted({str(t) for t in types} - {FULL, SLIDING})
    if other or len(types) != n:
        raise ValueError(
            f"{fields.where}: layer_types: expected {n} of {FULL!r} and {SLIDING!r}, got"
            f" {len(types)} with {other or 'no other'}. kvjax has no other kinds of layers."
        )
    return tuple(types)


def qwen_layers(fields: Fields, n: int) -> dict[str, Any]:
    """use_sliding_window, sliding_window, max_window_layers and layer_types of Qwen."""
    used = fields.take("use_sliding_window", bool, False)
    window = fields.take("sliding_window", int, None if fields.has("sliding_window") else 4096)
    first = fields.take("max_window_layers", int, 28)
    window = window if used else None

    def default(layer: int) -> str:
        return SLIDING if window is not None and layer >= first else FULL

    types = read_layer_types(fields, n, default)
    if SLIDING not in types:
        return {}
    if window is None:
        raise ValueError(
            f"{fields.where}: layer_types: expected no {SLIDING!r} without use_sliding_window and"
            f" sliding_window, got {types}."
        )
    return {"layer_types": types, "sliding_window": window}


def write_layers(config: ModelConfig) -> dict[str, Any]:
    """layer_types and sliding_window."""
    types = config.layer_types or (FULL,) * config.num_layers
    return {"layer_types": list(types), "sliding_window": config.sliding_window}


def gemma_ropes(fields: Fields, limit: int) -> dict[str, Any]:
    """rope and rope_local of Gemma 3: rope_parameters by layer type (transformers 5), or
    rope_theta, rope_scaling and rope_local_base_freq."""
    by_type = fields.take("rope_parameters", dict, None)
    if by_type is None:
        local = {"rope_theta": fields.take("rope_local_base_freq", float, GEMMA_THETA[SLIDING])}
        whole = {
            "rope_theta": fields.take("rope_theta", float, GEMMA_THETA[FULL]),
            "rope_scaling": fields.take("rope_scaling", dict, None),
        }
    else:
        inner = Fields(by_type, f"{fields.where}: rope_parameters")
        both = {k: inner.take(k, dict, {"rope_theta": v}) for k, v in GEMMA_THETA.items()}
        inner.finish(GEMMA_THETA)
        whole, local = ({"rope_parameters": both[k]} for k in (FULL, SLIDING))
    ropes = [
        rope_from_hf(Fields(part, fields.where), max_position_embeddings=limit)
        for part in (whole, local)
    ]
    return {"rope": ropes[0], "rope_local": ropes[1]}


def write_gemma_ropes(config: ModelConfig) -> dict[str, Any]:
    """The inverse, in transformers 5's form and in 4's."""
    local = config.rope if config.rope_local is None else config.rope_local
    whole = rope_to_hf(config.rope)

    def inner(rope: dict[str, Any]) -> dict[str, Any]:
        scaling = rope["rope_scaling"] or {"rope_type": "default"}
        return {**scaling, "rope_theta": rope["rope_theta"]}

    return {"rope_parameters": {FULL: inner(whole), SLIDING: inner(rope_to_hf(local))}}
