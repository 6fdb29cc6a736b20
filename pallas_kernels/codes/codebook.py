"""Non-uniform levels: a codebook, a cubic in its place, and signs."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import words as packing
from pallas_kernels.codes.base import LANES, Code, Leaves, need
from pallas_kernels.codes.uniform import INTEGERS, MAGIC, Symmetric, above_magic


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
        return sum(packing.word_rows(entries, width) for width in self._planes)

    def pack(self, leaves: Leaves, *, channels_first: bool) -> Int[Array, "*lead W L"]:
        q = leaves["q"].astype(jnp.int32)
        q = jnp.swapaxes(q, -1, -2) if channels_first else q
        if self.bits == 4:  # sign and magnitude: a table of 8 entries is one register
            q = jnp.where(q < 8, (7 - q) | 8, q - 8)
        low = q & 3 if self.bits == 3 else q
        planes = [low] if self.bits != 3 else [low, q >> 2]
        parts = [packing.pack(x, w, self.order) for x, w in zip(planes, self._planes, strict=True)]
        return jnp.concatenate(parts, axis=-2)

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

    @property
    def _planes(self) -> tuple[int, ...]:
        return (2, 1) if self.bits == 3 else (self.bits,)

    def _codes(self, words, unpack):
        if self.bits != 3:
            return unpack(words, self.bits)
        rows = words.shape[-2] * 2 // 3
        return unpack(words[..., :rows, :], 2) | (unpack(words[..., rows:, :], 1) << 2)


#: (a, b) of the cubic t (a + b t^2), t = q + 1/2, nearest to the optimal levels of N(0, 1). Its
#: squared error over Lloyd-Max's is 1.000 at 2 bits and 1.018 at 4 (pallas.md).
CUBIC = {2: (0.89544, 0.05031), 4: (0.24093, 0.00211)}


@dataclasses.dataclass(frozen=True)
class Cubic(Symmetric):
    """value = scale * t (a + b t^2), t = q + 1/2, q signed: a codebook without a table.

    In the order "adjacent" in bfloat16 arithmetic, whose rounding is part of the levels; in "pairs"
    in float32, for chips without.
    """

    bits: int = 4

    def __post_init__(self):
        super().__post_init__()
        need(self.bits in CUBIC, "bits", "2 or 4", self.bits)

    @property
    def bias(self) -> float:
        return 0.0

    def numbers(self, words):
        if self.order == "adjacent":
            t = pltpu.bitcast(words, INTEGERS[self.bits]).astype(jnp.bfloat16) + jnp.bfloat16(0.5)
            return self._cubic(t)
        t = above_magic(words, self.bits).astype(jnp.float32)
        return self._cubic(t - (MAGIC + 2.0 ** (self.bits - 1) - 0.5))

    def levels(self, words):
        return self._cubic(super().levels(words) + 0.5)

    def _cubic(self, t: Float[Array, "*t"]) -> Float[Array, "*t"]:
        a, b = (jnp.asarray(c, t.dtype) for c in CUBIC[self.bits])
        return t * (a + b * (t * t))


@dataclasses.dataclass(frozen=True)
class Signs(Code):
    """Sign sketches of keys (QJL 2406.03482), each with a norm: `groups` of equal width. Leaves: `q
    [..., T, M]`, 1 for +1 and 0 for -1, M rows of all sketches; `scale [..., (n,) T]`."""

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
        one, sign = jnp.int32(0x3F803F80), jnp.int32(0x80008000 - 2**32)  # of two bfloat16
        planes = [words << (15 - j) if j < 15 else words for j in range(16)]
        return jnp.concatenate([pltpu.bitcast((x & sign) | one, jnp.bfloat16) for x in planes], 0)

    def levels(self, words):
        return 1.0 - 2.0 * packing.unpack(words, 1, self.order).astype(jnp.float32)


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
