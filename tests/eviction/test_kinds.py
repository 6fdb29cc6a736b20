"""Eviction with latent attention, sliding windows and shared layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

import kvjax
from kvjax import CacheConfig
from kvjax.config import MLAConfig
from kvjax.evaluation.kept import kept
from kvjax.layers.attention import KV
from kvjax.layers.rope import rope_tables
from kvjax.sharing import cla, yoco

MLA = MLAConfig(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24)
LATENT = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 24, "mla": MLA, "rope_interleave": True}
SLIDING, FULL = "sliding_attention", "full_attention"
WINDOWS = {"num_layers": 3, "layer_types": (SLIDING, FULL, SLIDING), "sliding_window": 20}
KINDS = {
    "mla": LATENT,
    "mla+cla": LATENT | cla(2, 2),
    "windows": WINDOWS,
    "yoco": {"num_layers": 4, **yoco(4, window=20)},
}
SMALL = "sinks=2/window=4"


def latent_heads(model, tokens) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and values [T, N, H] of a one-layer model's heads, float64."""
    layer, config, T = model.stack.layers[0], model.config, tokens.shape[1]
    attention, mla = layer.attention, config.mla
    x = layer.input_norm(model.embed(jnp.asarray(tokens)))
    rope = rope_tables(config.rope, mla.qk_rope_head_dim, jnp.arange(T)[None], jnp.asarray([T]))

    class Grab:
        def fresh(self, k, v, plain):
            return KV(k, v, k)

    kv, up = attention._make(x, rope, Grab()), attention._up()
    q = attention._queries(x).reshape(1, T, -1, mla.qk_head_dim)
    q, q_rope = jnp.split(q, [mla.qk_nope_head_dim], axis=-1)
    q = jnp.concatenate([q, attention._turn(q_rope, rope)], axis=-1)
    k = jnp.einsum("btc,cnu->btnu", kv.k[:, :, 0], up.key)
    k = jnp.concatenate([k, jnp.broadcast_to(kv.v, (*k.shape[:3], kv.v.shape[-1]))], axis=-1)
    v = jnp.einsum("btc,cnw->btnw", kv.k[:, :, 0], up.value)
    return tuple(np.asarray(x[0], np.float64) for x in (q, k, v))


def weights_of(q, k) -> np.ndarray:
    """Softmax weights [N, S] of one query over keys [S, N, H]."""
    scores = np.einsum("nh,snh->ns", q, k) * q.shape[-1] ** -0.5
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def logits_of(model, token, out):
    """Of a one-layer model, from its heads' outputs `[N, W]`."""
    layer = model.stack.layers[0]
    x = model.embed(jnp.asarray(token)) + layer.attention.o_proj(
        jnp.asarray(out.reshape(1, 1, -1), jnp.float32)
    )
    return model.logits(model.norm(x + layer.mlp(layer.post_norm(x))))


@pytest.mark.parametrize("name", ["snapkv", pytest.param("expected", marks=pytest.mark.slow)])
def test_latents_keep_one_set_for_all_heads(tiny, name):
    """One layer by hand: what stays has the heads' best votes, and the next token sees just it."""
    model, n = tiny(num_layers=1, **LATENT), 69
    tokens = oracles.tokens_for(model, 1, n + 1)
    config = CacheConfig(evict=f"{name}:24/{SMALL}", page_size=8, max_new=64)
    (stay,) = kept(model, tokens[:, :n], config)[0, 0]
    assert {0, 1, 65, 66, 67, 68} <= set(stay)
    assert len(set(stay)) == 24
    q, k, v = latent_heads(model, tokens)
    if name == "snapkv":
        votes = np.zeros(n)
        for t in range(n - 4, n):
            votes[: t + 1] += weights_of(q[t], k[: t + 1]).sum(0)
        votes[n - 4 :] = 0
        votes = np.convolve(votes, np.ones(5), "same")
        best = sorted(range(2, n - 4), key=lambda t: -votes[t])[:18]
        assert set(stay) == {0, 1, *best, 65, 66, 67, 68}
    cache = model.init_cache(batch=1, max_len=200, config=config)
    logits, cache = model(tokens[:, :n], cache)
    assert np.array_equal(logits, model(tokens[:, :n])[0])
    got, cache = model(tokens[:, n:], cache)
    see = [*stay, n]
    out = np.einsum("ns,snw->nw", weights_of(q[n], k[see]), v[see])
    oracles.close(got, logits_of(model, tokens[:, n:], out), 3e-5)
    assert kvjax.cache_report(cache)["codecs"][0]["rows"] == [25]
    oracles.exact_bytes(model, config)


