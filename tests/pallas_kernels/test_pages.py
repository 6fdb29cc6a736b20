import jax.numpy as jnp
import numpy as np
import pytest
from kernel_data import CODES, book, random_leaves

from kvjax.codecs.codebook import lloyd_max
from pallas_kernels.codes import (
    Codebook,
    OutlierKey,
    OutlierValue,
    Signs,
    Smooth,
    Symmetric,
    for_generation,
)
from pallas_kernels.pages import LatentFormat, PageFormat


@pytest.mark.parametrize("head_dim", [96, pytest.param(256, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CODES)
def test_unpack_gives_what_the_leaves_stand_for(name, head_dim):
    rng = np.random.default_rng(0)
    k_code, v_code = CODES[name]
    fmt = PageFormat(k_code, v_code, 3, head_dim)
    k = random_leaves(k_code, rng, (2, 3), head_dim, mean=0.0)
    v = random_leaves(v_code, rng, (2, 3), head_dim, mean=1.0)
    pages = fmt.pack(k.leaves, v.leaves)
    assert pages.shape == (2, fmt.rows, 128)
    for got, plain in zip(fmt.unpack(pages, (k.params, v.params)), (k, v), strict=True):
        np.testing.assert_allclose(got, plain.values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_words_of_calibrated_codes_have_every_code_once(bits):
    """Whatever is left over of eight rows of words."""
    code = OutlierKey(bits)
    for channels in range(32, 257, 32):
        q = np.random.default_rng(channels).integers(0, 2**bits, (2, 128, channels))
        words = code.pack({"q": jnp.asarray(q)}, channels_first=True)
        assert words.shape == (2, channels * bits // 32, 128)
        np.testing.assert_array_equal(code.levels(words), np.swapaxes(q, 1, 2))


def test_bits_of_a_page():
    """Codes, two float16 scales a token in one word, and nothing else at eight heads."""
    for bits, expected in ((8, 8.125), (4, 4.125), (2, 2.125)):
        fmt = PageFormat(Symmetric(bits), Symmetric(bits), 8, 128)
        assert 8 * fmt.page_bytes / (2 * 8 * 128 * 128) == expected
    # two outliers of three bytes, and of values four bytes more
    fmt = PageFormat(OutlierKey(3, outliers=2), OutlierValue(3, outliers=2), 8, 128)
    assert fmt.page_bytes == 8 * 128 * (2 * (48 + 6) + 4)


def test_the_form_follows_the_chip():
    assert for_generation(Symmetric(4), 5).order == "pairs"
    assert for_generation(Symmetric(4), 6).order == "adjacent"
    assert for_generation(Symmetric(8), 5).order == "adjacent"
    assert for_generation(Symmetric(8), 6).narrow
    assert not for_generation(Symmetric(8), 5).narrow
    assert not for_generation(Symmetric(8, groups=2), 6).narrow
    assert for_generation(OutlierKey(3), 6) == OutlierKey(3, narrow=True)
    assert for_generation(OutlierKey(3), 5) == OutlierKey(3)
    for bits in (2, 3, 4):
        normal = Codebook(bits, table=lloyd_max(bits))
        assert for_generation(normal, 5) == normal
        assert for_generation(normal, 6) == Smooth(bits, table=lloyd_max(bits))
        assert for_generation(book(bits), 6) == book(bits)  # no normal table: looked up


def test_a_table_that_the_polynomial_misses_is_refused():
    with pytest.raises(NotImplementedError, match="not that of a normal distribution"):
        Smooth(3, table=book(3).table)


def test_formats_that_do_not_fit_are_refused_with_the_reason():
    with pytest.raises(ValueError, match="Signs has no values"):
        PageFormat(Symmetric(8), Signs(rows=256), 2, 128)
    with pytest.raises(ValueError, match="expected codes without calibrated arrays"):
        LatentFormat(OutlierValue(4), OutlierValue(4), 1, 128)
    with pytest.raises(NotImplementedError, match="3 bits need a multiple of 32 channels"):
        _ = PageFormat(OutlierKey(3), OutlierValue(4), 2, 80).rows
    with pytest.raises(NotImplementedError, match=r"at most 256 .* got 512"):
        _ = PageFormat(OutlierKey(4), OutlierValue(4), 2, 512).rows
    with pytest.raises(ValueError, match="outliers: expected 0 to 8, got 9"):
        OutlierKey(4, outliers=9)
