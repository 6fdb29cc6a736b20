"""The model's attention of new tokens to each other: flash attention's kernels, interpreted, beside
plain XLA, which is what runs without a TPU."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax import CacheConfig, MLAConfig, ModelConfig, RopeConfig, Transformer, attending
from kvjax.attending import attended_by
from kvjax.cache.attend import attend_layer
from kvjax.cache.latent import attend_latent
from kvjax.training.loss import next_token_loss
from pallas_kernels import devices
from pallas_kernels.flash_attention import causal_partial, entry, flash_attention, unsupported
from pallas_kernels.softmax import finish

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
SLIDING, FULL = "sliding_attention", "full_attention"
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 4,
    "max_position_embeddings": 512,
}
MODELS = {
    "gqa": {"num_kv_heads": 2, "head_dim": 16},
    "windows, soft cap, sinks": {
        "num_kv_heads": 2,
        "head_dim": 24,
        "sliding_window": 40,
        "layer_types": (SLIDING, FULL),
        "attn_logit_softcap": 5.0,
        "attention_sinks": True,
    },
    "mla": {
        "num_kv_heads": 4,
        "head_dim": 24,
        "mla": MLAConfig(
            q_lora_rank=None,
            kv_lora_rank=16,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
        ),
    },
}
T = 150  # more than the block of 128


def model_of(name, dtype="bfloat16"):
    config = ModelConfig(**SHAPE | MODELS[name] | {"rope": RopeConfig(), "initializer_range": 0.3})
    return Transformer(config, rngs=nnx.Rngs(0), dtype=dtype, form="stacked")


def tokens(count=T):
    return jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, count)), jnp.int32)


@contextlib.contextmanager
def interpreted():
    """The kernels, interpreted, where a TPU's program has them; gives what was called."""
    called, traced = set(), (entry.attend, attend_layer, attend_latent)

    def kernel(form, plain, *operands):
        called.add(form.func.__name__)
        f = dataclasses.replace(form.keywords["f"], interpret=True)
        return form.func(*operands, f=f)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry, "by_program", kernel)
        patch.setattr(entry, "tpu_generation", lambda: 5)
        for f in traced:
            f.clear_cache()
        yield called
    for f in traced:
        f.clear_cache()


def losses(name):
    """(loss, gradients of all parameters) of a bfloat16 model, with recomputed layers."""
    graphdef, state = nnx.split(model_of(name))

    def loss(state):
        return next_token_loss(nnx.merge(graphdef, state), tokens(T + 1), remat=True)[0]

    return jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)(state)


def prompted(name):
    """Logits of a prompt's second chunk, of ragged rows on a cache."""
    model = model_of(name)
    cache = model.init_cache(batch=2, max_len=384, config=CacheConfig(k="int8", v="int8"))
    graphdef, state = nnx.split(model)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def chunk(state, tokens, cache, new):
        model = nnx.merge(graphdef, state)
        x, cache = model.hidden(tokens, cache, new)
        return model.logits(x), cache

    _, cache = chunk(state, tokens(), cache, jnp.asarray([T, 70]))
    logits, _ = chunk(state, tokens()[:, ::-1], cache, jnp.asarray([T, 131]))
    return np.concatenate([np.asarray(logits)[0], np.asarray(logits)[1, :131]])


def assert_near(got, expected, tolerance):
    got, expected = (np.asarray(x, np.float64) for x in (got, expected))
    assert np.linalg.norm(got - expected) <= tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize("name", [pytest.param("gqa", marks=pytest.mark.slow), *list(MODELS)[1:]])
def test_training_and_prompts_by_the_kernel(name):
    """bfloat16 has 8 bits: rounding a weight errs by 0.4 %."""
    loss, gradients = losses(name)
    with interpreted() as called:
        got_loss, got = losses(name)
    assert called == {"_kernel", "_kernel_backward"}
    assert_near(got_loss, loss, 0.001)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(gradients), strict=True):
        assert_near(a, b, 0.03)
    logits = prompted(name)
    with interpreted() as called:
        assert_near(prompted(name), logits, 0.01)
    assert called == {"_kernel"}


