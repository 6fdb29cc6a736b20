"""Teacher forcing through a cache, and the losses that come out."""

from __future__ import annotations

import numpy as np
import oracles
import pytest

from kvjax import CacheConfig
from kvjax.evaluation.reading import best_tokens, cached_states, compare, dense_states, mean

RAW = CacheConfig(page_size=8, sinks=2, recent=4)
LOSSY = CacheConfig.parse("int4", page_size=8, sinks=2, recent=4)


def test_raw_through_the_cache_is_the_dense_model(tiny):
    model = tiny(form="stacked")
    tokens = oracles.tokens_for(model, 2, 75)
    dense = dense_states(model, tokens)
    states, cache = cached_states(model, tokens, config=RAW, chunk=16, max_len=80)
    np.testing.assert_allclose(states, dense, atol=2e-5)
    assert np.asarray(cache.length).tolist() == [75, 75]
    losses = compare(model, tokens, dense, states, first=30, chunk=16)
    assert losses.kl.shape == (2 * 45,)
    assert np.abs(losses.kl).max() < 1e-6
    assert losses.agree.all()


def test_losses_by_hand(tiny):
    model = tiny(form="stacked")
    tokens = oracles.tokens_for(model, 2, 75)
    dense = dense_states(model, tokens)
    states, _ = cached_states(model, tokens, config=LOSSY, chunk=16, max_len=80)
    losses = compare(model, tokens, dense, states, first=30, chunk=64)
    logits = np.asarray(model(tokens)[0], np.float64)
    p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    cache = model.init_cache(batch=2, max_len=80, config=LOSSY)
    logits, _ = oracles.feed(model, cache, tokens, [16] * 4 + [11])
    q = logits.astype(np.float64) - np.log(np.exp(logits).sum(-1, keepdims=True))
    p, q, target = p[:, 29:-1], q[:, 29:-1], tokens[:, 30:, None]
    want = [
        -np.take_along_axis(q, target, -1)[..., 0],
        -np.take_along_axis(p, target, -1)[..., 0],
        (np.exp(p) * (p - q)).sum(-1),
        p.argmax(-1) == q.argmax(-1),
    ]
    for got, expected in zip(losses, want, strict=True):
        np.testing.assert_allclose(got, expected.ravel(), atol=3e-4)
    assert losses.kl.mean() > 1e-4  # it read codes, not what came in
    np.testing.assert_array_equal(best_tokens(model, states[:, 29:-1]), q.argmax(-1))


def test_rows_of_other_lengths(tiny):
    model = tiny(form="stacked")
    tokens = oracles.tokens_for(model, 2, 64)
    both, cache = cached_states(model, tokens, config=LOSSY, chunk=16, max_len=80, lengths=[64, 37])
    alone, _ = cached_states(model, tokens[1:, :37], config=LOSSY, chunk=16, max_len=80)
    assert np.asarray(cache.length).tolist() == [64, 37]
    np.testing.assert_allclose(both[1, :37], alone[0], atol=1e-3)


def test_mean_and_standard_error():
    got = mean(np.asarray([1.0, 2.0, 3.0, 6.0]))
    assert got == (3.0, pytest.approx(np.sqrt(14 / 3) / 2), 4)
