"""Small integers in 32-bit words, down the sublanes of a TPU tile.

A tile is `[n, L]`: n entries (channels of a key, or tokens of a value) down the rows, lanes across.
`bits`-bit entries of a lane share words, F = 32 / bits fields a word, W = n * bits / 32 word rows.
Which entry lies in which field is an *order*, chosen by how a chip gets them out for the least:

* "adjacent": entry i F + f in field f of row i. What a sublane bit-cast gives (`pltpu.bitcast`);
* "pairs": entry j 2W + 2i + h in field j + h F/2 of row i. One shift, mask and or turn a field and
  its partner 16 bits above into two bfloat16 numbers;
* "fields": entry f W + i in field f of row i. For 32-bit arithmetic on one field at a time.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

ORDERS = ("adjacent", "pairs", "fields")


def word_rows(entries: int, bits: int) -> int:
    """W. Raises NotImplementedError unless the entries fill whole words."""
    if entries * bits % 32:
        raise NotImplementedError(
            f"{entries} entries of {bits} bits do not fill 32-bit words: "
            f"the entries must be a multiple of {32 // bits}."
        )
    return entries * bits // 32


def pack(codes: Int[Array, "*lead n L"], bits: int, order: str) -> Int[Array, "*lead W L"]:
    """int32 words of the low `bits` of each code."""
    *lead, n, lanes = codes.shape
    fields, rows = 32 // bits, word_rows(n, bits)
    codes = codes.astype(jnp.uint32) & jnp.uint32(2**bits - 1)
    if order == "adjacent":
        codes = codes.reshape(*lead, rows, fields, lanes)
    elif order == "pairs":
        codes = codes.reshape(*lead, fields // 2, rows, 2, lanes)
        codes = jnp.moveaxis(codes, -2, -4)  # h j i
        codes = jnp.moveaxis(codes.reshape(*lead, fields, rows, lanes), -2, -3)
    else:
        codes = jnp.moveaxis(codes.reshape(*lead, fields, rows, lanes), -2, -3)
    shifts = bits * lax.broadcasted_iota(
        jnp.uint32, (1,) * len(lead) + (1, fields, 1), len(lead) + 1
    )
    # fields do not overlap, so their sum is their union
    return lax.bitcast_convert_type(jnp.sum(codes << shifts, axis=-2, dtype=jnp.uint32), jnp.int32)


def unpack(words: Int[Array, "*lead W L"], bits: int, order: str) -> Int[Array, "*lead n L"]:
    """The codes, unsigned, as int32. Inverse of `pack`."""
    *lead, rows, lanes = words.shape
    fields = 32 // bits
    shifts = bits * lax.broadcasted_iota(
        jnp.uint32, (1,) * len(lead) + (1, fields, 1), len(lead) + 1
    )
    words = lax.bitcast_convert_type(words, jnp.uint32)[..., None, :]
    codes = ((words >> shifts) & jnp.uint32(2**bits - 1)).astype(jnp.int32)
    if order == "adjacent":
        return codes.reshape(*lead, rows * fields, lanes)
    codes = jnp.moveaxis(codes, -3, -2)  # f i
    if order == "pairs":
        codes = codes.reshape(*lead, 2, fields // 2, rows, lanes)
        codes = jnp.moveaxis(codes, -4, -2)  # j i h
    return codes.reshape(*lead, rows * fields, lanes)


def half_bits(x: Array) -> Int[Array, "*x"]:
    """float16 bits of numbers, in the low 16 bits of int32."""
    return lax.bitcast_convert_type(x.astype(jnp.float16), jnp.uint16).astype(jnp.int32)


def float_bits(x: Float[Array, "*x"], *, exponent: int, mantissa: int) -> Int[Array, "*x"]:
    """Bits of the nearest float with this many bits of exponent and mantissa (IEEE's bias, ties to
    even), in 32-bit arithmetic: what kernels have instead of a cast. |x| within the format's
    range."""
    bias, drop = 2 ** (exponent - 1) - 1, 23 - mantissa
    bits = lax.bitcast_convert_type(x, jnp.int32)
    magnitude = bits & 0x7FFFFFFF
    odd = lax.shift_right_logical(magnitude, jnp.int32(drop)) & 1
    rounded = magnitude + (2 ** (drop - 1) - 1) + odd
    normal = lax.shift_right_logical(rounded, jnp.int32(drop)) - ((127 - bias) << mantissa)
    # a power of two whose last place is the format's smallest: adding it rounds subnormals there
    large = jnp.float32(2.0 ** (24 - bias - mantissa))
    small = lax.bitcast_convert_type(_as_float(magnitude) + large, jnp.int32) & 0x7FFFFF
    smallest_normal = (128 - bias) << 23
    sign = lax.shift_right_logical(bits, jnp.int32(31)) << (exponent + mantissa)
    return jnp.where(magnitude < smallest_normal, small, normal) | sign


def as_half(x: Float[Array, "*x"]) -> Float[Array, "*x"]:
    """The nearest float16, as float32, clipped to what it holds."""
    return half_value(float_bits(jnp.clip(x, -65504.0, 65504.0), exponent=5, mantissa=10))


def half_value(x: Int[Array, "*x"]) -> Array:
    """float32 of the float16 in the low 16 bits, in 32-bit arithmetic: TPUs have no float16.

    Never NaN or infinite, whatever the bits: unused slots may hold anything. Runs in a kernel and
    outside of one.
    """
    sign = (x & 0x8000) << 16
    magnitude = (x & 0x7FFF) << 13
    normal = _as_float(magnitude + (112 << 23))
    # float16's subnormals: 2^-14 plus the fraction, less 2^-14
    small = _as_float(magnitude | (113 << 23)) - jnp.float32(2.0**-14)
    value = jnp.where(magnitude < (1 << 23), small, normal)
    return _as_float(lax.bitcast_convert_type(value, jnp.int32) | sign)


def _as_float(x: Int[Array, "*x"]) -> Array:
    return lax.bitcast_convert_type(x, jnp.float32)
