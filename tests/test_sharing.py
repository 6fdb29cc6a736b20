"""Layers that read other layers' keys and values: CLA, YOCO, Gemma-style tails."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from flax import nnx

import kvjax
from kvjax import CacheConfig, ModelConfig, plan
from kvjax.cache.attend import How
from kvjax.checkpoints.export import export
from kvjax.layers.kinds import exit_layer, runs_of
from kvjax.sharing import cla, describe, shared_tail, yoco
from kvjax.training.loss import next_token_loss

SLIDING, FULL = "sliding_attention", "full_attention"
TAIL = (SLIDING, FULL, SLIDING, FULL, SLIDING, FULL)
KINDS = {
    "cla2": {"num_layers": 4, **cla(4)},
    "cla3": {"num_layers": 5, **cla(5, 3)},
    "yoco": {"num_layers": 4, **yoco(4, window=20)},
    "tail": {
        "num_layers": 6,
        "layer_types": TAIL,
        "sliding_window": 20,
        **shared_tail(TAIL, 3),
    },
}
PAGES = CacheConfig(page_size=8, sinks=2, recent=5)
#: by default the two with windows; CLA's kinds are among them in what they do
WINDOWED = [
    kind if kind in ("yoco", "tail") else pytest.param(kind, marks=pytest.mark.slow)
    for kind in KINDS
]


def test_maps():
    assert cla(6)["kv_source"] == (0, 0, 2, 2, 4, 4)
    assert cla(7, 3)["kv_source"] == (0, 0, 0, 3, 3, 3, 6)
    assert cla(3, 1)["kv_source"] == (0, 1, 2)
    assert yoco(6, window=4)["kv_source"] == (0, 1, 2, 3, 3, 3)
    assert yoco(22, window=4)["kv_source"].count(11) == 11
    assert shared_tail(TAIL, 3)["kv_source"] == (0, 1, 2, 1, 2, 1)


def test_the_map_prints(tiny):
    assert describe(tiny(**KINDS["yoco"]).config).splitlines() == [
        "layer 0: sees the last 20 tokens; reads its own keys and values",
        "layer 1: sees the last 20 tokens; reads its own keys and values",
        "layer 2: sees all tokens; reads its own keys and values",
        "layer 3: sees all tokens; reads layer 2's",
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_source": (1, 1)}, r"kv_source\[0\]: expected a layer from 0 to 0, got 1"),
        ({"kv_source": (0,)}, "kv_source: expected 2 entries"),
        ({"num_layers": 3, "kv_source": (0, 0, 1)}, r"kv_source\[2\]: expected an owner.*at 0"),
        (
            {"layer_types": (SLIDING, FULL), "sliding_window": 4, "kv_source": (0, 0)},
            "an owner of the same layer type",
        ),
        ({"kv_norm": True}, "kv_norm: expected False without layers that share"),
        ({"sliding_window": 4}, "sliding_window: expected None without sliding_attention"),
        ({"layer_types": ("local", FULL)}, "layer_types: expected one of"),
        ({"layer_types": (SLIDING, FULL)}, "sliding_window: expected a positive int"),
    ],
)
def test_refused(tiny, fields, message):
    with pytest.raises(ValueError, match=message):
        tiny(**fields)


def test_readers_have_no_codec_of_their_own(tiny):
    model = tiny(**KINDS["cla2"])
    with pytest.raises(ValueError, match="Layer 1 reads layer 0's cache"):
        model.init_cache(batch=1, max_len=9, config=CacheConfig(layers="1:int8"))
    config = CacheConfig(page_size=32, layers="0-1:int8")
    cache = model.init_cache(batch=1, max_len=99, config=config)
    assert [g.spec.layers for g in cache.groups] == [(0,), (2,)]


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_and_bytes(tiny, kind):
    """Readers own nothing: parameters by count, cache by the formula and by measurement."""
    fields = KINDS[kind]
    model = tiny(form="stacked", **fields)
    config = model.config
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert config.num_params() == sum(leaf.size for leaf in leaves)
    apart = dataclasses.replace(config, kv_source=(), kv_norm=False)
    readers = config.num_layers - len(config.owners)
    norm = config.hidden_size * config.kv_norm
    saved = readers * 2 * config.hidden_size * config.num_kv_heads * config.head_dim
    assert apart.num_params() - config.num_params() == saved - norm
    oracles.exact_bytes(model, PAGES)
    cache = model.init_cache(batch=1, max_len=200, config=PAGES)
    assert sum(len(g.spec.layers) for g in cache.groups) == len(config.owners)
    assert [cache.layer_map[i] for i in range(config.num_layers)] == [
        cache.layer_map[config.source_of(i)] for i in range(config.num_layers)
    ]


@pytest.mark.filterwarnings("ignore::kvjax.cache.LowBitKeysWarning")
@pytest.mark.parametrize(
    "codec",
    [
        "int8",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("turboquant4", "int4-hadamard", "fp8", "kivi2", "qjl+int4")
        ),
    ],
)
def test_readers_read_their_owners_codes(tiny, codec):
    """The same as a model of the owners alone, bit for bit (case 104)."""
    shared, alone = tiny(num_layers=4, **cla(4)), tiny(num_layers=2)
    config = CacheConfig.parse(codec, page_size=32, sinks=2, recent=5)
    k, v = oracles.unlike_kv(alone, 2, 120)
    new, one = jnp.asarray([120, 70]), jnp.asarray([1, 1])
    q = jax.random.normal(jax.random.key(0), (2, 1, 2, 2, 32))
    append = jax.jit(lambda cache: cache.append(k, v, new=new))
    own, theirs = (
        append(m.init_cache(batch=2, max_len=128, config=config)) for m in (shared, alone)
    )
    oracles.assert_same_tree([g.pool for g in own.groups], [g.pool for g in theirs.groups])

    def read(cache, layer):
        chunk = k[0, :, :1], v[0, :, :1]
        return np.asarray(cache.attend(layer, q, *chunk, new=one, how=How(0.2, None, False, None)))

    for layer in range(4):
        assert np.array_equal(read(own, layer), read(theirs, layer // 2))
    assert not np.array_equal(read(own, 1), read(own, 2))


@pytest.mark.parametrize("kind", WINDOWED)
def test_cached_equals_full(tiny, kind):
    form = "unrolled" if kind == "cla3" else "stacked"
    tokens = oracles.tokens_for(tiny(form=form, **KINDS[kind]), 2, 90)
    model = tiny(form=form, **KINDS[kind])
    full, _ = model(tokens)
    cache = model.init_cache(batch=2, max_len=90, config=PAGES)
    logits, cache = oracles.feed(model, cache, tokens, [40, 40, *[1] * 10])
    oracles.close(logits, full, 2e-5)


def forms(tiny, fields):
    """The same model in both forms."""
    from kvjax.checkpoints.export import _sources
    from kvjax.checkpoints.params import fill
    from kvjax.checkpoints.tensors import LazyTensor

    a, b = tiny(form="stacked", **fields), tiny(form="unrolled", **fields)
    tensors = {}
    for name, (array, index, transpose) in _sources(a).items():
        data = np.asarray(array[index] if index else array)
        data = data.T if transpose else data
        tensors[name] = LazyTensor(data.shape, data.dtype, lambda data=data: data)
    return a, fill(b, tensors)


@pytest.mark.parametrize("kind", WINDOWED)
def test_both_forms_and_by_hand(tiny, kind):
    """Against a plain loop over layers that keeps every owner's keys and values."""
    a, b = forms(tiny, KINDS[kind])
    tokens = oracles.tokens_for(a, 2, 50)
    got = a(tokens)[0]
    oracles.close(b(tokens)[0], got, 1e-5)
    oracles.close(by_hand(b, tokens), got, 2e-5)


