"""Sealed pages: the kernel in interpret mode against plain XLA, which packs otherwise."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import aot, words
from pallas_kernels.codes import Asymmetric, BFloat16, KiviKey, Symmetric
from pallas_kernels.pages import LatentFormat, PageFormat
from pallas_kernels.seal import Quantiser, seal, tpu
from pallas_kernels.seal import words as products


def absmax(x):
    scale = words.as_half(jnp.max(jnp.abs(x), axis=0, keepdims=True) / 127)
    return jnp.round(x / jnp.maximum(scale, 1e-6)).astype(jnp.int32), scale


def to_4_bits(x):
    """With a low, over all rows or, of a key's 128 tokens, over spans of 32."""
    low = words.as_half(jnp.min(x, axis=-2, keepdims=True))
    scale = words.as_half((jnp.max(x, axis=-2, keepdims=True) - low) / 15)
    q = jnp.clip(jnp.round((x - low) / jnp.maximum(scale, 1e-6)), 0, 15)
    return q.astype(jnp.int32), scale, low


def by_token(x):
    q, scale, low = to_4_bits(x)
    return q, jnp.concatenate([scale, low])


def by_channel(x):
    q, scale, low = to_4_bits(x.reshape(4, 32, -1))
    return q.reshape(x.shape), jnp.concatenate([scale[:, 0], low[:, 0]])


ROTATION = np.linalg.qr(np.random.default_rng(7).normal(size=(64, 64)))[0].astype(np.float32)
AS_IS, INT8, INT4 = Quantiser(lambda x: (x, None)), Quantiser(absmax), Quantiser(by_token)
TURNED = Quantiser(absmax, ROTATION)
KIVI = Quantiser(by_channel, by_tokens=True)

#: (format, quantisers) by name
CASES = {
    "bf16": (PageFormat(BFloat16(), BFloat16(), 2, 128), (AS_IS, AS_IS)),
    "int8-one-head": (PageFormat(Symmetric(8), Symmetric(8), 1, 128), (INT8, INT8)),
    "int8-ten-heads": (PageFormat(Symmetric(8), Symmetric(8), 10, 64), (INT8, INT8)),
    "rotated": (PageFormat(Symmetric(8), Symmetric(8), 3, 64), (TURNED, TURNED)),
    "int4-wide": (PageFormat(Asymmetric(4), Asymmetric(4), 2, 256), (INT4, INT4)),
    "kivi-narrow": (
        PageFormat(KiviKey(4, order="pairs"), Asymmetric(4, order="pairs"), 2, 80),
        (KIVI, INT4),
    ),
    "int8-four-wide-heads": (PageFormat(Symmetric(8), Symmetric(8), 4, 256), (INT8, INT8)),
    "kivi-three-heads-of-192": (
        PageFormat(KiviKey(4, order="pairs"), BFloat16(), 3, 192),
        (KIVI, AS_IS),
    ),
    "latent": (
        LatentFormat(Symmetric(8), Symmetric(8), 1, 256, rope=BFloat16(), rope_dim=64),
        (INT8, AS_IS),
    ),
}


def operands(fmt, *, sequences=2, tokens=300, pages=6):
    """(pool, k, v): keys and values of unlike means, the pool full of sevens."""
    rng = np.random.default_rng(3)
    K = fmt.num_kv_heads
    k, v = (
        jnp.asarray(rng.normal(size=(sequences, tokens, K, H)) + mean, jnp.bfloat16)
        for H, mean in ((fmt.width_of(0), 0), (fmt.width_of(1), 2))
    )
    return jnp.full((pages, fmt.rows, 128), 7, jnp.int32), k, v


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.quick if n == "rotated" else ()) for n in CASES]
)
def test_the_kernel_writes_what_plain_xla_does(name):
    fmt, quantisers = CASES[name]
    pool, k, v = operands(fmt)
    ids, start = jnp.asarray([[4, 1], [9, 2]]), jnp.asarray([3, 44])
    both = [
        np.asarray(seal(pool, ids, k, v, start=start, fmt=fmt, quantisers=quantisers, **how))
        for how in ({"implementation": "xla"}, {"implementation": "tpu", "interpret": True})
    ]
    same = both[0] == both[1]
    assert same[[0, 3, 5]].all()  # no page's id, and one past the end
    assert (both[1][[0, 3, 5]] == 7).all()
    # a rotation's products add up in another order, and a number may round to its neighbour
    assert same.mean() > (0.9999 if name == "rotated" else 0.999999)
    # and the pages stand for the tokens
    keys, values = (np.asarray(x) for x in fmt.unpack(both[1][[4, 1, 2]]))
    for got, x in ((keys, k), (values, v)):
        x = np.asarray(x.astype(jnp.float32))
        want = np.stack([x[0, 3:131], x[0, 131:259], x[1, 172:300]]).swapaxes(1, 2)
        want = want @ ROTATION.T if name == "rotated" else want
        step = 0.6 if "int4" in name or "kivi" in name else 0.2 if name == "rotated" else 0.06
        np.testing.assert_allclose(got, want, atol=step / 2 + 0.02)


