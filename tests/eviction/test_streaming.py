"""StreamingLLM: fixed memory, positions in the cache or in the text, any split into calls."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from flax import nnx

import kvjax
from kvjax import CacheConfig
from kvjax.layers.rope import rope_tables


def config_of(text: str = "3+24", codec: str = "raw", **fields) -> CacheConfig:
    base = {"page_size": 8, "recent": 2}
    return CacheConfig.parse(codec, evict=f"streaming:{text}", **(base | fields))


@pytest.mark.parametrize("positions", ["cache", "text"])
def test_a_short_stream_is_the_dense_model(tiny, positions):
    model = tiny()
    tokens = oracles.tokens_for(model, 2, 27)
    full, _ = model(tokens)
    config = config_of(f"3+24/positions={positions}")
    cache = model.init_cache(batch=2, max_len=10_000, config=config)
    logits, _ = oracles.feed(model, cache, tokens, [9, 9, *[1] * 9])
    oracles.close(logits, full, 2e-5)


@pytest.mark.parametrize("positions", ["cache", "text"])
def test_a_long_stream_by_hand(tiny, positions):
    """Case 37, one layer: attention over the kept raw keys at positions 0 to n - 1, or as in the
    text; however the text is cut into calls."""
    model = tiny(num_layers=1)
    config, H, n = model.config, model.config.head_dim, 90
    tokens = oracles.tokens_for(model, 1, n)
    x = model.embed(jnp.asarray(tokens))
    layer = model.stack.layers[0]
    normed, attention = layer.input_norm(x), layer.attention
    q, k, v = (
        np.asarray(p(normed)).reshape(n, -1, H)
        for p in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    tables = rope_tables(config.rope, H, jnp.arange(n)[None], jnp.asarray([n]))
    cos, sin = (np.asarray(x)[0] for x in tables)  # n half

    def turned(y, at):
        a, b, c, s = *np.split(y, 2, axis=-1), cos[at][:, None], sin[at][:, None]
        return np.concatenate([a * c - b * s, b * c + a * s], axis=-1)

    heads = np.zeros((n, config.num_heads, H), np.float32)
    for p in range(n):
        see = np.asarray([t for t in range(p + 1) if t < 3 or t >= p - 24])
        at = np.arange(len(see)) if positions == "cache" else see
        qs, ks = turned(q[p : p + 1], at[-1:])[0], turned(k[see], at)
        for m in range(config.num_heads):
            h = m // config.group_size
            weights = np.exp(ks[:, h] @ qs[m] * H**-0.5)
            heads[p, m] = weights / weights.sum() @ v[see, h]
    y = x + attention.o_proj(jnp.asarray(heads).reshape(1, n, -1))
    y = y + layer.mlp(layer.post_norm(y))
    want = np.asarray(model.logits(model.norm(y)))
    for splits in ([1] * n, [24, 24, 24, 18], [7, 20, 24, 1, 1, 24, 13]):
        cache = model.init_cache(
            batch=1, max_len=10_000, config=config_of(f"3+24/positions={positions}")
        )
        got, cache = oracles.feed(model, cache, tokens, splits)
        oracles.close(got, want, 3e-5)
    assert kvjax.cache_report(cache)["codecs"][0]["rows"] == [27]


@pytest.mark.parametrize("codec", ["int8", "kivi4", "turboquant4"])
def test_codecs_stack(tiny, codec):
    model = tiny()
    config = config_of("2+70", codec, page_size=32, recent=8)
    tokens = oracles.tokens_for(model, 2, 200)

    def run(config):
        cache = model.init_cache(batch=2, max_len=1000, config=config)
        return oracles.feed(model, cache, tokens, [50] * 4)

    want, _ = run(config_of("2+70", page_size=32, recent=8))
    got, cache = run(config)
    assert np.abs(got - want).mean() < 0.5 * want.std()  # unrelated logits: 1.1
    oracles.exact_bytes(model, config)
    more = oracles.tokens_for(model, 2, 3, seed=4)
    clean, dirty = (oracles.feed(model, c, more, [3])[0] for c in (cache, oracles.poisoned(cache)))
    assert np.array_equal(clean, dirty)


def stream(model, steps: int) -> tuple[np.ndarray, int, list]:
    """Loss of each quarter of a stream of random tokens, bytes, and what compiled late."""
    graphdef, state = nnx.split(model)
    cache = model.init_cache(batch=1, max_len=2**31 - 1, config=config_of("4+60", page_size=16))
    size = kvjax.cache_report(cache)["total_bytes"]

    @jax.jit
    def quarter(state, cache, tokens):
        def one(cache, token):
            logits, cache = nnx.merge(graphdef, state)(token[:-1][None], cache)
            loss = -jnp.mean(jax.nn.log_softmax(logits[0])[jnp.arange(32), token[1:]])
            return cache, loss

        windows = jnp.stack([tokens[i : i + 33] for i in range(0, 128, 32)])
        every = jnp.tile(windows, (steps // 128, 1))
        cache, losses = jax.lax.scan(one, cache, every)
        return cache, jnp.mean(losses)

    tokens = jnp.asarray(oracles.tokens_for(model, 1, 129)[0])
    losses = []
    for _ in range(4):
        cache, loss = quarter(state, cache, tokens)
        losses.append(float(loss))
    assert int(cache.length[0]) == 4 * steps // 128 * 128
    assert kvjax.cache_report(cache)["total_bytes"] == size
    return np.asarray(losses), size, quarter._cache_size()


def test_a_stream_goes_on_for_ever(tiny):
    """200,000 tokens: loss stays flat, memory constant, and nothing new compiles, far past the
    trained length."""
    model = tiny(num_layers=2, max_position_embeddings=128)
    losses, _, programs = stream(model, 51_200)
    assert programs == 1
    assert np.ptp(losses[1:]) < 0.02 * losses[1]
    assert np.isfinite(losses).all()


def test_the_engine_streams(tiny):
    """Generation past the model's limit, with prompts longer than the window."""
    model = tiny(max_position_embeddings=64)
    prompt = oracles.tokens_for(model, 1, 150)[0].tolist()
    config = config_of("4+40", page_size=16)
    with pytest.raises(ValueError, match="max_model_len: expected 1 to 64"):
        kvjax.generate(model, [prompt], max_tokens=50, max_model_len=300)
    out = kvjax.generate(model, [prompt], max_tokens=50, max_model_len=300, cache_config=config)
    assert len(out.tokens[0]) == 50
    report = out.stats["cache"]
    assert report["evict"] == "streaming:4+40"
    assert report["codecs"][0]["rows"] == [44]
    free = kvjax.generate(model, [prompt], max_tokens=400, cache_config=config)  # no max_model_len
    assert len(free.tokens[0]) == 400
    assert free.stats["cache"]["bf16_bytes"] == 2 * 2 * 2 * 2 * 32 * (150 + 399)
    with pytest.raises(ValueError, match="Raise max_model_len"):
        kvjax.generate(model, [prompt], max_model_len=100, cache_config=config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("streaming:1024", "expected SINKS\\+RECENT"),
        ("streaming:4+99999999999999", "expected SINKS"),
        ("streaming:4+0", "recent: expected an int > 0"),
        ("streaming:4+20/positions=here", "positions: expected one of"),
        ("streaming:4+20/window=3", "expected the option positions"),
        ("streaming", "streaming:BUDGET, such as streaming:4\\+1020"),
    ],
)
def test_bad_streams_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        CacheConfig(evict=text)


def test_long_calls_are_refused(tiny):
    model = tiny()
    cache = model.init_cache(batch=1, max_len=100, config=config_of())
    with pytest.raises(ValueError, match="tokens: expected at most 24 a call"):
        model(oracles.tokens_for(model, 1, 25), cache)
