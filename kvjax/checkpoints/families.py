"""Hugging Face config.json -> ModelConfig, strictly, and back. One table entry a model family.

Every key is mapped, or known not to change results (with the values for which that is true), or
refused. Where a key is absent the value is transformers' default for the family.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvjax.checkpoints.fields import ANY, Fields
from kvjax.checkpoints.rope import rope_from_hf, rope_to_hf
from kvjax.config import ModelConfig, near

# gelu_new and gelu_pytorch_tanh are the same function.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


def _words(text: str) -> list[str]:
    return text.split()


# Keys that change no logits of a decoder, for any value or for the values listed.
HARMLESS: dict[str, Any] = {
    **dict.fromkeys(
        # dropout is for training, and kvjax trains without; the rest is bookkeeping
        _words(
            "attention_dropout hidden_dropout resid_pdrop embd_pdrop use_cache dtype torch_dtype"
            " transformers_version _name_or_path name_or_path transformers.js_config"
            " _attn_implementation _attn_implementation_autoset attn_implementation"
            " _flash_attn_2_enabled _from_model_config is_llama_config max_sequence_length"
            " unsloth_version unsloth_fixed tokenizer_class return_dict output_attentions"
            " output_hidden_states torchscript use_bfloat16 id2label label2id num_labels"
            " problem_type finetuning_task task_specific_params prefix chunk_size_feed_forward"
            " sep_token_id decoder_start_token_id begin_suppress_tokens suppress_tokens"
            " forced_bos_token_id forced_eos_token_id max_length min_length do_sample"
            " early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p"
            " typical_p repetition_penalty length_penalty no_repeat_ngram_size"
            " encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores"
            " return_dict_in_generate exponential_decay_length_penalty remove_invalid_values"
            " tf_legacy_loss"
        ),
        ANY,
    ),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "tie_encoder_decoder": (False,),
    "cross_attention_hidden_size": (),
    "pruned_heads": ({},),
    "pretraining_tp": (1,),
    "quantization_config": (),
    "rope_interleaved": (False,),
    "partial_rotary_factor": (1, 1.0),
    "sliding_window": (),
    "use_sliding_window": (False,),
}


@dataclasses.dataclass(frozen=True)
class Family:
    """What a model_type means beyond the keys that all families share."""

    architecture: str
    rms_norm_eps: float  # transformers' default
    bias_on_output: bool  # attention_bias covers the output projection too


FAMILIES = {
    "llama": Family(architecture="LlamaForCausalLM", rms_norm_eps=1e-6, bias_on_output=True),
}


def model_config(
    hf_config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None = None,
    *,
    where: str = "config.json",
) -> ModelConfig:
    """The ModelConfig of a Hugging Face config.

    generation_config: generation_config.json, whose bos, eos and pad ids win over the config's; its
        other keys are sampling defaults and belong to no model.
    """
    fields = Fields(hf_config, where)
    family = _family(fields)
    hidden_size, num_heads = (
        fields.take("hidden_size", int),
        fields.take("num_attention_heads", int),
    )
    attention_bias = fields.take("attention_bias", bool, False)
    max_positions = fields.take("max_position_embeddings", int, 2048)
    known: dict[str, Any] = {
        "vocab_size": fields.take("vocab_size", int),
        "hidden_size": hidden_size,
        "intermediate_size": fields.take("intermediate_size", int),
        "num_layers": fields.take("num_hidden_layers", int),
        "num_heads": num_heads,
        "num_kv_heads": fields.take("num_key_value_heads", int, num_heads),
        "head_dim": fields.take("head_dim", int, None) or _head_dim(hidden_size, num_heads, where),
        "rope": rope_from_hf(fields, max_position_embeddings=max_positions),
        "rms_norm_eps": fields.take("rms_norm_eps", float, family.rms_norm_eps),
        "hidden_act": _activation(fields),
        "attention_bias": attention_bias,
        "attention_out_bias": attention_bias and family.bias_on_output,
        "mlp_bias": fields.take("mlp_bias", bool, False),
        "tie_word_embeddings": fields.take("tie_word_embeddings", bool, False),
        "max_position_embeddings": max_positions,
        "initializer_range": fields.take("initializer_range", float, 0.02),
    }
    special = _special_ids(fields, generation_config or {})
    fields.drop(HARMLESS)
    fields.finish(_HF_KEYS)
    return ModelConfig(**known, **special)


_HF_KEYS = _words(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads head_dim"
    " num_key_value_heads rope_parameters rope_scaling rope_theta rms_norm_eps hidden_act"
    " attention_bias mlp_bias tie_word_embeddings max_position_embeddings initializer_range"
)


def _family(fields: Fields) -> Family:
    model_type = fields.take("model_type", str)
    supported = ", ".join(map(repr, sorted(FAMILIES)))
    if model_type not in FAMILIES:
        raise ValueError(
            f"{fields.where}: model_type: expected one of {supported}, got {model_type!r}."
            f"{near(model_type, FAMILIES)} Use a model of a supported family."
        )
    family = FAMILIES[model_type]
    architectures = fields.take("architectures", list, [family.architecture])
    if architectures != [family.architecture]:
        raise ValueError(
            f"{fields.where}: architectures: expected [{family.architecture!r}], got"
            f" {architectures!r}. Use the causal language model of the family."
        )
    return family


def _head_dim(hidden_size: int, num_heads: int, where: str) -> int:
    if num_heads < 1 or hidden_size % num_heads:
        raise ValueError(
            f"{where}: head_dim: expected hidden_size divisible by num_attention_heads={num_heads}"
            f" where head_dim is not given, got hidden_size={hidden_size}. Give head_dim."
        )
    return hidden_size // num_heads


def _activation(fields: Fields) -> str:
    name = fields.take("hidden_act", str, "silu")
    if name not in ACTIVATIONS:
        raise ValueError(
            f"{fields.where}: hidden_act: expected one of {sorted(ACTIVATIONS)}, got {name!r}."
            f"{near(name, ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def _special_ids(fields: Fields, generation: Mapping[str, Any]) -> dict[str, Any]:
    """bos, eos and pad: generation_config.json where it names them, else config.json."""
    merged = {}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        own = fields.take(key, (int, list), None)
        merged[key] = own if generation.get(key) is None else generation[key]
    eos = merged["eos_token_id"]
    eos_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    # Some published configs say -1 for "none".
    pad = None if merged["pad_token_id"] == -1 else merged["pad_token_id"]
    return {"bos_token_id": merged["bos_token_id"], "eos_token_ids": eos_ids, "pad_token_id": pad}


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a ModelConfig: the inverse of `model_config`."""
    if config.attention_bias != config.attention_out_bias:
        raise ValueError(
            "attention_out_bias: expected the value of attention_bias for a Llama config.json, got"
            f" attention_bias={config.attention_bias}, attention_out_bias="
            f"{config.attention_out_bias}. Llama has one key for both."
        )
    eos = config.eos_token_ids
    back = {ours: hf for hf, ours in reversed(ACTIVATIONS.items())}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": back[config.hidden_act],
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "initializer_range": config.initializer_range,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
        "pad_token_id": config.pad_token_id,
        "pretraining_tp": 1,
        "use_cache": True,
        **rope_to_hf(config.rope),
    }
