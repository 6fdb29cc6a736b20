"""What eviction costs, and the picture of what stays."""

from __future__ import annotations

import json

import numpy as np
import oracles
import programs
import pytest

from kvjax import CacheConfig
from kvjax.evaluation.evicted import states_after
from kvjax.evaluation.kept import kept
from kvjax.evaluation.reading import dense_states


@pytest.fixture(scope="module")
def figures():
    return programs.load("infer/figures.py")


def test_states_after_a_prompt(tiny):
    """With the whole prompt kept they are the dense model's; with half, only up to its end."""
    model = tiny()
    tokens = oracles.tokens_for(model, 2, 60)
    prompts, lengths = np.asarray([40, 25]), np.asarray([60, 33])
    dense = dense_states(model, tokens)
    for budget, same in (("100%", True), ("50%", False)):
        config = CacheConfig(evict=f"knorm:{budget}/sinks=1/window=2", page_size=8)
        got, cache = states_after(model, tokens, prompts, config=config, lengths=lengths, chunk=8)
        assert cache.length.tolist() == lengths.tolist()
        for row, (prompt, end) in enumerate(zip(prompts, lengths, strict=True)):
            np.testing.assert_allclose(got[row, :prompt], dense[row, :prompt], atol=1e-4)
            after = np.abs(got[row, prompt:end] - dense[row, prompt:end]).max()
            assert (after < 1e-4) == same


def test_the_picture(tiny, figures, tmp_path):
    """Kept tokens are exact or sealed as the cache has them; h2o seals nothing."""
    model = tiny()
    tokens = oracles.tokens_for(model, 1, 60)
    for evict, sealed in (("snapkv:30/sinks=2/window=4", 16), ("h2o:30", 0)):
        config = CacheConfig(evict=evict, page_size=8, recent=10)
        cache = model.init_cache(batch=1, max_len=60 + config.max_new, config=config)
        states = figures.fates(kept(model, tokens, config)[:, 0], 60, cache)
        counts = [(states == fate).sum(2) for fate in (figures.SEALED, figures.EXACT)]
        assert (counts[0] == sealed).all()
        assert (counts[1] == 30 - sealed).all()
        assert sum(figures.shares(states)) == pytest.approx(1)
    figures.draw(states, tmp_path / "kept.png", "title")
    assert (tmp_path / "kept.png").stat().st_size > 1000
    page = figures.as_html(states, [f"<{i}>" for i in range(60)], evict, (0, 1))
    assert page.count("&lt;59&gt;") == 3  # all layers, and each


def test_the_program_measures_policies(program, tiny, letters, tmp_path, monkeypatch, capsys):
    """quality.py --evict: a row a policy, dense where nothing is evicted."""
    model = tiny(form="stacked", initializer_range=0.3)
    monkeypatch.setattr("kvjax.load", lambda name, form: (model, letters))
    (tmp_path / "read.txt").write_text("Some text that is read, and read again. " * 20)
    out = tmp_path / "evict.json"
    code = program.main([
        "--evict", "none,recent:50%/window=8", "--text", str(tmp_path / "read.txt"),
        "--tokens", "120", "--score-from", "80", "--page-size", "8", "--recent", "8",
        "--passkey-lengths", "240", "--passkey-depths", "0.5,0.8", "--json-out", str(out),
        "--haystack", str(tmp_path / "read.txt"),
    ])  # fmt: skip
    assert code == 0
    whole, half = json.loads(out.read_text())["rows"]
    assert abs(whole["kl"]) < 1e-6 < half["kl"]
    assert half["rows"][0] == 40 + 40
    assert half["layers"] == [[0, 1]]
    assert half["constants"] == {"budget": [None, 0.5, None], "sinks": 4, "window": 8}  # case 46
    assert half["prompt_ratio"] > half["ratio"] > 1
    for kind in ("passkey_inside", "passkey_outside", "needle_inside", "needle_outside"):
        assert half[kind]["n"] == 2
        assert len(half[kind]["cells"]) == 2
    shown = capsys.readouterr().out
    assert "| recent:50%/window=8 | raw | 80 |" in shown
    assert "| needle outside |" in shown
