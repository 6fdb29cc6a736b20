"""Gated retention: YOCO's other self-decoder, whose layers keep a state and no tokens."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from flax import nnx

import kvjax
from kvjax import CacheConfig, MLAConfig, calibration
from kvjax.attending import attending
from kvjax.checkpoints.export import export
from kvjax.layers.kinds import Place, exit_layer, layer_kind, runs_of
from kvjax.layers.retention import retain
from kvjax.sharing import describe, yoco
from kvjax.training.loss import next_token_loss

FULL, RETENTION = "full_attention", "gated_retention"
YOCO = {"num_layers": 4, **yoco(4, self_decoder=RETENTION)}
PAIR = {"num_layers": 2, "layer_types": (RETENTION, FULL)}
#: states and keys in one period; and a layer with a state as the exit layer
MIXED = {"num_layers": 4, "layer_types": (RETENTION, FULL) * 2}
LAST = {"num_layers": 3, "layer_types": (FULL, RETENTION, FULL), "kv_source": (0, 1, 0)}
PAGES = CacheConfig(page_size=8, sinks=2, recent=5)


# -- the formula -----------------------------------------------------------------------------------


def entries(T: int, seed: int = 0):
    """Queries, keys, values `[2, T, 3, 8]` of unlike distributions, log decays, a state."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(2, T, 3, 8))
    k = rng.normal(size=q.shape) + 1
    v = rng.uniform(-0.5, 0.2, size=(2, T, 3, 5))
    decay = np.log(rng.uniform([0.8, 0.98, 0.998], 1.0, size=(2, T, 3)))  # short and long memory
    state = rng.normal(size=(2, 3, 8, 5))
    return [x.astype(np.float32) for x in (q, k, v, decay, state)]


def recurrence(q, k, v, decay, state):
    """S_n = gamma_n S_(n-1) + k_n^T v_n, o_n = q_n S_n (methods.md, section 15), in float64."""
    q, k, v, decay, state = (np.asarray(x, np.float64) for x in (q, k, v, decay, state))
    out = []
    for n in range(q.shape[1]):
        kept = np.exp(decay[:, n])[..., None, None] * state
        state = kept + k[:, n, ..., None] * v[:, n, :, None]
        out.append(np.einsum("bnh,bnhr->bnr", q[:, n], state))
    return np.stack(out, axis=1), state


@pytest.mark.parametrize("T", [1, 255, 256, 257, 600])
def test_three_forms(T):
    """Parallel, recurrent and in chunks, with a state before them."""
    each = entries(T)
    want, end = recurrence(*each)
    chunks = {1, T, 256} if T != 255 else {256, 100}  # 100: a chunk is left that is not full
    for chunk in chunks:
        out, state = jax.jit(retain, static_argnames="chunk")(*each, chunk=chunk)
        oracles.close(out, want, 3e-5)
        oracles.close(state, end, 3e-5)


def test_the_decay_is_seen():
    """Decays one token late, or none, are far away."""
    q, k, v, decay, state = entries(300)
    want, _ = recurrence(q, k, v, decay, state)
    for other in (np.roll(decay, 1, axis=1), np.zeros_like(decay)):
        out, _ = retain(q, k, v, other, state)
        short = slice(0, 1)  # the head with the shortest memory
        assert np.abs(out - want)[:, :, short].max() > 0.1 * want[:, :, short].std()


# -- the layer in a model --------------------------------------------------------------------------


def by_hand(model, layer: int, x):
    """What a layer of gated retention adds to its input, from its parameters alone."""
    c, module = model.config, model.stack.layers[layer]
    at, (B, T, _) = module.attention, x.shape
    w = {name: np.asarray(getattr(at, f"{name}_proj").kernel[...]) for name in ("q", "k", "v", "o")}
    rms = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + c.rms_norm_eps)
    h = x / rms * np.asarray(module.input_norm.weight[...])[None, None]
    q, k, v = ((h @ w[name]).reshape(B, T, c.num_heads, c.head_dim) for name in "qkv")
    angles = np.arange(T)[:, None] * 1e4 ** (-np.arange(0, c.head_dim, 2) / c.head_dim)
    cos, sin = np.cos(angles)[None, :, None], np.sin(angles)[None, :, None]
    q, k = (
        np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
        for a, b in (np.split(y, 2, axis=-1) for y in (q, k))
    )
    gamma = (1 / (1 + np.exp(-h @ np.asarray(at.decay_proj.kernel[...])))) ** (1 / 16)
    state = np.zeros((B, c.num_heads, c.head_dim, c.head_dim))
    out, _ = recurrence(q, k * c.head_dim**-0.5, v, np.log(gamma), state)
    out = out / np.sqrt(np.mean(out**2, axis=-1, keepdims=True) + c.rms_norm_eps)
    gate = h @ np.asarray(at.gate_proj.kernel[...])
    return (gate / (1 + np.exp(-gate)) * out.reshape(B, T, -1)) @ w["o"]


