"""H2O: every step against the greedy algorithm in NumPy, head by head."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

import kvjax
from kvjax import CacheConfig
from kvjax.layers.rope import apply_rope, rope_tables


def config_of(budget: int, **fields) -> CacheConfig:
    return CacheConfig(evict=f"h2o:{budget}", page_size=8, **fields)


def test_each_step_is_the_greedy_algorithm(tiny):
    """One layer: survivors, their scores and the logits of 60 steps after a prompt of 40, budget
    20: case 47."""
    model = tiny(num_layers=1)
    c, H, n, P = model.config, model.config.head_dim, 100, 40
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

    def softmax(s):
        e = np.exp(s - s.max())
        return e / e.sum()

    def weights(t, h, see):
        return np.stack([softmax(k[see, h] @ q[t, h * G + g] * H**-0.5) for g in range(G)])

    kept = {}
    for h in range(c.num_kv_heads):
        total = np.zeros(P)
        for t in range(P):
            total[: t + 1] += weights(t, h, np.arange(t + 1)).sum(0)
        heavy = sorted(range(P - 10), key=lambda t: -total[t])[:10]
        kept[h] = {t: total[t] for t in [*heavy, *range(P - 10, P)]}

    cache = model.init_cache(batch=1, max_len=n, config=config_of(20))
    _, cache = model(tokens[:, :P], cache)
    for t in range(P, n):
        got, cache = model(tokens[:, t : t + 1], cache)
        heads = []
        for h in range(c.num_kv_heads):
            see = np.asarray([*sorted(kept[h]), t])
            w = weights(t, h, see)
            heads.append(w @ v[see, h])
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
    oracles.exact_bytes(model, config_of(60))
    oracles.exact_bytes(model, config_of(20))


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
    with pytest.raises(ValueError, match="evict: expected raw keys and values"):
        model.init_cache(batch=1, max_len=50, config=CacheConfig("int8", "int8", evict="h2o:20"))
    cache = model.init_cache(batch=1, max_len=100, config=config_of(20))
    _, cache = model(oracles.tokens_for(model, 1, 30), cache)
    with pytest.raises(ValueError, match="tokens: expected at most 1 a call"):
        model(oracles.tokens_for(model, 1, 2), cache)
