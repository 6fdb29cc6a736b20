import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from codec_data import normal

from kvjax.codecs import codebook, packing, trellis


def read(codes, bits):
    """Levels of codes `[..., T, A]`, token by token: the shift register as the module has it."""
    levels, register, out = np.array(trellis.levels(bits)), 0, []
    for code in np.moveaxis(np.asarray(codes).astype(np.int64), -2, 0):
        register = (register << 1 | (code & 1)) % (2 * trellis.STATES)
        out.append(levels[(code >> 1) << 2 | trellis._subset(register)])
    return np.stack(out, axis=-2)


@pytest.mark.parametrize("bits", range(1, 7))
@pytest.mark.parametrize("tokens", [32, 128])
def test_words_are_read_as_token_by_token(bits, tokens):
    codes = np.random.RandomState(bits).randint(0, 2**bits, (2, tokens, 3)).astype(np.uint32)
    got = jax.jit(trellis.decode, static_argnums=1)(packing.pack(jnp.asarray(codes), bits), bits)
    np.testing.assert_array_equal(got, read(codes, bits).astype(np.float32))


@pytest.mark.parametrize("bits", range(1, 7))
def test_beats_lloyd_max_at_equal_bits(bits):
    x = normal(12, 128, 16)
    codes = jax.jit(lambda v: trellis.encode(v, [(bits, 16)]))(x)
    assert codes.dtype == jnp.uint32
    assert int(codes.max()) == 2**bits - 1
    error = float(np.mean((read(codes, bits) - np.asarray(x)) ** 2))
    bound = {1: 0.87, 2: 0.78, 3: 0.74, 4: 0.71, 5: 0.71, 6: 0.71}[bits]
    assert error < bound * codebook.distortion(bits)


def test_the_search_finds_the_best_path():
    x = normal(3, 6, 2, seed=4)
    codes = np.stack(list(itertools.product(range(2), repeat=6))).astype(np.uint32)  # P T
    every = read(codes[..., None], 1)[..., 0]
    best = ((x[:, None] - every[None, :, :, None]) ** 2).sum(2).min(1)
    got = read(trellis.encode(jnp.asarray(x), [(1, 2)]), 1)
    np.testing.assert_allclose(((x - got) ** 2).sum(1), best, rtol=1e-5)


def test_channels_do_not_meet():
    x = normal(2, 32, 5)
    whole = trellis.encode(jnp.asarray(x), [(2, 5)])
    alone = trellis.encode(jnp.asarray(x[1:, :, 3:4]), [(2, 1)])
    np.testing.assert_array_equal(whole[1:, :, 3:4], alone)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_levels_are_symmetric_and_every_state_reaches_all(bits):
    levels = np.array(trellis.levels(bits))
    assert len(levels) == 2 ** (bits + 1)
    np.testing.assert_allclose(levels, -levels[::-1], atol=1e-12)
    register = np.arange(2 * trellis.STATES)
    subset = trellis._subset(register)
    for state in range(trellis.STATES):  # a state offers subsets two apart, so levels spread evenly
        assert abs(subset[2 * state] - subset[2 * state + 1]) == 2
