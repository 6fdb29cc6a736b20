"""`cache_report`: what each part counts."""

from __future__ import annotations

import numpy as np
import oracles
import pytest

from kvjax import CacheConfig, cache_report
from kvjax.cache import format_report
from kvjax.codecs import effective_bits, pair


def report_of(model, text, *, tokens=0, batch=2, max_len=200, **fields):
    config = CacheConfig.parse(text, page_size=32, sinks=3, recent=8, **fields)
    cache = model.init_cache(batch=batch, max_len=max_len, config=config)
    if tokens:
        _, cache = model(oracles.tokens_for(model, batch, 150), cache, lengths=[tokens, 1])
    return cache_report(cache)


def test_parts_by_hand(tiny):
    """2 layers, 2 rows of 200, 2 KV heads of 32: 5 pages a row and layer."""
    report = report_of(tiny(), "kivi4", layers="1:int8+raw")
    numbers = 2 * 32 * 32  # of a page: heads, tokens, channels
    pages = 2 * 5
    kivi, int8, raw = numbers // 2, numbers, 4 * numbers
    kivi_side = 2 * 2 * (2 * 32)  # scale and low, float16: per channel, or per token, each head
    assert report["bytes"] == {
        "codes": pages * (2 * kivi + int8 + raw),
        "scales": pages * (2 * kivi_side + 2 * 2 * 32),
        "exact": 2 * 2 * 2 * 2 * 32 * (3 + 8 + 32) * 4,
        "calibration": 0,
        "states": 0,
        "tables": 4 * 2 * 2 * 5 + 4 * 2,
    }
    assert report["total_bytes"] == sum(report["bytes"].values())
    assert report["raw_bytes"] == 2 * report["bf16_bytes"] == 2 * 200 * 2 * 2 * 2 * 32 * 4
    assert report["ratio"] == report["raw_bytes"] / report["total_bytes"]
    assert report["bf16_ratio"] == report["bf16_bytes"] / report["total_bytes"]


def test_effective_bits_are_the_mean_over_layers(tiny):
    report = report_of(tiny(), "kivi4", layers="1:int8+raw")
    shape = {"head_dim": 32, "page_size": 32, "dtype": np.dtype("float32")}
    k4, v4 = (effective_bits(codec, **shape) for codec in pair("kivi4"))
    k8 = effective_bits(pair("int8")[0], **shape)
    assert report["effective_bits"] == {
        "k": (k4 + k8) / 2,
        "v": (v4 + 32) / 2,
        "mean": (k4 + k8 + v4 + 32) / 4,
    }
    assert [g["effective_bits"]["v"] for g in report["codecs"]] == [v4, 32]


def test_page_slack_is_what_no_token_has_filled(tiny):
    model = tiny()
    empty, used = report_of(model, "int8"), report_of(model, "int8", tokens=150)
    page = 2 * (2 * 32 * 32 + 2 * 32 * 2)  # keys and values: bytes, and a float16 scale a token
    assert empty["page_slack_bytes"] == 2 * 2 * 5 * page
    assert used["tokens"] == [150, 1]
    assert used["page_slack_bytes"] == empty["page_slack_bytes"] - 2 * 4 * page
    assert used["bytes"] == empty["bytes"]


@pytest.mark.parametrize("text", ["raw", "kivi4", "turboquant3"])
def test_the_table_names_every_part(tiny, text):
    report = report_of(tiny(), text, tokens=100)
    table = format_report(report)
    for word in [*report["bytes"], "page slack", text, "bfloat16 of the same capacity"]:
        assert word in table
    bits = report["effective_bits"]
    assert f"keys {text} {bits['k']:.3g} bits, values {text} {bits['v']:.3g} bits" in table
    assert max(map(len, table.splitlines())) <= 120
