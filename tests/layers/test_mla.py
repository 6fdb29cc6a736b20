"""Latent attention: both ways to bracket it, what is cached, and what a decode step computes."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from flax import nnx

from kvjax import CacheConfig, Engine, MLAConfig, MoEConfig, RopeConfig, cache_report
from kvjax.cache import latent
from kvjax.engine import programs
from kvjax.engine.sampling import Sampling, SamplingParams
from kvjax.layers.moe import MoE
from kvjax.layers.rope import inverse_frequencies, score_factor
from kvjax.sharing import cla

MLA = MLAConfig(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24)
FIELDS = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 24, "mla": MLA, "rope_interleave": True}
LORA = FIELDS | {"mla": MLAConfig(**{**MLA.__dict__, "q_lora_rank": 20})}
PAGES = CacheConfig(page_size=8, sinks=2, recent=5)


def with_heads(n: int) -> dict:
    return FIELDS | {"num_heads": n, "num_kv_heads": n}


@pytest.fixture
def bracketed(monkeypatch):
    """Forces latent attention to absorb or to expand, whatever is cheaper."""

    def force(absorb: bool) -> None:
        monkeypatch.setattr(latent, "absorbs", lambda queries, **sizes: absorb)
        jax.clear_caches()

    yield force
    jax.clear_caches()


@pytest.mark.parametrize(
    "text", ["turboquant4", *(pytest.param(t, marks=pytest.mark.slow) for t in ("raw", "int8"))]
)
def test_absorbed_equals_expanded(tiny, bracketed, text):
    """Of the chunk, the exact tokens and the pages, over 64 steps; by rounding alone (case 100)."""
    model = tiny(form="stacked", num_layers=1, **LORA)
    config = CacheConfig.parse(text, page_size=32, sinks=2, recent=5)
    tokens, found = oracles.tokens_for(model, 2, 164), []
    for absorb in (True, False):
        bracketed(absorb)
        cache = model.init_cache(batch=2, max_len=164, config=config)
        found.append(oracles.feed(model, cache, tokens, [50, 50, *[1] * 64])[0])
        if not absorb:  # prefill expanded, decode absorbed
            _, cache = oracles.feed(model, cache, tokens[:, :100], [50, 50])
            bracketed(True)
            found.append(oracles.feed(model, cache, tokens[:, 100:], [1] * 64)[0])
    absorbed, expanded, mixed = found
    oracles.close(absorbed, expanded, 1e-4)
    oracles.close(mixed, expanded[:, 100:], 1e-4)
    for other in (absorbed[:, 100:], mixed):
        assert np.array_equal(other.argmax(-1), expanded[:, 100:].argmax(-1))


def test_the_cheaper_way_is_taken():
    """DeepSeek-V3's sizes: decode absorbs, a prefill of more than 170 tokens expands."""
    sizes = {"latent": 512, "key": 128, "value": 128}
    assert latent.absorbs(1, **sizes)
    assert latent.absorbs(170, **sizes)
    assert not latent.absorbs(171, **sizes)


