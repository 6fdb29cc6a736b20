"""Keys with a scale and a low for each channel and a few consecutive tokens (KIVI 2402.02750).

Channels go down the rows of a tile of keys, where a number per channel would have to be spread over
lanes. So the scales go to the query instead, which has channels on lanes: a block of its rows for
each span of tokens, all multiplied with the page's tile, and of each span the scores that its own
block gave. The matrix unit has room for the rows, and the tile is never touched.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import words as packing
from pallas_kernels.codes.base import LANES, Leaves, matmul, need
from pallas_kernels.codes.uniform import Asymmetric


@dataclasses.dataclass(frozen=True)
class KiviKey(Asymmetric):
    """value = scale * q + low. Leaves: `q [..., T, H]`, `scale` and `low [..., T / span, H]`.

    Scales and lows lie below the words as pairs of float16, channels on lanes.
    """

    bits: int = 2
    span: int = 32
    has_scale: ClassVar[bool] = False
    has_low: ClassVar[bool] = False
    turns: ClassVar[bool] = False  # scales of a token's channels would have to lie down its tile

    def __post_init__(self):
        super().__post_init__()
        need(LANES % self.span == 0, "span", "a divisor of 128", self.span)

    @property
    def needs_sums(self) -> bool:
        return False

    def word_rows(self, entries: int) -> int:
        return packing.word_rows(entries, self.bits) + self._spans * -(-entries // LANES)

    def pack(self, leaves: Leaves, *, channels_first: bool) -> Int[Array, "*lead W L"]:
        words = super().pack(leaves, channels_first=channels_first)
        halves = [packing.half_bits(leaves[name]) for name in ("scale", "low")]
        below = self.below(jnp.concatenate(halves, axis=-2))
        return jnp.concatenate([words, *below], axis=-2)

    def below(self, halves):
        spans, channels = self._spans, halves.shape[-1]
        pair = halves[..., :spans, :] | (halves[..., spans:, :] << 16)
        padding = jnp.zeros((*pair.shape[:-1], -channels % LANES), jnp.int32)
        pair = jnp.concatenate([pair, padding], axis=-1) if channels % LANES else pair
        tiles = [pair[..., i : i + LANES] for i in range(0, pair.shape[-1], LANES)]
        return [tile[..., s : s + 1, :] for s in range(spans) for tile in tiles]

    def values(self, words, side, params, *, channels_first):
        rows = self._code_rows(words.shape[-2])
        q = jnp.swapaxes(self.levels(words[..., :rows, :]), -1, -2)  # T H
        pair = words[..., rows:, :]
        pair = pair.reshape(*pair.shape[:-2], self._spans, -1)[..., : q.shape[-1]]
        scale, low = (
            jnp.repeat(packing.half_value(x), self.span, axis=-2) for x in (pair, pair >> 16)
        )
        return q * scale + low

    def scores(self, q, sums, words, side, factor, columns=None):
        R, H = q.shape
        rows = packing.word_rows(H, self.bits)
        tile = self.tile(words[:rows])
        pages = [slice(i, i + LANES) for i in range(0, words.shape[1], LANES)]
        queries = [self._queries(q, words[rows:, at], factor) for at in pages]
        stack, lows = (
            jnp.concatenate([x[i] for x in queries], axis=0).astype(jnp.bfloat16) for i in (0, 1)
        )
        # sums over channels, the same on every lane: a product with ones
        ones = jnp.ones((H, LANES), jnp.bfloat16)
        offset = matmul(lows, ones)
        if self._large_bias:
            offset = offset + matmul(stack, ones) * self.bias
        each = self._spans * R
        parts = [
            self._own_span(matmul(stack[i * each : (i + 1) * each], tile[:, at])
                           + offset[i * each : (i + 1) * each])
            for i, at in enumerate(pages)
        ]  # fmt: skip
        return jnp.concatenate(parts, axis=1)

    def _queries(self, q: Array, pair: Int[Array, "r 128"], factor: float) -> tuple[Array, Array]:
        """A page's `[spans R, H]` queries times scales, and times lows, float32."""
        q = q.astype(jnp.float32)
        tiles = self._tiles(q.shape[1])
        scaled, lows = [], []
        for s in range(self._spans):
            wide = [pair[s * tiles + j][None] for j in range(tiles)]
            row = jnp.concatenate(wide, axis=1)[:, : q.shape[1]]
            scale = packing.half_value(row) * factor
            low = packing.half_value(row >> 16) * factor
            scaled.append(q * scale)
            lows.append(q * (low if self._large_bias else low + self.bias * scale))
        return jnp.concatenate(scaled, axis=0), jnp.concatenate(lows, axis=0)

    def _own_span(self, y: Float[Array, "sR 128"]) -> Float[Array, "R 128"]:
        R = y.shape[0] // self._spans
        lane = lax.broadcasted_iota(jnp.int32, (R, LANES), 1)
        out = y[:R]
        for s in range(1, self._spans):
            out = jnp.where(lane >= s * self.span, y[s * R : (s + 1) * R], out)
        return out

    @property
    def _large_bias(self) -> bool:
        """Many times the codes, so it must cancel with the same rounded queries."""
        return self.order == "pairs"

    @property
    def _spans(self) -> int:
        return LANES // self.span

    @staticmethod
    def _tiles(channels: int) -> int:
        return -(-channels // LANES)

    def _code_rows(self, total: int) -> int:
        """Rows of the words among all rows of a head's page."""
        for tiles in range(1, 9):  # the head dim decides both, and is known only by their sum
            rows = total - self._spans * tiles
            if rows > 0 and self._tiles(rows * 32 // self.bits) == tiles:
                return rows
        raise NotImplementedError(f"KiviKey: {total} rows fit no head dim up to 1024.")
