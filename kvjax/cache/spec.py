"""The static shape of one group of layers' cache, and where each token of a row lives.

A row's tokens, in order: the first `sinks` stay exact for ever; of the others, whole pages are
*sealed* (encoded once into the pool) as soon as `recent` newer tokens exist; the rest lie exact in
a ring of `recent + page_size` slots. So everything is a function of a row's length alone: any split
of the same tokens into calls gives the same cache.

Layers with a window have a ring of pages too: page i of a row lies in slot i of the table modulo
its width, which is what the window can reach beyond the exact tokens. Where the exact ring holds
the whole window there are no pages.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax.codecs.base import Codec
from kvjax.eviction import Streaming
from pallas_kernels.pages import PageFormat


@dataclasses.dataclass(frozen=True)
class GroupSpec:
    """What layers that share shapes and codecs have in common. Static under `jit`."""

    layers: tuple[int, ...]  # model layers that own a slot here, in slot order
    num_kv_heads: int
    head_dim: int  # of keys; with MLA of the latent, which is key and value
    k_codec: Codec
    v_codec: Codec
    page_size: int
    sinks: int
    recent: int
    max_len: int
    dtype: Any
    v_head_dim: int  # of values; with MLA of the rotated key
    window: int | None = None  # tokens back that a query sees, itself included
    own_window: bool = False  # it is the model's, not a stream's: eviction leaves the layers alone
    latent: bool = False
    stream: Streaming | None = None  # sinks stay whatever the window
    heavy: bool = False  # slots that single tokens take from each other
    kept: int | None = None  # tokens of a prompt that eviction leaves at most; None: all stay
    kernel: str = "xla"  # what reads sealed pages: "xla", "tpu", "gpu" (`kvjax.cache.kernel`)
    why_xla: str = ""  # why no kernel does
    packed: PageFormat | None = None  # a page is one array in this form; None: the codecs' leaves

    @property
    def turns(self) -> bool:
        """Keys are stored before RoPE and turned when they are read."""
        return self.k_codec.pre_rope or (self.stream is not None and self.stream.moves)

    def shift(self, length: Int[Array, "B"]) -> Int[Array, "B"]:
        """How far below their places in the text a row's tokens and queries are turned."""
        if self.stream is None or not self.stream.moves:
            return jnp.zeros_like(length)
        return jnp.maximum(0, length - self.stream.sinks - self.stream.recent)

    @property
    def exact_window(self) -> bool:
        """Whether the exact ring holds all that the window can reach: nothing is sealed."""
        return self.window is not None and self.window - 1 <= self.recent + self.page_size

    @property
    def coded(self) -> bool:
        """Single tokens are coded in the slots, once they have left the ring."""
        return self.heavy and not self.k_codec.name == self.v_codec.name == "raw"

    @property
    def heavy_slots(self) -> int:
        """Coded slots of single tokens."""
        return max(1, self.max_len - self.ring) if self.coded else 0

    @property
    def places(self) -> int:
        """Single tokens that a KV head holds where they are evicted one by one."""
        return self.ring + self.heavy_slots

    @property
    def ring(self) -> int:
        """Slots of the exact ring: the guaranteed recent tokens and a page that fills up."""
        if self.coded:
            return max(1, min(self.recent, self.max_len - 1))
        if self.heavy:
            return self.max_len
        if self.window is not None and self.exact_window:
            return max(1, self.window - 1)
        return self.recent + self.page_size

    @property
    def exact_slots(self) -> int:
        return self.sinks + self.ring

    @property
    def pages_per_row(self) -> int:
        """Sealed pages of a row that is `max_len` tokens long, or that a window can reach."""
        if self.heavy:
            return -(-self.heavy_slots // self.page_size)
        if self.exact_window:
            return 0
        pages = max(0, (self.max_len - self.sinks - self.recent) // self.page_size)
        if self.window is None:
            return pages
        return min(pages, -(-(self.window - 1 - self.recent) // self.page_size))

    def reached(self, length: Int[Array, "B"]) -> Int[Array, "B"]:
        """The first token of a row of this length that a window's ring and pages can hold."""
        return jnp.maximum(0, length - self.span)

    @property
    def span(self) -> int:
        """Newest tokens that a window's ring and pages can hold."""
        return self.ring + self.pages_per_row * self.page_size

    def sealed_pages(self, length: Int[Array, ...]) -> Int[Array, ...]:
        """How many pages of a row of this length have been sealed, those that a window has left
        behind included."""
        if self.exact_window:
            return jnp.zeros_like(length)
        return jnp.maximum(0, (length - self.sinks - self.recent) // self.page_size)

    def used_pages(self, length: Int[Array, "B"]) -> Int[Array, "B"]:
        """Slots of a row's table that hold a page."""
        return jnp.minimum(self.sealed_pages(length), self.pages_per_row)

    def paged_token(
        self, slot_token: Int[Array, "S"], length: Int[Array, "B"]
    ) -> Int[Array, "B S"]:
        """Which token of each row lies at place `slot_token` of its pages, in table order.

        The place counts tokens from the table's first slot. Without a window it is the same in
        every row.
        """
        B, S = length.shape[0], slot_token.shape[0]
        token = jnp.broadcast_to(slot_token[None], (B, S))
        if self.window is not None:
            slot, newest = token // self.page_size, self.sealed_pages(length)[:, None] - 1
            page = newest - (newest - slot) % self.pages_per_row
            token = page * self.page_size + token % self.page_size
        return self.sinks + token

    def exact_slot(self, token: Int[Array, ...]) -> Int[Array, ...]:
        """The exact slot that holds (or held) a token."""
        ring = self.sinks + (token - self.sinks) % self.ring
        return jnp.where(token < self.sinks, token, ring)

    def token_in_slot(self, length: Int[Array, "B"]) -> Int[Array, "B E"]:
        """The newest token that each exact slot holds in a row of this length; -1 for none."""
        slot = jnp.arange(self.exact_slots)[None]
        newest = length[:, None] - 1
        ring = newest - (newest - slot) % self.ring
        # the ring holds tokens from `sinks` on; slot s holds those congruent to s
        ring = jnp.where(ring >= self.sinks, ring, -1)
        return jnp.where(slot < self.sinks, jnp.where(slot <= newest, slot, -1), ring)

    def exact_valid(self, length: Int[Array, "B"]) -> Bool[Array, "B E"]:
        """Slots that hold a token which no sealed page holds."""
        token = self.token_in_slot(length)
        first = self.sinks + self.sealed_pages(length)[:, None] * self.page_size
        return (token >= 0) & ((token < self.sinks) | (token >= first))
