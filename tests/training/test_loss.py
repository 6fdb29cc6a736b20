"""The loss and its gradient against plain formulas."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.model import Transformer
from kvjax.training import next_token_loss
from pallas_kernels.flash_attention import causal_partial
from pallas_kernels.softmax import finish


@pytest.fixture
def model(config):
    return Transformer(config.model, rngs=nnx.Rngs(0), form="stacked")


@pytest.fixture
def tokens():
    return jax.random.randint(jax.random.key(1), (3, 17), 0, 320)


def test_it_is_the_cross_entropy_of_the_next_token(model, tokens):
    logits, _ = model(tokens[:, :-1])
    chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    z = jax.nn.logsumexp(logits, axis=-1)
    each = z - chosen
    loss, nll = next_token_loss(model, tokens)
    np.testing.assert_allclose(loss, each.mean(), rtol=1e-6)
    assert loss == nll
    mask = jnp.arange(16)[None] < jnp.array([[3], [0], [16]])
    masked, _ = next_token_loss(model, tokens, mask)
    np.testing.assert_allclose(masked, each[mask].mean(), rtol=1e-6)
    with_z, nll = next_token_loss(model, tokens, z_loss=0.1)
    np.testing.assert_allclose(with_z, each.mean() + 0.1 * (z**2).mean(), rtol=1e-6)
    np.testing.assert_allclose(nll, each.mean(), rtol=1e-6)


def test_saving_memory_changes_nothing(model, tokens):
    graphdef, state = nnx.split(model)

    def value(state, **options):
        return next_token_loss(nnx.merge(graphdef, state), tokens, z_loss=0.1, **options)[0]

    plain, want = jax.jit(jax.value_and_grad(value))(state)
    for options in ({"chunk": 4}, {"chunk": 8, "remat": True}):
        lean = functools.partial(value, **options)
        loss, got = jax.jit(jax.value_and_grad(lean))(state)
        np.testing.assert_allclose(loss, plain, rtol=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6), got, want)


def test_a_chunk_that_does_not_divide_is_refused(model, tokens):
    with pytest.raises(
        ValueError, match=r"loss_chunk: expected a divisor of the context 16, got 5"
    ):
        next_token_loss(model, tokens, chunk=5)


@pytest.mark.parametrize("block", [8, 64])
def test_the_gradient_of_attention_is_that_of_dense_attention(block):
    B, T, K, G, H = 2, 21, 2, 3, 4
    keys = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(keys[0], (B, T, K, G, H))
    k = jax.random.normal(keys[1], (B, T, K, H))
    v = 3 * jax.random.normal(keys[2], (B, T, K, H)) + 1
    lengths = jnp.array([T, 13])
    real = jnp.arange(T)[None] < lengths[:, None]  # outputs of padding do not count
    weight = jax.random.normal(keys[3], (B, K, G, T, H))
    weight = jnp.where(real[:, None, None, :, None], weight, 0.0)

    def blockwise(q, k, v):
        part = causal_partial(q, k, v, lengths=lengths, scale=0.5, block=block)
        return jnp.sum(finish(part) * weight)

    def dense(q, k, v):
        scores = jnp.einsum("btkgh,bskh->bkgts", q, k) * 0.5
        scores = jnp.where(jnp.tril(jnp.ones((1, 1, 1, T, T), bool)), scores, -jnp.inf)
        out = jnp.einsum("bkgts,bskh->bkgth", jax.nn.softmax(scores, axis=-1), v)
        return jnp.sum(out * weight)

    got = jax.jit(jax.grad(blockwise, argnums=(0, 1, 2)))(q, k, v)
    want = jax.jit(jax.grad(dense, argnums=(0, 1, 2)))(q, k, v)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_norms_and_biases_do_not_decay(config):
    from kvjax.training.optimizer import decayed

    biased = dataclasses.replace(config.model, attention_bias=True, attention_out_bias=True)
    model = Transformer(biased, rngs=nnx.Rngs(0), form="stacked")
    mask = decayed(nnx.to_pure_dict(nnx.state(model)))
    assert mask["embedding"]
    assert mask["stack"]["runs"][0][0]["attention"]["q_proj"] == {"kernel": True, "bias": False}
    assert mask["stack"]["runs"][0][0]["input_norm"] == {"weight": False}
    assert mask["norm"] == {"weight": False}
