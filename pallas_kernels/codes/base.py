"""Tile codes: how the entries of a page lie in words, and what a kernel does with them.

A *tile* is `[n, L]`: for keys n channels by L tokens (K^T); for values n tokens by L channels, or
keys' form again (`pages.py` says when). What a code stands for is

    value = scale * (tile + bias) + low

with `tile` in bfloat16, exact for every code but the codebooks, `scale` and `low` one number for
each token and group of channels, and `bias` a constant. So a kernel multiplies the tile as it comes
out of the words, scales the scores of keys after the product and the weights of values before it,
and never computes a value. A code whose scales run along tokens (KIVI's keys) has its own `scores`.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import operator
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels import words as packing
from pallas_kernels.turn import turned

Leaves = Mapping[str, Array]
Shapes = dict[str, tuple[int, ...]]

#: Tokens of a kernel page, and lanes of a vector register.
LANES = 128

ROWS_BY_ROWS = (((1,), (0,)), ((), ()))  # a @ b
ROWS_BY_LANES = (((1,), (1,)), ((), ()))  # a @ b.T


class Plane(NamedTuple):
    """Fields of one width, for each code one."""

    fields: Int[Array, "*q"]
    bits: int
    order: str


@dataclasses.dataclass(frozen=True)
class Code(abc.ABC):
    """bits: of an entry. groups: of channels, each with a scale (and low) per token. order: of
    `words.py`. narrow: keys are turned in bfloat16, for chips with its arithmetic; the error is
    0.2 % of the scores' spread. `codes.for_generation` picks both."""

    bits: int
    groups: int = 1
    order: str = "adjacent"
    narrow: bool = False
    has_scale: ClassVar[bool] = True
    has_low: ClassVar[bool] = False
    #: keys may be stored before RoPE: `turned_scores`
    turns: ClassVar[bool] = True
    #: reads arrays that come with the call: `param_shapes`
    calibrated: ClassVar[bool] = False
    #: values lie as keys do whatever the head dim, and `across_tile` reads them
    across: ClassVar[bool] = False

    def __post_init__(self):
        need(self.order in packing.ORDERS, "order", f"one of {packing.ORDERS}", self.order)
        need(self.groups == 1 or not self.narrow, "narrow", "False with groups", self.narrow)

    # --- the page ---------------------------------------------------------------------------------

    @property
    def halves(self) -> int:
        """float16 numbers of a token, beside its words: scales of the groups, then lows."""
        return self.groups * (self.has_scale + self.has_low)

    def param_shapes(self, num_kv_heads: int, head_dim: int) -> Shapes:
        """The arrays that a call brings for a `calibrated` code, float32."""
        return {}

    def width(self, head_dim: int) -> int:
        """Channels of a token in the code's own space."""
        return head_dim

    def word_rows(self, entries: int) -> int:
        """Rows of words of one head's page with `entries` down the rows."""
        return packing.word_rows(entries, self.bits)

    def pack(self, leaves: Leaves, *, channels_first: bool) -> Int[Array, "*lead W L"]:
        """Words of `leaves["q"] [..., T, H]`; channels_first: with channels down the rows."""
        q = leaves["q"]
        planes = self.planes(jnp.swapaxes(q, -1, -2) if channels_first else q)
        return jnp.concatenate([packing.pack(*plane) for plane in planes], axis=-2)

    def planes(self, q: Shaped[Array, "*q"]) -> list[Plane]:
        """What lies in the words, from the top rows down: fields, their bits and their order."""
        return [Plane(self.stored(q.astype(jnp.int32)), self.bits, self.order)]

    def below(self, halves: Int[Array, "*lead n L"]) -> list[Int[Array, "*lead m 128"]]:
        """Rows below the words, of float16 numbers (their bits) that are not one a token."""
        return []

    def stored(self, q: Int[Array, "*q"]) -> Int[Array, "*q"]:
        """What the fields hold for a code."""
        return q

    def side(self, leaves: Leaves) -> Array | None:
        """`[..., halves, T]` float32."""
        names = [n for n, has in (("scale", self.has_scale), ("low", self.has_low)) if has]
        if not names:
            return None
        parts = [leaves[name].astype(jnp.float32) for name in names]
        parts = [x if x.ndim == leaves["q"].ndim else x[..., None, :] for x in parts]
        return jnp.concatenate(parts, axis=-2)

    def side_bits(self, leaves: Leaves) -> Int[Array, "*lead n T"] | None:
        """The 16 bits of each number of `side`."""
        side = self.side(leaves)
        return None if side is None else packing.half_bits(side)

    def from_bits(self, bits: list[Int[Array, "*b"]]) -> list[Float[Array, "*b"]]:
        """The rows of `side`, of those of `side_bits`; the higher bits may hold anything."""
        return [packing.half_value(x) for x in bits]

    def values(
        self,
        words: Int[Array, "*lead K W L"],
        side: Array | None,
        params: Leaves,
        *,
        channels_first: bool,
    ) -> Float[Array, "*lead K T H"]:
        """What a page stands for, float32, in plain XLA: the reference of the kernel's part."""
        x = self.levels(words)
        x = jnp.swapaxes(x, -1, -2) if channels_first else x
        if side is None:
            return x
        columns = jnp.swapaxes(side, -1, -2)  # T halves
        columns = jnp.repeat(columns, x.shape[-1] // self.groups, axis=-1)
        scale, low = columns[..., : x.shape[-1]], columns[..., x.shape[-1] :]
        return x * scale + low if self.has_low else x * scale

    @abc.abstractmethod
    def levels(self, words: Int[Array, "*lead W L"]) -> Float[Array, "*lead n L"]:
        """`tile + bias` in float32, in plain XLA."""

    # --- inside a kernel --------------------------------------------------------------------------

    @property
    def bias(self) -> float:
        return 0.0

    @property
    def needs_sums(self) -> bool:
        """`scores` wants the sums of the query's channels, and `product` gives loose sums."""
        return self.has_low or self.bias != 0.0

    @abc.abstractmethod
    def numbers(self, words: Int[Array, "W L"]) -> Array:
        """The tile `[n, L]` before its cast to bfloat16."""

    def tile(self, words: Int[Array, "W L"]) -> Float[Array, "n L"]:
        return self.numbers(words).astype(jnp.bfloat16)

    def columns(self, params: Leaves) -> Float[Array, "K n 128"]:
        """What a kernel reads of the arrays of a `calibrated` code, the same on all lanes."""
        raise NotImplementedError(f"{type(self).__name__} has no calibrated arrays.")

    def across_tile(
        self, words: Int[Array, "W S"], side: list[Array], columns: Any
    ) -> Float[Array, "H S"]:
        """The tile of values that lie channels first, one page beside the other. columns: the
        head's, `[n, 128]`, an array or a reference."""
        return self.tile(words)

    def tiles(self, words: list[Array]) -> Float[Array, "Sn L"]:
        """The tiles of several pages one below the other."""
        if self.order == "adjacent":  # then rows of words stand in the order of the entries
            return self.tile(jnp.concatenate(words, axis=0))
        # joined before the cast: registers half full of bfloat16 are costly to move
        return jnp.concatenate([self.numbers(w) for w in words], axis=0).astype(jnp.bfloat16)

    def scores(
        self,
        q: Float[Array, "R H"],
        sums: list[Array],
        words: Int[Array, "W S"],
        side: list[Array],
        factor: float,
        columns: Any = None,
    ) -> Float[Array, "R S"]:
        """factor * <q, key> of each token. sums: of q's channels in each group, `[R, 1]`; side: the
        rows of `side`, `[1, S]`."""
        tile = self.tile(words)
        if not self.has_scale:
            return matmul(q, tile) * factor
        parts = []
        for g in range(self.groups):
            scale = side[g] * factor
            part = matmul(*self._group(q, tile, g))
            part = part + sums[g] * self.bias if self.bias else part
            part = part * scale
            if self.has_low:
                part = part + sums[g] * (side[self.groups + g] * factor)
            parts.append(part)
        return functools.reduce(operator.add, parts)

    @property
    def needs_turned_sums(self) -> bool:
        """`turned_scores` wants the product of the query with turned ones."""
        return self.has_low and self.groups == 1

    def turned_scores(
        self,
        q: Float[Array, "R H"],
        sums: Float[Array, "R S"] | None,
        words: Int[Array, "W S"],
        side: list[Array],
        cos: Float[Array, "half S"],
        sin: Float[Array, "half S"],
        factor: float,
        columns: Any = None,
    ) -> Float[Array, "R S"]:
        """`scores` of keys that are turned first, each token by its own angles. A scale and a low
        that all channels share come after the product, as there. sums: of q with turned ones."""
        kind = jnp.bfloat16 if self.narrow else jnp.float32
        x = self.numbers(words).astype(kind)
        x = x + self.bias if self.bias else x
        x = self._scaled(x, side) if self.groups > 1 else x
        x = turned(x, cos.astype(kind), sin.astype(kind), axis=0)
        s = matmul(q, x.astype(jnp.bfloat16)) * factor
        if self.groups > 1 or not self.has_scale:
            return s
        s = s * side[0]
        return s if sums is None else s + sums * (side[1] * factor)

    def _scaled(self, x: Float[Array, "H S"], side: list[Array]) -> Float[Array, "H S"]:
        """Of `tile + bias` the values, channels down."""
        each, out = x.shape[0] // self.groups, []
        for g in range(self.groups):
            part = x[g * each : (g + 1) * each] * side[g]
            out.append(part + side[self.groups + g] if self.has_low else part)
        return jnp.concatenate(out, axis=0)

    def _group(self, q: Array, tile: Array, g: int) -> tuple[Array, Array]:
        """q and tile of a group of channels: a slice where it has whole lanes, else a mask."""
        each = q.shape[-1] // self.groups
        if self.groups == 1:
            return q, tile
        if each % LANES == 0:
            return q[:, g * each : (g + 1) * each], tile[g * each : (g + 1) * each]
        lane = lax.broadcasted_iota(jnp.int32, q.shape, 1)
        inside = (lane >= g * each) & (lane < (g + 1) * each)
        return jnp.where(inside, q.astype(jnp.float32), 0.0).astype(q.dtype), tile

    def weights(
        self, p: Float[Array, "R S"], side: list[Array]
    ) -> tuple[Float[Array, "nR S"], list[Array]]:
        """What multiplies a tile of values, a block of rows per group, in bfloat16; and per group
        what has yet to be summed over lanes and added to its channels, `[R, 128]`."""
        if not self.has_scale:
            return p.astype(jnp.bfloat16), []
        scaled = [p * side[g] for g in range(self.groups)]
        loose = []
        if self.bias:  # many times what it is to cancel: both must see the same rounded weights
            scaled = [round_to_bfloat16(x) for x in scaled]
        for g in range(self.groups if self.needs_sums else 0):
            terms = [scaled[g] * self.bias] if self.bias else []
            terms += [p * side[self.groups + g]] if self.has_low else []
            loose.append(fold(functools.reduce(operator.add, terms)))
        # joined before the cast, as in `tiles`
        return jnp.concatenate(scaled, axis=0).astype(jnp.bfloat16), loose

    def gather_groups(self, y: Float[Array, "nR H"]) -> Float[Array, "R H"]:
        """From the product with `weights`, the channels of each group out of its own rows."""
        if self.groups == 1:
            return y
        rows, each = y.shape[0] // self.groups, y.shape[1] // self.groups
        lane = lax.broadcasted_iota(jnp.int32, (rows, y.shape[1]), 1)
        out = y[:rows]
        for g in range(1, self.groups):
            out = jnp.where(lane >= g * each, y[g * rows : (g + 1) * rows], out)
        return out


def matmul(a: Array, b: Array, dims=ROWS_BY_ROWS) -> Array:
    return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def round_to_bfloat16(x: Float[Array, "*x"]) -> Float[Array, "*x"]:
    """The nearest bfloat16, as float32: its upper 8 of 24 bits by Veltkamp's splitting."""
    wide = x * 65537.0
    return wide - (wide - x)


def fold(x: Float[Array, "R S"]) -> Float[Array, "R 128"]:
    """Sum over whole lane tiles."""
    tiles = [x[:, i : i + LANES] for i in range(0, x.shape[1], LANES)]
    return functools.reduce(operator.add, tiles)


def need(ok: bool, field: str, expected: str, got: object) -> None:
    if not ok:
        raise ValueError(f"{field}: expected {expected}, got {got}.")
