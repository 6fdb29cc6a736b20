"""Calibrated levels, and a few entries of each token kept as they are (KVQuant 2401.18079).

value = range * levels[q] + offset, or the token's outlier where it has one. Levels are a head's own
and come with the call, not with the code. Offset and range of keys are a channel's, calibrated too;
those of values are a token's, float16.

Tiles have channels down and tokens across, values' as well, so that what a token has lies along
lanes: its outliers are selects, a compare and a choice for each, and of values the table that a
code is looked up in is the token's, level by level down the sublanes.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import operator
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import words as packing
from pallas_kernels.codes.base import LANES, Code, Leaves, Shapes, matmul, need
from pallas_kernels.turn import turned

#: rows of a vector register
_ROWS = 8


@dataclasses.dataclass(frozen=True)
class _Calibrated(Code):
    """2 to 4 bits. outliers: of a token. Leaves: `q [..., T, H]` unsigned; `outlier [..., n, T]`
    float16 and `outlier_index [..., n, T]`, their channels.

    Beside a token's words: its outliers' channels, two to the bits of a float16, and the outliers.
    Words lie in an order of their own (`_places`). Numbers are float32 up to the product; narrow:
    once scaled they are bfloat16, and so are the places of outliers.
    """

    bits: int = 4
    outliers: int = 1
    has_scale: ClassVar[bool] = False
    calibrated: ClassVar[bool] = True
    across: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        need(self.bits in (2, 3, 4), "bits", "2, 3 or 4", self.bits)
        need(0 <= self.outliers <= 8, "outliers", "0 to 8", self.outliers)

    @property
    def halves(self) -> int:
        return self._pairs + self.outliers

    def param_shapes(self, num_kv_heads: int, head_dim: int) -> Shapes:
        return {"levels": (num_kv_heads, 2**self.bits)}

    # --- the page ---------------------------------------------------------------------------------

    def word_rows(self, entries: int) -> int:
        step = 32 if self.bits == 3 else 32 // self.bits
        if entries > 256 or entries % step:
            raise NotImplementedError(
                f"{type(self).__name__}: codes of {self.bits} bits need a multiple of {step} "
                f"channels, at most 256 (an outlier's channel is a byte), got {entries}."
            )
        return entries * self.bits // 32

    def pack(self, leaves: Leaves, *, channels_first: bool) -> Int[Array, "*lead W L"]:
        q = leaves["q"].astype(jnp.int32)
        return _pack(jnp.swapaxes(q, -1, -2) if channels_first else q, self.bits)

    def side_bits(self, leaves: Leaves) -> Int[Array, "*lead n T"]:
        index = leaves["outlier_index"].astype(jnp.int32)
        index = jnp.pad(index, [(0, 0)] * (index.ndim - 2) + [(0, self.outliers % 2), (0, 0)])
        pairs = index[..., ::2, :] | (index[..., 1::2, :] << 8)
        return jnp.concatenate([pairs, packing.half_bits(leaves["outlier"])], axis=-2)

    def from_bits(self, bits: list[Int[Array, "*b"]]) -> list[Float[Array, "*b"]]:
        """Channels, then outliers, then what else there is."""
        pairs = [x for pair in bits[: self._pairs] for x in (pair & 255, (pair >> 8) & 255)]
        channels = [x.astype(jnp.float32) for x in pairs[: self.outliers]]
        return channels + super().from_bits(bits[self._pairs :])

    def levels(self, words: Int[Array, "*lead W L"]) -> Int[Array, "*lead n L"]:
        """The codes, which are yet to be looked up."""
        return _unpack(words, self.bits)

    def values(self, words, side, params, *, channels_first):
        q = jnp.swapaxes(self.levels(words), -1, -2)  # T H
        x = self._plain(_choose(q, _per_head(params["levels"], q)), side, params)
        channel = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1).astype(jnp.float32)
        for i in range(self.outliers):
            index, value = (side[..., j, :, None] for j in (i, self.outliers + i))
            x = jnp.where(channel == index, value, x)
        return x

    @abc.abstractmethod
    def _plain(
        self, u: Float[Array, "*lead K T H"], side: Array | None, params: Leaves
    ) -> Float[Array, "*lead K T H"]:
        """Of levels the values, in plain XLA."""

    # --- inside a kernel --------------------------------------------------------------------------

    def columns(self, params: Leaves) -> Float[Array, "K n 128"]:
        levels = params["levels"]
        return _on_all_lanes(jnp.pad(levels, [(0, 0), (0, -levels.shape[1] % _ROWS)]))

    def numbers(self, words: Int[Array, "W L"]) -> Int[Array, "n L"]:
        return self.levels(words)

    def across_tile(self, words, side, columns):
        return self._entries(words, side, columns).astype(jnp.bfloat16)

    def scores(self, q, sums, words, side, factor, columns=None):
        return matmul(q, self.across_tile(words, side, columns)) * factor

    def turned_scores(self, q, sums, words, side, cos, sin, factor, columns=None):
        x = self._entries(words, side, columns)
        x = turned(x, cos.astype(x.dtype), sin.astype(x.dtype), axis=0)
        return matmul(q, x.astype(jnp.bfloat16)) * factor

    def _entries(
        self, words: Int[Array, "W S"], side: list[Array], columns: Any
    ) -> Float[Array, "H S"]:
        """Values, page by page: 128 lanes of them stay in registers."""
        pages = [slice(i, i + LANES) for i in range(0, words.shape[1], LANES)]
        tiles = [self._page(words[:, at], [x[:, at] for x in side], columns) for at in pages]
        return jnp.concatenate(tiles, axis=1)

    def _page(
        self, words: Int[Array, "W 128"], side: list[Array], columns: Any
    ) -> Float[Array, "H 128"]:
        q, tables = self.numbers(words), self._tables(side, columns)
        registers = []
        for g in range(q.shape[0] // _ROWS):
            x = _look_up(tables, q[g * _ROWS : (g + 1) * _ROWS])
            registers.append(self._scaled_rows(x, g, q.shape[0], columns))
        x = jnp.concatenate(registers, axis=0)
        return self._with_outliers(x.astype(jnp.bfloat16) if self.narrow else x, side)

    def _with_outliers(self, x: Float[Array, "H 128"], side: list[Array]) -> Float[Array, "H 128"]:
        rows = min(16 if self.narrow else _ROWS, x.shape[0])
        row = lax.broadcasted_iota(jnp.int32, (rows, LANES), 0).astype(x.dtype)
        wide = [jnp.broadcast_to(s, row.shape).astype(x.dtype) for s in side[: 2 * self.outliers]]
        channels, values = wide[: self.outliers], wide[self.outliers :]
        # where a channel less the row is a register's first channel, the outlier is there
        spots = [(channel - row, value) for channel, value in zip(channels, values, strict=True)]
        registers = []
        for first in range(0, x.shape[0], rows):
            part = x[first : first + rows]
            for at, value in spots:
                part = jnp.where((at == first)[: len(part)], value[: len(part)], part)
            registers.append(part)
        return jnp.concatenate(registers, axis=0)

    def _tables(self, side: list[Array], columns: Any) -> list[Float[Array, "8 128"]]:
        """Levels of each lane, eight to a register."""
        return [columns[i : i + _ROWS] for i in range(0, self._table_rows, _ROWS)]

    def _scaled_rows(
        self, x: Float[Array, "8 128"], g: int, channels: int, columns: Any
    ) -> Float[Array, "8 128"]:
        """Register g of a tile, once looked up."""
        return x

    @property
    def _table_rows(self) -> int:
        return max(_ROWS, 2**self.bits)

    @property
    def _pairs(self) -> int:
        return -(-self.outliers // 2)


@dataclasses.dataclass(frozen=True)
class OutlierKey(_Calibrated):
    """params: `levels [K, 2^bits]`; `range` and `offset [K, H]`."""

    def param_shapes(self, num_kv_heads: int, head_dim: int) -> Shapes:
        own = dict.fromkeys(("range", "offset"), (num_kv_heads, head_dim))
        return super().param_shapes(num_kv_heads, head_dim) | own

    def columns(self, params: Leaves) -> Float[Array, "K n 128"]:
        own = [_on_all_lanes(params[name]) for name in ("range", "offset")]
        return jnp.concatenate([super().columns(params), *own], axis=1)

    def _plain(self, u, side, params):
        return u * _per_head(params["range"], u) + _per_head(params["offset"], u)

    def _scaled_rows(self, x, g, channels, columns):
        row = self._table_rows + g * _ROWS
        spread, offset = (columns[i : i + _ROWS] for i in (row, row + channels))
        return x * spread + offset


@dataclasses.dataclass(frozen=True)
class OutlierValue(_Calibrated):
    """params: `levels [K, 2^bits]`. Leaves besides: `range` and `offset [..., T]`, the last two of
    a token's float16 numbers."""

    @property
    def halves(self) -> int:
        return super().halves + 2

    def side_bits(self, leaves: Leaves) -> Int[Array, "*lead n T"]:
        own = [packing.half_bits(leaves[name])[..., None, :] for name in ("range", "offset")]
        return jnp.concatenate([super().side_bits(leaves), *own], axis=-2)

    def _plain(self, u, side, params):
        spread, offset = (side[..., i, :, None] for i in (-2, -1))
        return u * spread + offset

    def _tables(self, side, columns):
        spread, offset = (jnp.broadcast_to(x, (_ROWS, LANES)) for x in side[-2:])
        return [table * spread + offset for table in super()._tables(side, columns)]


