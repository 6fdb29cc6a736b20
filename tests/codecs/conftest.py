"""Strict dtype and rank promotion for every test here."""

import jax
import pytest


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