def by_hand(model, tokens):
    """The decoder written out, from its parameters alone."""
    c, T = model.config, tokens.shape[1]
    x, kept = model.embedding[...][tokens], {}
    back = np.arange(T)[:, None] - np.arange(T)[None]
    angles = np.arange(T)[:, None] * c.rope.theta ** (-np.arange(0, c.head_dim, 2) / c.head_dim)
    cos, sin = (jnp.asarray(f(angles), jnp.float32)[None, :, None] for f in (np.cos, np.sin))

    def turn(x):
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def norm(x, module):
        rms = jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + c.rms_norm_eps)
        return x / rms * module.weight[...][None, None]

    def heads(x, linear, n):
        return (x @ linear.kernel[...]).reshape(*x.shape[:2], n, c.head_dim)

    for i, layer in enumerate(model.stack.layers):
        at, h = layer.attention, norm(x, layer.input_norm)
        if c.source_of(i) == i:
            src = h if layer.kv_norm is None else norm(x, layer.kv_norm)
            kept[i] = (
                turn(heads(src, at.k_proj, c.num_kv_heads)),
                heads(src, at.v_proj, c.num_kv_heads),
            )
        k, v = (jnp.repeat(a, c.group_size, axis=2) for a in kept[c.source_of(i)])
        window = c.window_of(i)
        seen = (back >= 0) & ((back < window) if window else True)
        q = turn(heads(h, at.q_proj, c.num_heads))
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) * c.head_dim**-0.5
        p = jax.nn.softmax(jnp.where(seen[None, None], scores, -1e30), axis=-1)
        out = jnp.einsum("bnts,bsnh->btnh", p, v).reshape(*x.shape[:2], -1)
        x = x + out @ at.o_proj.kernel[...]
        h = norm(x, layer.post_norm)
        mlp = jax.nn.silu(h @ layer.mlp.gate_proj.kernel[...]) * (h @ layer.mlp.up_proj.kernel[...])
        x = x + mlp @ layer.mlp.down_proj.kernel[...]
    return model.logits(norm(x, model.norm))


