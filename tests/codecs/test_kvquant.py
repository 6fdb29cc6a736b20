import jax
import jax.numpy as jnp
import numpy as np
import pytest
from codec_data import entries, normal, ready, rel_mse, round_trip
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax import codecs
from kvjax.codecs.kmeans import weighted_kmeans


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31 - 1), st.integers(1, 300), st.sampled_from([2, 4, 8, 16]))
def test_kmeans_never_increases_the_objective(seed, size, n):
    rng = np.random.RandomState(seed)
    x, w = rng.standard_normal(size), rng.exponential(size=size)
    centres, objectives = weighted_kmeans(x, w, n)
    assert np.all(np.diff(objectives) <= 1e-9 * max(objectives[0], 1e-9))
    assert np.all(np.diff(centres) >= 0)
    assert x.min() - 1e-9 <= centres.min() <= centres.max() <= x.max() + 1e-9
    nearest = np.abs(x[:, None] - centres).min(1)
    assert np.sum(w * nearest**2) <= objectives[-1] * (1 + 1e-6) + 1e-9


def test_kmeans_finds_lloyd_max_and_follows_weights():
    centres, _ = weighted_kmeans(normal(200_000), np.ones(200_000), 4, iterations=200)
    np.testing.assert_allclose(centres, [-1.5104, -0.4528, 0.4528, 1.5104], atol=0.02)
    x = np.array([0.0, 1.0, 10.0])
    np.testing.assert_allclose(weighted_kmeans(x, np.array([1, 3, 1.0]), 2)[0], [0.75, 10])
    np.testing.assert_allclose(weighted_kmeans(x, np.zeros(3), 2)[0], [0.5, 10])
    with pytest.raises(ValueError, match="as many numbers as weights"):
        weighted_kmeans(np.zeros(0), np.zeros(0), 2)


@pytest.mark.parametrize("role", "kv")
@pytest.mark.parametrize("head_dim", [64, 256])
def test_outliers_are_exact(role, head_dim):
    codec, params = ready("kvquant2", role, head_dim)
    x = np.float32(jnp.asarray(entries(role, 2, 64, head_dim, seed=3), jnp.bfloat16))
    codes = jax.jit(lambda v: codec.encode(v, params))(x)
    n = codec.num_outliers(head_dim)
    assert codes["outlier_index"].shape == (2, n, 64)
    assert codes["outlier_index"].dtype == jnp.uint8
    index = np.swapaxes(np.asarray(codes["outlier_index"], int), -1, -2)
    assert all(len(set(row)) == n for row in index.reshape(-1, n))
    read = np.asarray(jax.jit(lambda c: codec.decode(c, params, "float32"))(codes))
    take = np.take_along_axis
    np.testing.assert_array_equal(take(read, index, -1), take(x, index, -1))
    if role == "v":  # the largest deviation from the median is among them
        far = np.abs(x - np.median(x, -1, keepdims=True)).argmax(-1)
        assert (index == far[..., None]).any(-1).all()


@pytest.mark.parametrize("role", "kv")
def test_all_outliers_are_exact(role):
    codec, params = ready("kvquant2", role, 64)
    codec = type(codec)(bits=2, outliers=1.0)
    x = np.float32(jnp.asarray(entries(role, 2, 32, 64), jnp.bfloat16))
    np.testing.assert_array_equal(round_trip(codec, params, x), x)


@pytest.mark.parametrize("role", "kv")
def test_levels_are_sorted_within_minus_one_and_one(role):
    _, params = ready("kvquant3", role)
    levels = np.asarray(params["levels"])
    assert levels.shape == (2, 8)
    assert np.all(np.diff(levels) > 0)
    assert np.abs(levels).max() <= 1
    np.testing.assert_allclose(params["bounds"], (levels[:, 1:] + levels[:, :-1]) / 2, rtol=1e-5)


def test_outliers_help_and_so_does_the_channel_of_a_key():
    x = entries("k", 2, 64, 64, seed=8)
    errors = {}
    for outliers in (0.0, 0.01):
        codec, params = ready("kvquant3", "k", outliers=outliers)
        errors[outliers] = rel_mse(round_trip(codec, params, x), x)
    assert errors[0.01] < errors[0.0]


def test_fisher_weights_move_the_levels():
    codec = codecs.KVQuantKey(bits=2)
    x = normal(1, 4000, 8)
    weights = np.where(np.abs(x) < 0.5, 100.0, 1.0).astype(np.float32)
    plain, weighted = (np.asarray(codec.calibrate(x, w)["levels"]) for w in (None, weights))
    assert np.abs(weighted).mean() < np.abs(plain).mean()


def test_q_norm_matches_spread():
    x = normal(2, 2000, 64)
    read = {}
    for q_norm in (False, True):
        codec = codecs.KVQuantKey(bits=2, q_norm=q_norm, outliers=0.02)
        read[q_norm] = round_trip(codec, codec.calibrate(x), x).std()
    assert abs(read[True] - x.std()) < 0.5 * abs(read[False] - x.std())


def test_a_calibration_file_is_asked_for():
    for codec in codecs.pair("kvquant4"):
        assert codec.uses_weights
        with pytest.raises(ValueError, match="a calibration file is needed"):
            codec.init_params(num_kv_heads=2, head_dim=64)
    key, value = codecs.pair("kvquant4")
    assert key.pre_rope
    assert not value.pre_rope
    with pytest.raises(ValueError, match="expected role 'k'"):
        key.check(head_dim=64, page_size=64, role="v")
