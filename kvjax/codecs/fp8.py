"""8-bit floats with one scale per token and head.

Formats: https://arxiv.org/abs/2209.05433. e4m3 (max 448) has the smaller error; e5m2 keeps more
range inside a token. Both are scaled to an absolute maximum of 448: e5m2 could hold 57344, but then
ordinary scales would fall into float16's subnormals, and its own range is wide enough.

Kept as uint8, the bits of a float8: XLA's CPU backend has no float8 writes, and would widen the
whole pool of pages to write one (found at 8k tokens: 17 MB beside a cache of 9).

Bytes per token and head: H + 2.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt8

from kvjax.codecs.base import Codec, Codes, Params, divide, stored_as
from kvjax.codecs.uniform import Store

_TOP = 448.0
_FORMATS = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


@dataclasses.dataclass(frozen=True)
class Fp8(Codec):
    name: ClassVar[str] = "fp8"
    single: ClassVar[bool] = True
    format: str = "e4m3"
    scale_dtype: str = "float16"

    def __post_init__(self):
        if self.format not in _FORMATS:
            raise ValueError(f"fp8: format: expected one of {sorted(_FORMATS)}, got {self.format}.")

    def encode(self, x: Float[Array, "*lead T H"], params: Params) -> Codes:
        x, scale = scaled(x.astype(jnp.float32), axis=-1, store=stored_as(self.scale_dtype))
        bits = lax.bitcast_convert_type(x.astype(_FORMATS[self.format]), jnp.uint8)
        return {"x": bits, "scale": scale[..., 0]}

    def decode(self, codes: Codes, params: Params, dtype: Any) -> Float[Array, "*lead T H"]:
        scale = codes["scale"].astype(jnp.float32)[..., None]
        return (numbers(codes["x"], self.format) * scale).astype(dtype)


def scaled(
    x: Float[Array, "*x"], *, axis: int, store: Store
) -> tuple[Float[Array, "*x"], Float[Array, "*s"]]:
    """x over its scale, clipped: a cast of more than 464 to e4m3 is NaN, it does not saturate. And
    the scale, along `axis`, which is kept, of length 1."""
    scale = store(jnp.max(jnp.abs(x), axis=axis, keepdims=True) / _TOP)
    return jnp.clip(divide(x, scale), -_TOP, _TOP), scale


def numbers(bits: UInt8[Array, "*x"], format: str) -> Float[Array, "*x"]:
    """The float32 that a float8's bits stand for, exactly.

    Both formats are float16s with fewer bits, e4m3 with its exponent 8 lower: XLA's CPU backend
    converts these in lanes and a float8 number by number.
    """
    wide = bits.astype(jnp.uint16)
    if format == "e5m2":
        return lax.bitcast_convert_type(wide << 8, jnp.float16).astype(jnp.float32)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    x = lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32) * 256.0
    return jnp.where((wide & 0x7F) == 0x7F, jnp.nan, x)
