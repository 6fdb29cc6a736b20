"""Codes of b bits in 32-bit words, along tokens.

Adjacent tokens share a word, little endian: with b dividing 32, token t of a channel is field
t % (32/b) of word row t // (32/b). The head dim stays the last axis, on the lanes of a TPU, so
unpacking is a broadcast shift, a mask and a free reshape. Other widths are sums of *planes* that do
divide 32 (3 = 2+1, 7 = 4+2+1), the plane of the low bits first, stacked along the row axis: one
array `[..., T*b/32, H]` for every b, with no padding.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, UInt32


def planes(bits: int) -> tuple[int, ...]:
    """The widths, powers of two and descending, that `bits` is stored in."""
    return tuple(w for w in (8, 4, 2, 1) if bits & w)


def check(bits: int, page_size: int) -> None:
    """Raises ValueError unless `page_size` tokens of `bits` bits fill whole words."""
    if not 1 <= bits <= 8:
        raise ValueError(f"bits: expected 1 to 8, got {bits}.")
    per_word = 32 // planes(bits)[-1]
    if page_size % per_word:
        raise ValueError(
            f"page_size: expected a multiple of {per_word} ({bits}-bit codes fill 32-bit words "
            f"along tokens), got {page_size}. Take a multiple of 32."
        )


def pack(codes: UInt32[Array, "*lead T H"], bits: int) -> UInt32[Array, "*lead W H"]:
    """Words of codes below 2**bits."""
    check(bits, codes.shape[-2])
    sections, offset = [], 0
    for width in planes(bits):
        sections.append(_pack_plane((codes >> offset) & (2**width - 1), width))
        offset += width
    return jnp.concatenate(sections, axis=-2)


def pack_leaves(codes: Mapping[str, Array], bits: int) -> dict[str, Array]:
    """The leaves `words*` packed, the others as they are."""
    return {n: pack(c, bits) if n.startswith("words") else c for n, c in codes.items()}


def unpack(words: UInt32[Array, "*lead W H"], bits: int) -> UInt32[Array, "*lead T H"]:
    """The inverse of `pack`."""
    tokens = words.shape[-2] * 32 // bits
    parts, row, offset = [], 0, 0
    for width in planes(bits):
        rows = tokens * width // 32
        plane = _unpack_plane(lax.slice_in_dim(words, row, row + rows, axis=-2), width)
        parts.append(plane << offset if offset else plane)
        row, offset = row + rows, offset + width
    return functools.reduce(operator.or_, parts)


def _shifts(ndim: int, width: int) -> UInt32[Array, "*ones F 1"]:
    shape = (1,) * (ndim - 2) + (32 // width, 1)
    return lax.broadcasted_iota(jnp.uint32, shape, ndim - 2) * width


def _pack_plane(codes: UInt32[Array, "*lead T H"], width: int) -> UInt32[Array, "*lead W H"]:
    *lead, T, H = codes.shape
    fields = codes.reshape(*lead, T * width // 32, 32 // width, H)
    # fields do not overlap, so their sum is their union
    return jnp.sum(fields << _shifts(fields.ndim, width), axis=-2, dtype=jnp.uint32)


def _unpack_plane(words: UInt32[Array, "*lead W H"], width: int) -> UInt32[Array, "*lead T H"]:
    *lead, W, H = words.shape
    words = words[..., None, :]
    fields = (words >> _shifts(words.ndim, width)) & (2**width - 1)
    return fields.reshape(*lead, W * (32 // width), H)
