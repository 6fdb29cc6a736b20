"""`bench` measures what it says, and refuses what does not fit."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.engine import floor


@pytest.mark.parametrize("batch", [1, 2])
def test_bench_prints_json(cli, tmp_path, batch):
    path = tmp_path / "bench.json"
    words = ("--context", "64", "--steps", "9", "--batch", str(batch), "--json-out", str(path))
    done = cli("bench", *words)
    assert done.code == 0, done.err
    record = json.loads(done.out)
    assert json.loads(path.read_text()) == record
    assert (record["context"], record["batch"], record["steps"]) == (64, batch, 16)
    assert record["ratio"] == pytest.approx(np.median(record["ratios"]), abs=1e-3)
    assert record["decode_ms"] > 0
    assert record["floor_ms"] > 0
    assert record["cache"]["tokens"] == [64 + 8 + 16] * batch
    assert record["threads"] >= 1


def test_bench_options_reach_the_cache(cli):
    words = ("--context", "64", "--steps", "8", "--kv-cache-dtype", "int8", "--page-size", "16")
    record = json.loads(cli("bench", *words, "--dtype", "bfloat16").out)
    (codecs,) = record["cache"]["codecs"]
    assert codecs["k"].startswith("int8")
    assert codecs["page_size"] == 16
    assert record["dtype"] == "bfloat16"


def test_attention_by_codec(cli):
    """Codecs without, with a plain and with a trellised key before RoPE, beside raw."""
    names = ["int8", "kvquant3", "klt3"]
    words = ("--context", "256", "--steps", "2", "--page-size", "32", "--attention")
    done = cli("bench", *words, ",".join(names))
    assert done.code == 0, done.err
    record = json.loads(done.out)
    found = record["attention"]
    assert list(found) == ["raw", *names]
    assert found["raw"]["ratio"] == 1
    assert all(codec["ms"] > 0 for codec in found.values())
    raw = 2 * 2 * 16 * 256 * 4  # keys and values of 2 heads of 16, float32
    assert found["raw"]["page_bytes"] == raw
    assert (
        found["int8"]["page_bytes"] == raw / 4 + 2 * 2 * 256 * 2
    )  # a float16 scale a token and head


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--context", "500"), "context: expected at most 416"),
        (("--steps", "0"), "--steps"),
        (("--contxt", "3"), "--context"),
        (("--attention", "int9"), "int8"),
        (("--attention", "int8", "--context", "16"), "context: expected whole pages of 128 tokens"),
        (("--attention", ""), "attention: expected codecs"),
        (("--attention", "int8,recommended"), "a preset is made of klt1 to klt5"),
        (("--attention", "int8", "--evict", "streaming:4+60"), "evict: expected none beside"),
        (("--attention", "int8", "--kv-cache-dtype", "int4"), "kv-cache-dtype: expected none"),
        (("hello",), "expected options only"),
    ],
)
def test_bench_refuses(cli, words, says):
    done = cli("bench", *words)
    assert done.code == 2
    assert says in done.err


@pytest.mark.parametrize("form", ["stacked", "unrolled"])
@pytest.mark.parametrize("tied", [True, False])
def test_floor_reads_every_matrix(tiny, form, tied):
    model = tiny(form=form, tie_word_embeddings=tied)
    config = model.config
    matrices = floor.weight_matrices(model)
    vectors = (2 * config.num_layers + 1) * config.hidden_size  # norms
    embedding = 0 if tied else config.vocab_size * config.hidden_size  # read a row at a time
    read = config.num_params() - vectors - embedding
    assert floor.weight_bytes(matrices) == 4 * read
    clean = floor.read_weights(matrices, jnp.int32(2), batch=1)
    assert np.isfinite(clean)
    leaves, tree = jax.tree.flatten(matrices)
    for i, leaf in enumerate(leaves):  # a NaN in any matrix comes out at the end
        poisoned = tree.unflatten(
            [*leaves[:i], leaf.at[(-1,) * leaf.ndim].set(jnp.nan), *leaves[i + 1 :]]
        )
        assert np.isnan(floor.read_weights(poisoned, jnp.int32(1), batch=1))
