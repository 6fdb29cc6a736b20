"""1-bit sketches: <q, k> ~ constant * |k| * <S q, sign(S k)>, unbiased over S.

QJL (https://arxiv.org/abs/2406.03482, definition 3.1). The constant belongs to the kind of S, and
mixing them up is the field's most common bug, so both come from here:

* "gaussian": rows N(0, I), constant sqrt(pi/2)/m; variance (pi/2 - rho^2)/m for unit vectors;
* "orthogonal": orthonormal rows, chunks of H; variance about 2.75 times lower at rho = 0. A row
  has E |<s, u>| = Gamma(H/2)/(sqrt(pi) Gamma((H+1)/2)) =: e instead of sqrt(2/pi), so the
  constant is 1/(m e), up to 1 + 1/(4H) the sqrt(pi/2) sqrt(H)/m that is often quoted.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt32

from kvjax.codecs import rotation

_KINDS = {"orthogonal": rotation.haar, "gaussian": rotation.gaussian}

project = rotation.apply


def projection(kind: str, head_dim: int, rows: int, seed: int) -> np.ndarray:
    """S, `[rows, H]`."""
    if kind not in _KINDS:
        raise ValueError(f"sketch: expected one of {sorted(_KINDS)}, got {kind!r}.")
    return _KINDS[kind](head_dim, rows, seed)


def sketch_constant(kind: str, head_dim: int, rows: int) -> float:
    """What makes the estimate unbiased, for the S that `projection` gives."""
    if kind == "gaussian":
        return math.sqrt(math.pi / 2) / rows
    mean_abs = math.exp(math.lgamma(head_dim / 2) - math.lgamma((head_dim + 1) / 2))
    return math.sqrt(math.pi) / (rows * mean_abs)


def sign_bits(x: Float[Array, "*x"]) -> UInt32[Array, "*x"]:
    """1 where positive; 0 is a negative sign, as in the reference."""
    return (x > 0).astype(jnp.uint32)


def sign_values(bits: UInt32[Array, "*x"]) -> Float[Array, "*x"]:
    return jnp.where(bits == 0, -1.0, 1.0).astype(jnp.float32)