def _look_up(tables: list[Array], q: Int[Array, "8 128"]) -> Float[Array, "8 128"]:
    """tables[q] of each lane: a register is read along sublanes; two, and bit 3 chooses."""

    def read(table: Array, index: Array) -> Array:
        return jnp.take_along_axis(table, index, axis=0, mode="promise_in_bounds")

    if len(tables) == 1:
        return read(tables[0], q)
    return jnp.where(q > 7, read(tables[1], q & 7), read(tables[0], q & 7))


def _per_head(p: Float[Array, "K n"], x: Array) -> Float[Array, "*ones K 1 n"]:
    """Shaped to meet x `[..., K, T, H]`."""
    K, n = p.shape
    return p.reshape((1,) * (x.ndim - 3) + (K, 1, n))


def _choose(q: Int[Array, "*q"], levels: Float[Array, "*ones n"]) -> Float[Array, "*q"]:
    """levels[q], by selects on the bits of q."""
    nodes, bit = [levels[..., i : i + 1] for i in range(levels.shape[-1])], 0
    while len(nodes) > 1:
        odd = (q & (1 << bit)) != 0
        nodes = [jnp.where(odd, b, a) for a, b in zip(nodes[::2], nodes[1::2], strict=True)]
        bit += 1
    return nodes[0]


