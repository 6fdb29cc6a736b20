import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import words


@pytest.mark.parametrize("order", words.ORDERS)
@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_round_trip_fills_every_bit(order, bits):
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 2**bits, (2, 3, 160, 8))
    packed = words.pack(jnp.asarray(codes), bits, order)
    assert packed.shape == (2, 3, 160 * bits // 32, 8)
    assert packed.dtype == jnp.int32
    np.testing.assert_array_equal(words.unpack(packed, bits, order), codes)
    assert set(np.unique(words.pack(jnp.full((32, 8), -1), bits, order))) == {-1}


def test_orders_place_entries_as_documented():
    """By the entry number itself: 64 entries of 8 bits, 16 rows of 4 fields."""
    entries = jnp.arange(64)[:, None]
    bytes_of = {o: np.asarray(words.pack(entries, 8, o)).view(np.uint8) for o in words.ORDERS}
    for i in range(16):
        for f in range(4):
            assert bytes_of["adjacent"][i, f] == i * 4 + f
            assert bytes_of["fields"][i, f] == f * 16 + i
            j, h = f % 2, f // 2
            assert bytes_of["pairs"][i, f] == j * 32 + 2 * i + h


def test_entries_that_do_not_fill_words_are_refused():
    with pytest.raises(NotImplementedError, match="20 entries of 2 bits"):
        words.pack(jnp.zeros((20, 8), jnp.int32), 2, "adjacent")


def test_half_values_are_those_of_float16_and_always_finite():
    bits = np.arange(2**16, dtype=np.uint32)
    got = np.asarray(words.half_value(jnp.asarray(bits, jnp.int32)))
    expected = bits.astype(np.uint16).view(np.float16).astype(np.float32)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(got[finite], expected[finite])
    assert np.isfinite(got).all()
    # the upper half of a word is not looked at
    both = jnp.asarray(bits | 0xABCD0000, jnp.uint32).view(jnp.int32)
    np.testing.assert_array_equal(words.half_value(both), got)
    back = words.half_bits(jnp.asarray(expected[finite]))
    np.testing.assert_array_equal(back, bits[finite])
