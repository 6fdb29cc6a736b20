"""The sketch's constants, https://arxiv.org/abs/2406.03482."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from codec_data import normal

from kvjax import codecs
from kvjax.codecs import rotation, sketch

H, DRAWS = 64, 2000


@functools.cache
def draws(kind):
    make = {"gaussian": rotation.gaussian, "orthogonal": rotation.haar}[kind].__wrapped__
    return np.stack([make(H, H, seed) for seed in range(DRAWS)])


def estimates(kind, rho):
    """<q, k> of unit vectors at cosine rho, one estimate per draw of S."""
    rng = np.random.RandomState(0)
    k, e = np.linalg.qr(rng.standard_normal((H, 2)))[0].T
    q = rho * k + np.sqrt(1 - rho**2) * e
    signs = np.where(draws(kind) @ k > 0, 1, -1)
    return sketch.sketch_constant(kind, H, H) * np.sum((draws(kind) @ q) * signs, -1)


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("kind", ["gaussian", "orthogonal"])
def test_unbiased_with_the_published_variance(kind, rho):
    got = estimates(kind, rho)
    assert abs(got.mean() - rho) < 4 * got.std() / np.sqrt(DRAWS)
    published = {"gaussian": np.pi / 2 - rho**2, "orthogonal": np.pi / 2 - 1 - rho**2 / 2}[kind]
    # 12 %: 4 standard errors of a variance from 2000 draws; the second formula is approximate
    expected = {("orthogonal", 0.5): 0.448, ("orthogonal", 0.9): 0.163}.get((kind, rho), published)
    assert got.var() * H == pytest.approx(expected, rel=0.13)


def test_constant_of_orthonormal_rows():
    for head_dim, excess in ((64, 1.00391), (128, 1.00196), (256, 1.00098)):
        exact = sketch.sketch_constant("orthogonal", head_dim, head_dim)
        assert exact * np.sqrt(head_dim) / np.sqrt(np.pi / 2) == pytest.approx(1 / excess, abs=2e-5)
    assert sketch.sketch_constant("gaussian", 64, 128) == pytest.approx(np.sqrt(np.pi / 2) / 128)


@functools.partial(jax.jit, static_argnums=0)
def scores(codec, params, q, k):
    read = codec.decode(codec.encode(jnp.asarray(k), params), params, "float32")
    return jnp.einsum("kgr,ktr->kgt", codec.prepare_query(q, params), read)


@pytest.mark.parametrize("kind", ["gaussian", "orthogonal"])
def test_more_rows_less_error_and_scale_invariance(kind):
    q, k = normal(2, 4, H), normal(2, 32, H, seed=1)
    exact = np.einsum("kgh,kth->kgt", q, k)
    errors = []
    for rows in (64, 256, 1024):
        codec = codecs.QjlKey(rows=rows, outlier_rows=rows, sketch=kind)
        params = codec.init_params(num_kv_heads=2, head_dim=H)
        got = scores(codec, params, q, k)
        errors.append(float(jnp.mean((got - exact) ** 2)) / np.mean(exact**2))
        np.testing.assert_allclose(scores(codec, params, q, 4 * k), 4 * got, rtol=1e-4)
    assert errors[0] > 2 * errors[1] > 4 * errors[2]
    assert errors[2] < 0.1


def test_outliers_have_a_sketch_of_their_own():
    k = normal(1, 64, H)
    k[..., [5, 40]] *= 30
    q = normal(1, 4, H, seed=1)
    q[..., [5, 40]] = 0  # a query that does not look at them must not hear them
    codec, one = codecs.QjlKey(num_outliers=2), codecs.QjlKey(num_outliers=0)
    params = codec.calibrate(k)
    assert set(np.flatnonzero(params["outlier"][0])) == {5, 40}
    exact = np.einsum("kgh,kth->kgt", q, k)
    apart, together = (np.mean((scores(c, params, q, k) - exact) ** 2) for c in (codec, one))
    assert apart < 0.05 * together


def test_bytes_of_the_reference_defaults():
    """116 of the table's 116.25 bytes: outlier channels are a param, not a list per 32 tokens."""
    key, value = codecs.pair("qjl")
    shapes = [c.code_shapes(tokens=128, head_dim=128, dtype=jnp.bfloat16) for c in (key, value)]
    assert sum(map(codecs.code_bytes, shapes)) == 116 * 128


def test_values_are_refused():
    with pytest.raises(ValueError, match="expected role 'k', got 'v'"):
        codecs.QjlKey().check(head_dim=64, page_size=64, role="v")
    with pytest.raises(ValueError, match="fewer than head_dim=8, got 8"):
        codecs.QjlKey().check(head_dim=8, page_size=64, role="k")