def test_against_the_formula(tiny):
    """Every head's keys and values made from the latent, dense softmax (methods.md 2)."""
    model = tiny(form="unrolled", num_layers=1, **LORA)
    layer, T = model.stack.layers[0], 9
    at, c = layer.attention, model.config
    x = jax.random.normal(jax.random.key(1), (1, T, c.hidden_size))
    positions = np.arange(T)[None]
    ropes = model.ropes(jnp.zeros((1,), jnp.int32), T, jnp.asarray([T]))

    def norm(x):
        return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)

    def turn(x):  # neighbours (2i, 2i+1) by position * theta^(-2i/d), as complex numbers
        angles = positions[..., None] * 10000.0 ** (-np.arange(0, 8, 2) / 8)
        z = jax.lax.complex(x[..., ::2], x[..., 1::2])
        z = z * jnp.asarray(np.exp(1j * angles), jnp.complex64)[:, :, None]
        return jnp.stack([z.real, z.imag], axis=-1).reshape(x.shape)

    q = (norm(x @ at.q_a_proj.kernel[...]) @ at.q_b_proj.kernel[...]).reshape(1, T, 4, 24)
    kv = x @ at.kv_a_proj.kernel[...]
    up = (norm(kv[..., :32]) @ at.kv_b_proj.kernel[...]).reshape(1, T, 4, 16 + 24)
    k_rope = jnp.broadcast_to(turn(kv[:, :, None, 32:]), (1, T, 4, 8))
    k = jnp.concatenate([up[..., :16], k_rope], axis=-1)
    q = jnp.concatenate([q[..., :16], turn(q[..., 16:])], axis=-1)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * 24**-0.5
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool))[None, None], scores, -1e30)
    out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), up[..., 16:])
    want = out.reshape(1, T, -1) @ at.o_proj.kernel[...]

    from kvjax.attending import attending
    from kvjax.layers.kinds import Place, layer_kind

    place = Place(layer_kind(c, 0), 0, (0,), 0, (0,))
    attend = attending(c, jnp.asarray([T]), None)(place)
    rope = ropes[c.rope]
    got, _ = at(x, rope, attend, source=x, source_rope=rope, shared=None)
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_bytes_do_not_depend_on_the_heads(tiny):
    """A latent and a rotated key a token: 32 + 8 numbers, for 2 heads or for 8."""
    sizes = []
    for n in (2, 8):
        model = tiny(**with_heads(n))
        oracles.exact_bytes(model, PAGES)
        report = cache_report(model.init_cache(batch=1, max_len=200, config=PAGES))
        assert report["raw_bytes"] == 200 * 2 * 40 * 4
        sizes.append(report["total_bytes"])
    assert sizes[0] == sizes[1]
    assert "latents raw" in __import__("kvjax").cache.format_report(report)


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("int8", None),
        ("turboquant4", 4),
        pytest.param("raw", None, marks=pytest.mark.slow),
        pytest.param("int4", 8, marks=pytest.mark.slow),
    ],
)
def test_codecs(tiny, text, bits):
    """The rotated key stays exact unless its bits are asked for."""
    model = tiny(form="stacked", **FIELDS)
    config = CacheConfig.parse(text, page_size=32, sinks=2, recent=5, mla_rope_bits=bits)
    oracles.exact_bytes(model, config)
    report = cache_report(model.init_cache(batch=1, max_len=200, config=config))
    wanted = {None: 32, 8: 8 + 16 / 8, 4: 4 + 32 / 8}[bits]
    assert report["effective_bits"]["v"] == wanted
    tokens = oracles.tokens_for(model, 2, 120)
    full, _ = model(tokens)
    cache = model.init_cache(batch=2, max_len=120, config=config)
    logits, cache = oracles.feed(model, cache, tokens, [60, 60])
    error = np.sqrt(np.mean((logits - np.asarray(full))[:, 60:] ** 2)) / np.std(full)
    assert error < {"raw": 1e-5, "int8": 0.03, "int4": 0.4, "turboquant4": 0.4}[text], error


@pytest.mark.parametrize(
    ("text", "fields", "message"),
    [
        ("kivi4", {}, "one codec for keys and values that works token by token"),
        ("klt4", {}, "kv-cache-dtype: .*klt4.* Take turboquant4 or int4. Calibrated codecs"),
        ("int8+int4", {}, r"one codec.*got 'int8\+int4'"),
        ("kvquant3", {}, "one codec for keys and values"),
        ("int8", {"mla_rope_bits": 1}, "mla_rope_bits: expected an int from 2 to 8"),
    ],
)
def test_refuses(tiny, text, fields, message):
    with pytest.raises(ValueError, match=message):
        tiny(**FIELDS).init_cache(batch=1, max_len=9, config=CacheConfig.parse(text, **fields))


def test_rope_bits_are_for_latents(tiny):
    with pytest.raises(ValueError, match="mla_rope_bits: expected None"):
        tiny().init_cache(batch=1, max_len=9, config=CacheConfig(mla_rope_bits=8))


def test_config_refuses(tiny):
    for fields, message in [
        ({"num_kv_heads": 2}, "num_kv_heads: expected num_heads=4 with mla"),
        ({"head_dim": 32}, "head_dim: expected 24, mla's query channels"),
        ({"qk_norm": "head"}, "qk_norm: expected 'none' with mla"),
    ]:
        with pytest.raises(ValueError, match=message):
            tiny(**(FIELDS | fields))


def test_two_layers_share_a_latent(tiny):
    model = tiny(form="stacked", num_layers=4, **FIELDS, **cla(4))
    assert model.config.num_params() == sum(
        leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))
    )
    oracles.exact_bytes(model, PAGES)
    tokens = oracles.tokens_for(model, 1, 60)
    cache = model.init_cache(batch=1, max_len=60, config=PAGES)
    logits, _ = oracles.feed(model, cache, tokens, [50, *[1] * 10])
    oracles.close(logits, model(tokens)[0], 2e-5)