def arrays(T, K=2, G=2, H=32, dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    shapes = ((2, T, K, G, H), (2, T, K, H), (2, T, K, H))
    return [jnp.asarray(rng.normal(size=s), dtype) for s in shapes]


@pytest.mark.parametrize("T", [130, 600])
def test_without_a_tpu_it_is_plain_xla(T):
    """To the bit, in one block (130 tokens) and in several."""
    how = {"lengths": jnp.asarray([T, T - 40]), "scale": 0.3, "softcap": 4.0, "window": T // 2}
    operands = arrays(T, K=1, H=8)

    def output(attend, q, k, v):
        return finish(attend(q, k, v, **how))

    def loss(*operands):
        return jnp.sum(jnp.sin(output(*operands)))

    forward, backward = (
        [
            jax.jit(functools.partial(f, attend))(*operands)
            for attend in (flash_attention, causal_partial)
        ]
        for f in (output, jax.grad(loss, argnums=(1, 2, 3)))
    )
    np.testing.assert_array_equal(*forward)
    for got, expected in zip(*backward, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_rows_mapped_by_vmap():
    q, k, v = arrays(128)
    lengths = jnp.asarray([128, 90])

    def one(q, k, v, length):
        return flash_attention(q[None], k[None], v[None], lengths=length[None], scale=0.3)

    got = finish(jax.vmap(one)(q, k, v, lengths))[:, 0]
    np.testing.assert_array_equal(got, finish(causal_partial(q, k, v, lengths=lengths, scale=0.3)))


def test_what_the_kernel_is_not_taken_for(monkeypatch):
    def reason(T=128, G=2, H=64, R=64, dtype=jnp.bfloat16, **more):
        q = jax.ShapeDtypeStruct((1, T, 2, G, H), dtype)
        return unsupported(q, jax.ShapeDtypeStruct((1, T, 2, R), dtype), **more)

    assert reason() == reason(T=4096, G=16, H=256, R=256) == ""
    assert "multiplies bfloat16, and the arrays are float32" in reason(dtype=jnp.float32)
    assert "pads queries to 128 a row, and there are 127" in reason(T=127)
    assert "there are 17 and 64" in reason(G=17)
    assert "256 channels of a head, and there are 2 and 264" in reason(R=264)
    assert "named by their places" in reason(at=jnp.zeros((1, 128), jnp.int32))
    cases = [(jnp.float32, 5, False), (jnp.bfloat16, 5, True), (jnp.bfloat16, 4, False)]
    for dtype, generation, held in [*cases, (jnp.bfloat16, None, False)]:
        for module in (entry, devices):
            monkeypatch.setattr(module, "tpu_generation", lambda now=generation: now)
        attend = functools.partial(flash_attention, lengths=jnp.asarray([130, 9]), scale=0.3)
        text = str(jax.make_jaxpr(attend)(*arrays(130, dtype=dtype)))
        assert ("pallas_call" in text) == held
    at = jnp.zeros((2, 130), jnp.int32)
    with pytest.raises(NotImplementedError, match="at: the kernel takes queries in a row only"):
        attend(*arrays(130), at=at, implementation="tpu")


def test_without_a_tpu_derivatives_of_all_orders_are_there():
    q, k, v = arrays(130)
    lengths = jnp.asarray([130, 9])

    def loss(q):
        part = flash_attention(q, k, v, lengths=lengths, scale=0.3)
        return jnp.sum(finish(part).astype(jnp.float32) ** 2)

    _, along = jax.jvp(loss, (q,), (q,))
    backward = jax.grad(loss)(q)
    np.testing.assert_allclose(along, jnp.sum((backward * q).astype(jnp.float32)), rtol=0.02)
    second = jax.jvp(jax.grad(loss), (q,), (q,))[1]
    assert bool(jnp.all(jnp.isfinite(second)))
    assert bool(jnp.any(second != 0))


def test_reports_say_which(monkeypatch):
    config = model_of("gqa").config
    call = functools.partial(attended_by, dtype="bfloat16", tokens=128)
    assert call(config) == f"plain XLA (no kernel for {jax.default_backend()})"
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(attending, "tpu_generation", lambda: 4)
    assert "needs a TPU of v5 or later" in call(config)
    monkeypatch.setattr(attending, "tpu_generation", lambda: 5)
    assert call(config) == "the TPU kernel"
    assert "the arrays are float32" in call(config, dtype="float32")
    latent = MLAConfig(512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    heads = {"num_heads": 128, "num_kv_heads": 128, "head_dim": 192, "mla": latent}
    deepseek = dataclasses.replace(config, **heads)
    assert call(deepseek, tokens=512) == "the TPU kernel"
    assert "there are 128 and 576" in call(deepseek)  # few tokens: absorbed
