"""Calibrated codecs, which keep keys before RoPE, on models of other kinds than Llama's."""

from __future__ import annotations

import dataclasses

import numpy as np
import oracles
import pytest

from kvjax import CacheConfig, RopeConfig, calibration
from kvjax.sharing import cla

SLIDING, FULL = "sliding_attention", "full_attention"
KINDS = {
    "two ropes": {
        "layer_types": (SLIDING, FULL),
        "sliding_window": 72,
        "rope": RopeConfig(theta=1e6),
        "rope_local": RopeConfig(theta=100.0),
        "qk_norm": "head",
    },
    "no rope": {"no_rope_layers": (0,), "rope_interleave": True},
    "cla": {"num_layers": 4, **cla(4)},
}
CALLS = [64, 64, *[1] * 8]


@pytest.mark.parametrize(
    ("kind", "fisher"),
    [
        ("cla", False),
        *(pytest.param(kind, True, marks=pytest.mark.slow) for kind in KINDS),
    ],
)
def test_keys_before_rope(tiny, tmp_path, kind, fisher):
    """Each layer's own RoPE, or none, when they are read; samples are of owners alone."""
    model = tiny(form="stacked", seed=2, **KINDS[kind])
    config = CacheConfig.parse("kvquant4", page_size=32, sinks=3, recent=8)
    rows = oracles.tokens_for(model, 2, 200, seed=7)
    made = calibration.calibrate(model, rows, config, fisher=fisher)  # gradients through readers
    readers = set(range(model.config.num_layers)) - set(model.config.owners)
    assert {n for n, params in enumerate(made) if not any(params)} == readers
    calibration.save(tmp_path / "c", model, config, made)
    config = dataclasses.replace(config, calibration=str(tmp_path / "c"))
    tokens = oracles.tokens_for(model, 2, 136)
    full = np.asarray(model(tokens)[0])
    cache = model.init_cache(batch=2, max_len=136, config=config)
    logits, _ = oracles.feed(model, cache, tokens, CALLS)
    far = np.sqrt(np.mean((logits - full)[:, 128:] ** 2)) / full.std()
    assert far < 0.3, far


def test_presets_need_layers_of_their_own(tiny):
    from kvjax import presets

    with pytest.raises(ValueError, match="preset: expected a model whose layers share no keys"):
        presets.collect(tiny(num_layers=4, **cla(4)), oracles.tokens_for(tiny(), 1, 40))
