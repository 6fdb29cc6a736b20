"""config.json to ModelConfig: every key is mapped, harmless, or refused by name."""

import dataclasses
import json
from pathlib import Path

import pytest

from kvjax.checkpoints.families import hf_config, model_config
from kvjax.config import ModelConfig, RopeConfig

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 49152,
}


def test_smollm2():
    assert model_config(SMOLLM2) == ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rope=RopeConfig(theta=100000.0),
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        initializer_range=0.041666666666666664,
        bos_token_id=1,
        eos_token_ids=(2,),
        pad_token_id=2,
    )


@pytest.mark.parametrize("name", sorted(p.name for p in GOLDENS.iterdir() if "llama" in p.name))
def test_goldens_and_back(name):
    config = model_config(json.loads((GOLDENS / name / "config.json").read_text()))
    assert model_config(hf_config(config)) == config
    assert config.attention_bias == config.attention_out_bias == (name == "llama_bias")
    assert config.mlp_bias == (name == "llama_bias")


def test_unknown_keys_are_all_listed():
    with pytest.raises(ValueError, match="logit_scale") as error:
        model_config({**SMOLLM2, "logit_scale": 0.5, "qk_norm": True})
    assert "qk_norm" in str(error.value)
    with pytest.raises(ValueError, match="Did you mean 'rms_norm_eps'"):
        model_config({**SMOLLM2, "rms_norm_epsilon": 1e-3})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pretraining_tp", 2),
        ("quantization_config", {"quant_method": "gptq"}),
        ("rope_interleaved", True),
        ("partial_rotary_factor", 0.5),
        ("sliding_window", 4096),
        ("is_encoder_decoder", True),
        ("hidden_act", "relu"),
        ("architectures", ["LlamaForSequenceClassification"]),
        ("model_type", "lama"),
        ("vocab_size", None),
        ("vocab_size", "49152"),
        ("attention_bias", 1),
        ("num_hidden_layers", True),
    ],
)
def test_values_that_change_results_are_refused(key, value):
    with pytest.raises(ValueError, match=key):
        model_config({**SMOLLM2, key: value})


def test_unsupported_family_names_the_supported():
    with pytest.raises(
        ValueError, match=r"model_type: expected one of .*'llama', 'mistral'.*got 'mamba'"
    ):
        model_config({**SMOLLM2, "model_type": "mamba"})


def test_head_dim():
    assert model_config({**SMOLLM2, "head_dim": 32}).head_dim == 32
    with pytest.raises(ValueError, match="head_dim"):
        model_config({**SMOLLM2, "hidden_size": 577})


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 4096,
}


@pytest.mark.parametrize(
    ("scaling", "rope"),
    [
        ({"rope_type": "default"}, RopeConfig()),
        ({"type": "linear", "factor": 4}, RopeConfig(type="linear", factor=4.0)),
        (
            {"type": "dynamic", "factor": 2.0},
            RopeConfig(type="dynamic", factor=2.0, original_max_position_embeddings=8192),
        ),
        (
            {"rope_type": "llama3", **LLAMA3},
            RopeConfig(type="llama3", factor=8.0, original_max_position_embeddings=4096),
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "mscale": 0.7, "truncate": False},
            RopeConfig(
                type="yarn",
                factor=4.0,
                beta_fast=16.0,
                mscale=0.7,
                truncate=False,
                original_max_position_embeddings=8192,
            ),
        ),
        (
            {"type": "yarn", "factor": None, "original_max_position_embeddings": 2048},
            RopeConfig(type="yarn", factor=4.0, original_max_position_embeddings=2048),
        ),
    ],
)
def test_rope_in_both_spellings(scaling, rope):
    base = {k: v for k, v in SMOLLM2.items() if k not in ("rope_theta", "rope_scaling")}
    old = model_config({**base, "rope_theta": 1e4, "rope_scaling": scaling})
    new = model_config({**base, "rope_parameters": {**scaling, "rope_theta": 1e4}})
    assert old.rope == new.rope == rope
    assert model_config(hf_config(old)) == old


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "rope_type"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        ({"rope_type": "linear", "type": "yarn", "factor": 2.0}, "rope_type"),
        ({"rope_type": "linear", "factor": 2.0, "mrope_section": [1, 2]}, "mrope_section"),
        ({"rope_type": "default", "factor": 2.0}, "factor"),
        ({"rope_type": "default", "rope_theta": 5.0}, "rope_theta"),
    ],
)
def test_rope_refusals(scaling, message):
    with pytest.raises(ValueError, match=message):
        model_config({**SMOLLM2, "rope_scaling": scaling})


def test_rope_given_twice():
    both = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"factor": 3.0}}
    with pytest.raises(ValueError, match="rope_scaling"):
        model_config({**SMOLLM2, **both})


def test_generation_config_wins():
    config = model_config(SMOLLM2, {"eos_token_id": [5, 6], "pad_token_id": 7, "temperature": 0.6})
    assert (config.eos_token_ids, config.pad_token_id, config.bos_token_id) == ((5, 6), 7, 1)
    assert model_config(SMOLLM2, {"do_sample": True}).eos_token_ids == (2,)
    assert model_config({**SMOLLM2, "pad_token_id": -1}).pad_token_id is None


def test_export_names_the_family_that_can_say_it():
    config = model_config(SMOLLM2)
    assert hf_config(config)["model_type"] == "llama"
    biased = dataclasses.replace(config, attention_bias=True)
    assert hf_config(biased)["model_type"] == "qwen2"
    odd = dataclasses.replace(config, attention_bias=True, mlp_bias=True)
    assert hf_config(odd)["model_type"] == "kvjax"
    assert model_config(json.loads(json.dumps(hf_config(odd)))) == odd
