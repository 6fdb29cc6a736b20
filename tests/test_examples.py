"""The examples do what they say."""

from __future__ import annotations

import jax
import numpy as np
import programs
import pytest


@pytest.fixture(scope="module")
def foreign():
    return programs.load("infer/foreign_model.py")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["run_linen", pytest.param("run_nnx", marks=pytest.mark.slow)])
def test_attention_and_cache_in_a_foreign_model(foreign, kind, monkeypatch):
    """Fed in pieces it is what it is fed at once: exactly while tokens are exact, closely after."""
    tokens = jax.random.randint(jax.random.key(1), (2, 90), 0, foreign.HEADS.vocab_size)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):  # flax's own
        whole = np.asarray(getattr(foreign, kind)(tokens, [90]))
        pieces = np.asarray(getattr(foreign, kind)(tokens, [40, *[1] * 50]))
    np.testing.assert_allclose(pieces[:, :41], whole[:, :41], atol=1e-5)
    error = np.abs(pieces - whole)[:, 60:].mean() / whole.std()
    assert 0 < error < 0.1  # pages of 32 tokens have been sealed at 4 bits


def test_the_foreign_cache_is_compressed(foreign):
    group = foreign.empty_cache(2, 120).groups[0]
    assert group.spec.pages_per_row == 3
    assert {leaf.dtype.name for leaf in group.pool.k[0].values()} == {"uint32", "float16"}
