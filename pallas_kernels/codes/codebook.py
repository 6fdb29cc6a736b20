"""Non-uniform levels: a codebook, a polynomial in its place, and signs."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import words as packing
from pallas_kernels.codes.base import LANES, Code, Plane, need
from pallas_kernels.codes.uniform import INTEGERS

#: numpy's scalar: arithmetic rounds at every step, in a kernel and outside of one
_BFLOAT16 = jnp.dtype(jnp.bfloat16).type


@dataclasses.dataclass(frozen=True)
class Codebook(Code):
    """value = scale * table[q], 2 to 4 bits (TurboQuant 2504.19874). Leaves: `q [..., T, H]`
    unsigned, `scale`. 3 bits lie as 2 + 1. Levels are rounded to bfloat16."""

    bits: int = 4
    order: str = "fields"
    table: tuple[float, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        need(self.bits in (2, 3, 4), "bits", "2, 3 or 4", self.bits)
        need(self.order == "fields", "order", "'fields'", self.order)
        need(len(self.table) == 2**self.bits, "table", f"{2**self.bits} levels", len(self.table))
        mirrored = all(abs(a + b) < 1e-6 for a, b in zip(self.table, self.table[::-1], strict=True))
        if self.bits == 4 and not mirrored:
            raise NotImplementedError("Codebook: 16 levels must be symmetric about 0.")

    def word_rows(self, entries: int) -> int:
        widths = (2, 1) if self.bits == 3 else (self.bits,)
        return sum(packing.word_rows(entries, width) for width in widths)

    def planes(self, q):
        q = q.astype(jnp.int32)
        if self.bits == 3:
            return [Plane(q & 3, 2, self.order), Plane(q >> 2, 1, self.order)]
        if self.bits == 4:  # sign and magnitude: a table of 8 entries is one register
            q = jnp.where(q < 8, (7 - q) | 8, q - 8)
        return [Plane(q, self.bits, self.order)]

    def numbers(self, words):
        q = self._codes(words, _fields)
        if self.bits < 4:
            return _lookup8(self.table, q)
        magnitude = _lookup8(self.table[8:], q & 7)
        flipped = lax.bitcast_convert_type(magnitude, jnp.int32) ^ ((q & 8) << 28)
        return lax.bitcast_convert_type(flipped, jnp.float32)

    def levels(self, words):
        q = self._codes(words, lambda w, bits: packing.unpack(w, bits, "fields"))
        q = jnp.where(q >= 8, 15 - q, q + 8) if self.bits == 4 else q
        table = jnp.asarray(self.table, jnp.bfloat16).astype(jnp.float32)
        return table.at[q].get(mode="promise_in_bounds")

    def _codes(self, words, unpack):
        if self.bits != 3:
            return unpack(words, self.bits)
        rows = words.shape[-2] * 2 // 3
        return unpack(words[..., :rows, :], 2) | (unpack(words[..., rows:, :], 1) << 2)


#: c_0, c_1, ... of t (c_0 + c_1 t^2 + ...), t = q - 2^(bits-1) + 1/2, all bfloat16: what gives the
#: optimal levels of N(0, 1) with every step rounded to bfloat16, within 0.4, 0.3 and 0.6 % of each.
POLYNOMIALS = {
    2: (0.89453125, 0.049560546875),
    3: (0.48828125, 0.00616455078125, 0.000347137451171875),
    4: (0.255859375, 0.00128173828125, -1.3947486877441406e-05, 4.5262277126312256e-07),
}


@dataclasses.dataclass(frozen=True)
class Smooth(Codebook):
    """A `Codebook` whose table a polynomial meets, for chips with bfloat16 arithmetic: half of the
    look-up's instructions. 3 bits lie as two low bits and a sign."""

    order: str = "adjacent"

    def __post_init__(self):
        Code.__post_init__(self)
        need(self.bits in POLYNOMIALS, "bits", "2, 3 or 4", self.bits)
        need(len(self.table) == 2**self.bits, "table", f"{2**self.bits} levels", len(self.table))
        if not meets(self.table):
            raise NotImplementedError("Smooth: the table is not that of a normal distribution.")

    def planes(self, q):
        q = q.astype(jnp.int32) - 2 ** (self.bits - 1)
        if self.bits != 3:
            return [Plane(q, self.bits, "adjacent")]
        low = jnp.where(q < 0, q + 2, q - 2)  # -2 to 1: two bits with their sign
        return [Plane(low, 2, "adjacent"), Plane((q < 0).astype(jnp.int32), 1, "pairs")]

    def numbers(self, words):
        if self.bits == 3:
            rows = words.shape[-2] * 2 // 3
            low = pltpu.bitcast(words[:rows], jnp.int2).astype(jnp.bfloat16)
            t = (low + _BFLOAT16(0.5)) + signs(words[rows:], 0x4000)  # 2.0
        else:
            q = pltpu.bitcast(words, INTEGERS[self.bits]).astype(jnp.bfloat16)
            t = q + _BFLOAT16(0.5)
        return _odd_polynomial(t, POLYNOMIALS[self.bits])

    def tiles(self, words: list[Array]) -> Array:
        if self.bits != 3:
            return super().tiles(words)
        return jnp.concatenate([self.tile(w) for w in words], axis=0)

    def levels(self, words):
        half = 2 ** (self.bits - 1)
        if self.bits == 3:
            rows = words.shape[-2] * 2 // 3
            low = packing.unpack(words[..., :rows, :], 2, "adjacent")
            low = jnp.where(low >= 2, low - 4, low)
            q = low + jnp.where(packing.unpack(words[..., rows:, :], 1, "pairs") == 1, -2, 2) + half
        else:
            q = packing.unpack(words, self.bits, "adjacent") ^ half  # from two's complement
        return jnp.asarray(self.table, jnp.float32).at[q].get(mode="promise_in_bounds")


