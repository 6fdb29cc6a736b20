"""Keys that are stored before RoPE, turned when they are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.config import RopeConfig
from kvjax.layers.rope import apply_rope, attention_factor, turn_pairs

if TYPE_CHECKING:
    from kvjax.cache.attend import Chunk, LayerView


class Turn:
    """Keys before RoPE in a tile of pages: <q, turned k> = <q, k cos> + <q', k sin>, where q' is q
    a quarter of a turn ahead, so no channel of a key meets another.

    A page's tokens stand one behind the other in the text. So the query is turned back by the
    page's first position, and keys by 0 to S - 1, whose cosines and sines are those of all pages:
    on CPU they cost more than all else. Where eviction left each head positions of its own, they
    are computed for each tile. For a long chunk turning the queries costs more than turning the
    keys, which is done `whole` then.
    """

    #: queries of a KV head up to which they are turned: about where both cost the same on CPU
    MOST_QUERIES = 48

    def __init__(self, layer: LayerView, chunk: Chunk, q: Float[Array, "B K Q H"]):
        self.layer, self.chunk, self.q = layer, chunk, q
        self.by_head = layer.positions is not None
        self.whole = q.shape[2] > self.MOST_QUERIES
        S, B = layer.spec.page_size, q.shape[0]
        offset = chunk.angles(jnp.broadcast_to(jnp.arange(S)[None], (B, S)))
        self.offset = self._wide([x[:, None, None] for x in offset])  # B 1 1 S H

    def _wide(self, angles: Sequence[Float[Array, "*x half"]]) -> list[Float[Array, "*x H"]]:
        """As the pairs of the keys lie."""
        if self.chunk.how.interleave:
            return [jnp.repeat(x, 2, axis=-1) for x in angles]
        return [jnp.concatenate([x, x], axis=-1) for x in angles]

    def _positions(self, tokens: Int[Array, "nS"]) -> Array:
        return self.layer.position(
            self.layer.spec.paged_token(tokens, self.chunk.length), self.chunk.length
        )

    def queries(self, tokens: Int[Array, "nS"]) -> tuple[Array, Array]:
        """`[B, n, K, Q, H]`: q and q'. Queries come in halves, whatever the keys' pairs."""
        q = self.q[:, None]
        if not self.by_head:
            assert self.chunk.how.rope is not None
            first = self._positions(tokens[:: self.layer.spec.page_size])  # B n
            B, n = first.shape
            rows = jnp.broadcast_to(q, (B, n, *q.shape[2:])).reshape(B, n, -1, q.shape[-1])
            q = turned_back(rows, self.chunk.angles(first), self.chunk.how.rope)
            q = q.reshape(B, n, *self.q.shape[1:])
        a, b = jnp.split(q, 2, axis=-1)
        if not self.chunk.how.interleave:
            return q, jnp.concatenate([b, -a], axis=-1)
        first_way, second_way = (
            jnp.stack(pair, axis=-1).reshape(q.shape) for pair in ((a, b), (b, -a))
        )
        return first_way, second_way

    def keys(self, k: Float[Array, "B n K S H"], tokens: Int[Array, "nS"]) -> tuple[Array, Array]:
        """Keys times cosines and times sines."""
        cos, sin = self._wide(self._angles(k, tokens)) if self.by_head else self.offset
        wide = k.astype(jnp.float32)
        return (wide * cos).astype(k.dtype), (wide * sin).astype(k.dtype)

    def turned(self, k: Float[Array, "B n K S H"], tokens: Int[Array, "nS"]) -> Array:
        """Keys as queries meet them, `[B, n, K, S, H]`."""
        return turn_pairs(k, *self._angles(k, tokens), interleave=self.chunk.how.interleave)

    def _angles(self, k: Float[Array, "B n K S H"], tokens: Int[Array, "nS"]) -> list[Array]:
        """cos and sin of each token, `[B, n, 1 or K, S, half]`."""
        B, n, _, S, _ = k.shape
        at = self._positions(tokens)  # B nS, or B K nS
        angles = self.chunk.angles(at.reshape(-1, at.shape[-1]))
        return [jnp.swapaxes(x.reshape(B, -1, n, S, x.shape[-1]), 1, 2) for x in angles]


def rope_tile(
    k_t: Float[Array, "B K H S"], chunk: Chunk, positions: Int[Array, "B *K S"]
) -> Float[Array, "B K H S"]:
    """Keys at any positions, tokens last."""
    if positions.ndim == 3:  # each head has positions of its own
        heads = k_t.reshape(-1, 1, *k_t.shape[2:])
        flat = positions.reshape(heads.shape[0], -1)
        return rope_tile(heads, chunk, flat).reshape(k_t.shape)
    cos, sin = (jnp.swapaxes(x, 1, 2)[:, None] for x in chunk.angles(positions))  # B 1 half S
    return turn_pairs(k_t, cos, sin, interleave=chunk.how.interleave, axis=-2)


def turned_back(
    q: Float[Array, "B A N R"], angles: tuple[Array, Array], rope: RopeConfig
) -> Float[Array, "B A N R"]:
    """Queries turned the other way, by the angles of `rope_tables`; their length stays."""
    cos, sin = (x / attention_factor(rope) for x in angles)
    return apply_rope(q, cos, -sin)