def _on_all_lanes(x: Float[Array, "K n"]) -> Float[Array, "K n 128"]:
    return jnp.broadcast_to(x.astype(jnp.float32)[..., None], (*x.shape, LANES))


# Codes come out of words eight rows at a time, a register each. A chunk is eight rows of words, or,
# of what is left over, four, two or one: these lie so that the words and their upper parts, one
# below the other, are eight rows of 16, 8 or 4 bits. A chunk's codes lie from its lowest bit up. Of
# codes of 3 bits one or two bits remain above them: three of these are another register's.


def _chunks(rows: int) -> list[tuple[int, int]]:
    """(first row, rows) of words: eights, then at most a four, a two and a one."""
    sizes = [_ROWS] * (rows // _ROWS) + [n for n in (4, 2, 1) if rows & n]
    return [(sum(sizes[:i]), n) for i, n in enumerate(sizes)]


def _places(rows: int, bits: int) -> list[list[tuple[int, int, int, int]]]:
    """Of each register of codes its parts: (chunk, bit of the chunk, bit of the code, bits)."""
    widths = [4 * n for _, n in _chunks(rows)]
    whole = [
        [(i, bit, 0, bits)]
        for i, width in enumerate(widths)
        for bit in range(0, width - bits + 1, bits)
    ]
    spare = [
        (i, bit) for i, width in enumerate(widths) for bit in range(width - width % bits, width)
    ]
    return whole + [
        [(i, bit, at, 1) for at, (i, bit) in enumerate(spare[j : j + bits])]
        for j in range(0, len(spare), bits)
    ]


def _pack(codes: Int[Array, "*lead n L"], bits: int) -> Int[Array, "*lead W L"]:
    rows = codes.shape[-2] * bits // 32
    codes = codes.astype(jnp.uint32)
    chunks = [jnp.uint32(0)] * len(_chunks(rows))
    for g, parts in enumerate(_places(rows, bits)):
        x = codes[..., g * _ROWS : (g + 1) * _ROWS, :]
        for i, bit, at, n in parts:
            chunks[i] = chunks[i] | (((x >> at) & (2**n - 1)) << bit)
    out = []
    for (_, n), x in zip(_chunks(rows), chunks, strict=True):
        folded = [x[..., j * n : (j + 1) * n, :] << (4 * n * j) for j in range(_ROWS // n)]
        out.append(functools.reduce(operator.or_, folded))
    return lax.bitcast_convert_type(jnp.concatenate(out, axis=-2), jnp.int32)


def _unpack(words: Int[Array, "*lead W L"], bits: int) -> Int[Array, "*lead n L"]:
    """Inverse of `_pack`, in a kernel and outside of one."""
    chunks = []
    for row, n in _chunks(words.shape[-2]):
        x = words[..., row : row + n, :]
        below = [_right(x, 4 * n * j) for j in range(1, _ROWS // n)]
        chunks.append(jnp.concatenate([x, *below], axis=-2) if below else x)
    out = []
    for parts in _places(words.shape[-2], bits):
        each = [_right(chunks[i], bit - at) & ((2**n - 1) << at) for i, bit, at, n in parts]
        out.append(functools.reduce(operator.or_, each))
    return jnp.concatenate(out, axis=-2)


def _right(x: Int[Array, "*lead W L"], by: int) -> Int[Array, "*lead W L"]:
    if by <= 0:
        return x << -by if by else x
    return lax.shift_right_logical(x, jnp.int32(by))
