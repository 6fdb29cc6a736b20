import jax.numpy as jnp
import numpy as np
import pytest
from codec_data import normal, rel_mse, round_trip

from kvjax import codecs

BYTES = {(2, 32): 96, (2, 64): 80, (2, 128): 72, (4, 32): 160, (4, 64): 144, (4, 128): 136}


@pytest.mark.parametrize(("bits", "group"), BYTES)
def test_published_bytes(bits, group):
    both = codecs.pair("kivi2", bits=bits, group=group)
    shapes = [c.code_shapes(tokens=128, head_dim=128, dtype=jnp.bfloat16) for c in both]
    assert sum(map(codecs.code_bytes, shapes)) == 128 * BYTES[bits, group]


def test_keys_are_grouped_along_tokens_and_values_along_channels():
    loud_channel = normal(1, 64, 64)
    loud_channel[..., 5] *= 100
    loud_token = np.swapaxes(loud_channel, -1, -2).copy()
    key, value = codecs.pair("kivi2")

    quiet = np.arange(64) != 5

    def error(codec, x):
        return np.mean(np.square(round_trip(codec, {}, x) - x)[:, quiet][..., quiet])

    assert error(key, loud_channel) < 0.3 * error(value, loud_channel)
    assert error(value, loud_token) < 0.3 * error(key, loud_token)


def test_layout_of_scales():
    x = normal(2, 64, 96)
    key, value = (c.encode(jnp.asarray(x), {}) for c in codecs.pair("kivi2"))
    assert key["scale"].shape == key["low"].shape == (2, 2, 96)
    assert value["scale"].shape == value["low"].shape == (2, 3, 64)
    np.testing.assert_array_equal(key["low"][1, 1], x[1, 32:].min(0).astype(np.float16))
    np.testing.assert_array_equal(value["low"][1, 2], x[1, :, 64:].min(-1).astype(np.float16))


def test_groups_do_not_see_each_other():
    x = normal(1, 64, 64)
    other = x.copy()
    other[:, 32:] *= 9
    key, value = codecs.pair("kivi2")
    for codec in (key, value):
        a, b = round_trip(codec, {}, x), round_trip(codec, {}, other)
        np.testing.assert_array_equal(a[:, :32], b[:, :32])


def test_a_constant_group_reads_back():
    x = np.full((1, 64, 64), 0.1, np.float32)
    for codec in codecs.pair("kivi2"):
        np.testing.assert_allclose(round_trip(codec, {}, x), x, rtol=1e-3)


def test_eight_bits_are_nearly_exact():
    x = normal(1, 64, 64)
    for codec in codecs.pair("kivi8"):
        assert rel_mse(round_trip(codec, {}, x), x) < 1e-4


def test_groups_must_divide():
    key, value = codecs.pair("kivi2", group=32)
    with pytest.raises(ValueError, match=r"expected a divisor of head_dim=80, got 32"):
        value.check(head_dim=80, page_size=64, role="v")
    with pytest.raises(ValueError, match=r"expected a divisor of page_size=48, got 32"):
        key.check(head_dim=80, page_size=48, role="k")
    codecs.get("kivi2", role="v", group=16).check(head_dim=80, page_size=64, role="v")
