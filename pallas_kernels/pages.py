"""The TPU page: 128 tokens of all KV heads, keys, values and scales, in one int32 array.

A pool is `[P, rows, 128]`, so one contiguous copy brings a page on chip. Its rows, in order:

* of each head the words of its keys, then those of its values;
* the float16 numbers of the tokens (scales, lows), two to a word and tokens on lanes: pair j of
  head k in row `j K + k`. Pair j has numbers 2j and 2j + 1 of a head, its keys' first.

Padded with zeros to whole sublanes (8 rows). Keys go channels down and tokens across, so a score is
`q @ tile`. Values go tokens down and channels across, so an output is `p @ tile`: both products
take the tile without a transposition. Where the head dim has no whole lanes (64, 80, 96), or a code
asks for it, values lie as keys do and the matrix unit transposes them: a third more pushes, and no
byte of padding.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.codes.base import LANES, Code, Leaves
from pallas_kernels.codes.uniform import BFloat16

#: calibrated arrays of the keys' code and of the values'
Params = tuple[Leaves, Leaves]

#: rotated keys as they are
_EXACT = BFloat16()


class KeyPart(NamedTuple):
    """A part of the keys: channels of the query that meet it, rows of words among a head's, and
    the first of its float16 numbers."""

    code: Code
    start: int
    stop: int
    row: int
    rows: int
    side: int


class Section(NamedTuple):
    """Words of a head's page: source 0 for keys (latents), 1 for values (rotated keys); the
    channels in them; the first of their rows among the head's."""

    source: int
    code: Code
    start: int
    stop: int
    row: int
    channels_first: bool