def test_h2o_on_latents_is_the_greedy_algorithm(tiny):
    """20 steps after a prompt of 40, budget 20; scores are those of all heads together."""
    model, P, n = tiny(num_layers=1, **LATENT), 40, 60
    tokens = oracles.tokens_for(model, 1, n)
    q, k, v = latent_heads(model, tokens)
    total = np.zeros(P)
    for t in range(P):
        total[: t + 1] += weights_of(q[t], k[: t + 1]).sum(0)
    heavy = sorted(range(P - 10), key=lambda t: -total[t])[:10]
    stay = {t: total[t] for t in [*heavy, *range(P - 10, P)]}
    config = CacheConfig(evict="h2o:20", page_size=8)
    cache = model.init_cache(batch=1, max_len=n, config=config)
    _, cache = model(tokens[:, :P], cache)
    for t in range(P, n):
        got, cache = model(tokens[:, t : t + 1], cache)
        see = [*sorted(stay), t]
        w = weights_of(q[t], k[see])
        out = np.einsum("ns,snw->nw", w, v[see])
        oracles.close(got, logits_of(model, tokens[:, t : t + 1], out), 3e-5)
        for token, paid in zip(see[:-1], w[:, :-1].sum(0), strict=True):
            stay[token] += paid
        del stay[min((s for s in stay if s < t - 9), key=lambda s: stay[s])]
        stay[t] = w[:, -1].sum()
        assert sorted(np.asarray(cache.groups[0].positions)[0, 0, 0]) == sorted(stay)
    oracles.exact_bytes(model, config)


@pytest.mark.parametrize(
    ("kind", "evict"),
    [
        ("yoco", "expected"),
        ("windows", "h2o"),
        pytest.param("mla+cla", "expected", marks=pytest.mark.slow),
    ],
)
def test_a_large_budget_changes_nothing(tiny, kind, evict):
    """7, past windows and pages; windows are not judged."""
    model = tiny(form="stacked", **KINDS[kind])
    tokens = oracles.tokens_for(model, 2, 64)
    policy = "h2o:64" if evict == "h2o" else f"{evict}:100%/{SMALL}"
    config = CacheConfig(evict=policy, page_size=8, recent=3, max_new=16)
    cache = model.init_cache(batch=2, max_len=64, config=config)
    logits, cache = oracles.feed(model, cache, tokens, [50, *[1] * 14])
    oracles.close(logits, model(tokens)[0], 3e-5)
    oracles.exact_bytes(model, config)
    windows = [n for n in model.config.owners if model.config.window_of(n)]
    groups = kvjax.cache_report(cache)["codecs"]
    assert [n for g in groups if not g["judged"] for n in g["layers"]] == windows


def test_windows_stay_as_they_are(tiny):
    """After a judged prompt the first layer's window holds, bit for bit, what it holds without
    eviction, whatever the rows' lengths; global layers keep the budget."""
    model = tiny(**WINDOWS)
    tokens, lengths = oracles.tokens_for(model, 3, 75), [75, 30, 5]
    shape = {"page_size": 4, "recent": 5, "max_new": 32}
    found = []
    for evict in (None, f"snapkv:24/{SMALL}"):
        config = CacheConfig.parse("int8", evict=evict, **shape)
        cache = model.init_cache(batch=3, max_len=100, config=config)
        found.append(model(tokens, cache, lengths=lengths)[1])
    plain, evicted = (cache.groups[cache.layer_map[0][0]] for cache in found)
    assert plain.spec == evicted.spec
    spec, length = plain.spec, jnp.asarray(lengths)
    valid = np.asarray(spec.exact_valid(length))[:, None, :, None]
    used = np.arange(spec.pages_per_row) < np.asarray(spec.used_pages(length))[:, None]
    ids = np.asarray(plain.table[0])[used]
    assert used.sum() == 4 + 4
    assert np.array_equal(
        np.where(valid, plain.v_exact[0], 0), np.where(valid, evicted.v_exact[0], 0)
    )
    for a, b in zip(*(jax.tree.leaves(g.pool.k[0]) for g in (plain, evicted)), strict=True):
        assert np.array_equal(np.asarray(a)[ids], np.asarray(b)[ids])
    report = kvjax.cache_report(found[1])
    assert [(g["layers"], g["judged"], g["rows"]) for g in report["codecs"]] == [
        ([0, 2], False, lengths),
        ([1], True, [24, 24, 5]),
    ]
    text = kvjax.cache.format_report(report)
    assert "24 to 24 of 75 tokens are here; layers 0,2 keep their windows" in text
    dirty = oracles.poisoned(found[1])
    step = oracles.tokens_for(model, 3, 6, seed=5)
    outs = [oracles.feed(model, cache, step, [6])[0] for cache in (found[1], dirty)]
    assert np.array_equal(*outs)


