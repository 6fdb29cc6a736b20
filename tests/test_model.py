"""The decoder against transformers' logits, and what it refuses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax import CacheConfig

UNROLLED = ["llama_mha", "llama_mqa", "llama3_rope", "llama_2shard", "mistral_window"]
STACKED = ["llama", "llama_bias", "qwen2", "qwen3", "gemma3", "deepseek_v2", "deepseek_v3"]
FAMILIES = UNROLLED + STACKED
PAGES = CacheConfig(page_size=8, sinks=2, recent=5)


@pytest.fixture(scope="module", params=FAMILIES)
def golden(request, goldens):
    form = "stacked" if request.param in STACKED else "unrolled"
    data = goldens(request.param)
    model, tokenizer = kvjax.load(data.path, form=form)
    assert tokenizer is None
    return data, model


@pytest.mark.quick
def test_full_forward(golden):
    data, model = golden
    assert data.error(model(data.ids)[0]) < 1e-4


def test_prefill_then_token_by_token(golden):
    data, model = golden
    T = data.ids.shape[1]
    cache = model.init_cache(batch=2, max_len=T, config=PAGES)
    prefill, cache = model(data.ids[:, :20], cache)
    out = [prefill]
    for t in range(20, T):
        logits, cache = model(data.ids[:, t : t + 1], cache)
        out.append(logits)
    assert int(cache.groups[0].spec.sealed_pages(jnp.int32(T))) == 11
    assert data.error(np.concatenate(out, axis=1)) < 1e-4


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded(golden, side):
    data, model = golden
    T = data.ids.shape[1]
    ids = np.full((2, T + 12), 5, np.int32)
    mask = np.zeros(ids.shape, bool)
    lengths = [T, T - 30]
    for row, n in enumerate(lengths):
        where = slice(0, n) if side == "right" else slice(T + 12 - n, T + 12)
        ids[row, where], mask[row, where] = data.ids[row, :n], True
    cache = model.init_cache(batch=2, max_len=T + 12, config=PAGES)
    for logits in (model(ids, mask=mask)[0], model(ids, cache, mask=mask)[0]):
        for row, n in enumerate(lengths):
            real = np.asarray(logits)[row][mask[row]]
            error = np.abs(real - data.logits[row, :n]).max() / data.logits.std()
            assert error < 1e-4


@pytest.mark.quick
def test_both_forms_are_the_same_model(goldens):
    data = goldens("llama")
    a, _ = kvjax.load(data.path, form="stacked")
    b, _ = kvjax.load(data.path, form="unrolled")
    np.testing.assert_allclose(a(data.ids)[0], b(data.ids)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.quick
def test_long_prompts_go_blockwise(tiny):
    """Past one block of 512 the result and its gradient are those of dense attention."""
    from pallas_kernels.flash_attention import causal_partial
    from pallas_kernels.softmax import finish

    key = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(key[0], (2, 70, 2, 3, 8))
    k = jax.random.normal(key[1], (2, 70, 2, 8)) * 2
    v = jax.random.uniform(key[2], (2, 70, 2, 8))
    lengths = jnp.asarray([70, 33])
    real = (jnp.arange(70)[None] < lengths[:, None])[:, None, None, :, None]

    def total(q, k, v, block):
        out = finish(causal_partial(q, k, v, lengths=lengths, scale=0.3, block=block))
        return jnp.sum(jnp.where(real, jnp.sin(out), 0.0)), out

    def dense(q, k, v):
        scores = jnp.einsum("btkgh,bskh->bkgts", q, k) * 0.3
        mask = jnp.tril(jnp.ones((70, 70), bool))[None, None, None]
        out = jnp.einsum("bkgts,bskh->bkgth", jax.nn.softmax(jnp.where(mask, scores, -1e30)), v)
        return jnp.sum(jnp.where(real, jnp.sin(out), 0.0)), out

    def both(f, **static):
        return jax.jit(jax.value_and_grad(f, (0, 1, 2), has_aux=True), **static)

    (want, want_out), want_grad = both(dense)(q, k, v)
    for block in (512, 16):
        (got, out), grad = both(total, static_argnums=3)(q, k, v, block)
        np.testing.assert_allclose(got, want, rtol=1e-5)
        np.testing.assert_allclose(
            jnp.where(real, out, 0.0), jnp.where(real, want_out, 0.0), atol=1e-5
        )
        for g, w in zip(grad, want_grad, strict=True):
            np.testing.assert_allclose(g, w, atol=2e-5)


def test_prefill_memory_grows_linearly(tiny):
    """Temporary memory of a full forward grows with the length, not with its square."""
    model = tiny(form="stacked")
    graphdef, state = nnx.split(model)

    def hidden(state, tokens, lengths):
        return nnx.merge(graphdef, state).hidden(tokens, None, lengths)[0]

    def temp(T):
        tokens = jnp.zeros((1, T), jnp.int32)
        compiled = jax.jit(hidden).lower(state, tokens, jnp.asarray([T])).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temp(4096) < 2.2 * temp(2048)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close(goldens, dtype):
    data = goldens("llama")
    model, _ = kvjax.load(data.path, dtype=dtype)
    cache = model.init_cache(batch=2, max_len=100, config=PAGES)
    assert cache.groups[0].k_exact.dtype == jnp.dtype(dtype)
    logits, _ = model(data.ids, cache)
    assert logits.dtype == jnp.float32
    assert data.error(logits) < 0.1


@pytest.mark.quick
def test_refuses_what_does_not_fit(tiny):
    model = tiny()
    cache = model.init_cache(batch=2, max_len=10)
    ones = np.ones((2, 4), np.int32)
    for call, message in [
        (lambda: model(ones[0]), r"tokens: expected integers of shape \[B, T\]"),
        (lambda: model(ones * 0.5), r"tokens: expected integers"),
        (lambda: model(ones + 200), r"tokens: expected ids 0 to 96, got \[201"),
        (lambda: model(np.ones((3, 4), np.int32), cache), r"tokens: expected a batch of 2"),
        (lambda: model(ones, cache, lengths=[4, 5]), r"lengths: expected 0 to 4"),
        (lambda: model(ones, lengths=[4]), r"lengths: expected shape \(2,\)"),
        (lambda: model(ones, mask=np.asarray([[1, 0, 1, 1]] * 2)), "mask: expected contiguous"),
        (lambda: model(ones, lengths=[4, 4], mask=ones), "expected one of the two, got 'both'"),
        (lambda: model(np.ones((2, 11), np.int32), cache), "cache.max_len: expected at least 11"),
        (lambda: model.init_cache(batch=0, max_len=3), "batch: expected a positive int, got 0"),
        (lambda: model.init_cache(batch=1, max_len=0), "max_len: expected a positive int"),
        (lambda: kvjax.Transformer(model.config, rngs=nnx.Rngs(0), dtype="int8"), "dtype: exp"),
        (lambda: kvjax.Transformer(model.config, rngs=nnx.Rngs(0), form="x"), "form: expected"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_an_all_padding_row_is_harmless(tiny):
    """A row without real tokens gives no NaN and leaves its neighbours alone (case 56)."""
    model = tiny()
    tokens = oracle_tokens = np.arange(20, dtype=np.int32).reshape(2, 10)
    cache = model.init_cache(batch=2, max_len=20, config=PAGES)
    logits, cache = model(tokens, cache, lengths=[10, 0])
    assert np.isfinite(np.asarray(logits)).all()
    alone, _ = model(oracle_tokens[:1])
    np.testing.assert_allclose(logits[0], alone[0], atol=1e-5)
    assert cache.length.tolist() == [10, 0]
