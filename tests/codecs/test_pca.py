import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from codec_data import normal, rel_mse, round_trip

from kvjax import codecs
from kvjax.codecs import codebook, pca


def low_rank(*shape, seed=0):
    """Entries whose variance falls along random axes."""
    H = shape[-1]
    axes = np.linalg.qr(normal(shape[0], H, H, seed=7))[0]
    z = normal(*shape, seed=seed) * (1 / (1 + np.arange(H))).astype(np.float32)
    return (z @ axes + 0.5).astype(np.float32)


def test_allocation_is_greedy_and_on_budget():
    assert pca.allocate(np.ones(8), 2) == (2,) * 8
    assert pca.allocate(np.ones(8), 7) == (6,) * 8
    got = pca.allocate(4.0 ** -np.arange(8), 1)
    assert sum(got) == 8
    assert got == tuple(sorted(got, reverse=True))
    error = [1.0, *(codebook.distortion(b) for b in range(1, 7))]
    variance = 1.5 ** -np.arange(6.0)
    cost = sum(v * error[b] for v, b in zip(variance, pca.allocate(variance, 2), strict=True))
    rng = np.random.RandomState(0)
    for _ in range(200):  # no other split of 12 bits does better
        other = rng.multinomial(12, np.ones(6) / 6)
        if other.max() <= 6:
            assert cost <= sum(v * error[b] for v, b in zip(variance, other, strict=True)) + 1e-9


def test_both_roles_read_the_same_entries():
    x = low_rank(2, 512, 32)
    key, value = codecs.pair("pca3", allocation=pca.allocate(np.exp(-np.arange(32) / 8), 3))
    params = key.calibrate(x)
    np.testing.assert_allclose(
        round_trip(key, params, x), round_trip(value, params, x), rtol=1e-4, atol=1e-5
    )
    q = normal(2, 3, 32)

    @jax.jit
    def scores(x, q):
        read = value.decode(value.encode(jnp.asarray(x), params), params, "float32")
        return jnp.einsum("kgr,ktr->kgt", value.prepare_query(q, params), read)

    direct = q @ np.swapaxes(round_trip(key, params, x), -1, -2)
    np.testing.assert_allclose(scores(x, q), direct, rtol=1e-4, atol=1e-4)


def test_beats_plain_quantisers_where_the_spectrum_falls():
    x = low_rank(2, 1024, 64)
    train, test = x[:, :768], x[:, 768:]
    allocated = pca.allocate(np.square(codecs.Pca().calibrate(train)["spread"]), 2)
    codec = codecs.Pca(bits=2, allocation=allocated)
    codec.check(head_dim=64, page_size=64, role="v")
    centred = test - test.mean(1, keepdims=True)
    error = np.sum((round_trip(codec, codec.calibrate(train), test) - test) ** 2)
    other = rel_mse(round_trip(codecs.get("turboquant2"), {}, centred), centred)
    assert error / np.sum(centred**2) < 0.3 * other
    assert codecs.effective_bits(codec, head_dim=64, page_size=64, dtype=jnp.bfloat16) == 2


def test_token_scale_follows_loud_tokens():
    x = low_rank(2, 512, 32) - 0.5
    loud = x[:, :64] * np.linspace(0.1, 20, 64, dtype=np.float32)[:, None]
    plain = codecs.Pca(bits=3)
    params = plain.calibrate(x)
    scaled = dataclasses.replace(plain, token_scale=True)
    errors = [rel_mse(round_trip(c, params, loud), loud) for c in (plain, scaled)]
    assert errors[1] < 0.2 * errors[0]


def test_refusals():
    with pytest.raises(ValueError, match="a calibration file is needed"):
        codecs.get("pca2").init_params(num_kv_heads=1, head_dim=32)
    with pytest.raises(ValueError, match=r"not increasing, got \(1, 2\)"):
        codecs.Pca(allocation=(1, 2))
    with pytest.raises(ValueError, match=r"head_dim=32 axes, got 2"):
        codecs.Pca(allocation=(2, 1)).check(head_dim=32, page_size=32, role="v")
    with pytest.raises(ValueError, match="expected role 'k'"):
        codecs.PcaPreRope().check(head_dim=32, page_size=32, role="v")
    assert codecs.get("pca2").pre_rope
    assert not codecs.get("pca2", role="v").pre_rope
