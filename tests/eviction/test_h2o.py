"""H2O: every step against the greedy algorithm in NumPy, head by head."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

import kvjax
from kvjax import CacheConfig, codecs
from kvjax.cache.slots import one_token, slot_keys
from kvjax.layers.rope import apply_rope, rope_tables


def config_of(budget: int, codec: str = "raw", **fields) -> CacheConfig:
    return CacheConfig.parse(codec, evict=f"h2o:{budget}/sinks=0", page_size=8, **fields)


def test_a_share_is_of_the_cache(tiny):
    """Prompt and answer; and the first four tokens stay (case 34), unlike in the paper."""
    model = tiny(num_layers=1)
    config = CacheConfig(evict="h2o:25%", page_size=8)
    cache = model.init_cache(batch=2, max_len=80, config=config)
    assert cache.groups[0].k_exact.shape[-1] == 20
    tokens = oracles.tokens_for(model, 2, 80)
    _, cache = oracles.feed(model, cache, tokens, [40, *[1] * 40])
    kept = np.asarray(cache.groups[0].positions[0])
    assert np.isin(np.arange(4), kept[0, 0]).all()
    assert np.isin(np.arange(70, 80), kept[1, 1]).all()  # half of the budget
    assert "h2o:25%" in kvjax.cache_report(cache)["evict"]


def stored(name: str, role: str, x: np.ndarray) -> np.ndarray:
    """Tokens `[T, K, H]` as a codec gives them back."""
    codec = codecs.get(name, role=role)
    codes = codec.encode(jnp.moveaxis(jnp.asarray(x, jnp.float32), 0, 1), {})  # K T H
    y = codec.decode(codes, {}, jnp.float32)
    if role == "k":  # a key is what its query meets
        y = y @ codec.prepare_query(jnp.eye(x.shape[2]), {}).T
    else:
        y = codec.finish_output(y, {})
    return np.asarray(jnp.moveaxis(y, 0, 1), np.float64)


@pytest.mark.parametrize(
    "codec", ["raw", "turboquant4", pytest.param("int8", marks=pytest.mark.slow)]
)
def test_each_step_is_the_greedy_algorithm(tiny, codec):
    """Cases 32 and 47, one layer: survivors, their scores and the logits of 60 steps after a prompt
    of 40, budget 20. With a codec, tokens older than the window are as it stored them, once."""
    model = tiny(num_layers=1)
    c, H, n, P = model.config, model.config.head_dim, 100 if codec == "raw" else 96, 40
    tokens = oracles.tokens_for(model, 1, n)
    x = model.embed(jnp.asarray(tokens))
    layer = model.stack.layers[0]
    attention, normed = layer.attention, layer.input_norm(x)
    rope = rope_tables(c.rope, H, jnp.arange(n)[None], jnp.asarray([n]))
    q, k = (
        np.asarray(apply_rope(p(normed).reshape(1, n, -1, H), *rope)[0], np.float64)
        for p in (attention.q_proj, attention.k_proj)
    )
    v = np.asarray(attention.v_proj(normed).reshape(n, -1, H), np.float64)
    G = c.group_size
    k_old, v_old = (k, v) if codec == "raw" else (stored(codec, "k", k), stored(codec, "v", v))

    def softmax(s):
        e = np.exp(s - s.max())
        return e / e.sum()

    def mixed(t, h, see, new, old):
        return np.where((see < t - 10)[:, None], old[see, h], new[see, h])

    def weights(t, h, see, old=k):
        keys = mixed(t, h, see, k, old)
        return np.stack([softmax(keys @ q[t, h * G + g] * H**-0.5) for g in range(G)])

    kept = {}
    for h in range(c.num_kv_heads):
        total = np.zeros(P)
        for t in range(P):
            total[: t + 1] += weights(t, h, np.arange(t + 1)).sum(0)
        heavy = sorted(range(P - 10), key=lambda t: -total[t])[:10]
        kept[h] = {t: total[t] for t in [*heavy, *range(P - 10, P)]}

    cache = model.init_cache(batch=1, max_len=n, config=config_of(20, codec))
    _, cache = model(tokens[:, :P], cache)
    for t in range(P, n):
        got, cache = model(tokens[:, t : t + 1], cache)
        heads = []
        for h in range(c.num_kv_heads):
            see = np.asarray([*sorted(kept[h]), t])
            w = weights(t, h, see, k_old)
            heads.append(w @ mixed(t, h, see, v, v_old))
            for token, paid in zip(see[:-1], w[:, :-1].sum(0), strict=True):
                kept[h][token] += paid
            old = [token for token in kept[h] if token < t + 1 - 10]
            del kept[h][min(old, key=lambda token: kept[h][token])]
            kept[h][t] = w[:, -1].sum()
        out = jnp.asarray(np.concatenate(heads).reshape(1, 1, -1), jnp.float32)
        y = x[:, t : t + 1] + attention.o_proj(out)
        y = y + layer.mlp(layer.post_norm(y))
        oracles.close(got, model.logits(model.norm(y)), 3e-5)
        (group,) = cache.groups
        assert int(group.rows(cache.length)[0]) == 20
        for h in range(c.num_kv_heads):
            at, scores = (np.asarray(a[0, 0, h]) for a in (group.positions, group.scores))
            assert sorted(at) == sorted(kept[h])
            np.testing.assert_allclose(scores, [kept[h][token] for token in at], rtol=1e-3)


@pytest.mark.parametrize("form", ["unrolled", "stacked"])
def test_a_large_budget_changes_nothing(tiny, form):
    model = tiny(form=form)
    tokens = oracles.tokens_for(model, 2, 50)
    full, _ = model(tokens)
    cache = model.init_cache(batch=2, max_len=60, config=config_of(60))
    logits, cache = oracles.feed(model, cache, tokens, [40, *[1] * 10])
    oracles.close(logits, full, 2e-5)
    for budget, codec in ((60, "raw"), (20, "raw"), (90, "int4"), (20, "fp8")):
        oracles.exact_bytes(model, config_of(budget, codec))


@pytest.mark.parametrize("name", [n for n in codecs.names() if codecs.get(n, role="v").single])
def test_one_token_of_a_page_is_written_over(name):
    """Bit for bit as if the page had been encoded with it; the others' codes stay."""
    rng = np.random.default_rng(0)
    page, token = rng.normal(size=(2, 32, 16)), rng.normal(size=(2, 1, 16)) * 3
    changed = page.copy()
    changed[:, 5] = token[:, 0]
    hit = jnp.broadcast_to(jnp.arange(32)[None] == 5, (2, 32))
    for role in ("k", "v"):
        codec = codecs.get(name, role=role)
        if not codec.single:
            continue
        params = codec.init_params(num_kv_heads=2, head_dim=16)
        old, new, want = (
            codec.encode(jnp.asarray(x, jnp.float32), params)
            for x in (page, np.repeat(token, 32, axis=1), changed)
        )
        for leaf, codes in want.items():
            assert np.array_equal(one_token(leaf, old[leaf], new[leaf], hit), codes), leaf


