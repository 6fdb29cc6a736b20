"""The sealed pages of a group of layers: one array for all of them, or one a layer.

Each layer has pages of its own, numbered from 0. In a "stacked" pool a leaf holds the pages of all
layers one after the other, so a traced layer number is an offset into one array. In an "unrolled"
pool each layer's pages are an array apart: XLA's CPU backend multiplies by a whole array where it
lies, but copies a slice out first (measured: 1.5 times the time of attention at 1k tokens).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.cache.spec import GroupSpec
from kvjax.codecs.base import Codec, Codes
from pallas_kernels.codes.base import LANES

#: of a block's keys and values, where pages lie in it and whose slots they are, the block with
#: these pages written
Write = Callable[[Codes, Codes, Int[Array, "slots *n"], slice], tuple[Codes, Codes]]


def put_codes(block: Codes, at: Int[Array, "n"], new: Codes) -> Codes:
    """A block with pages `at` replaced; new: leaves `[n, ...]`."""
    return {name: leaf.at[at].set(new[name].astype(leaf.dtype)) for name, leaf in block.items()}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pool:
    """Keys and values in blocks of n = slots / len(blocks) layers; leaves `[n P, K, ...]`.

    With `GroupSpec.packed` keys and values are one leaf, `page [n P, rows, 128]`, among the keys.
    """

    k: tuple[Codes, ...]
    v: tuple[Codes, ...]
    slots: int = dataclasses.field(metadata={"static": True})
    pages: int = dataclasses.field(metadata={"static": True})  # P, of each layer

    @property
    def apart(self) -> bool:
        """Each layer's pages are an array of their own."""
        return len(self.k) == self.slots

    def at(self, slot: int | Int[Array, ""]) -> tuple[Codes, Codes, int | Int[Array, ""]]:
        """Codes of the keys, of the values, and where the slot's page 0 lies in them.

        slot: an int where the pool is unrolled, else an int or traced.
        """
        block, offset = self._where(slot)
        return self.k[block], self.v[block], offset

    def put(self, ids: Int[Array, "slots *n"], write: Write) -> Pool:
        """The pool with pages of every slot written, block by block; an id of -1 stands for none,
        and stays -1."""
        per = self.slots // len(self.k)
        offset = (jnp.arange(self.slots) % per * self.pages).reshape(-1, *[1] * (ids.ndim - 1))
        at = jnp.where(ids < 0, -1, ids + offset)
        both = []
        for i, (k, v) in enumerate(zip(self.k, self.v, strict=True)):
            own = slice(i * per, (i + 1) * per)
            both.append(write(k, v, at[own], own))
        k_blocks, v_blocks = zip(*both, strict=True)
        return dataclasses.replace(self, k=k_blocks, v=v_blocks)

    def _where(self, slot: Any) -> tuple[int, Any]:
        if len(self.k) == 1:
            return 0, slot * self.pages
        return int(slot), 0


def init_pool(spec: GroupSpec, *, batch: int, apart: bool) -> Pool:
    """Room for the sealed pages of `batch` rows, all zeros."""
    slots, pages = len(spec.layers), batch * spec.pages_per_row
    blocks = slots if apart else 1

    def of(codec: Codec, dim: int) -> tuple[Codes, ...]:
        shapes = codec.code_shapes(
            tokens=spec.page_size,
            head_dim=dim,
            num_kv_heads=spec.num_kv_heads,
            dtype=spec.dtype,
        )
        lead = slots // blocks * pages
        return tuple(
            {name: jnp.zeros((lead, *s.shape), s.dtype) for name, s in shapes.items()}
            for _ in range(blocks)
        )

    if spec.packed is not None:
        shape = (slots // blocks * pages, spec.packed.rows, LANES)
        # an array for each block: a buffer that stands twice in a cache cannot be donated
        packed = tuple({"page": jnp.zeros(shape, jnp.int32)} for _ in range(blocks))
        return Pool(packed, ({},) * blocks, slots=slots, pages=pages)
    k, v = of(spec.k_codec, spec.head_dim), of(spec.v_codec, spec.v_head_dim)
    return Pool(k, v, slots=slots, pages=pages)