def test_an_owner_reaches_its_readers(tiny):
    """Another value projection of layer 0 changes what layer 1 alone reads (CLA)."""
    _, model = forms(tiny, {"num_layers": 2, **cla(2)})
    tokens = oracles.tokens_for(model, 1, 12)
    before = model(tokens)[0]
    model.stack.layers[0].attention.o_proj.kernel[...] *= 0  # layer 0 itself adds nothing
    alone = model(tokens)[0]
    model.stack.layers[0].attention.v_proj.kernel[...] *= 2.0
    assert np.abs(np.asarray(model(tokens)[0] - alone)).max() > 0.1
    assert np.abs(np.asarray(before - alone)).max() > 0.1


@pytest.mark.parametrize("kind", ["cla2", "yoco"])
def test_out_and_in_again(tiny, tmp_path, kind):
    """No Hugging Face family has them: the folder is kvjax's own, and says so."""
    model = tiny(form="stacked", **KINDS[kind])
    export(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "kvjax"
    back, _ = kvjax.load(tmp_path, form="stacked")
    assert back.config == model.config
    for a, b in zip(
        jax.tree.leaves(nnx.state(back)), jax.tree.leaves(nnx.state(model)), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_training_reaches_every_parameter(tiny):
    """Gradients of a YOCO through the pair that its readers share, with and without remat."""
    model = tiny(form="stacked", **KINDS["yoco"])
    graphdef, state = nnx.split(model)
    tokens = jnp.asarray(oracles.tokens_for(model, 2, 25))

    def grads(remat):
        def loss(state):
            return next_token_loss(nnx.merge(graphdef, state), tokens, remat=remat)[0]

        return jax.jit(jax.grad(loss))(state)

    plain, again = grads(False), grads(True)
    for (path, a), b in zip(jax.tree.leaves_with_path(plain), jax.tree.leaves(again), strict=True):
        assert np.abs(a).max() > 0, jax.tree_util.keystr(path)
        np.testing.assert_allclose(a, b, atol=1e-5)


# -- leaving early -------------------------------------------------------------------------------


def test_exit_layers(tiny):
    def leave(kind):
        return exit_layer(tiny(**KINDS[kind]).config)

    assert (leave("yoco"), leave("tail"), leave("cla2"), leave("cla3")) == (2, 2, 2, 3)
    assert exit_layer(tiny().config) is None


@pytest.mark.parametrize("kind", ["yoco", pytest.param("tail", marks=pytest.mark.slow)])
def test_early_exit_is_exact(tiny, kind):
    """Prefill for the last token's logits, then decoding, as if every token had gone through."""
    model = tiny(form="stacked", **KINDS[kind])
    graphdef, state = nnx.split(model)
    tokens = jnp.asarray(oracles.tokens_for(model, 2, 50))
    lengths, at = jnp.asarray([50, 31]), jnp.asarray([[49], [30]])

    @jax.jit
    def hidden(state, tokens, cache, lengths, at):
        return nnx.merge(graphdef, state).hidden(tokens, cache, lengths, at=at)

    def empty():
        return model.init_cache(batch=2, max_len=60, config=PAGES)

    whole, full_cache = hidden(state, tokens, empty(), lengths, None)
    last, cache = hidden(state, tokens, empty(), lengths, at)
    np.testing.assert_allclose(last[:, 0], whole[jnp.arange(2), at[:, 0]], atol=2e-5)
    for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(full_cache), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    dense, _ = hidden(state, tokens, None, lengths, at)
    np.testing.assert_allclose(dense, last, atol=2e-5)


def flops_of_prefill(config: ModelConfig, *, one: bool) -> float:
    model = nnx.eval_shape(lambda: kvjax.Transformer(config, rngs=nnx.Rngs(0), form="unrolled"))
    graphdef, state = nnx.split(model)
    at = jnp.full((1, 1), 255) if one else None

    def hidden(state, tokens):
        lengths = jnp.asarray([256])
        return nnx.merge(graphdef, state).hidden(tokens, None, lengths, at=at)[0]

    lowered = jax.jit(hidden).lower(state, jax.ShapeDtypeStruct((1, 256), jnp.int32))
    return lowered.cost_analysis()["flops"]


def test_yoco_prefill_skips_the_cross_decoder(tiny):
    """For one token's logits the second half costs its keys and values alone."""
    config = tiny(num_layers=8, **yoco(8, window=20)).config
    early, whole = flops_of_prefill(config, one=True), flops_of_prefill(config, one=False)
    assert early < 0.6 * whole, (early, whole)


# -- runs ----------------------------------------------------------------------------------------


def bodies(config: ModelConfig) -> list[tuple[int, int]]:
    return [(run.period, run.repeats) for run in runs_of(config, scan=True)]


def test_runs_compile_few_bodies(tiny):
    """Gemma's period of six, CLA's of two, YOCO's halves: compile time is flat in depth."""
    pattern = [FULL if (i + 1) % 6 == 0 else SLIDING for i in range(26)]
    gemma = tiny(num_layers=26, layer_types=pattern, sliding_window=4).config
    assert bodies(gemma) == [(6, 4), (1, 2)]
    assert bodies(tiny(num_layers=8, **cla(8)).config) == [(2, 3), (1, 1), (1, 1)]
    assert bodies(tiny(num_layers=8, **yoco(8, window=4)).config) == [(1, 4), (1, 1), (1, 3)]
    assert bodies(tiny(num_layers=7).config) == [(1, 7)]
    for config in (gemma, tiny(**KINDS["tail"]).config):
        layers = [
            n
            for run in runs_of(config, scan=True)
            for j in range(run.period)
            for n in run.layers(j)
        ]
        assert sorted(layers) == list(range(config.num_layers))


def test_cache_ratio(tiny):
    """YOCO's cache at long context: one global pair and bounded windows."""
    many = tiny(num_layers=8).config
    once = tiny(num_layers=8, **yoco(8, window=64)).config
    size = {"batch": 1, "max_len": 65536, "config": CacheConfig(page_size=64), "dtype": "bfloat16"}
    ratio = sum(plan.cache_bytes(many, **size).values()) / sum(
        plan.cache_bytes(once, **size).values()
    )
    assert 7.9 < ratio < 8
