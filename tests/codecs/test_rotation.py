import jax.numpy as jnp
import numpy as np
import pytest
from codec_data import normal

from kvjax.codecs import rotation

HEAD_DIMS = (8, 32, 40, 64, 80, 96, 112, 128, 192, 256)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rotation_keeps_inner_products_and_undoes(head_dim):
    q, k = jnp.asarray(normal(4, head_dim)), jnp.asarray(normal(4, head_dim, seed=1))
    got = np.sum(np.asarray(rotation.rotate(q)) * np.asarray(rotation.rotate(k)), -1)
    np.testing.assert_allclose(got, np.sum(q * k, -1), atol=1e-5 * head_dim)
    np.testing.assert_allclose(rotation.unrotate(rotation.rotate(q)), q, atol=1e-5)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_an_outlier_is_spread_over_the_head(head_dim):
    matrix = rotation.hadamard(head_dim)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(head_dim), atol=1e-6)
    assert np.abs(matrix).max() <= 4.5 / np.sqrt(head_dim)
    assert np.count_nonzero(np.abs(matrix) > 1e-6, axis=1).min() >= head_dim / 5


def test_blocks_and_seeds():
    assert rotation.blocks(96) == [64, 32]
    assert rotation.blocks(112) == [64, 32, 16]
    assert rotation.hadamard(64, 0) is rotation.hadamard(64, 0)
    assert not np.array_equal(rotation.hadamard(64, 0), rotation.hadamard(64, 1))
    # a cache written on one machine is read on another: these signs may never change
    assert (rotation.hadamard(8, 0)[0] > 0).sum() in (0, 8)
    with pytest.raises(ValueError, match="multiple of 8, got 20"):
        rotation.check(20)


def test_haar_rows_are_orthonormal_in_chunks():
    matrix = rotation.haar(16, 40)
    np.testing.assert_allclose(matrix[:16] @ matrix[:16].T, np.eye(16), atol=1e-6)
    np.testing.assert_allclose(matrix[16:32] @ matrix[16:32].T, np.eye(16), atol=1e-6)
    assert matrix.shape == (40, 16)
