"""The choice between a kernel and plain XLA, made when a program is lowered; that for several
devices is in `test_aot_flash_model.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.devices import on_one_device

pytestmark = pytest.mark.quick  # it leans on jax's inside


def choice(x, y):
    """Both forms are there until one is lowered."""
    return on_one_device("sum", lambda x, y: {"s": x + y}, lambda x, y: {"s": x - y}, x, y)["s"]


def test_one_device():
    x, y = jnp.arange(6.0).reshape(2, 3), jnp.arange(3.0)
    text = str(jax.make_jaxpr(choice)(y, y))
    assert "add" in text
    assert "sub" in text
    for call in (choice, jax.jit(choice)):
        np.testing.assert_array_equal(call(x, x), 2 * x)
    with jax.disable_jit():
        np.testing.assert_array_equal(choice(x, x), 2 * x)
    np.testing.assert_array_equal(jax.vmap(choice, in_axes=(0, None))(x, y), x + y[None])


def test_forms_of_unlike_shapes():
    with pytest.raises(TypeError, match=r"sum: plain: expected .*float32\[3\].*got .*float32\[\]"):
        on_one_device("sum", lambda x: x, jnp.sum, jnp.zeros(3))
