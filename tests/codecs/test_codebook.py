import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.codecs import codebook

LEVELS = {
    1: [0.7978846],
    2: [0.4527800, 1.5104176],
    3: [0.2450942, 0.7560053, 1.3439093, 2.1519457],
    4: [0.1283950, 0.3880483, 0.6567591, 0.9423404, 1.2562312, 1.6180464, 2.0690172, 2.7325896],
}
LEVELS[5] = [0.06589, 0.198052, 0.331378, 0.4667, 0.604934, 0.747136, 0.894565, 1.048783]
LEVELS[5] += [1.211804, 1.38634, 1.576228, 1.787233, 2.028728, 2.317739, 2.69112, 3.260732]
BOUNDS = {
    2: [0.9815988],
    3: [0.5005497, 1.0499573, 1.7479275],
    4: [0.2582216, 0.5224037, 0.7995497, 1.0992858, 1.4371388, 1.8435318, 2.4008034],
}
DISTORTION = [0.36338023, 0.11748185, 0.03454776, 0.00950101]
DISTORTION += [0.00250467, 0.00064424, 0.00016348, 0.00004120]


@pytest.mark.parametrize("bits", LEVELS)
def test_lloyd_max_levels(bits):
    table = codebook.lloyd_max(bits)
    levels, half = np.array(table), len(table) // 2
    np.testing.assert_allclose(levels[half:], LEVELS[bits], atol=1e-5)
    np.testing.assert_array_equal(levels, -levels[::-1])
    if bits in BOUNDS:
        np.testing.assert_allclose(codebook.midpoints(table)[half:], BOUNDS[bits], atol=1e-5)


@pytest.mark.parametrize("bits", range(1, 9))
def test_distortion(bits):
    assert codebook.distortion(bits) == pytest.approx(DISTORTION[bits - 1], abs=2e-8)
    assert 4.0**-bits <= codebook.distortion(bits) <= 2.7207 * 4.0**-bits


@pytest.mark.parametrize("bits", range(1, 9))
def test_nearest_and_lookup_agree_with_a_search(bits):
    levels = codebook.lloyd_max(bits)
    x = np.random.RandomState(bits).standard_normal((3, 500)).astype(np.float32) * 1.5
    want = np.abs(x[..., None] - np.float32(levels)).argmin(-1)
    codes = codebook.nearest(jnp.asarray(x), codebook.midpoints(levels))
    assert codes.dtype == jnp.uint32
    assert np.mean(np.asarray(codes) != want) < 1e-3  # ties by a float32 ulp
    np.testing.assert_array_equal(codebook.lookup(codes, levels), np.float32(levels)[codes])