def test_a_layer_by_hand(tiny):
    """Its gates, decays, scale, norm and RoPE."""
    model = tiny(**PAIR)
    x = np.random.default_rng(0).normal(size=(2, 9, 32)).astype(np.float32)
    lengths = jnp.asarray([9, 9])
    layer = model.stack.layers[0]
    place = Place(layer_kind(model.config, 0), 0, (0,), 0, (0,))

    @jax.jit
    def added(x):
        h = layer.input_norm(x)
        rope = model.ropes(jnp.zeros_like(lengths), 9, lengths)[model.config.rope]
        attend = attending(model.config, lengths, None)(place)
        return layer.attention(h, rope, attend, source=h, source_rope=rope, shared=None)[0]

    oracles.close(added(x), by_hand(model, 0, x), 1e-5)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        (PAIR, "unrolled"),
        pytest.param(YOCO, "stacked", marks=pytest.mark.slow),
        pytest.param(MIXED, "stacked", marks=pytest.mark.slow),
    ],
)
def test_cached_equals_full(tiny, kind, form):
    """Token by token after a long call, past a chunk of 256."""
    model = tiny(form=form, **kind)
    tokens = oracles.tokens_for(model, 2, 290)
    full, _ = model(tokens)
    cache = model.init_cache(batch=2, max_len=290, config=PAGES)
    logits, _ = oracles.feed(model, cache, tokens, [270, *[1] * 20])
    oracles.close(logits, full, 5e-5)


def test_rows_apart(tiny):
    """Rows of unlike lengths, padded on either side, with and without neighbours."""
    oracles.batching(tiny(form="stacked", **PAIR), PAGES, tolerance=5e-5, pad_alone=90)


def test_a_row_without_tokens_keeps_its_state(tiny):
    model = tiny(form="stacked", **PAIR)
    cache = model.init_cache(batch=2, max_len=40, config=PAGES)
    _, cache = model(oracles.tokens_for(model, 2, 9), cache)
    _, after = model(oracles.tokens_for(model, 2, 9, seed=1), cache, lengths=[0, 5])
    old, new = np.asarray(cache.states), np.asarray(after.states)
    assert old.any()
    assert np.array_equal(old[:, 0], new[:, 0])
    assert np.abs(old[:, 1] - new[:, 1]).max() > 0.01
    _, still = model(oracles.tokens_for(model, 2, 9, seed=1), after, lengths=[0, 0])
    oracles.assert_same_tree(after, still)


def test_with_codecs(tiny):
    """Keys and values are compressed, states are not; logits are near the dense model's."""
    model = tiny(form="stacked", **PAIR)
    tokens = oracles.tokens_for(model, 2, 140)
    full = np.asarray(model(tokens)[0])
    config = CacheConfig.parse("int4", page_size=32, sinks=3, recent=8)
    cache = model.init_cache(batch=2, max_len=140, config=config)
    logits, cache = oracles.feed(model, cache, tokens, [64, 64, *[1] * 12])
    far = np.sqrt(np.mean((logits - full)[:, 128:] ** 2)) / full.std()
    assert 1e-3 < far < 0.4


@pytest.mark.slow
def test_poison_changes_nothing(tiny):
    config = CacheConfig.parse("int4", page_size=32, sinks=3, recent=8)
    oracles.poison_changes_nothing(tiny(form="stacked", **YOCO), config, length=64, more=64)


@pytest.mark.slow
def test_calibrated_codecs(tiny, tmp_path):
    """Samples are of the layers that have keys; the others need no arrays."""
    model = tiny(form="stacked", **MIXED)
    config = CacheConfig.parse("kvquant4", page_size=32, sinks=3, recent=8)
    made = calibration.calibrate(model, oracles.tokens_for(model, 2, 100), config, fisher=True)
    assert [bool(any(params)) for params in made] == [False, True, False, True]
    calibration.save(tmp_path / "c", model, config, made)
    config = dataclasses.replace(config, calibration=str(tmp_path / "c"))
    cache = model.init_cache(batch=1, max_len=99, config=config)
    assert [g.spec.layers for g in cache.groups] == [(1, 3)]


def test_bytes_by_formula(tiny):
    """A state of N H^2 float32 a row and layer, whatever the length; then the one global pair."""
    model = tiny(form="stacked", dtype="bfloat16", **YOCO)
    for text, max_len in (("raw", 64), ("int8", 640)):
        config = CacheConfig.parse(text, page_size=32)
        oracles.exact_bytes(model, config, batch=3, max_len=max_len)
        report = kvjax.cache_report(model.init_cache(batch=3, max_len=max_len, config=config))
        assert report["bytes"]["states"] == 2 * 3 * 4 * 32 * 32 * 4
        assert "states" in kvjax.cache.format_report(report)
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert model.config.num_params() == sum(leaf.size for leaf in leaves)


