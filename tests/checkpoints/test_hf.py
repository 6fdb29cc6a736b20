"""Hugging Face folders: whole, sharded, incomplete, and names that do not fit the model."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvjax.checkpoints import check_names, open_checkpoint
from kvjax.checkpoints.hf import read_safetensors

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"


def test_whole_and_sharded_hold_the_same():
    whole, shards = (open_checkpoint(GOLDENS / name) for name in ("llama", "llama_2shard"))
    truth = load_file(GOLDENS / "llama" / "model.safetensors")
    assert set(truth) == set(whole.tensors) == set(shards.tensors)
    for name, value in truth.items():
        np.testing.assert_array_equal(whole.tensors[name].read(), value)
        assert whole.tensors[name].shape == value.shape == shards.tensors[name].read().shape
    assert whole.config == shards.config
    assert whole.tokenizer is None
    assert whole.hf_config["model_type"] == "llama"


def test_dtypes(tmp_path):
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3).astype(ml_dtypes.bfloat16),
        "b": np.arange(4, dtype=np.float16),
        "c": np.array(3.0, np.float32),
        "d": np.zeros((0, 4), np.float32),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    for name, lazy in read_safetensors(tmp_path / "x.safetensors").items():
        assert lazy.dtype == lazy.read().dtype == tensors[name].dtype
        assert lazy.shape == lazy.read().shape
        np.testing.assert_array_equal(lazy.read(), tensors[name])
    save_file({"q": np.zeros(3, np.int8)}, tmp_path / "q.safetensors")
    with pytest.raises(ValueError, match=r"q: expected a dtype .* got I8"):
        read_safetensors(tmp_path / "q.safetensors")


def test_arrays_belong_to_the_caller():
    tensor = open_checkpoint(GOLDENS / "llama").tensors["model.norm.weight"]
    tensor.read()[:] = 0
    assert tensor.read().any()


def test_missing_shard_is_named(golden):
    folder = golden("llama_2shard")
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"got all but model-00002-of-00003.safetensors"):
        open_checkpoint(folder)


def test_index_and_shard_disagree(golden):
    folder = golden("llama_2shard")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    moved = {**index["weight_map"], "extra.weight": "model-00001-of-00003.safetensors"}
    path.write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(ValueError, match=r"extra.weight"):
        open_checkpoint(folder)
    path.write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    with pytest.raises(ValueError, match=r"plain file names"):
        open_checkpoint(folder)
    path.write_text(json.dumps({"weight_map": None}))
    with pytest.raises(ValueError, match=r"weight_map"):
        open_checkpoint(folder)


def test_truncated_files_are_refused(golden):
    folder = golden("llama")
    data = (folder / "model.safetensors").read_bytes()
    for length in (0, 5, 100, len(data) - 1):
        (folder / "model.safetensors").write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"expected a complete safetensors file"):
            open_checkpoint(folder)


def test_pickles_are_refused(golden):
    folder = golden("llama")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model.bin.*safe_serialization"):
        open_checkpoint(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match=r"no weights"):
        open_checkpoint(folder)


def test_config_must_be_there_and_whole(golden):
    folder = golden("llama")
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"expected JSON"):
        open_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config.json: expected a file.*model.safetensors"):
        open_checkpoint(folder)


def test_names_missing_and_unexpected():
    tensors = dict(open_checkpoint(GOLDENS / "llama").tensors)
    expected = set(tensors)
    check_names(expected, tensors)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = tensors["model.norm.weight"]
    check_names(expected, tensors)
    tensors["model.layers.0.self_attn.q_norm.weight"] = tensors.pop("model.norm.weight")
    with pytest.raises(ValueError, match=r"missing 1: model.norm.weight") as error:
        check_names(expected, tensors)
    assert "unexpected 1: model.layers.0.self_attn.q_norm.weight" in str(error.value)


def test_tied_head_must_equal_the_embedding():
    tensors = dict(open_checkpoint(GOLDENS / "llama").tensors)
    expected = set(tensors) - {"lm_head.weight"}  # what a tied model has
    with pytest.raises(ValueError, match=r"lm_head.weight: expected the same values"):
        check_names(expected, tensors)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    check_names(expected, tensors)
    del tensors["lm_head.weight"]
    check_names(expected, tensors)


def test_tied_golden_has_no_head():
    checkpoint = open_checkpoint(GOLDENS / "llama3_rope")
    assert checkpoint.config.tie_word_embeddings
    assert "lm_head.weight" not in checkpoint.tensors
