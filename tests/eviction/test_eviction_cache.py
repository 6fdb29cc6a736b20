"""Eviction through the model and the cache: cases.md, "eviction"."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

import kvjax
from kvjax import CacheConfig, eviction
from kvjax.evaluation.kept import kept
from kvjax.layers.rope import apply_rope, rope_tables
from kvjax.plan import cache_bytes

SMALL = "sinks=2/window=4"


def config_of(name: str, budget: str = "24", codec: str = "raw", **fields) -> CacheConfig:
    base = {"page_size": 8, "max_new": 64}
    return CacheConfig.parse(codec, evict=f"{name}:{budget}/{SMALL}", **(base | fields))


@pytest.mark.parametrize("name", eviction.names())
@pytest.mark.parametrize("form", ["unrolled", "stacked"])
def test_prefill_is_the_dense_model(tiny, name, form):
    """Case 28: the prompt's logits are the dense model's, bit for bit."""
    model = tiny(form=form, num_layers=3)
    tokens = oracles.tokens_for(model, 2, 60)
    cache = model.init_cache(batch=2, max_len=160, config=config_of(name))
    logits, cache = model(tokens, cache, lengths=[60, 13])
    dense, _ = model(tokens, lengths=[60, 13])
    assert np.array_equal(logits[0], dense[0])
    assert np.array_equal(logits[1, :13], dense[1, :13])
    assert cache.length.tolist() == [60, 13]
    rows = np.stack([g.rows(cache.length) for g in cache.groups])
    least = 6 if name == "pyramidkv" else 13  # a prompt below a layer's budget stays whole
    assert rows[:, 1].min() == least
    assert rows[:, 0].max() <= (24 if name != "pyramidkv" else 43)
    more, cache = model(tokens[:, :1], cache)
    assert cache.length.tolist() == [61, 14]
    assert np.isfinite(np.asarray(more)).all()


@pytest.mark.parametrize("form", ["unrolled", "stacked"])
def test_a_large_budget_changes_nothing(tiny, form):
    """7 and case 40: a prompt within the budget decodes as the dense model does."""
    model = tiny(form=form)
    tokens = oracles.tokens_for(model, 2, 50)
    full, _ = model(tokens)
    for name, budget in (("snapkv", "40"), ("pyramidkv", "100%")):
        cache = model.init_cache(batch=2, max_len=60, config=config_of(name, budget, max_new=16))
        logits, cache = oracles.feed(model, cache, tokens, [40, *[1] * 10])
        oracles.close(logits, full, 2e-5)


@pytest.mark.parametrize("name", ["snapkv", "keydiff"])
def test_decoding_sees_just_what_stayed(tiny, name):
    """One layer by hand: the next token attends to the kept tokens where they were, and itself."""
    model = tiny(num_layers=1)
    c, H = model.config, model.config.head_dim
    tokens = oracles.tokens_for(model, 1, 70)
    cache = model.init_cache(batch=1, max_len=200, config=config_of(name))
    _, cache = model(tokens[:, :69], cache)
    got, _ = model(tokens[:, 69:], cache)
    stay = kept(model, tokens[:, :69], config_of(name))[0, 0]  # K C
    assert stay.shape == (2, 24)
    assert {0, 1, 65, 66, 67, 68} <= set(stay[0]) & set(stay[1])
    assert set(stay[0]) != set(stay[1])

    layer = model.stack.layers[0]
    x = model.embed(jnp.asarray(tokens))
    normed = layer.input_norm(x)
    rope = rope_tables(c.rope, H, jnp.arange(70)[None], jnp.asarray([70]))
    attention = layer.attention
    q, k = (
        apply_rope(p(normed).reshape(1, 70, -1, H), *rope)
        for p in (attention.q_proj, attention.k_proj)
    )
    v = attention.v_proj(normed).reshape(1, 70, -1, H)
    out = []
    for n in range(c.num_heads):
        h = n // (c.num_heads // c.num_kv_heads)
        see = np.append(stay[h], 69)
        p = jax.nn.softmax(q[0, 69, n] @ k[0, see, h].T * H**-0.5)
        out.append(p @ v[0, see, h])
    y = x[:, 69:] + attention.o_proj(jnp.concatenate(out)[None, None])
    y = y + layer.mlp(layer.post_norm(y))
    oracles.close(got, model.logits(model.norm(y)), 2e-5)


@pytest.mark.parametrize("name", ["snapkv", "expected"])
def test_rows_keep_what_they_keep_alone(tiny, name):
    """Case 41: padding is never scored and never kept, on either side."""
    model = tiny()
    config = config_of(name)
    rows = [oracles.tokens_for(model, 1, n, seed=n)[0] for n in (40, 100)]
    left = np.full((2, 100), 7, np.int32)
    mask = np.zeros((2, 100), bool)
    for b, row in enumerate(rows):
        left[b, 100 - len(row) :], mask[b, 100 - len(row) :] = row, True
    step = oracles.tokens_for(model, 2, 1)
    cache = model.init_cache(batch=2, max_len=160, config=config)
    _, cache = model(left, cache, mask=mask)
    together, _ = model(step, cache)
    right = np.stack([np.pad(row, (0, 100 - len(row))) for row in rows])
    lengths = np.asarray([len(row) for row in rows])
    both = kept(model, right, config, lengths=lengths)
    for b, row in enumerate(rows):
        cache = model.init_cache(batch=1, max_len=160, config=config)
        padded = np.pad(row, (0, 100 - len(row)))[None]
        _, cache = model(padded, cache, lengths=[len(row)])
        alone, _ = model(step[b : b + 1], cache)
        assert np.array_equal(
            kept(model, padded, config, lengths=lengths[b : b + 1])[:, 0], both[:, b]
        )
        oracles.close(together[b], alone[0], 1e-5)


def test_keys_that_are_turned_when_read(tiny, monkeypatch):
    """Keys stored before RoPE give the same answer: each head has positions of its own."""
    from kvjax.codecs.raw import RawKey

    model = tiny(num_layers=3)
    tokens, step = oracles.tokens_for(model, 2, 60), oracles.tokens_for(model, 2, 12, seed=3)

    def run():
        cache = model.init_cache(batch=2, max_len=160, config=config_of("snapkv", recent=3))
        _, cache = model(tokens, cache, lengths=[60, 17])
        logits, cache = oracles.feed(model, cache, step, [5, *[1] * 7])
        oracles.exact_bytes(model, config_of("snapkv"))
        return logits, kvjax.cache_report(cache)["bytes"]["tables"]

    want, plain = run()
    monkeypatch.setattr(RawKey, "pre_rope", True)
    jax.clear_caches()
    try:
        got, tables = run()
    finally:
        jax.clear_caches()
    oracles.close(got, want, 1e-5)
    assert tables == plain + 4 * 3 * 2 * 2 * 24  # positions of 3 layers, 2 rows, 2 heads


@pytest.mark.parametrize("codec", ["raw", "int8", "kivi4", "turboquant4", "qjl+int4"])
def test_codecs_stack(tiny, codec):
    """Survivors are sealed once, from exact keys: close to the same eviction without a codec."""
    model = tiny(seed=1)
    tokens, step = oracles.tokens_for(model, 2, 120), oracles.tokens_for(model, 2, 6, seed=3)

    def run(text):
        config = config_of("snapkv", "64", text, page_size=32, sinks=2, recent=8)
        oracles.exact_bytes(model, config)
        cache = model.init_cache(batch=2, max_len=200, config=config)
        _, cache = model(tokens, cache, lengths=[120, 90])
        dirty = oracles.poisoned(cache)
        logits, cache = oracles.feed(model, cache, step, [1] * 6)
        assert np.array_equal(oracles.feed(model, dirty, step, [1] * 6)[0], logits)
        return logits, kvjax.cache_report(cache)

    want, dense = run("raw")
    got, report = run(codec)
    assert report["codecs"][0]["rows"] == [64 + 6, 64 + 6]
    assert np.abs(got - want).mean() <= (0 if codec == "raw" else 0.5) * np.std(want)
    assert codec == "raw" or report["total_bytes"] < dense["total_bytes"]


def test_readers_of_shared_layers_see_the_same_tokens(tiny):
    """CLA: layers that own nothing read what their owner kept."""
    from kvjax.sharing import cla

    model = tiny(num_layers=4, **cla(4, 2))
    tokens = oracles.tokens_for(model, 1, 60)
    cache = model.init_cache(batch=1, max_len=160, config=config_of("expected"))
    logits, cache = model(tokens, cache)
    assert np.array_equal(logits, model(tokens)[0])
    assert [g.spec.layers for g in cache.groups] == [(0, 2)]
    more, _ = model(tokens[:, :1], cache)
    assert np.isfinite(np.asarray(more)).all()
    oracles.exact_bytes(model, config_of("expected"))


def test_length_and_rows(tiny):
    """Case 38: prompt 500, keep 64, one more token: length 501, 65 rows, and bytes to match."""
    model = tiny()
    config = config_of("snapkv", "64", max_new=32)
    cache = model.init_cache(batch=1, max_len=1000, config=config)
    dense = model.init_cache(batch=1, max_len=1000, config=dataclasses.replace(config, evict=None))
    tokens = oracles.tokens_for(model, 1, 501)
    _, cache = model(tokens[:, :500], cache)
    _, cache = model(tokens[:, 500:], cache)
    report = kvjax.cache_report(cache)
    assert (report["tokens"], report["codecs"][0]["rows"]) == ([501], [65])
    assert report["evict"] == "snapkv:64/sinks=2/window=4"
    assert report["total_bytes"] < kvjax.cache_report(dense)["total_bytes"] / 7
    assert "65 to 65 of 501 tokens" in kvjax.cache.format_report(report)


def test_calls_leave_nothing_behind(tiny):
    """Case 35: a second generation equals the first, and a fresh process's."""
    model = tiny()
    prompts = [oracles.tokens_for(model, 1, n, seed=n)[0].tolist() for n in (90, 33)]
    config = CacheConfig.parse("int8", evict=f"snapkv:50%/{SMALL}", page_size=16)
    runs = [kvjax.generate(model, prompts, max_tokens=20, cache_config=config) for _ in range(2)]
    assert runs[0].tokens == runs[1].tokens
    assert [len(t) for t in runs[0].tokens] == [20, 20]
    rows = runs[0].stats["cache"]["codecs"][0]["rows"]
    assert rows == [45 + 19, 17 + 19]