@pytest.mark.parametrize("kind", ["mla+cla", pytest.param("yoco", marks=pytest.mark.slow)])
def test_codecs_stack(tiny, kind):
    """All survivors of a wide budget, coded, are close to the dense model; unused slots may hold
    anything."""
    model = tiny(form="stacked", **KINDS[kind])
    tokens = oracles.tokens_for(model, 2, 106)
    config = CacheConfig.parse(
        "turboquant4", evict=f"snapkv:100/{SMALL}", page_size=32, sinks=2, recent=8, max_new=32
    )
    cache = model.init_cache(batch=2, max_len=200, config=config)
    _, cache = model(tokens[:, :100], cache)
    dirty = oracles.poisoned(cache)
    got, cache = oracles.feed(model, cache, tokens[:, 100:], [6])
    assert np.array_equal(oracles.feed(model, dirty, tokens[:, 100:], [6])[0], got)
    want = np.asarray(model(tokens)[0])[:, 100:]
    assert 0 < np.abs(got - want).mean() <= 0.5 * np.std(want)


@pytest.mark.parametrize(
    ("kind", "positions"),
    [
        ("mla", "cache"),
        ("windows", "cache"),
        pytest.param("windows", "text", marks=pytest.mark.slow),
        pytest.param("mla", "text", marks=pytest.mark.slow),
    ],
)
def test_streams_of_other_kinds(tiny, kind, positions):
    """The first tokens as the dense model; any split into calls; and, one layer, each token sees
    its cache as a text of its own (positions in the cache)."""
    model = tiny(form="stacked", **KINDS[kind])
    tokens = oracles.tokens_for(model, 2, 96)
    config = CacheConfig(evict=f"streaming:3+30/positions={positions}", page_size=8, recent=2)
    outs = []
    for splits in ([6] * 16, [30, 30, 6, 30]):
        cache = model.init_cache(batch=2, max_len=10_000, config=config)
        logits, cache = oracles.feed(model, cache, tokens, splits)
        outs.append(logits)
    oracles.close(outs[1], outs[0], 3e-5)
    oracles.close(outs[0][:, :33], model(tokens[:, :33])[0], 3e-5)
    oracles.exact_bytes(model, config, max_len=10_000)
    dirty = oracles.poisoned(cache)
    a, b = (oracles.feed(model, c, tokens[:, :6], [6])[0] for c in (cache, dirty))
    assert np.array_equal(a, b)


def test_a_stream_of_latents_by_hand(tiny):
    """Case 37 with latent attention: in one layer a text of the kept tokens alone is the same."""
    model = tiny(form="unrolled", num_layers=1, **LATENT)
    tokens = oracles.tokens_for(model, 1, 96)
    config = CacheConfig(evict="streaming:3+30", page_size=8, recent=2)
    cache = model.init_cache(batch=1, max_len=10_000, config=config)
    logits, _ = oracles.feed(model, cache, tokens, [24] * 4)
    for p in (40, 65, 95):
        own = np.concatenate([tokens[:, :3], tokens[:, p - 30 : p + 1]], axis=1)
        oracles.close(logits[:, p], model(own)[0][:, -1], 3e-5)


def test_a_window_within_a_stream_is_the_dense_window(tiny):
    """Windows see no first tokens and, as angles are differences, are what they are without a
    stream, though its positions stay small."""
    model = tiny(form="stacked", num_layers=2, layer_types=(SLIDING, SLIDING), sliding_window=12)
    tokens = oracles.tokens_for(model, 1, 96)
    cache = model.init_cache(batch=1, max_len=10_000, config=CacheConfig(evict="streaming:3+30"))
    logits, cache = oracles.feed(model, cache, tokens, [24] * 4)
    assert int(cache.start[0]) == 33
    oracles.close(logits, model(tokens)[0], 3e-5)


def test_layers_without_angles_see_the_sinks_in_every_call(tiny):
    """A stream of a model some of whose layers do not rotate (SmolLM3), in calls of any length."""
    model = tiny(no_rope_layers=(1,))
    tokens = oracles.tokens_for(model, 1, 60)
    outs = []
    for splits in ([1] * 60, [20, 20, 20]):
        cache = model.init_cache(batch=1, max_len=999, config=CacheConfig(evict="streaming:3+20"))
        outs.append(oracles.feed(model, cache, tokens, splits)[0])
    oracles.close(outs[1], outs[0], 3e-5)


def test_nothing_to_judge_is_refused(tiny):
    model = tiny(num_layers=2, layer_types=(SLIDING, SLIDING), sliding_window=12)
    with pytest.raises(ValueError, match="evict: expected none, as windows bound all layers"):
        model.init_cache(batch=1, max_len=99, config=CacheConfig(evict="snapkv:50"))