def expanded_arrays(tiny) -> list[str]:
    """Arrays of a compiled decode step that have all heads' keys or values of a tile of pages."""
    N, U, R, W, page = 14, 22, 8, 26, 64
    mla = MLAConfig(kv_lora_rank=40, qk_nope_head_dim=U, qk_rope_head_dim=R, v_head_dim=W)
    fields = {"num_heads": N, "num_kv_heads": N, "head_dim": U + R, "mla": mla}
    model = tiny(form="stacked", num_layers=2, **fields)
    config = CacheConfig.parse("int8", page_size=page)
    engine = Engine(model, batch=1, max_model_len=2048, cache_config=config, eos_ids=())
    cache, logits = engine.empty()
    sampling = Sampling.of([SamplingParams()])
    rows = programs.first_token(logits, sampling, cache.length, jnp.asarray([5]), engine.eos)
    compiled = programs.decode.lower(
        engine.graphdef, engine.state, cache, rows, sampling, engine.eos, jnp.int32(1)
    ).compile()
    shapes = set(re.findall(r"\w+\[([\d,]+)\]", compiled.as_text()))
    dims = [{int(d) for d in shape.split(",")} for shape in shapes]
    widths = {U, W, U + R, N * U, N * W, N * (U + W)}
    found = [d for d in dims if d & {page, 2 * page} and d & widths and (N in d or max(d) > N * U)]
    return [str(sorted(d)) for d in found]


def test_a_decode_step_does_not_expand_the_latent(tiny, bracketed):
    assert expanded_arrays(tiny) == []
    bracketed(False)  # and the check sees it where it is done
    assert expanded_arrays(tiny)


# -- numbers ---------------------------------------------------------------------------------------


def test_yarn_numbers_of_deepseek():
    """methods.md, section 2: V3's frequencies and its scale."""
    rope = RopeConfig(
        type="yarn",
        factor=40.0,
        original_max_position_embeddings=4096,
        mscale=1.0,
        mscale_all_dim=1.0,
    )
    want = {0: 1.0, 10: 5.62341325e-2, 12: 2.68793601e-2, 16: 5.5e-3, 20: 7.90569e-4}
    freq = inverse_frequencies(rope, 64)
    for i, value in (want | {23: 3.33380e-5, 31: 3.33380e-6}).items():
        assert freq[i] == pytest.approx(value, rel=1e-5)
    assert 192**-0.5 * score_factor(rope) == pytest.approx(0.1352338, rel=1e-6)


def moe_of(**fields) -> tuple[MoE, MoEConfig]:
    from kvjax import ModelConfig

    moe = MoEConfig(
        **{"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 12, **fields}
    )
    config = ModelConfig(32, 16, 24, 1, 2, 2, 8, moe=moe, initializer_range=0.3)
    return MoE(config, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(3)), moe


def expert(module: MoE, e: int, x):
    gate, up, down = (
        m.kernel[...][e] for m in (module.gate_proj, module.up_proj, module.down_proj)
    )
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"normalize": True, "scale": 2.5, "num_shared_experts": 2},
        {"scoring": "sigmoid", "num_groups": 4, "topk_groups": 2, "group_score": "top2"},
        {"num_groups": 4, "topk_groups": 1},
    ],
)
def test_mixture_token_by_token(fields):
    """Each token alone: choose by hand, run its experts, weigh them."""
    module, moe = moe_of(correction_bias=fields.get("scoring") == "sigmoid", **fields)
    if module.correction is not None:
        module.correction[...] = jnp.linspace(-0.4, 0.4, 8)
    x = jax.random.normal(jax.random.key(0), (3, 5, 16))
    got = np.asarray(module(x)).reshape(-1, 16)
    for token, vector in enumerate(np.asarray(x).reshape(-1, 16)):
        logits = vector @ np.asarray(module.router.kernel[...])
        soft = moe.scoring == "softmax"
        scores = np.exp(logits) / np.exp(logits).sum() if soft else 1 / (1 + np.exp(-logits))
        choice = scores + (0 if module.correction is None else np.asarray(module.correction[...]))
        groups = choice.reshape(moe.num_groups, -1)
        count = 1 if moe.group_score == "max" else 2
        best = np.sort(groups, axis=1)[:, -count:].sum(axis=1)
        kept = np.argsort(-best)[: moe.topk_groups]
        allowed = [e for e in range(8) if e // groups.shape[1] in kept]
        chosen = sorted(allowed, key=lambda e: -choice[e])[:2]
        weights = scores[chosen] / (scores[chosen].sum() if moe.normalize else 1) * moe.scale
        want = sum(w * expert(module, e, vector) for w, e in zip(weights, chosen, strict=True))
        if module.shared is not None:
            want = want + module.shared(jnp.asarray(vector))
        np.testing.assert_allclose(got[token], want, atol=1e-5)


def test_mixture_has_a_gradient():
    module, _ = moe_of(num_shared_experts=1)
    graphdef, state = nnx.split(module)
    x = jax.random.normal(jax.random.key(0), (2, 3, 16))
    grads = jax.grad(lambda s: jnp.sum(nnx.merge(graphdef, s)(x) ** 2))(state)
    for leaf in jax.tree.leaves(grads):
        assert np.abs(leaf).max() > 0
