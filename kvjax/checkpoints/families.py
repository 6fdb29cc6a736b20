"""Hugging Face config.json -> ModelConfig, strictly, and back. One table entry a model family.

Every key is mapped, or known not to change results (with the values for which that is true), or
refused. Where a key is absent the value is transformers' default for the family.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from kvjax.checkpoints.family_table import FAMILIES, Family
from kvjax.checkpoints.fields import ANY, Fields
from kvjax.checkpoints.rope import rope_from_hf, rope_to_hf
from kvjax.config import ModelConfig, model_config_from_dict, near, to_dict

#: the model_type of what no Hugging Face family can say
OWN = "kvjax"

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
    "cache_implementation": ANY,
    "auto_map": ANY,  # remote code for what the model_type says already
}


#: keys that all families have, by our name: (HF's, type)
_SHARED: dict[str, tuple[str, type]] = {
    "vocab_size": ("vocab_size", int),
    "hidden_size": ("hidden_size", int),
    "intermediate_size": ("intermediate_size", int),
    "num_layers": ("num_hidden_layers", int),
    "num_heads": ("num_attention_heads", int),
}
_OPTIONAL: dict[str, tuple[str, type, Any]] = {
    "rms_norm_eps": ("rms_norm_eps", float, 1e-6),
    "tie_word_embeddings": ("tie_word_embeddings", bool, False),
    "max_position_embeddings": ("max_position_embeddings", int, 2048),
    "initializer_range": ("initializer_range", float, 0.02),
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
    if hf_config.get("model_type") == OWN:
        return _own_config(hf_config, where)
    fields = Fields(hf_config, where)
    family = _family(fields)
    known: dict[str, Any] = {k: fields.take(hf, kind) for k, (hf, kind) in _SHARED.items()}
    for ours, (hf, kind, default) in _OPTIONAL.items():
        key = family.keys.get(hf, hf)
        known[ours] = fields.take(key, kind, family.defaults.get(hf, default))
    heads = known["num_heads"]
    kv_heads = family.defaults.get("num_key_value_heads", heads)
    known["num_kv_heads"] = fields.take("num_key_value_heads", int, kv_heads)
    known["hidden_act"] = _activation(fields, family.keys.get("hidden_act", "hidden_act"))
    head_dim = fields.take("head_dim", int, family.defaults.get("head_dim"))
    if not family.own_rope:
        known["rope"] = rope_from_hf(
            fields,
            max_position_embeddings=known["max_position_embeddings"],
            theta=family.defaults.get("rope_theta", 10000.0),
        )
    own = family.read(fields, known)
    if "head_dim" not in own:
        known["head_dim"] = head_dim or _head_dim(known["hidden_size"], heads, where)
    special = _special_ids(fields, generation_config or {})
    fields.drop(HARMLESS)
    fields.finish(_HF_KEYS)
    return ModelConfig(**{**known, **family.fixed, **own, **special})


_HF_KEYS = _words(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads head_dim"
    " num_key_value_heads rope_parameters rope_scaling rope_theta rms_norm_eps hidden_act"
    " attention_bias mlp_bias tie_word_embeddings max_position_embeddings initializer_range"
)


def _own_config(data: Mapping[str, Any], where: str) -> ModelConfig:
    config = data.get("model")
    if not isinstance(config, dict):
        raise ValueError(f"{where}: model: expected a kvjax model's fields, got {config!r}.")
    return model_config_from_dict(config)


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


def _activation(fields: Fields, key: str) -> str:
    default = "silu" if key == "hidden_act" else "gelu_pytorch_tanh"
    name = fields.take(key, str, default)
    if name not in ACTIVATIONS:
        raise ValueError(
            f"{fields.where}: {key}: expected one of {sorted(ACTIVATIONS)}, got {name!r}."
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
    """The config.json of a ModelConfig: of the first family that can say all of it, which is found
    by reading it back. What no family has (CLA, YOCO, ...) is kvjax's own model_type, which
    transformers does not load."""
    for name, family in FAMILIES.items():
        data = {**_shared(config, family), "model_type": name, **family.write(config)}
        data = {**data, "architectures": [family.architecture]}
        try:
            said = model_config(data)
        except ValueError:
            continue
        if _plain(said) == _plain(config):
            return data
    own = json.loads(json.dumps(to_dict(config)))
    return {"architectures": ["KvjaxForCausalLM"], "model_type": OWN, "model": own, **_ids(config)}


def _plain(config: ModelConfig) -> ModelConfig:
    """Without differences of form: an explicit default scale, layer types that are all full."""
    changes: dict[str, Any] = {}
    if config.attention_scale == config.head_dim**-0.5:
        changes["attention_scale"] = None
    if set(config.layer_types) == {"full_attention"}:
        changes["layer_types"] = ()
    if config.kv_source == tuple(range(config.num_layers)):
        changes["kv_source"] = ()
    if config.rope_local == config.rope:
        changes["rope_local"] = None
    return dataclasses.replace(config, **changes)


def _ids(config: ModelConfig) -> dict[str, Any]:
    eos = config.eos_token_ids
    return {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
        "pad_token_id": config.pad_token_id,
    }


def _shared(config: ModelConfig, family: Family) -> dict[str, Any]:
    back = {ours: hf for hf, ours in reversed(ACTIVATIONS.items())}
    names = {ours: hf for ours, (hf, _) in _SHARED.items()}
    names |= {ours: hf for ours, (hf, _, _) in _OPTIONAL.items()}
    shared: dict[str, Any] = {hf: getattr(config, ours) for ours, hf in names.items()}
    shared |= {
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": back[config.hidden_act],
    }
    shared = {family.keys.get(hf, hf): value for hf, value in shared.items()}
    rope = {} if family.own_rope else rope_to_hf(config.rope)
    return {**shared, "attention_dropout": 0.0, "use_cache": True, **_ids(config), **rope}
