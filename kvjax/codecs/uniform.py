"""Uniform quantisers over one axis, the arithmetic that int8, int4 and KIVI share.

Asymmetric: z = min, s = (max - min) / (2^b - 1), q = round((x - z) / s), x^ = q s + z.
Symmetric: s = amax / (2^(b-1) - 1), x^ = q s. Codes are computed against the scale and minimum as
stored, so |x - x^| <= s/2 but for the rounding of the minimum.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped, UInt32

from kvjax.codecs.base import divide

#: a scale or minimum as it is stored: `as_scale` of a dtype, or in a kernel `words.as_half`
Store = Callable[[Array], Array]


def affine(
    x: Float[Array, "*x"], *, bits: int, axis: int, store: Store
) -> tuple[Float[Array, "*x"], Float[Array, "*s"], Float[Array, "*s"]]:
    """Codes 0..2**bits-1 of x, as floats, with scale and minimum per slice along `axis` (kept, of
    length 1). Runs in a kernel."""
    top = 2**bits - 1
    low = store(jnp.min(x, axis=axis, keepdims=True))
    above = x - low.astype(jnp.float32)
    scale = store(jnp.maximum(jnp.max(above, axis=axis, keepdims=True), 0) / top)
    return jnp.clip(jnp.round(divide(above, scale)), 0, top), scale, low


def unaffine(
    codes: UInt32[Array, "*x"], scale: Float[Array, "*s"], low: Float[Array, "*s"]
) -> Float[Array, "*x"]:
    # through int32: a cast from uint32 to float is slow on most devices
    q = codes.astype(jnp.int32).astype(jnp.float32)
    return q * scale.astype(jnp.float32) + low.astype(jnp.float32)


def symmetric(
    x: Float[Array, "*x"], *, bits: int, axis: int, store: Store
) -> tuple[Float[Array, "*x"], Float[Array, "*s"]]:
    """Whole numbers in -(2**(bits-1)-1)..2**(bits-1)-1, as floats, and their scale. Runs in a
    kernel."""
    top = 2 ** (bits - 1) - 1
    scale = store(jnp.max(jnp.abs(x), axis=axis, keepdims=True) / top)
    return jnp.clip(jnp.round(divide(x, scale)), -top, top), scale


def split_channels(x: Shaped[Array, "*lead T H"], group: int) -> Shaped[Array, "*lead T C G"]:
    """Groups of `group` channels of a token, on a last axis of their own."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // group, group)


def to_rows(s: Float[Array, "*lead T C 1"]) -> Float[Array, "*lead C T"]:
    """Numbers per token and channel group as they are stored: tokens last."""
    return jnp.swapaxes(s[..., 0], -1, -2)


def to_columns(s: Float[Array, "*lead C T"]) -> Float[Array, "*lead T C 1"]:
    return jnp.swapaxes(s, -1, -2)[..., None]
