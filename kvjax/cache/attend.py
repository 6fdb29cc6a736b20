"""Attention to a cached row: exact tokens, sealed pages and the chunk itself, merged exactly."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache.spec import GroupSpec
from kvjax.codecs.base import Codec, Params
from kvjax.config import RopeConfig
from kvjax.layers.rope import apply_rope, rope_tables
from pallas_kernels.flash_attention import causal_partial
from pallas_kernels.paged_attention import paged_partial
from pallas_kernels.softmax import Partial, attend_tile, finish, merge

if TYPE_CHECKING:
    from kvjax.cache.kv_cache import LayerGroup


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunk:
    """The tokens of one call, in one layer: what attends, and what else it may see."""

    q: Float[Array, "B T K G H"]
    k: Float[Array, "B T K H"]
    v: Float[Array, "B T K H"]
    length: Int[Array, "B"]  # tokens of each row before this call
    new: Int[Array, "B"]  # real tokens of each row in this call
    scale: float = dataclasses.field(metadata={"static": True})
    rope: RopeConfig = dataclasses.field(metadata={"static": True})

    def angles(self, positions: Int[Array, "B S"]) -> tuple[Array, Array]:
        """cos and sin of positions, for keys that are stored before RoPE."""
        total = self.length + self.new
        return rope_tables(self.rope, self.q.shape[-1], positions, total)

    @property
    def rows(self) -> Float[Array, "B K Q H"]:
        """Queries by KV head; all of them, Q = G T, see the same history."""
        B, T, K, G, H = self.q.shape
        return jnp.moveaxis(self.q, 1, 3).reshape(B, K, G * T, H)


@jax.jit  # traced once for all layers of a group; XLA inlines the calls
def attend_group(
    group: LayerGroup, slot: int | Int[Array, ""], chunk: Chunk
) -> Float[Array, "B T K G H"]:
    """See `KVCache.attend`. The chunk's tokens are attended as they came, whatever the codec."""
    B, T, K, G, H = chunk.q.shape
    part = merge(_exact_part(group, slot, chunk), _chunk_part(chunk))
    if group.spec.pages_per_row:
        part = _paged_part(group, slot, chunk, part)
    out = finish(part).astype(chunk.q.dtype).reshape(B, K, G, T, H)
    return jnp.moveaxis(out, 3, 1)  # B T K G H


def _exact_part(group: LayerGroup, slot: Any, chunk: Chunk) -> Partial:
    spec: GroupSpec = group.spec
    valid = spec.exact_valid(chunk.length)  # B E
    k_t, v = _layer(group.k_exact, slot), _layer(group.v_exact, slot)  # B K H E, B K E H
    v = jnp.where(valid[:, None, :, None], v, 0)  # an unused slot may hold anything
    if spec.k_codec.pre_rope:
        k_t = _rope_tile(k_t, chunk.angles(spec.token_in_slot(chunk.length)))
    return attend_tile(chunk.rows, k_t, v, valid[:, None, None, :], scale=chunk.scale)


def _chunk_part(chunk: Chunk) -> Partial:
    rows = chunk.rows
    if chunk.q.shape[1] > 1:
        part = causal_partial(chunk.q, chunk.k, chunk.v, lengths=chunk.new, scale=chunk.scale)
        return jax.tree.map(lambda x: x.reshape(*rows.shape[:3], *x.shape[4:]), part)
    # One token sees itself; a row without a new token has no use for its output.
    k, v = (jnp.moveaxis(x, 1, 2).astype(jnp.float32) for x in (chunk.k, chunk.v))  # B K 1 H
    score = jnp.sum(rows.astype(jnp.float32) * k, axis=-1) * chunk.scale
    return Partial(jnp.broadcast_to(v, rows.shape), score, jnp.ones_like(score))


def _paged_part(group: LayerGroup, slot: Any, chunk: Chunk, others: Partial) -> Partial:
    """The pages' part merged into the others, while they are read where values need no way back."""
    spec: GroupSpec = group.spec
    k_codec, v_codec = spec.k_codec, spec.v_codec
    k_params, v_params = _params(group.k_params, slot), _params(group.v_params, slot)
    q, dtype = chunk.rows, chunk.q.dtype

    def decode_k(codes: Any, tokens: Int[Array, "S"]) -> Array:
        k_t = k_codec.decode_t(codes, k_params, dtype)  # B n K H S
        if k_codec.pre_rope:
            k_t = jnp.moveaxis(k_t, 1, 3)  # B K H n S
            positions = jnp.broadcast_to(spec.sinks + tokens[None], (k_t.shape[0], tokens.shape[0]))
            flat = _rope_tile(k_t.reshape(*k_t.shape[:3], -1), chunk.angles(positions))
            k_t = jnp.moveaxis(flat.reshape(k_t.shape), 3, 1)
        return k_t

    plain = type(v_codec).finish_output is Codec.finish_output
    part = paged_partial(
        k_codec.prepare_query(q, k_params).astype(dtype),
        group.k_pages,
        group.v_pages,
        _layer(group.table, slot),
        spec.sealed_pages(chunk.length),
        decode_k=decode_k,
        decode_v=lambda codes, tokens: v_codec.decode(codes, v_params, dtype),
        page_size=spec.page_size,
        scale=chunk.scale,
        start=others if plain else None,
    )
    if plain:
        return part
    acc = v_codec.finish_output(part.acc, v_params).astype(jnp.float32)
    return merge(others, part._replace(acc=acc))


def _rope_tile(k_t: Float[Array, "B K H S"], rope: tuple[Array, Array]) -> Float[Array, "B K H S"]:
    return jnp.moveaxis(apply_rope(jnp.moveaxis(k_t, 3, 1), *rope), 1, 3)


def _params(params: Params, slot: Any) -> Params:
    return jax.tree.map(lambda x: _layer(x, slot), params)


def _layer(x: Array, slot: Any) -> Array:
    return jax.lax.dynamic_index_in_dim(x, slot, keepdims=False)