def test_copies_race_with_nothing_and_other_tokens_do_not_matter(capsys, monkeypatch):
    """The interpreter that looks for races knows no pairs in words; they are read apart here."""
    monkeypatch.setattr(
        tpu, "_pair", lambda tokens, p: (tokens[0, :, 2 * p], tokens[0, :, 2 * p + 1])
    )
    monkeypatch.setattr(tpu, "_half", lambda pair, *, upper: pair[upper].astype(jnp.float32))
    fmt, quantisers = CASES["int8-ten-heads"]
    pool, k, v = operands(fmt)
    ids, start = jnp.asarray([[4, 1], [-1, 2]]), jnp.asarray([3, 44])
    how = {"start": start, "fmt": fmt, "quantisers": quantisers, "implementation": "tpu"}
    want = seal(pool, ids, k, v, interpret=True, **how)
    token = jnp.arange(300)[None, :, None, None]
    used = jnp.stack([(token[0] >= 3) & (token[0] < 259), (token[0] >= 172) & (token[0] < 300)])
    hidden = [jnp.where(used, x, jnp.nan) for x in (k, v)]
    checked = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    got = seal(pool, ids, *hidden, interpret=checked, **how)
    np.testing.assert_array_equal(got, want)
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.mark.parametrize(("dtype", "exponent", "mantissa", "most"), [
    (np.float16, 5, 10, 65504), (ml_dtypes.float8_e4m3fn, 4, 3, 448),
    (ml_dtypes.float8_e5m2, 5, 2, 57344),
])  # fmt: skip
def test_bits_of_small_floats_are_the_cast(dtype, exponent, mantissa, most):
    rng = np.random.default_rng(0)
    x = rng.normal(size=20000) * 10.0 ** rng.uniform(-9, 4, 20000)
    every = np.arange(2**16 if mantissa == 10 else 2**8)
    of_format = every.astype(np.uint16 if mantissa == 10 else np.uint8).view(dtype)
    of_format = of_format.astype(np.float32)
    of_format = of_format[np.isfinite(of_format)]
    halfway = (of_format[1:] + of_format[:-1]) / 2
    x = np.concatenate([x, of_format, halfway]).astype(np.float32)
    x = x[np.abs(x) <= most]
    want = x.astype(dtype).view(np.uint16 if mantissa == 10 else np.uint8)
    got = words.float_bits(jnp.asarray(x), exponent=exponent, mantissa=mantissa)
    np.testing.assert_array_equal(got, want)


def test_halves_are_clipped_and_rounded():
    x = jnp.asarray([1e9, -1e9, 1e-9, 0.1, 65519.0])
    with np.errstate(over="ignore"):
        want = np.clip(np.asarray(x), -65504, 65504).astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(words.as_half(x), want)


@pytest.mark.parametrize("order", words.ORDERS)
@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_words_by_products_are_the_words(order, bits):
    rng = np.random.default_rng(bits)
    for entries in (64, 96, 128, 256):
        codes = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (entries, 128)).astype(np.int32)
        given = jnp.asarray(codes)
        if bits == 16:  # the numbers themselves
            numbers = jnp.asarray(rng.normal(size=codes.shape), jnp.bfloat16)
            codes = jax.lax.bitcast_convert_type(numbers, jnp.uint16).astype(jnp.int32)
            given = numbers.astype(jnp.float32)
        want = words.pack(jnp.asarray(codes), bits, order)
        matrix = jnp.asarray(products.places(entries, bits, order), jnp.bfloat16)
        for x, turned in ((given, False), (given.T, True)):
            np.testing.assert_array_equal(products.pack(x, matrix, bits, turned=turned), want)


def test_what_does_not_fit_is_named():
    fmt, quantisers = CASES["bf16"]
    pool, k, v = operands(fmt)
    ids, how = jnp.zeros((2, 1), jnp.int32), {"fmt": fmt, "quantisers": quantisers}
    with pytest.raises(ValueError, match=r"seal: pool: expected \[P, 256, 128\]"):
        seal(pool[:, :8], ids, k, v, **how)
    with pytest.raises(ValueError, match=r"seal: v: expected \(2, 300, 2, 128\)"):
        seal(pool, ids, k, v[:, :, :1], **how)
    with pytest.raises(ValueError, match="seal: k: expected 128 tokens or more, got 100"):
        seal(pool, ids, k[:, :100], v[:, :100], **how)
    with pytest.raises(ValueError, match="seal: ids: expected one page or more"):
        seal(pool, ids[:, :0], k, v, **how)
    with pytest.raises(ValueError, match="seal: start: expected"):
        seal(pool, ids, k, v, start=jnp.zeros(3, jnp.int32), **how)
    with pytest.raises(NotImplementedError, match="takes bfloat16, got float32"):
        seal(pool, ids, k.astype(jnp.float32), v, implementation="tpu", **how)
    with pytest.raises(NotImplementedError, match="no GPU kernel"):
        seal(pool, ids, k, v, implementation="gpu", **how)


BY_DEFAULT = [
    ("rotated", "v6e"), ("int8-one-head", "v5e"), ("int8-four-wide-heads", "v5e"),
    ("kivi-three-heads-of-192", "v6e"), ("latent", "v5e"),
]  # fmt: skip


@pytest.mark.skipif(not aot.available(), reason="needs libtpu, of the extra kvjax[aot]")
@pytest.mark.usefixtures("libtpu_environment")
@pytest.mark.parametrize(
    ("name", "chip"),
    [
        pytest.param(name, chip, marks=pytest.mark.slow if (name, chip) not in BY_DEFAULT else ())
        for name in CASES
        for chip in ("v5e", "v6e")
    ],
)
def test_it_compiles_and_copies_no_pool(name, chip):
    fmt, quantisers = CASES[name]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands(fmt, tokens=1024)]
    ids, start = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((2, 7), (2,)))

    def step(pool, k, v, ids, start):
        how = {"fmt": fmt, "quantisers": quantisers, "implementation": "tpu"}
        return seal(pool, ids, k, v, start=start, **how)

    done = aot.compile_for(chip, step, *shapes, ids, start, donate_argnums=0)
    pool = ",".join(map(str, shapes[0].shape))
    assert f"s32[{pool}]{{2,1,0:T(8,128)}} copy" not in done.as_text()
    assert done.memory_analysis().alias_size_in_bytes == 4 * np.prod(shapes[0].shape)