@functools.lru_cache(maxsize=16)
def meets(table: tuple[float, ...]) -> bool:
    """Whether the polynomial gives the levels of the table, within 0.6 % of each."""
    bits = len(table).bit_length() - 1
    t = (np.arange(len(table)) - len(table) / 2 + 0.5).astype(_BFLOAT16)
    got = _odd_polynomial(t, POLYNOMIALS[bits]).astype(np.float64)
    return bool(np.all(np.abs(got - table) <= 0.006 * np.abs(table)))


def _odd_polynomial(t, coefficients):
    square = t * t
    value, *rest = [_BFLOAT16(c) for c in coefficients[::-1]]
    for c in rest:
        value = value * square + c
    return value * t


@dataclasses.dataclass(frozen=True)
class Signs(Code):
    """Sign sketches of keys (QJL 2406.03482), each with a norm: `groups` of equal width. Leaves: `q
    [..., T, M]`, 1 for +1 and 0 for -1, M rows of all sketches; `scale [..., (n,) T]`."""

    turns: ClassVar[bool] = False
    bits: int = 1
    order: str = "pairs"
    rows: int = 256

    def __post_init__(self):
        super().__post_init__()
        need(self.order == "pairs", "order", "'pairs'", self.order)
        if self.rows % (LANES * self.groups):
            raise NotImplementedError(
                f"Signs: {self.groups} sketches of {self.rows} rows in all: each needs a multiple "
                f"of {LANES}."
            )

    def width(self, head_dim: int) -> int:
        return self.rows

    def stored(self, q: Int[Array, "*q"]) -> Int[Array, "*q"]:
        return 1 - q  # bfloat16's sign bit

    def numbers(self, words):
        return signs(words, 0x3F80)  # 1.0

    def levels(self, words):
        return 1.0 - 2.0 * packing.unpack(words, 1, self.order).astype(jnp.float32)


def signs(words: Int[Array, "W L"], magnitude: int) -> Float[Array, "n L"]:
    """The bfloat16 of these bits, negative where the bit of the order "pairs" is set."""
    both, sign = jnp.int32(magnitude * 0x10001), jnp.int32(0x80008000 - 2**32)
    planes = [words << (15 - j) if j < 15 else words for j in range(16)]
    return jnp.concatenate([pltpu.bitcast((x & sign) | both, jnp.bfloat16) for x in planes], 0)


def _fields(words: Int[Array, "W L"], bits: int) -> Int[Array, "n L"]:
    mask = jnp.int32(2**bits - 1)
    planes = [lax.shift_right_logical(words, jnp.int32(bits * f)) & mask for f in range(32 // bits)]
    return jnp.concatenate(planes, axis=0)


def _lookup8(table: tuple[float, ...], index: Int[Array, "n L"]) -> Float[Array, "n L"]:
    """table[index], at most 8 entries: a register whose row i is entry i, read along sublanes."""
    n, lanes = index.shape
    if n % 8:
        raise NotImplementedError(f"Codebook: {n} entries down the rows: need a multiple of 8.")
    row = lax.broadcasted_iota(jnp.int32, (8, LANES), 0)
    entries = jnp.zeros((8, LANES), jnp.float32)
    for i, level in enumerate(table):
        entries = jnp.where(row == i, jnp.float32(level), entries)

    def read(i: int, j: int) -> Array:
        piece = index[i : i + 8, j : j + LANES]
        return jnp.take_along_axis(entries, piece, axis=0, mode="promise_in_bounds")

    rows = [[read(i, j) for j in range(0, lanes, LANES)] for i in range(0, n, 8)]
    return jnp.concatenate([jnp.concatenate(row, axis=1) for row in rows], axis=0)
