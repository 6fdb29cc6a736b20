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
        pair = packing.half_bits(leaves["scale"]) | (packing.half_bits(leaves["low"]) << 16)
        pair = jnp.pad(pair, [(0, 0)] * (pair.ndim - 1) + [(0, -pair.shape[-1] % LANES)])
        pair = pair.reshape(*pair.shape[:-1], -1, LANES)  # spans, lane tiles, lanes
        return jnp.concatenate([words, pair.reshape(*words.shape[:-2], -1, LANES)], axis=-2)

    def values(self, words, side, *, channels_first):
        rows = self._code_rows(words.shape[-2])
        q = jnp.swapaxes(self.levels(words[..., :rows, :]), -1, -2)  # T H
        pair = words[..., rows:, :]
        pair = pair.reshape(*pair.shape[:-2], self._spans, -1)[..., : q.shape[-1]]
        scale, low = (
            jnp.repeat(packing.half_value(x), self.span, axis=-2) for x in (pair, pair >> 16)
        )
        return q * scale + low

    def scores(self, q, sums, words, side, factor):
        H = q.shape[-1]
        rows = packing.word_rows(H, self.bits)
        tile = self.tile(words[:rows])
        pages = [slice(i, i + LANES) for i in range(0, words.shape[1], LANES)]
        parts = [self._page_scores(q, tile[:, at], words[rows:, at], factor) for at in pages]
        return jnp.concatenate(parts, axis=1)

    def _page_scores(
        self, q: Array, tile: Float[Array, "H 128"], pair: Int[Array, "r 128"], factor: float
    ) -> Float[Array, "R 128"]:
        R, H = q.shape
        q32 = q.astype(jnp.float32)
        scaled, lows = [], []
        for s in range(self._spans):
            wide = [pair[s * self._tiles(H) + j][None] for j in range(self._tiles(H))]
            row = jnp.concatenate(wide, axis=1)[:, :H]
            scaled.append((q32 * (packing.half_value(row) * factor)).astype(jnp.bfloat16))
            lows.append((q32 * (packing.half_value(row >> 16) * factor)).astype(jnp.bfloat16))
        stack = jnp.concatenate(scaled, axis=0)
        y = matmul(stack, tile)  # spans R, 128
        # sums over channels, the same on every lane: a product with ones, from the rounded numbers
        ones = jnp.ones((H, LANES), jnp.bfloat16)
        y = y + matmul(stack, ones) * self.bias + matmul(jnp.concatenate(lows, axis=0), ones)
        lane = lax.broadcasted_iota(jnp.int32, (R, LANES), 1)
        out = y[:R]
        for s in range(1, self._spans):
            out = jnp.where(lane >= s * self.span, y[s * R : (s + 1) * R], out)
        return out

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
