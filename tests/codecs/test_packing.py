import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.codecs import packing


def words(codes, bits):
    """Words of one channel."""
    codes = jnp.asarray(codes, jnp.uint32)[:, None]
    return [int(w) for w in packing.pack(codes, bits)[:, 0]]


def test_adjacent_tokens_share_a_word_little_endian():
    assert words(range(8), 4) == [0x76543210]
    assert words([0, 1, 2, 3] * 4, 2) == [0xE4E4E4E4]
    assert words([1, 0, 1, 1] + [0] * 28, 1) == [0b1101]
    assert words([1, 2, 3, 255], 8) == [0xFF030201]


def test_three_bits_are_a_two_bit_plane_then_a_one_bit_plane():
    codes = [0, 1, 2, 3, 4, 5, 6, 7] * 4
    assert packing.planes(3) == (2, 1)
    assert words(codes, 3) == [0xE4E4E4E4] * 2 + [0xF0F0F0F0]
    assert packing.planes(7) == (4, 2, 1)


@pytest.mark.parametrize("bits", range(1, 9))
def test_every_width_is_exact_and_dense(bits):
    for head_dim in (8, 40):
        rng = np.random.RandomState(head_dim)
        codes = rng.randint(0, 2**bits, (32, head_dim)).astype(np.uint32)
        packed = packing.pack(jnp.asarray(codes), bits)
        assert packed.dtype == jnp.uint32
        assert packed.shape == (bits, head_dim)  # 32 * bits / 32 rows
        np.testing.assert_array_equal(packing.unpack(packed, bits), codes)


@functools.partial(jax.jit, static_argnums=1)
def pack_unpack(codes, bits):
    return packing.unpack(packing.pack(codes, bits), bits)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([1, 3, 5, 7, 8]), st.sampled_from([1, 3]), st.just(5), st.integers(0, 2**31 - 1)
)
def test_round_trip(bits, pages, head_dim, seed):
    shape = (2, 32 * pages, head_dim)
    codes = np.random.RandomState(seed).randint(0, 2**bits, shape).astype(np.uint32)
    np.testing.assert_array_equal(pack_unpack(codes, bits), codes)


def test_a_page_that_leaves_half_a_word_is_refused():
    with pytest.raises(ValueError, match=r"page_size: expected a multiple of 16 .*got 24"):
        packing.check(2, 24)
    packing.check(4, 8)
