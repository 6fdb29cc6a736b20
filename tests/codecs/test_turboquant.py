"""Constants of https://arxiv.org/abs/2504.19874 and of EDEN, H = 128."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from codec_data import entries, normal, round_trip

from kvjax import codecs
from kvjax.codecs import codebook

H = 128
MSE = {1: 0.3605, 2: 0.1159, 3: 0.0341, 4: 0.0093}


def unit(n, seed=0):
    x = normal(1, n, H, seed=seed)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def error(codec, x):
    return float(np.mean(np.sum((round_trip(codec, {}, x) - x) ** 2, -1)))


@pytest.mark.parametrize("bits", MSE)
def test_distortion_of_unit_vectors(bits):
    x = unit(4096)
    d = error(codecs.TurboQuant(bits, scale="norm"), x)
    assert d == pytest.approx(MSE[bits], rel=0.02)
    assert 4.0**-bits <= d <= 2.7207 * 4.0**-bits
    assert error(codecs.TurboQuant(bits), x) == pytest.approx(d / (1 - d), rel=0.02)


def test_norm_correction():
    for bits, expected in {1: 0.4006, 2: 0.1187, 3: 0.03395, 4: 0.00915}.items():
        got = error(codecs.TurboQuant(bits, scale="corrected"), unit(4096))
        assert got == pytest.approx(expected, rel=0.02)
        x = unit(64)
        read = round_trip(codecs.TurboQuant(bits, scale="corrected"), {}, x)
        np.testing.assert_allclose(np.linalg.norm(read, axis=-1), 1, rtol=1e-3)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_what_the_stored_norm_loses_along_x(bits):
    x = unit(4096)
    read = round_trip(codecs.TurboQuant(bits, scale="norm"), {}, x)
    assert np.mean(np.sum(x * read, -1)) == pytest.approx(1 - MSE[bits], rel=5e-3)
    # the unbiased scale gives <x, x^> = |x|^2, up to float16
    read = round_trip(codecs.TurboQuant(bits), {}, x)
    np.testing.assert_allclose(np.sum(x * read, -1), 1, rtol=1e-3)


def over_rotations(make, n=200):
    """Estimates of <q, k> for fixed unit q, k at cosine 0.5, one per random rotation."""
    k = unit(32, seed=3)
    noise = unit(32, seed=4)
    noise -= np.sum(noise * k, -1, keepdims=True) * k
    q = 0.5 * k + np.sqrt(0.75) * noise / np.linalg.norm(noise, axis=-1, keepdims=True)
    reads = np.stack([np.asarray(read(make(seed), k)) for seed in range(n)])
    return np.sum(q * reads, -1)  # [seed, 1, 32]


def read(codec, x):
    return codec.finish_output(codec.decode(codec.encode(jnp.asarray(x), {}), {}, "float32"), {})


def test_scores_are_unbiased_over_rotations():
    for bits in (1, 2):
        got = over_rotations(lambda seed, b=bits: codecs.TurboQuant(b, seed=seed))
        # over seeds and pairs: the pairs share rotations, so the error is that of their mean
        mean = got.mean((1, 2))
        assert abs(mean.mean() - 0.5) < 4 * mean.std() / np.sqrt(len(mean)) + 2e-4
        biased = over_rotations(lambda s, b=bits: codecs.TurboQuant(b, scale="norm", seed=s), 20)
        assert biased.mean() == pytest.approx(0.5 * (1 - MSE[bits]), rel=0.05)


@pytest.mark.parametrize("sketch", ["orthogonal", "gaussian"])
def test_prod_is_unbiased(sketch):
    got = over_rotations(lambda s: codecs.TurboQuantProd(2, sketch=sketch, seed=s), 100)
    mean = got.mean((1, 2))
    assert abs(mean.mean() - 0.5) < 4 * mean.std() / np.sqrt(len(mean)) + 2e-4


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_prod_distortion(bits):
    x = unit(4096)
    for sketch, factor in (("gaussian", np.pi / 2), ("orthogonal", np.pi / 2 - 1)):
        got = np.mean([error(codecs.TurboQuantProd(bits, sketch, seed=s), x) for s in range(4)])
        assert got == pytest.approx(factor * MSE[bits - 1], rel=0.04)


def test_mixed_is_two_and_a_half_bits_with_outliers_first():
    codec = codecs.get("turboquant2.5")
    assert codec.num_outliers(128) == 32
    assert codecs.effective_bits(codec, head_dim=128, page_size=64, dtype=jnp.bfloat16) == 2.5
    x = entries("k", 2, 256, H)
    params = codec.calibrate(x)
    assert {3, 17} == set(np.asarray(params["order"])[0, :2].tolist())
    default = codec.init_params(num_kv_heads=2, head_dim=H)
    chosen, given = (np.mean((round_trip(codec, p, x) - x) ** 2) for p in (params, default))
    last = {"order": params["order"][:, ::-1]}
    assert chosen < np.mean((round_trip(codec, last, x) - x) ** 2)
    assert np.isfinite(given)


def test_mixed_reads_channels_back_in_order():
    codec = codecs.TurboQuantMixed(7)
    x = entries("k", 2, 64, H)
    params = codec.calibrate(x)
    assert not np.array_equal(params["order"][0], params["order"][1])
    assert np.abs(round_trip(codec, params, x) - x).max() < 0.03 * np.abs(x).max()


def test_codes_span_all_levels():
    for bits in range(1, 9):
        bounds = codebook.midpoints(codebook.lloyd_max(bits))
        codes = codebook.nearest(jnp.linspace(-5, 5, 2000), bounds)
        assert int(codes.min()) == 0
        assert int(codes.max()) == 2**bits - 1


def test_a_scale_that_would_overflow_float16_is_clipped():
    x = np.full((1, 32, H), 1e9, np.float32)
    for name in ("turboquant4", "turboquant-prod3", "int8", "int4", "kivi2"):
        codec = codecs.get(name)
        assert np.isfinite(round_trip(codec, {}, x)).all()


def test_refusals():
    with pytest.raises(ValueError, match=r"scale: expected one of .*got 'eden'"):
        codecs.get("turboquant4", scale="eden")
    with pytest.raises(ValueError, match="bits: expected 1 to 8, got 9"):
        codecs.get("turboquant4", bits=9)
    with pytest.raises(ValueError, match="sketch: expected one of"):
        codecs.get("turboquant-prod3", sketch="dense")
    with pytest.raises(ValueError, match="calibrate takes no weights"):
        codecs.get("turboquant2.5").calibrate(normal(1, 4, 64), normal(1, 4, 64))


def test_hashable_and_static_under_jit():
    encode = jax.jit(lambda c, x: c.encode(jnp.asarray(x), {})["scale"], static_argnums=0)
    assert encode(codecs.TurboQuant(2), unit(32)).shape == (1, 32)
    assert hash(codecs.TurboQuant(2)) == hash(codecs.get("turboquant2"))
