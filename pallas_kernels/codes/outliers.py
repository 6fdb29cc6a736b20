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

    A token's float16 numbers: two channels in the bits of each of the first, then the outliers.
    3 bits lie as 2 + 1.
    """

    bits: int = 4
    order: str = "fields"
    outliers: int = 1
    has_scale: ClassVar[bool] = False
    calibrated: ClassVar[bool] = True
    across: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        need(self.bits in (2, 3, 4), "bits", "2, 3 or 4", self.bits)
        need(self.order == "fields", "order", "'fields'", self.order)
        need(0 <= self.outliers <= 8, "outliers", "0 to 8", self.outliers)

    @property
    def halves(self) -> int:
        return self.whole + self.outliers

    @property
    def whole(self) -> int:
        return -(-self.outliers // 2)

    def param_shapes(self, num_kv_heads: int, head_dim: int) -> Shapes:
        return {"levels": (num_kv_heads, 2**self.bits)}

    # --- the page ---------------------------------------------------------------------------------

    def word_rows(self, entries: int) -> int:
        if entries > 256 or entries % _ROWS:
            raise NotImplementedError(
                f"{type(self).__name__}: needs a multiple of 8 channels, at most 256 (an outlier's "
                f"channel is a byte), got {entries}."
            )
        return sum(packing.word_rows(entries, width) for width in self._planes)

    def pack(self, leaves: Leaves, *, channels_first: bool) -> Int[Array, "*lead W L"]:
        q = leaves["q"].astype(jnp.int32)
        q = jnp.swapaxes(q, -1, -2) if channels_first else q
        parts, shift = [], 0
        for width in self._planes:
            parts.append(_pack((q >> shift) & (2**width - 1), width))
            shift += width
        return jnp.concatenate(parts, axis=-2)

    def side(self, leaves: Leaves) -> Array | None:
        if not self.outliers:
            return None
        index = leaves["outlier_index"].astype(jnp.float32)
        index = jnp.pad(index, [(0, 0)] * (index.ndim - 2) + [(0, self.outliers % 2), (0, 0)])
        pairs = index[..., ::2, :] + 256.0 * index[..., 1::2, :]
        return jnp.concatenate([pairs, leaves["outlier"].astype(jnp.float32)], axis=-2)

    def levels(self, words: Int[Array, "*lead W L"]) -> Int[Array, "*lead n L"]:
        """The codes, which are yet to be looked up."""
        q, row, shift = jnp.int32(0), 0, 0
        for width, rows in zip(self._planes, self._rows(words.shape[-2]), strict=True):
            q = q | (_unpack(words[..., row : row + rows, :], width) << shift)
            row, shift = row + rows, shift + width
        assert isinstance(q, Array)
        return q

    def values(self, words, side, params, *, channels_first):
        q = jnp.swapaxes(self.levels(words), -1, -2)  # T H
        x = self._plain(_choose(q, _per_head(params["levels"], q)), side, params)
        channel = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
        for i in range(self.outliers):
            index, value = self._outlier(i, [side[..., j, :, None] for j in range(self.halves)])
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
        """The codes, which are yet to be looked up."""
        low, *high = self._rows(words.shape[0])
        q = _fields(words[:low], self._planes[0], 0)
        return q | _fields(words[low:], 1, 2) if high else q

    def across_tile(self, words, side, columns):
        return self._entries(words, side, columns).astype(jnp.bfloat16)

    def scores(self, q, sums, words, side, factor, columns=None):
        return matmul(q, self.across_tile(words, side, columns)) * factor

    def turned_scores(self, q, sums, words, side, cos, sin, factor, columns=None):
        x = turned(self._entries(words, side, columns), cos, sin, axis=0)
        return matmul(q, x.astype(jnp.bfloat16)) * factor

    def _entries(
        self, words: Int[Array, "W S"], side: list[Array], columns: Any
    ) -> Float[Array, "H S"]:
        """Values, float32, page by page: 128 lanes of them stay in registers."""
        pages = [slice(i, i + LANES) for i in range(0, words.shape[1], LANES)]
        tiles = [self._page(words[:, at], [x[:, at] for x in side], columns) for at in pages]
        return jnp.concatenate(tiles, axis=1)

    def _page(
        self, words: Int[Array, "W 128"], side: list[Array], columns: Any
    ) -> Float[Array, "H 128"]:
        q = self.numbers(words)
        side = [jnp.broadcast_to(x, (_ROWS, LANES)) for x in side]
        tables = self._tables(side, columns)
        spots = [self._spot(*self._outlier(i, side)) for i in range(self.outliers)]
        registers = []
        for g in range(q.shape[0] // _ROWS):
            x = _look_up(tables, q[g * _ROWS : (g + 1) * _ROWS])
            x = self._scaled_rows(x, g, q.shape[0], columns)
            for place, value in spots:
                x = jnp.where(place == g, value, x)
            registers.append(x)
        return jnp.concatenate(registers, axis=0)

    def _spot(self, channel: Int[Array, "8 128"], value: Array) -> tuple[Array, Array]:
        """The register of a tile in which an outlier takes a lane's place, -1 in other rows."""
        row = lax.broadcasted_iota(jnp.int32, channel.shape, 0)
        return jnp.where((channel & 7) == row, channel >> 3, -1), value

    def _tables(self, side: list[Array], columns: Any) -> list[Float[Array, "8 128"]]:
        """Levels of each lane, eight to a register."""
        return [columns[i : i + _ROWS] for i in range(0, self._table_rows, _ROWS)]

    def _scaled_rows(
        self, x: Float[Array, "8 128"], g: int, channels: int, columns: Any
    ) -> Float[Array, "8 128"]:
        """Register g of a tile, once looked up."""
        return x

    # --- both -------------------------------------------------------------------------------------

    def _outlier(self, i: int, side: list[Array]) -> tuple[Array, Array]:
        """Channel and value of each token's outlier i."""
        pair = side[i // 2].astype(jnp.int32)
        return (pair >> 8 if i % 2 else pair & 255), side[self.whole + i]

    @property
    def _planes(self) -> tuple[int, ...]:
        return (2, 1) if self.bits == 3 else (self.bits,)

    @property
    def _table_rows(self) -> int:
        return max(_ROWS, 2**self.bits)

    def _rows(self, total: int) -> list[int]:
        """Rows of each plane's words."""
        return [total * width // self.bits for width in self._planes]


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

    def side(self, leaves: Leaves) -> Array:
        own = [leaves[name].astype(jnp.float32)[..., None, :] for name in ("range", "offset")]
        outliers = super().side(leaves)
        return jnp.concatenate(own if outliers is None else [outliers, *own], axis=-2)

    def _plain(self, u, side, params):
        spread, offset = (side[..., i, :, None] for i in (-2, -1))
        return u * spread + offset

    def _tables(self, side, columns):
        return [table * side[-2] + side[-1] for table in super()._tables(side, columns)]


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


# Words whose fields come out eight rows at a time, a register each. Of eight rows of words, field f
# is register f. What is left over is four, two or one row of words, whose fields lie so that the
# words and their upper parts, one below the other, are eight such rows.


def _pieces(rows: int) -> list[tuple[int, int]]:
    """(first row, rows) of words: eights, then at most a four, a two and a one."""
    sizes = [_ROWS] * (rows // _ROWS) + [n for n in (4, 2, 1) if rows & n]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return list(zip(starts, sizes, strict=True))


def _pack(codes: Int[Array, "*lead n L"], bits: int) -> Int[Array, "*lead W L"]:
    *lead, entries, lanes = codes.shape
    out, fields = [], 32 // bits
    for row, rows in _pieces(packing.word_rows(entries, bits)):
        x = codes[..., row * fields : (row + rows) * fields, :]
        x = x.reshape(*lead, -1, _ROWS // rows, rows, lanes)
        x = jnp.swapaxes(x, -4, -3).reshape(*lead, -1, lanes)
        out.append(packing.pack(x, bits, "fields"))
    return jnp.concatenate(out, axis=-2)


def _unpack(words: Int[Array, "*lead W L"], bits: int) -> Int[Array, "*lead n L"]:
    *lead, total, lanes = words.shape
    out = []
    for row, rows in _pieces(total):
        x = packing.unpack(words[..., row : row + rows, :], bits, "fields")
        x = x.reshape(*lead, _ROWS // rows, -1, rows, lanes)
        out.append(jnp.swapaxes(x, -4, -3).reshape(*lead, -1, lanes))
    return jnp.concatenate(out, axis=-2)


def _fields(words: Int[Array, "W L"], bits: int, shift: int) -> Int[Array, "n L"]:
    """`_unpack` in a kernel, times 2^shift."""
    mask, out = jnp.int32((2**bits - 1) << shift), []
    for row, rows in _pieces(words.shape[0]):
        x, parts = words[row : row + rows], _ROWS // rows
        each = 32 // parts
        if parts > 1:
            x = jnp.concatenate([_right(x, each * part) for part in range(parts)], axis=0)
        out += [_right(x, f - shift) & mask for f in range(0, each, bits)]
    return jnp.concatenate(out, axis=0)


def _right(x: Int[Array, "W L"], by: int) -> Int[Array, "W L"]:
    if by <= 0:
        return x << -by if by else x
    return lax.shift_right_logical(x, jnp.int32(by))
