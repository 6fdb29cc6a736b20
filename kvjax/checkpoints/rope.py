"""RoPE settings of Hugging Face configs: `rope_theta` with `rope_scaling` (transformers 4, also the
older key "type"), or one `rope_parameters` (transformers 5)."""

from __future__ import annotations

from typing import Any

from kvjax.checkpoints.fields import ANY, Fields
from kvjax.config import ROPE_TYPES, RopeConfig, near

# Our fields that each type has besides theta, and their keys' types.
_KEYS: dict[str, dict[str, type]] = {
    "default": {},
    "linear": {"factor": float},
    "dynamic": {"factor": float},
    "llama3": {"factor": float, "low_freq_factor": float, "high_freq_factor": float},
    "yarn": {
        "factor": float,
        "attention_factor": float,
        "beta_fast": float,
        "beta_slow": float,
        "mscale": float,
        "mscale_all_dim": float,
        "truncate": bool,
    },
}
_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def rope_from_hf(
    config: Fields, *, max_position_embeddings: int, theta: float = 10000.0
) -> RopeConfig:
    """Takes the RoPE keys of `config`. theta: where absent."""
    outer_theta = config.take("rope_theta", float, None)
    old, new = config.take("rope_scaling", dict, None), config.take("rope_parameters", dict, None)
    outer = config.take("original_max_position_embeddings", int, None)
    if old and new and old != new:
        raise ValueError(
            f"{config.where}: rope_scaling: expected it absent or equal to rope_parameters={new!r},"
            f" got {old!r}. Keep one of them."
        )
    fields = Fields(
        new or old or {}, f"{config.where}: {'rope_parameters' if new else 'rope_scaling'}"
    )
    given = _same_theta(fields, outer_theta)
    theta = theta if given is None else given
    kind = _rope_type(fields)
    original = fields.take("original_max_position_embeddings", int, outer)
    values = {}
    for key, python_type in _KEYS[kind].items():
        required = key in _REQUIRED.get(kind, ())
        value = fields.take(key, python_type) if required else fields.take(key, python_type, None)
        if value is not None:
            values[key] = value
    fields.drop({"partial_rotary_factor": (1, 1.0), "finetuned": ANY})
    fields.finish(_KEYS[kind])
    if kind in ("llama3", "yarn"):
        original = original or max_position_embeddings  # as transformers does
        values["original_max_position_embeddings"] = original
    elif kind == "dynamic":
        # transformers reads max_position_embeddings here, whatever the original length says
        values["original_max_position_embeddings"] = max_position_embeddings
    if kind == "yarn" and "factor" not in values:
        values["factor"] = max_position_embeddings / original
    return RopeConfig(theta=theta, type=kind, **values)


def _same_theta(fields: Fields, outer: float | None) -> float | None:
    inner = fields.take("rope_theta", float, None)
    if inner is not None and outer is not None and inner != outer:
        raise ValueError(
            f"{fields.where}: rope_theta: expected the config's rope_theta={outer}, got {inner}."
            " Keep one of them."
        )
    return inner if inner is not None else outer


def _rope_type(fields: Fields) -> Any:
    legacy = fields.take("type", str, None)
    kind = fields.take("rope_type", str, legacy or "default")
    if kind not in ROPE_TYPES or (legacy is not None and legacy != kind):
        got = f"{kind!r}" if legacy in (None, kind) else f"{kind!r} and type={legacy!r}"
        raise ValueError(
            f"{fields.where}: rope_type: expected one of {ROPE_TYPES}, got {got}."
            f"{near(kind, ROPE_TYPES)} Another RoPE changes the results, so it is not ignored."
        )
    return kind


def rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, which transformers 4 and 5 both read."""
    if rope.type == "default":
        return {"rope_theta": rope.theta, "rope_scaling": None}
    scaling: dict[str, Any] = {"rope_type": rope.type}
    for key in _KEYS[rope.type]:
        if getattr(rope, key) is not None:
            scaling[key] = getattr(rope, key)
    if rope.type in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = rope.original_max_position_embeddings
    return {"rope_theta": rope.theta, "rope_scaling": scaling}