@pytest.mark.parametrize("form", ["stacked", pytest.param("unrolled", marks=pytest.mark.slow)])
def test_coded_slots(tiny, form):
    """Rows apart, also of lengths below the window; memory is the budget's; codes of survivors stay
    as they are, bit for bit, whatever their neighbours in a word become (case 49)."""
    model = tiny(form=form)
    tokens = oracles.tokens_for(model, 2, 90)
    config = config_of(40, "turboquant3")
    cache = model.init_cache(batch=2, max_len=200, config=config)
    _, cache = model(tokens[:, :50], cache, lengths=[50, 7])
    before = cache
    step = tokens[:, 50:51]
    moved, _ = model(step, oracles.moved_pages(before))
    logits, cache = oracles.feed(model, cache, tokens[:, 50:], [1] * 40)
    assert np.array_equal(moved[:, 0], logits[:, 0])  # case 50
    alone = model.init_cache(batch=1, max_len=200, config=config)
    _, alone = model(tokens[1:, :50], alone, lengths=[7])
    one, alone = oracles.feed(model, alone, tokens[1:, 50:], [1] * 40)
    oracles.close(one[0], logits[1], 1e-5)
    for a, b in zip(before.groups, cache.groups, strict=True):
        spec = a.spec
        assert (spec.ring, spec.heavy_slots, spec.pages_per_row) == (20, 20, 1)
        at_a, at_b = (np.asarray(g.positions)[..., spec.ring :] for g in (a, b))
        assert (at_b[:, 1] >= 0).all()
        same = at_a[:, 0] == at_b[:, 0]
        assert same.any()
        assert not same.all()
        views = (g.layer(0) for g in (a, b))
        keys = [np.asarray(slot_keys(view, jnp.float32))[0] for view in views]
        for head, stays in enumerate(same[0]):
            assert np.array_equal(keys[0][head][:, stays], keys[1][head][:, stays])
    report = kvjax.cache_report(cache)
    assert report["codecs"][0]["rows"] == [40, 40]
    assert report["total_bytes"] == kvjax.cache_report(before)["total_bytes"]
    assert "40 slots a head, one token each, the newest 20 exact" in kvjax.cache.format_report(
        report
    )


def test_rows_apart_and_memory(tiny):
    """Rows of a batch are as alone; memory is the budget's, whatever is generated; empty slots may
    hold anything."""
    model = tiny()
    prompts = [oracles.tokens_for(model, 1, n, seed=n)[0].tolist() for n in (90, 12)]
    together = kvjax.generate(model, prompts, max_tokens=30, cache_config=config_of(24))
    for prompt, tokens in zip(prompts, together.tokens, strict=True):
        alone = kvjax.generate(model, [prompt], max_tokens=30, cache_config=config_of(24))
        assert alone.tokens[0] == tokens
    report = together.stats["cache"]
    assert report["codecs"][0]["rows"] == [24, 24]
    assert report["bytes"]["exact"] == 2 * 2 * 2 * 2 * 32 * 24 * 4
    assert report["evict"].startswith("h2o:24")
    cache = model.init_cache(batch=1, max_len=200, config=config_of(24))
    nan = jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), [g.k_exact for g in cache.groups])
    groups = tuple(
        dataclasses.replace(g, k_exact=bad, v_exact=jnp.full_like(g.v_exact, jnp.nan))
        for g, bad in zip(cache.groups, nan, strict=True)
    )
    dirty = dataclasses.replace(cache, groups=groups)
    step = oracles.tokens_for(model, 1, 1)
    outs = []
    for one in (cache, dirty):
        _, one = model(np.asarray([prompts[1]]), one)
        outs.append(np.asarray(model(step, one)[0]))
    assert np.array_equal(*outs)


def test_refusals(tiny):
    model = tiny()
    for codec in ("kivi4", "klt4", "raw+int8"):
        with pytest.raises(
            ValueError, match="evict: expected raw, or keys and values whose tokens"
        ):
            model.init_cache(batch=1, max_len=50, config=config_of(20, codec))
    cache = model.init_cache(batch=1, max_len=100, config=config_of(20))
    _, cache = model(oracles.tokens_for(model, 1, 30), cache)
    with pytest.raises(ValueError, match="tokens: expected at most 1 a call"):
        model(oracles.tokens_for(model, 1, 2), cache)