def test_refusals(tiny):
    model = tiny()
    config = config_of("snapkv", max_new=3)
    cache = model.init_cache(batch=1, max_len=160, config=config)
    _, cache = model(oracles.tokens_for(model, 1, 60), cache)
    with pytest.raises(ValueError, match="max_new: expected at least 4: rows would have 28 tokens"):
        model(oracles.tokens_for(model, 1, 4), cache)
    for evict in ("streaming:4+20", "h2o:64"):
        with pytest.raises(ValueError, match="sinks: expected None, as the policy names"):
            CacheConfig(evict=evict, sinks=8)
    with pytest.raises(ValueError, match="evict: expected text"):
        CacheConfig(evict=5)
    with pytest.raises(ValueError, match="max_new: expected a positive int"):
        CacheConfig(evict="snapkv:100", max_new=0)


@pytest.mark.parametrize(
    ("name", "codec"),
    [("snapkv", "raw"), ("snapkv", "int8"), ("pyramidkv", "int8"), ("h2o", "raw")],
)
def test_budgets_in_bytes(tiny, name, codec):
    """A row's cache is never larger than its budget, and one more token would not fit."""
    model = tiny(num_layers=3)
    tail = "" if name == "h2o" else f"/{SMALL}"
    shape = {"page_size": 8, "max_new": 16, "recent": 4}
    for budget, size in (("96KiB", 96 * 1024), ("150kB", 150_000)):
        config = CacheConfig.parse(codec, evict=f"{name}:{budget}{tail}", **shape)
        cache = model.init_cache(batch=2, max_len=500, config=config)
        kept = cache.policy.budget.tokens
        report = kvjax.cache_report(cache)
        assert report["total_bytes"] <= 2 * size
        assert report["evict"].startswith(f"{name}:{budget}")
        oracles.exact_bytes(model, config, max_len=500)
        more = f"{name}:{kept + 8}{tail}"  # a page
        larger = CacheConfig.parse(codec, evict=more, **shape)
        assert (
            sum(
                cache_bytes(
                    model.config, batch=1, max_len=500, config=larger, dtype="float32"
                ).values()
            )
            > size
        )
    whole = CacheConfig.parse(codec, evict=f"{name}:1GB{tail}", **shape)
    cache = model.init_cache(batch=1, max_len=100, config=whole)
    assert cache.policy.budget.tokens == 100
    with pytest.raises(ValueError, match=rf"{name} budget: expected at least \d+B a row"):
        model.init_cache(
            batch=1,
            max_len=500,
            config=CacheConfig.parse(codec, evict=f"{name}:3KiB{tail}", **shape),
        )
