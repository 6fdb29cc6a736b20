"""One entry a model family: what its config.json says beyond the keys that all share, both ways.

`read` takes the family's own keys and returns ModelConfig fields; `write` returns the family's own
keys. An absent key has the value that transformers gives it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from kvjax.checkpoints.family_deepseek import deepseek_v2, deepseek_v3, write_deepseek
from kvjax.checkpoints.fields import Fields
from kvjax.checkpoints.layer_types import (
    every,
    gemma_ropes,
    qwen_layers,
    read_layer_types,
    write_gemma_ropes,
    write_layers,
)
from kvjax.config import ModelConfig

Read = Callable[[Fields, Mapping[str, Any]], dict[str, Any]]
Write = Callable[[ModelConfig], dict[str, Any]]


def _nothing(*_: Any) -> dict[str, Any]:
    return {}


@dataclasses.dataclass(frozen=True)
class Family:
    """What a model_type means.

    defaults: transformers' own, of keys that all families share. keys: names of shared keys that
    the family spells otherwise. own_rope: `read` takes the RoPE keys. fused: q, k and v are one
    tensor, gate and up another. fixed: ModelConfig fields that are the family's.
    """

    architecture: str
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    own_rope: bool = False
    fused: bool = False
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    read: Read = _nothing
    write: Write = _nothing


# -- biases ---------------------------------------------------------------------------------------


def _all_biases(fields: Fields, known: Mapping[str, Any]) -> dict[str, Any]:
    """attention_bias covers q, k, v and o."""
    bias = fields.take("attention_bias", bool, False)
    return {"attention_bias": bias, "attention_out_bias": bias}


def _write_bias(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.attention_bias}


def _llama(fields: Fields, known: Mapping[str, Any]) -> dict[str, Any]:
    return {**_all_biases(fields, known), "mlp_bias": fields.take("mlp_bias", bool, False)}


def _write_llama(config: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "pretraining_tp": 1,
    }


# -- windows --------------------------------------------------------------------------------------


def _mistral(fields: Fields, known: Mapping[str, Any]) -> dict[str, Any]:
    window = fields.take("sliding_window", int, None if fields.has("sliding_window") else 4096)
    if window is None:
        return {}
    return {"sliding_window": window, "layer_types": ("sliding_attention",) * known["num_layers"]}


def _phi3(fields: Fields, known: Mapping[str, Any]) -> dict[str, Any]:
    fields.drop({"attention_bias": (False,)})
    window = fields.take("sliding_window", int, None)
    if window is None:
        return {}
    return {"sliding_window": window, "layer_types": ("sliding_attention",) * known["num_layers"]}


def _write_window(config: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": config.sliding_window}


def _qwen2(fields: Fields, known: Mapping[str, Any]) -> dict[str, Any]:
    return {"attention_bias": True, **qwen_layers(fields, known["num_layers"])}


def _qwen3(fields: Fields, known: Mapping[str, Any]) -> dict[str, Any]:
    return {**_all_biases(fields, known), **qwen_layers(fields, known["num_layers"])}


def _write_qwen2(config: ModelConfig) -> dict[str, Any]:
    sliding = config.sliding_window is not None
    return {"use_sliding_window": sliding, "max_window_layers": 0, **write_layers(config)}


def _write_qwen3(config: ModelConfig) -> dict[str, Any]:
    return {**_write_qwen2(config), **_write_bias(config)}


# -- Gemma ----------------------------------------------------------------------------------------


def _gemma(fields: Fields, known: Mapping[str, Any], period: int) -> dict[str, Any]:
    scalar = fields.take("query_pre_attn_scalar", (int, float), 256)
    types = read_layer_types(fields, known["num_layers"], every(period))
    return {
        **_all_biases(fields, known),
        "attention_scale": scalar**-0.5,
        "embedding_scale": known["hidden_size"] ** 0.5,
        "layer_types": types,
        "sliding_window": fields.take("sliding_window", int, 4096),
    }


def _gemma2(fields: Fields, known: Mapping[str, Any]) -> dict[str, Any]:
    caps = {
        ours: fields.take(hf, float, None if fields.has(hf) else default)
        for ours, hf, default in (
            ("attn_logit_softcap", "attn_logit_softcapping", 50.0),
            ("final_logit_softcap", "final_logit_softcapping", 30.0),
        )
    }
    fields.drop({"use_bidirectional_attention": (False,)})
    return _bounded({**_gemma(fields, known, 2), **caps})


def _gemma3(fields: Fields, known: Mapping[str, Any]) -> dict[str, Any]:
    period = fields.take("sliding_window_pattern", int, 6)
    period = fields.take("_sliding_window_pattern", int, period)
    fields.drop({"use_bidirectional_attention": (False,)})
    caps = {
        "attn_logit_softcap": fields.take("attn_logit_softcapping", float, None),
        "final_logit_softcap": fields.take("final_logit_softcapping", float, None),
    }
    limit = known["max_position_embeddings"]
    own = {**_gemma(fields, known, period), **caps, **gemma_ropes(fields, limit)}
    return _bounded(own)


def _bounded(own: dict[str, Any]) -> dict[str, Any]:
    """Without sliding layers neither a window nor a RoPE of theirs."""
    if "sliding_attention" in own["layer_types"]:
        return own
    return {**own, "sliding_window": None, "rope_local": None}


def _write_gemma(config: ModelConfig) -> dict[str, Any]:
    scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    scalar = round(scale**-2, 6)
    return {
        **_write_bias(config),
        **write_layers(config),
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "attn_logit_softcapping": config.attn_logit_softcap,
        "final_logit_softcapping": config.final_logit_softcap,
    }


def _write_gemma3(config: ModelConfig) -> dict[str, Any]:
    return {**_write_gemma(config), **write_gemma_ropes(config)}


_GEMMA = {"norm_placement": "sandwich", "norm_type": "rms_offset"}

# -- others ---------------------------------------------------------------------------------------


def _granite(fields: Fields, known: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_llama(fields, known),
        "embedding_scale": fields.take("embedding_multiplier", float, 1.0),
        "residual_scale": fields.take("residual_multiplier", float, 1.0),
        "attention_scale": fields.take("attention_multiplier", float, 1.0),
        "logit_scale": 1 / fields.take("logits_scaling", float, 1.0),
    }


def _write_granite(config: ModelConfig) -> dict[str, Any]:
    scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    divisor = 1 / config.logit_scale
    return {
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "embedding_multiplier": config.embedding_scale,
        "residual_multiplier": config.residual_scale,
        "attention_multiplier": scale,
        "logits_scaling": float(round(divisor))
        if abs(divisor - round(divisor)) < 1e-9
        else divisor,
    }


def _smollm3(fields: Fields, known: Mapping[str, Any]) -> dict[str, Any]:
    n = known["num_layers"]
    interval = fields.take("no_rope_layer_interval", int, 4)
    turned = fields.take("no_rope_layers", list, [int((i + 1) % interval != 0) for i in range(n)])
    skipped = tuple(i for i, rotates in enumerate(turned) if not rotates)
    return {
        **_llama(fields, known),
        **qwen_layers(fields, n),
        "no_rope_layers": skipped,
    }


def _write_smollm3(config: ModelConfig) -> dict[str, Any]:
    layers = range(config.num_layers)
    return {
        **_write_qwen3(config),
        "mlp_bias": config.mlp_bias,
        "no_rope_layers": [int(i not in config.no_rope_layers) for i in layers],
    }


def _cohere(fields: Fields, known: Mapping[str, Any]) -> dict[str, Any]:
    fields.drop({"use_qk_norm": (False,)})
    scale = fields.take("logit_scale", float, 0.0625)
    return {**_all_biases(fields, known), "logit_scale": scale}


def _write_cohere(config: ModelConfig) -> dict[str, Any]:
    return {**_write_bias(config), "logit_scale": config.logit_scale, "use_qk_norm": False}


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", read=_llama, write=_write_llama),
    "mistral": Family(
        "MistralForCausalLM",
        {"num_key_value_heads": 8, "max_position_embeddings": 131072},
        read=_mistral,
        write=_write_window,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        {"num_key_value_heads": 32, "max_position_embeddings": 32768},
        read=_qwen2,
        write=_write_qwen2,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {"num_key_value_heads": 32, "max_position_embeddings": 32768, "head_dim": 128},
        fixed={"qk_norm": "head"},
        read=_qwen3,
        write=_write_qwen3,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 8192,
            "head_dim": 256,
            "tie_word_embeddings": True,
        },
        keys={"hidden_act": "hidden_activation"},
        fixed=_GEMMA,
        read=_gemma2,
        write=_write_gemma,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "head_dim": 256,
            "tie_word_embeddings": True,
        },
        keys={"hidden_act": "hidden_activation"},
        own_rope=True,
        fixed={**_GEMMA, "qk_norm": "head"},
        read=_gemma3,
        write=_write_gemma3,
    ),
    "phi3": Family("Phi3ForCausalLM", {"rms_norm_eps": 1e-5}, fused=True, read=_phi3),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        {"rms_norm_eps": 1e-5},
        fixed={"norm_placement": "post", "qk_norm": "full"},
        read=_all_biases,
        write=_write_bias,
    ),
    "granite": Family("GraniteForCausalLM", read=_granite, write=_write_granite),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
        },
        read=_smollm3,
        write=_write_smollm3,
    ),
    "cohere": Family(
        "CohereForCausalLM",
        {
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
        },
        keys={"rms_norm_eps": "layer_norm_eps"},
        fixed={"norm_placement": "parallel", "norm_type": "layer", "rope_interleave": True},
        read=_cohere,
        write=_write_cohere,
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        {"num_key_value_heads": None},
        read=deepseek_v2,
        write=write_deepseek,
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        {"num_key_value_heads": 128, "max_position_embeddings": 4096},
        read=deepseek_v3,
        write=write_deepseek,
    ),
}
