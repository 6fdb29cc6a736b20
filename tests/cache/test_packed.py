"""The kernels' pages hold, number for number, what the codecs decode."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import codecs
from kvjax.cache.packed import pack_page, page_format
from kvjax.cache.spec import GroupSpec

SUPPORTED = [
    "raw", "int8", "int8-hadamard", "int4", "int4-hadamard", "fp8", "fp8-e5m2", "kivi2", "kivi4",
    "kivi8", "kvquant2", "kvquant3", "kvquant4", "qjl", "turboquant2", "turboquant3", "turboquant4",
]  # fmt: skip


def spec_of(pair, *, page_size=128, head_dim=128, dtype=jnp.bfloat16):
    k, v = pair
    return GroupSpec(
        layers=(0,),
        num_kv_heads=2,
        head_dim=head_dim,
        v_head_dim=head_dim,
        k_codec=k,
        v_codec=v,
        page_size=page_size,
        sinks=4,
        recent=64,
        max_len=1024,
        dtype=jnp.dtype(dtype),
    )


def params_of(codec, rng, head_dim, mean):
    """Calibrated where it must be, on samples with a loud channel."""
    if not codec.param_shapes(num_kv_heads=2, head_dim=head_dim):
        return codec.init_params(num_kv_heads=2, head_dim=head_dim)
    samples = rng.normal(size=(2, 512, head_dim)) + mean
    samples[:, :, 3] *= 8
    return codec.calibrate(samples)


@pytest.mark.parametrize(
    ("head_dim", "generation"), [(64, 6), pytest.param(128, 5, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", SUPPORTED)
def test_pages_decode_as_the_codecs_do(name, head_dim, generation):
    spec = spec_of(codecs.pair(name), head_dim=head_dim)
    fmt = page_format(spec, generation=generation)
    rng = np.random.default_rng(0)
    quantised, decoded, both = [], [], []
    for codec, mean in ((spec.k_codec, 0.0), (spec.v_codec, 1.0)):
        x = jnp.asarray(rng.normal(size=(3, 2, 128, head_dim)) + mean, jnp.bfloat16)
        params = params_of(codec, rng, head_dim, mean)
        both.append(params)
        quantised.append(codec.quantise(x, params))
        decoded.append(np.asarray(codec.decode(codec.encode(x, params), params, jnp.float32)))
    pages = pack_page(fmt, spec, *quantised)
    assert pages.shape == (3, fmt.rows, 128)
    for got, expected in zip(fmt.unpack(pages, tuple(both)), decoded, strict=True):
        # levels of codebooks are rounded to bfloat16, nothing else
        np.testing.assert_allclose(got, expected, rtol=2**-8, atol=2e-3)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("head_dim", [32, 128, pytest.param(256, marks=pytest.mark.slow)])
def test_calibrated_levels_and_outliers_are_not_rounded(bits, head_dim):
    """One, two and three outliers a token; a page that nothing was written to reads finite."""
    spec = spec_of(codecs.pair(f"kvquant{bits}"), head_dim=head_dim)
    fmt = page_format(spec, generation=5)
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_t(3, size=(2, 128, head_dim)), jnp.bfloat16)
    pair = spec.k_codec, spec.v_codec
    params = tuple(params_of(codec, rng, head_dim, 0.5) for codec in pair)
    codes = [codec.quantise(x, own) for codec, own in zip(pair, params, strict=True)]
    pages = pack_page(fmt, spec, *codes)
    for got, codec, own in zip(fmt.unpack(pages, params), pair, params, strict=True):
        expected = np.asarray(codec.decode(codec.encode(x, own), own, jnp.float32))
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)
        exact = np.asarray(got == x.astype(jnp.float32)).sum(-1)
        assert (exact >= codec.num_outliers(head_dim)).all()
    for x in fmt.unpack(jnp.full_like(pages, -1), params):
        assert np.isfinite(x).all()


def test_what_the_kernels_do_not_read_is_refused_with_the_reason():
    for name, match in (("turboquant5", "bits=5"), ("kivi3", "bits=3"), ("pca2", "pca: no TPU")):
        with pytest.raises(NotImplementedError, match=match):
            page_format(spec_of(codecs.pair(name)), generation=6)
    for fields, head_dim, match in (
        ({"outliers": 0.1}, 128, "no TPU kernel reads KVQuantKey.*outliers=0.1"),
        ({}, 512, "at most 256 .* got 512"),
        ({}, 80, "3 bits need a multiple of 32 channels, .* got 80"),
    ):
        with pytest.raises(NotImplementedError, match=match):
            page_format(spec_of(codecs.pair("kvquant3", **fields), head_dim=head_dim), generation=6)
    with pytest.raises(NotImplementedError, match="page_size: TPU kernels need 128"):
        page_format(spec_of(codecs.pair("int8"), page_size=64), generation=6)
    with pytest.raises(NotImplementedError, match="raw: no TPU kernel reads"):
        page_format(spec_of(codecs.pair("raw"), dtype=jnp.float32), generation=6)
    with pytest.raises(NotImplementedError, match="float16 scales only"):
        page_format(spec_of(codecs.pair("int8", scale_dtype="float32")), generation=6)
