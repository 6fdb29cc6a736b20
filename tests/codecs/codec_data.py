"""Data on which a swap of keys and values shows, and codecs ready to use."""

import functools

import jax
import numpy as np

from kvjax import codecs


def normal(*shape, seed=0):
    return np.random.RandomState(seed).standard_normal(shape).astype(np.float32)


def entries(role, *shape, seed=0):
    """Keys have outlier channels with an offset; values have loud tokens and a skew."""
    x = normal(*shape, seed=seed + (role == "v"))
    if role == "k":
        x[..., 3] = 8 * x[..., 3] + 12
        x[..., 17] *= 6
    else:
        x = (np.abs(x) ** 1.5 * np.sign(x) + 0.2) * np.exp(normal(*shape[:-1], 1, seed=seed + 2))
    return x.astype(np.float32)


@functools.lru_cache(maxsize=256)
def ready(name, role="k", head_dim=64, heads=2, **fields):
    """A codec of the registry, and params calibrated on `entries`."""
    codec = codecs.get(name, role=role, **fields)
    if not codec.param_shapes(num_kv_heads=heads, head_dim=head_dim):
        return codec, {}
    return codec, codec.calibrate(entries(role, heads, 512, head_dim, seed=99))


def round_trip(codec, params, x):
    """x as it is read back in the head's own space (for codecs that have one)."""
    run = jax.jit(
        lambda v: codec.finish_output(
            codec.decode(codec.encode(v, params), params, "float32"), params
        )
    )
    return np.asarray(run(x))


def rel_mse(got, want):
    return float(np.sum((got - want) ** 2) / np.sum(want**2))
