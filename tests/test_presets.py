"""Presets: fitted once, kept, within their budget, and read back for the same model only."""

from __future__ import annotations

import numpy as np
import oracles
import pytest

from kvjax import MLAConfig, cache_report, presets
from kvjax.codecs import klt


@pytest.fixture(scope="module")
def fitted(tiny, tmp_path_factory):
    """A tiny model, the folder of its presets, and its samples."""
    model = tiny(form="stacked", num_layers=3, head_dim=64)
    folder = tmp_path_factory.mktemp("presets")
    collected = presets.collect(model, oracles.tokens_for(model, 2, 200))
    for name, budget in presets.PRESETS.items():
        presets.make(model, collected, budget, presets.kept(model, name, folder))
    return model, folder


@pytest.mark.parametrize(("name", "most"), [("recommended", 4.0), ("aggressive", 2.25)])
def test_within_the_budget(fitted, name, most):
    model, folder = fitted
    config = presets.prepare(model, None, name, folder=folder)  # kept: no tokenizer is asked
    cache = model.init_cache(batch=1, max_len=400, config=config)
    assert len(cache.groups) <= 3
    report = cache_report(cache)
    assert report["effective_bits"]["mean"] <= most
    assert report["bytes"]["calibration"] > 0


def test_it_caches_close_to_dense(fitted):
    model, folder = fitted
    config = presets.prepare(model, None, "recommended", folder=folder)
    tokens = oracles.tokens_for(model, 1, 400, seed=3)
    full, _ = model(tokens)
    cache = model.init_cache(batch=1, max_len=400, config=config)
    logits, _ = oracles.feed(model, cache, tokens, [100] * 4)
    far = np.sqrt(np.mean((logits[:, 300:] - np.asarray(full)[:, 300:]) ** 2)) / full.std()
    assert far < 0.2


def test_another_model_has_its_own(fitted, tiny):
    model, folder = fitted
    other = tiny(form="stacked", num_layers=3, head_dim=64, seed=1)
    assert presets.kept(other, "recommended", folder) != presets.kept(model, "recommended", folder)
    config = presets.prepare(model, None, "recommended", folder=folder)
    with pytest.raises(ValueError, match="fingerprint"):
        other.init_cache(batch=1, max_len=400, config=config)


def test_unknown_names_list_near_ones(fitted):
    with pytest.raises(ValueError, match="preset: expected one of recommended, aggressive"):
        presets.prepare(fitted[0], None, "recomended")


def test_bits_go_where_errors_cost():
    """A layer whose entries vary more gets more bits; the average keeps to the budget."""
    spectrum = np.ones((4, 1, 64)) * np.asarray([1.0, 1.0, 100.0, 1.0])[:, None, None]
    for paired in (False, True):
        plan = klt.plan(spectrum, spectrum, 2.25, low=1, high=4, paired=paired)
        assert np.mean(plan) == 2.25
        assert max(plan) == plan[2]
        if paired:
            assert all(k == v for k, v in plan)


def test_not_with_latents(tiny):
    mla = MLAConfig(kv_lora_rank=64, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16)
    model = tiny(num_kv_heads=4, mla=mla)
    with pytest.raises(ValueError, match=r"preset: .*latent attention.*'recommended with mla'"):
        presets.prepare(model, None, "recommended")