def test_training_reaches_every_parameter(tiny):
    """Finite gradients, past a chunk of 256."""
    model = tiny(form="stacked", **PAIR)
    graphdef, state = nnx.split(model)
    tokens = jnp.asarray(oracles.tokens_for(model, 1, 259))

    def loss(state):
        return next_token_loss(nnx.merge(graphdef, state), tokens, remat=True)[0]

    for path, grad in jax.tree.leaves_with_path(jax.jit(jax.grad(loss))(state)):
        assert np.isfinite(grad).all(), jax.tree_util.keystr(path)
        assert np.abs(grad).max() > 0, jax.tree_util.keystr(path)


@pytest.mark.parametrize(
    ("kind", "leave"), [(YOCO, 2), pytest.param(LAST, 1, marks=pytest.mark.slow)]
)
def test_early_exit_is_exact(tiny, kind, leave):
    """Prefill for the last token's logits leaves the cache that the whole prefill leaves."""
    model = tiny(form="stacked", **kind)
    assert exit_layer(model.config) == leave
    graphdef, state = nnx.split(model)
    tokens = jnp.asarray(oracles.tokens_for(model, 2, 50))
    lengths, at = jnp.asarray([50, 31]), jnp.asarray([[49], [30]])

    @jax.jit
    def hidden(state, tokens, cache, lengths, at):
        return nnx.merge(graphdef, state).hidden(tokens, cache, lengths, at=at)

    empty = model.init_cache(batch=2, max_len=60, config=PAGES)
    whole, full_cache = hidden(state, tokens, empty, lengths, None)
    last, cache = hidden(state, tokens, empty, lengths, at)
    np.testing.assert_allclose(last[:, 0], whole[jnp.arange(2), at[:, 0]], atol=2e-5)
    for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(full_cache), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.slow
def test_generates_what_the_whole_forward_says(tiny):
    """The engine's chunks of prefill, two rows of unlike lengths, a cache of pages."""
    model = tiny(form="unrolled", **YOCO)
    prompts = [oracles.tokens_for(model, 1, n, seed=n)[0].tolist() for n in (150, 9)]
    out = kvjax.generate(model, prompts, max_tokens=6, cache_config=PAGES, eos_ids=())
    for prompt, tokens in zip(prompts, out.tokens, strict=True):
        logits = np.asarray(model(np.asarray([prompt + tokens], np.int32))[0])
        assert logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == tokens


def test_out_and_in_again(tiny, tmp_path):
    """kvjax's own kind of folder, and from one form of storage into the other."""
    model = tiny(form="stacked", **MIXED)
    export(model, tmp_path)
    back, _ = kvjax.load(tmp_path, form="unrolled")
    assert back.config == model.config
    for path, value in nnx.to_flat_state(nnx.state(back.stack, nnx.Param)):
        want = model.stack.layer_array(path[1], *path[2:])
        np.testing.assert_array_equal(value[...], want)


def test_runs_and_the_map(tiny):
    """A period of two scans; YOCO's halves as with windows."""
    long = tiny(num_layers=8, layer_types=(RETENTION, FULL) * 4).config
    assert [(run.period, run.repeats) for run in runs_of(long, scan=True)] == [(2, 4)]
    halves = tiny(num_layers=8, **yoco(8, self_decoder=RETENTION)).config
    assert [(r.period, r.repeats) for r in runs_of(halves, scan=True)] == [(1, 4), (1, 1), (1, 3)]
    assert halves.owners == (4,)
    first = "layer 0: sees all tokens by gated retention; reads its own state"
    assert describe(halves).splitlines()[0] == first


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": (RETENTION,) * 2}, "layer_types: expected a layer with attention"),
        ({"qk_norm": "head"}, "qk_norm: expected 'none' with gated_retention"),
        ({"attention_sinks": True}, "attention_sinks: expected False with gated"),
        ({"attn_logit_softcap": 5.0}, "attn_logit_softcap: expected None with gated"),
        ({"layer_types": (RETENTION, RETENTION, FULL), "kv_source": (0, 0, 2)}, "no keys to share"),
        (
            {"num_kv_heads": 4, "mla": MLAConfig(32, 16, 16, 16)},
            "mla: expected None with gated_retention",
        ),
    ],
)
def test_refused_models(tiny, fields, message):
    layers = len(fields.get("layer_types", (0, 0)))
    with pytest.raises(ValueError, match=message):
        tiny(**{"num_layers": layers, "layer_types": (RETENTION, FULL), **fields})


def test_refused_helpers_and_caches(tiny):
    with pytest.raises(ValueError, match="window: expected None with gated_retention"):
        yoco(4, window=8, self_decoder=RETENTION)
    with pytest.raises(ValueError, match="window: expected a positive int"):
        yoco(4)
    with pytest.raises(ValueError, match="self_decoder: expected one of"):
        yoco(4, self_decoder="mamba")
    model = tiny(form="stacked", **YOCO)
    for evict in ("snapkv:25%", "streaming:4+60"):
        with pytest.raises(ValueError, match="evict: expected none with gated retention"):
            model.init_cache(batch=1, max_len=99, config=CacheConfig(evict=evict))
    with pytest.raises(ValueError, match="layers: expected layers that keep keys and values"):
        model.init_cache(batch=1, max_len=99, config=CacheConfig(layers="1:int8"))
