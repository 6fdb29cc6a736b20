"""Packing by the matrix unit: words are products of the codes with constant matrices.

A word is a sum of its fields' codes times powers of two. A matrix `[4 W, n]` with a block of rows
for each byte of the words gives the bytes of W rows of words from n entries, exactly: powers up to
2^7 and codes below 2^8 are bfloat16 numbers, and a sum is below 2^8. So every order of
`pallas_kernels/words.py` costs the same, nothing is moved between sublanes, and entries that lie
across lanes are turned on the way for nothing.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import words as packing
from pallas_kernels.codes.base import ROWS_BY_LANES, ROWS_BY_ROWS, matmul

#: rows of a block start at whole sublanes
_SUBLANES = 8


@functools.lru_cache(maxsize=64)
def places(entries: int, bits: int, order: str) -> np.ndarray:
    """`[4 W', n]` float32, W' = W in whole sublanes: what a code adds to each byte of each word.
    Of 16 bits `[2 W', n]`: which number is the lower half of a word, which the upper."""
    rows = packing.word_rows(entries, bits)
    padded = -(-rows // _SUBLANES) * _SUBLANES
    fields = 32 // bits
    entry = _entries(rows, fields, order)  # W F
    wide = bits == 16
    out = np.zeros((fields if wide else 4, padded, entries), np.float32)
    for f in range(fields):
        block, power = (f, 0) if wide else divmod(bits * f, 8)
        out[block, np.arange(rows), entry[:, f]] = 2.0**power
    matrix = out.reshape(-1, entries)
    matrix.setflags(write=False)
    return matrix


def _entries(rows: int, fields: int, order: str) -> np.ndarray:
    """`[W, F]`: which entry each field of each row of words holds."""
    row, field = np.arange(rows)[:, None], np.arange(fields)[None]
    if order == "adjacent":
        return row * fields + field
    if order == "fields":
        return field * rows + row
    half, block = np.divmod(field, fields // 2)
    return block * 2 * rows + 2 * row + half


def pack(
    codes: Array, matrix: Float[Array, "c n"], bits: int, *, turned: bool
) -> Int[Array, "W L"]:
    """Words of codes `[n, L]`, or of `[L, n]` when turned: int32 below 2^bits, or bfloat16 numbers
    as float32 for 16 bits. matrix: `places`, bfloat16."""
    if bits != 16:
        codes = (codes & (2**bits - 1)).astype(jnp.float32)
    dims = ROWS_BY_LANES if turned else ROWS_BY_ROWS
    out = matmul(matrix, codes.astype(jnp.bfloat16), dims)
    blocks, rows = 2 if bits == 16 else 4, packing.word_rows(matrix.shape[1], bits)
    each = out.shape[0] // blocks
    parts = [out[i * each : i * each + rows] for i in range(blocks)]
    if bits == 16:
        low, high = (lax.bitcast_convert_type(x, jnp.int32) for x in parts)
        return lax.shift_right_logical(low, jnp.int32(16)) | (high & jnp.int32(-65536))
    a, b, c, d = (x.astype(jnp.int32) for x in parts)
    return a | (b << 8) | (c << 16) | (d << 24)
