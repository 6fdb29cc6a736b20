"""int8, int4, fp8 and the relative errors of uniform quantisers on N(0, 1), H = 128."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from codec_data import entries, normal, rel_mse, round_trip

from kvjax import codecs
from kvjax.codecs import fp8

PUBLISHED = [
    ("int8", {}, 4.18e-5),
    ("int4", {"symmetric": True}, 1.373e-2),
    ("int4", {"group": 32}, 6.11e-3),
    ("int4", {"group": 64}, 8.01e-3),
    ("int4", {"group": 128}, 9.92e-3),
    ("int4", {"bits": 3, "group": 32}, 2.81e-2),
    ("int4", {"bits": 3, "group": None}, 4.56e-2),
    ("int4", {"bits": 2, "group": 32}, 0.1539),
    ("int4", {"bits": 2, "group": 128}, 0.2502),
    ("fp8", {}, 6.6e-4),
    ("int4-hadamard", {"group": 32}, 6.11e-3),
]


@pytest.mark.parametrize(("name", "fields", "expected"), PUBLISHED)
def test_relative_error(name, fields, expected):
    x = normal(1, 16384, 128)
    assert rel_mse(round_trip(codecs.get(name, **fields), {}, x), x) == pytest.approx(
        expected, rel=0.02
    )


def test_int8_scale_is_absmax_over_127_with_no_floor():
    codec = codecs.get("int8", scale_dtype="float32")
    x = entries("k", 2, 64, 32) * np.float32(1e-3)
    codes = codec.encode(jnp.asarray(x), {})
    np.testing.assert_allclose(codes["scale"], np.abs(x).max(-1) / 127, rtol=1e-6)
    assert codes["x"].dtype == jnp.int8
    assert np.abs(np.asarray(codes["x"])).max(-1).min() == 127


@pytest.mark.parametrize("name", ["int8", "int4", "kivi4"])
def test_error_is_at_most_half_a_step(name):
    codec = codecs.get(name, role="v")
    x = entries("k", 2, 64, 64)
    codes = codec.encode(jnp.asarray(x), {})
    read = np.asarray(codec.decode(codes, {}, "float32"))
    step = np.asarray(codes["scale"], np.float32)
    step = step[..., None] if step.ndim == 2 else np.swapaxes(step, -1, -2)
    step = np.repeat(step, 64 // step.shape[-1], axis=-1)
    minimum = np.abs(np.asarray(codes.get("low", np.zeros(1)), np.float32)).max() * 2.0**-11
    assert np.all(np.abs(read - x) <= step * 0.5001 + minimum)


@pytest.mark.parametrize("name", ["int8", "int4", "fp8", "kivi2", "raw"])
@pytest.mark.parametrize("role", "kv")
def test_reading_and_writing_again_changes_nothing(name, role):
    fields = {} if name == "raw" else {"scale_dtype": "float32"}
    codec = codecs.get(name, role=role, **fields)
    once = round_trip(codec, {}, entries(role, 1, 64, 64))
    np.testing.assert_allclose(round_trip(codec, {}, once), once, rtol=2e-5, atol=2e-5)


def test_raw_keeps_its_dtype():
    x = jnp.asarray(entries("v", 1, 32, 8), jnp.bfloat16)
    assert codecs.Raw().encode(jnp.asarray(x), {})["x"].dtype == jnp.bfloat16
    assert codecs.Raw(dtype="float32").encode(jnp.asarray(x), {})["x"].dtype == jnp.float32
    np.testing.assert_array_equal(codecs.Raw().decode({"x": x}, {}, "float32"), np.float32(x))


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_fp8_saturates(format):
    codec = codecs.get("fp8", format=format)
    # a scale that float16 rounds down sends amax past 448: it must clip, not become NaN
    x = np.float32(10.0 ** np.arange(-8, 5))[:, None] * np.linspace(-1, 1, 32, dtype=np.float32)
    x = np.tile(x, (5, 1))[None, :64]
    read = round_trip(codec, {}, x)
    assert np.isfinite(read).all()
    big = np.abs(x).max(-1) > 0.1
    np.testing.assert_allclose(read[big], x[big], atol=0.13 * np.abs(x[big]).max(), rtol=0.13)
    assert np.isnan(np.float32(jnp.float32(500).astype(jnp.float8_e4m3fn)))  # why it is clipped


def test_hadamard_rescues_four_bits_from_outlier_channels():
    x = normal(2, 256, 128)
    x[..., 7] *= 40
    plain, rotated = (codecs.get(n) for n in ("int4", "int4-hadamard"))
    others = np.arange(128) != 7
    errors = [rel_mse(round_trip(c, {}, x)[..., others], x[..., others]) for c in (plain, rotated)]
    assert errors[1] < 0.5 * errors[0]


def test_refusals():
    with pytest.raises(ValueError, match=r"int: group: expected a divisor of head_dim=80, got 32"):
        codecs.get("int4", group=32).check(head_dim=80, page_size=64, role="k")
    with pytest.raises(ValueError, match=r"page_size: expected a multiple of 8 .* got 12"):
        codecs.get("int4").check(head_dim=80, page_size=12, role="k")
    with pytest.raises(ValueError, match=r"multiple of 8, got 20"):
        codecs.get("int4-hadamard").check(head_dim=20, page_size=64, role="k")
    with pytest.raises(ValueError, match="bits: expected 2 to 8, got 9"):
        codecs.get("int4", bits=9)
    with pytest.raises(ValueError, match="format: expected one of"):
        codecs.get("fp8", format="e3m4")


def test_packed_leaves_hold_no_byte_per_code():
    codec = codecs.get("int4")
    codes = jax.eval_shape(lambda x: codec.encode(jnp.asarray(x), {}), jnp.zeros((1, 64, 128)))
    assert codes["words"].dtype == jnp.uint32
    assert codes["words"].size * 4 == 64 * 128 // 2


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_every_float8(format):
    bits = jnp.arange(256, dtype=jnp.uint8)
    kind = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}[format]
    expected = jax.lax.bitcast_convert_type(bits, kind).astype(jnp.float32)
    np.testing.assert_array_equal(jax.jit(fp8.numbers, static_argnums=1)(bits, format), expected)