@dataclasses.dataclass(frozen=True)
class PageFormat:
    """k, v: what the entries are made of. Static, and the key to every kernel on its pools."""

    k: Code
    v: Code
    num_kv_heads: int
    head_dim: int

    def __post_init__(self):
        if self.v.width(self.head_dim) != self.head_dim:
            raise ValueError(
                f"v: {type(self.v).__name__} has no values of head_dim={self.head_dim}."
            )

    @property
    def query_width(self) -> int:
        """Channels of a query, in the space of the keys."""
        return self.k.width(self.head_dim)

    @property
    def key_parts(self) -> tuple[KeyPart, ...]:
        """What a head's keys are made of."""
        return (KeyPart(self.k, 0, self.query_width, 0, self.key_rows, 0),)

    @property
    def sections(self) -> tuple[Section, ...]:
        """What is written of a head."""
        H, each = self.head_dim, self.head_dim // self.value_tiles
        keys = Section(0, self.k, 0, H, 0, True)
        values = [
            Section(1, self.v, i, i + each, self.value_row(i // each), self.values_channels_first)
            for i in range(0, H, each)
        ]
        return (keys, *values)

    def width_of(self, source: int) -> int:
        """Channels of a token in a source of the sections."""
        return max(s.stop for s in self.sections if s.source == source)

    @property
    def value_side(self) -> int:
        """The first of the values' float16 numbers."""
        return self.k.halves

    def value_row(self, tile: int) -> int:
        """The row, among a head's, at which a tile of its values begins."""
        return self.key_rows + tile * self.value_tile_rows

    @property
    def values_channels_first(self) -> bool:
        """Values lie as keys do, `[H, tokens]`."""
        return self.head_dim % LANES != 0 or self.v.across

    @property
    def key_rows(self) -> int:
        """Word rows of a head's keys."""
        return self.k.word_rows(self.k.width(self.head_dim))

    @property
    def value_tile_rows(self) -> int:
        """Word rows of 128 lanes of a head's values."""
        return self.v.word_rows(self.head_dim if self.values_channels_first else LANES)

    @property
    def value_tiles(self) -> int:
        return 1 if self.values_channels_first else self.head_dim // LANES

    @property
    def head_rows(self) -> int:
        return self.key_rows + self.value_tile_rows * self.value_tiles

    @property
    def side_row(self) -> int:
        """First row of the float16 numbers."""
        return self.num_kv_heads * self.head_rows

    @property
    def side_pairs(self) -> int:
        return -(-(self.k.halves + self.v.halves) // 2)

    @property
    def rows(self) -> int:
        used = self.side_row + self.side_pairs * self.num_kv_heads
        return -(-used // 8) * 8

    @property
    def page_bytes(self) -> int:
        return self.rows * LANES * 4

    @property
    def code_bytes(self) -> int:
        """Of a page's bytes the codes; the others are float16 numbers, and what pads the page."""
        return self.side_row * LANES * 4

    @property
    def code_bits(self) -> tuple[int, int]:
        """Bits of a code of the keys and of one of the values."""
        return self.k.bits, self.v.bits

    def bits(self) -> tuple[float, float]:
        """Bits that a number of the keys and one of the values cost. Padding counts as values'."""
        numbers = self.num_kv_heads * self.head_dim * LANES
        k = (32 * self.key_rows + 16 * self.k.halves) * self.num_kv_heads * LANES
        return k / numbers, (8 * self.page_bytes - k) / numbers

    @property
    def calibrated(self) -> tuple[Code, ...]:
        """Of its two codes those that read arrays of the call."""
        return tuple(code for code in (self.k, self.v) if code.calibrated)

    def columns(self, params: Params) -> tuple[Float[Array, "K n 128"], ...]:
        """What a kernel reads of the arrays of each of `calibrated`."""
        both = zip((self.k, self.v), params, strict=True)
        return tuple(code.columns(own) for code, own in both if code.calibrated)

    def keys_values(
        self, pages: Int[Array, "*lead rows 128"], params: Params = ({}, {})
    ) -> tuple[Array, Array]:
        """What attention meets, float32: keys `[..., K, 128, D]`, values `[..., K, 128, H]`."""
        return self.unpack(pages, params)

    def pack(self, k: Leaves, v: Leaves) -> Int[Array, "*lead rows 128"]:
        """A page of the plain leaves of its codes, `[..., K, 128, H]` and the like."""
        heads = [self.k.pack(k, channels_first=True), *self._value_words(v)]
        sides = [s for s in (self.k.side_bits(k), self.v.side_bits(v)) if s is not None]
        return self._page(jnp.concatenate(heads, axis=-2), sides)

    def _page(self, words: Int[Array, "*lead K n 128"], sides: list[Array]) -> Array:
        """The page of its heads' words and float16 numbers."""
        lead = words.shape[:-3]
        parts = [words.reshape(*lead, -1, LANES)]
        if self.side_pairs:
            parts.append(_side_words(sides))
        page = jnp.concatenate(parts, axis=-2)
        return jnp.pad(page, [(0, 0)] * len(lead) + [(0, self.rows - page.shape[-2]), (0, 0)])

    def unpack(
        self, pages: Int[Array, "*lead rows 128"], params: Params = ({}, {})
    ) -> tuple[Float[Array, "*lead K 128 D"], Float[Array, "*lead K 128 H"]]:
        """Keys, in their code's space of D channels, and values, float32: plain XLA, for tests and
        for devices without a kernel. params: arrays of `k` and of `v`, see `Code.param_shapes`."""
        lead, K = pages.shape[:-2], self.num_kv_heads
        words = pages[..., : self.side_row, :].reshape(*lead, K, self.head_rows, LANES)
        bits = self._side(pages)
        k_side, v_side = _numbers(self.k, bits, 0), _numbers(self.v, bits, self.value_side)
        k = self.k.values(words[..., : self.key_rows, :], k_side, params[0], channels_first=True)
        v = words[..., self.key_rows :, :].reshape(*lead, K, self.value_tiles, -1, LANES)
        v = jnp.moveaxis(v, -3, -2).reshape(*lead, K, self.value_tile_rows, -1)
        return k, self.v.values(v, v_side, params[1], channels_first=self.values_channels_first)

    def _value_words(self, v: Leaves) -> list[Array]:
        words = self.v.pack(v, channels_first=self.values_channels_first)
        return [words[..., i : i + LANES] for i in range(0, words.shape[-1], LANES)]

    def _side(self, pages: Array) -> Int[Array, "*lead K n 128"]:
        """The bits of each head's float16 numbers, and others above them."""
        lead, n, K = pages.shape[:-2], self.side_pairs, self.num_kv_heads
        pairs = pages[..., self.side_row : self.side_row + n * K, :].reshape(*lead, n, K, LANES)
        both = jnp.stack([pairs, pairs >> 16], axis=-3)
        return jnp.swapaxes(both.reshape(*lead, 2 * n, K, LANES), -2, -3)


def _numbers(code: Code, bits: Int[Array, "*lead K n 128"], first: int) -> Array | None:
    rows = [bits[..., first + i, :] for i in range(code.halves)]
    return jnp.stack(code.from_bits(rows), axis=-2) if rows else None


def _side_words(sides: list[Int[Array, "*lead K n 128"]]) -> Int[Array, "*lead r 128"]:
    halves = jnp.concatenate(sides, axis=-2)  # ... K n 128
    halves = jnp.pad(halves, [(0, 0)] * (halves.ndim - 2) + [(0, halves.shape[-2] % 2), (0, 0)])
    pairs = halves[..., ::2, :] | (halves[..., 1::2, :] << 16)
    pairs = jnp.swapaxes(pairs, -2, -3)  # ... pair K 128
    return pairs.reshape(*pairs.shape[:-3], -1, LANES)


@dataclasses.dataclass(frozen=True)
class LatentFormat(PageFormat):
    """Pages of latent attention (DeepSeek-V2 2405.04434): one latent of C = `head_dim` channels a
    token, which is key and value of all heads, and one rotated key of R = `rope_dim` channels.

    k and v are the latent's code, `rope` that of the rotated keys. A head's rows: the latent's
    words, channels down, then the rotated key's. A query is [its share for the latent, its R].
    """

    rope: Code = _EXACT
    rope_dim: int = 64

    def __post_init__(self):
        super().__post_init__()
        if self.num_kv_heads != 1 or self.k != self.v:
            raise ValueError(
                "LatentFormat: expected one KV head, and one code for keys and values."
            )
        if self.calibrated or self.rope.calibrated:
            raise ValueError("LatentFormat: k, rope: expected codes without calibrated arrays.")

    @property
    def query_width(self) -> int:
        return self.head_dim + self.rope.width(self.rope_dim)

    @property
    def key_parts(self) -> tuple[KeyPart, ...]:
        C, rows = self.head_dim, self.key_rows
        latent = KeyPart(self.k, 0, C, 0, rows, 0)
        turned = self.rope.word_rows(self.rope.width(self.rope_dim))
        return latent, KeyPart(self.rope, C, self.query_width, rows, turned, self.k.halves)

    @property
    def sections(self) -> tuple[Section, ...]:
        latent = Section(0, self.k, 0, self.head_dim, 0, True)
        return latent, Section(1, self.rope, 0, self.rope_dim, self.key_rows, True)

    @property
    def value_side(self) -> int:
        return 0

    def value_row(self, tile: int) -> int:
        return 0

    @property
    def values_channels_first(self) -> bool:
        return True

    @property
    def value_tile_rows(self) -> int:
        return self.key_rows

    @property
    def head_rows(self) -> int:
        return sum(part.rows for part in self.key_parts)

    @property
    def side_pairs(self) -> int:
        return -(-(self.k.halves + self.rope.halves) // 2)

    @property
    def code_bits(self) -> tuple[int, int]:
        return self.k.bits, self.rope.bits

    def bits(self) -> tuple[float, float]:
        """Of a latent's number, and of a rotated key's, which has the padding."""
        latent = 32 * self.key_rows + 16 * self.k.halves
        return latent / self.head_dim, (8 * self.page_bytes / LANES - latent) / self.rope_dim

    def pack(self, k: Leaves, v: Leaves) -> Int[Array, "*lead rows 128"]:
        """k: leaves of the latents, `[..., 1, 128, C]`; v: of the rotated keys."""
        parts = zip((self.k, self.rope), (k, v), strict=True)
        words = [code.pack(leaves, channels_first=True) for code, leaves in parts]
        sides = [s for s in (self.k.side_bits(k), self.rope.side_bits(v)) if s is not None]
        return self._page(jnp.concatenate(words, axis=-2), sides)

    def unpack(
        self, pages: Int[Array, "*lead rows 128"], params: Params = ({}, {})
    ) -> tuple[Array, Array]:
        """Latents `[..., 1, 128, C]` and rotated keys `[..., 1, 128, R]`."""
        bits, out = self._side(pages), []
        for part in self.key_parts:
            words = pages[..., None, part.row : part.row + part.rows, :]
            side = _numbers(part.code, bits, part.side)
            out.append(part.code.values(words, side, {}, channels_first=True))
        return out[0], out[1]

    def keys_values(
        self, pages: Int[Array, "*lead rows 128"], params: Params = ({}, {})
    ) -> tuple[Array, Array]:
        latent, rope = self.unpack(pages)
        return jnp.concatenate([latent, rope], axis=-1), latent
