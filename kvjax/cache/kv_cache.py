"""The cache pytree: allocation, and what the model calls: `attend` per layer, `append` once.

Layers only read the cache; their new keys and values come back stacked and are appended in one
place after the last layer. So layers that share KV need no special case, the pool is written in
place, and one function owns quantise-and-write.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache.append import append_group
from kvjax.cache.attend import attend_group
from kvjax.cache.spec import GroupSpec
from kvjax.codecs.base import Codes
from kvjax.codecs.raw import Raw, RawKey
from kvjax.config import CacheConfig, ModelConfig, need


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """Cache of the layers in `spec.layers`. Page 0 of the pool is the null page, for ever zero."""

    k_pages: Codes  # leaves [P, K, ...]
    v_pages: Codes
    k_exact: Float[Array, "slots B K H E"]  # tokens last: a score is a plain product
    v_exact: Float[Array, "slots B K E H"]
    table: Int[Array, "slots B M"]  # page ids
    spec: GroupSpec = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """All layers' cache. `length [B]`: true tokens of each row so far.

    layer_map[l] = (group, slot) of the layer whose keys and values layer l reads.
    """

    groups: tuple[LayerGroup, ...]
    length: Int[Array, "B"]
    layer_map: tuple[tuple[int, int], ...] = dataclasses.field(metadata={"static": True})
    max_len: int = dataclasses.field(metadata={"static": True})

    @property
    def batch(self) -> int:
        return self.length.shape[0]

    def attend(
        self,
        group: int,
        slot: int | Int[Array, ""],
        q: Float[Array, "B T K G H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        *,
        new: Int[Array, "B"],
        scale: float,
    ) -> Float[Array, "B T K G H"]:
        """Attention of a chunk to the cached tokens and, causally, to itself.

        k, v: the chunk's own keys and values, not yet appended; new: its real tokens per row.
        """
        return attend_group(
            self.groups[group], slot, q, k, v, length=self.length, new=new, scale=scale
        )

    def append(
        self,
        keys: tuple[Float[Array, "slots B T K H"], ...],
        values: tuple[Float[Array, "slots B T K H"], ...],
        *,
        new: Int[Array, "B"],
    ) -> KVCache:
        """The cache with each row's first `new[b]` tokens of the chunk appended.

        keys, values: one array a group, slots in the order of `spec.layers`. A row must not grow
        past `max_len`: callers check that, what would lie past it is dropped.
        """
        groups = tuple(
            append_group(group, k, v, length=self.length, new=new)
            for group, k, v in zip(self.groups, keys, values, strict=True)
        )
        return dataclasses.replace(self, groups=groups, length=self.length + new)


def init_cache(
    model: ModelConfig, *, batch: int, max_len: int, config: CacheConfig, dtype: Any
) -> KVCache:
    """An empty cache for `batch` rows of up to `max_len` tokens. Raises ValueError on bad sizes."""
    need(isinstance(batch, int) and batch > 0, "batch", "a positive int", batch)
    need(isinstance(max_len, int) and max_len > 0, "max_len", "a positive int", max_len)
    specs = group_specs(model, max_len=max_len, config=config, dtype=dtype)
    layer_map = {
        layer: (g, slot) for g, spec in enumerate(specs) for slot, layer in enumerate(spec.layers)
    }
    return KVCache(
        groups=tuple(_init_group(spec, batch) for spec in specs),
        length=jnp.zeros((batch,), jnp.int32),
        layer_map=tuple(layer_map[layer] for layer in range(model.num_layers)),
        max_len=max_len,
    )


def group_specs(
    model: ModelConfig, *, max_len: int, config: CacheConfig, dtype: Any
) -> tuple[GroupSpec, ...]:
    """The groups of layers that share shapes and codecs."""
    spec = GroupSpec(
        layers=tuple(range(model.num_layers)),
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        k_codec=RawKey(),
        v_codec=Raw(),
        page_size=config.page_size,
        sinks=config.sinks,
        recent=config.recent,
        max_len=max_len,
        dtype=jnp.dtype(dtype),
    )
    return (spec,)


def _init_group(spec: GroupSpec, batch: int) -> LayerGroup:
    slots, pages = len(spec.layers), spec.pages_per_row
    pool = 1 + slots * batch * pages if pages else 0

    def pages_of(codec):
        shapes = codec.code_shapes(
            tokens=spec.page_size,
            head_dim=spec.head_dim,
            num_kv_heads=spec.num_kv_heads,
            dtype=spec.dtype,
        )
        return {name: jnp.zeros((pool, *s.shape), s.dtype) for name, s in shapes.items()}

    H, E = spec.head_dim, spec.exact_slots
    rows = (slots, batch, spec.num_kv_heads)
    table = 1 + jnp.arange(slots * batch * pages, dtype=jnp.int32).reshape(slots, batch, pages)
    return LayerGroup(
        k_pages=pages_of(spec.k_codec),
        v_pages=pages_of(spec.v_codec),
        k_exact=jnp.zeros((*rows, H, E), spec.dtype),
        v_exact=jnp.zeros((*rows, E, H), spec.dtype),
        table=table,
        spec=spec,
    )
