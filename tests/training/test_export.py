"""Export and load are inverse."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import kvjax
from kvjax.checkpoints.export import export
from kvjax.model import Transformer
from kvjax.training.data import load_dataset

TOKENS = np.arange(24).reshape(2, 12)


@pytest.mark.parametrize("form", ["stacked", "unrolled"])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tie_word_embeddings": False},
        {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True, "num_layers": 1},
    ],
    ids=["tied", "untied", "biased"],
)
def test_logits_are_the_same_bit_for_bit(config, tmp_path, form, change):
    model = Transformer(dataclasses.replace(config.model, **change), rngs=nnx.Rngs(3), form=form)
    export(model, tmp_path)
    again, tokenizer = kvjax.load(tmp_path, form=form)
    assert again.config == model.config
    assert tokenizer is None
    np.testing.assert_array_equal(again(TOKENS)[0], model(TOKENS)[0])


def test_forms_write_the_same_file_and_safetensors_reads_it(config, tmp_path):
    stacked = Transformer(config.model, rngs=nnx.Rngs(3), form="stacked")
    export(stacked, tmp_path / "a")
    unrolled, _ = kvjax.load(tmp_path / "a", form="unrolled")
    export(unrolled, tmp_path / "b")
    a, b = (tmp_path / n / "model.safetensors" for n in "ab")
    assert a.read_bytes() == b.read_bytes()
    tensors = load_file(a)
    kernel = stacked.stack.stack.attention.k_proj.kernel[...]
    np.testing.assert_array_equal(
        tensors["model.layers.1.self_attn.k_proj.weight"], np.asarray(kernel[1]).T
    )
    assert tensors["model.layers.1.self_attn.k_proj.weight"].dtype == np.float32


def test_bfloat16_stays_bfloat16(config, tmp_path):
    model = Transformer(config.model, rngs=nnx.Rngs(3), dtype="bfloat16", form="unrolled")
    export(model, tmp_path)
    again, _ = kvjax.load(tmp_path, dtype="bfloat16", form="unrolled")
    np.testing.assert_array_equal(again(TOKENS)[0], model(TOKENS)[0])
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_the_tokenizer_comes_along_and_a_second_export_replaces_the_first(config, tmp_path):
    tokenizer = load_dataset(config.data, config.model).tokenizer
    export(Transformer(config.model, rngs=nnx.Rngs(0)), tmp_path, tokenizer)
    second = dataclasses.replace(config.model, num_layers=1)
    export(Transformer(second, rngs=nnx.Rngs(1)), tmp_path, tokenizer)
    model, again = kvjax.load(tmp_path)
    assert model.config.num_layers == 1
    assert again.encode("def read(x):\n") == tokenizer.encode("def read(x):\n")
    assert again.eos_ids == tokenizer.eos_ids
    assert not list(tmp_path.glob(".export-*"))


def test_a_failed_export_leaves_the_old_one(config, tmp_path, monkeypatch):
    export(Transformer(config.model, rngs=nnx.Rngs(0)), tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def fail(path, model):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("kvjax.checkpoints.export.write_safetensors", fail)
    with pytest.raises(OSError, match="disk full"):
        export(Transformer(config.model, rngs=nnx.Rngs(1)), tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_folder_of_another_kind_is_refused(config, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="expected an empty folder or an earlier export"):
        export(Transformer(config.model, rngs=nnx.Rngs(0)), tmp_path)
