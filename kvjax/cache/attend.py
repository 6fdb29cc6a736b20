"""Attention to a cached row: exact tokens, sealed pages and the chunk itself, merged exactly."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.spec import GroupSpec
from kvjax.codecs.base import Codec, Params
from kvjax.config import RopeConfig
from kvjax.layers.rope import apply_rope, rope_tables
from pallas_kernels.flash_attention import causal_partial
from pallas_kernels.paged_attention import paged_partial
from pallas_kernels.softmax import Partial, attend_tile, finish, merge, soft_cap, with_sinks

if TYPE_CHECKING:
    from kvjax.cache.kv_cache import LayerGroup


class How(NamedTuple):
    """What is static about a layer's attention. rope: of cached keys, for codecs that keep them
    before it; None where the layer does not rotate."""

    scale: float
    rope: RopeConfig | None = None
    interleave: bool = False
    softcap: float | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunk:
    """The tokens of one call, in one layer: what attends, and what else it may see."""

    q: Float[Array, "B A K G H"]
    k: Float[Array, "B T K H"]
    v: Float[Array, "B T K H"]
    length: Int[Array, "B"]  # tokens of each row before this call
    new: Int[Array, "B"]  # real tokens of each row in this call
    at: Int[Array, "B A"] | None  # which of the T tokens attend; None: all
    sinks: Float[Array, "K G"] | None  # learned logits that take a share of the softmax
    how: How = dataclasses.field(metadata={"static": True})

    def angles(self, positions: Int[Array, "B S"]) -> tuple[Array, Array]:
        """cos and sin of positions, for keys that are stored before RoPE."""
        assert self.how.rope is not None
        total = self.length + self.new
        return rope_tables(self.how.rope, self.q.shape[-1], positions, total)

    @property
    def rows(self) -> Float[Array, "B K Q H"]:
        """Queries by KV head; all of them, Q = G A, see the same history."""
        B, A, K, G, H = self.q.shape
        return jnp.moveaxis(self.q, 1, 3).reshape(B, K, G * A, H)

    def within(self, tokens: Int[Array, "B S"], window: int) -> Bool[Array, "B 1 Q S"]:
        """Which cached tokens each query's window reaches."""
        at = jnp.arange(self.q.shape[1])[None] if self.at is None else self.at
        oldest = jnp.tile(self.length[:, None] + at, (1, self.q.shape[3])) - window  # B Q
        return (tokens[:, None] > oldest[:, :, None])[:, None]


@jax.jit  # traced once for all layers of a group; XLA inlines the calls
def attend_group(
    group: LayerGroup, slot: int | Int[Array, ""], chunk: Chunk
) -> Float[Array, "B A K G H"]:
    """See `KVCache.attend`. The chunk's tokens are attended as they came, whatever the codec."""
    B, A, K, G, H = chunk.q.shape
    part = merge(_exact_part(group, slot, chunk), chunk_part(chunk, group.spec.window))
    if group.spec.pages_per_row:
        part = _paged_part(group, slot, chunk, part)
    if chunk.sinks is not None:
        part = with_sinks(part, jnp.repeat(chunk.sinks, A, axis=1)[None])
    out = finish(part).astype(chunk.q.dtype).reshape(B, K, G, A, H)
    return jnp.moveaxis(out, 3, 1)  # B A K G H


def exact_seen(spec: GroupSpec, chunk: Chunk) -> tuple[Bool[Array, "B E"], Bool[Array, "B 1 Q E"]]:
    """Exact slots that hold a token, and those that each query may see."""
    valid = spec.exact_valid(chunk.length)
    seen = valid[:, None, None, :]
    if spec.window is not None:
        seen = seen & chunk.within(spec.token_in_slot(chunk.length), spec.window)
    return valid, seen


def pages_seen(spec: GroupSpec, chunk: Chunk) -> Callable[[Array], Array] | None:
    """Which tokens of a tile of pages each query may see, beyond that they are there."""
    window = spec.window
    if window is None:
        return None
    return lambda tokens: chunk.within(spec.paged_token(tokens, chunk.length), window)


def _exact_part(group: LayerGroup, slot: Any, chunk: Chunk) -> Partial:
    spec: GroupSpec = group.spec
    valid, seen = exact_seen(spec, chunk)
    k_t, v = layer_of(group.k_exact, slot), layer_of(group.v_exact, slot)  # B K H E, B K E H
    v = jnp.where(valid[:, None, :, None], v, 0)  # an unused slot may hold anything
    if spec.k_codec.pre_rope and chunk.how.rope is not None:
        k_t = _rope_tile(k_t, chunk, spec.token_in_slot(chunk.length))
    how = chunk.how
    return attend_tile(chunk.rows, k_t, v, seen, scale=how.scale, softcap=how.softcap)


def chunk_part(chunk: Chunk, window: int | None) -> Partial:
    """Attention of the chunk to itself."""
    rows, how = chunk.rows, chunk.how
    if chunk.k.shape[1] > 1:
        part = causal_partial(
            chunk.q,
            chunk.k,
            chunk.v,
            lengths=chunk.new,
            scale=how.scale,
            softcap=how.softcap,
            window=window,
            at=chunk.at,
        )
        return jax.tree.map(lambda x: x.reshape(*rows.shape[:3], *x.shape[4:]), part)
    # One token sees itself; a row without a new token has no use for its output.
    k, v = (jnp.moveaxis(x, 1, 2).astype(jnp.float32) for x in (chunk.k, chunk.v))  # B K 1 H
    score = soft_cap(jnp.sum(rows.astype(jnp.float32) * k, axis=-1) * how.scale, how.softcap)
    return Partial(jnp.broadcast_to(v, (*score.shape, v.shape[-1])), score, jnp.ones_like(score))


def _paged_part(group: LayerGroup, slot: Any, chunk: Chunk, others: Partial) -> Partial:
    """The pages' part merged into the others, while they are read where values need no way back."""
    spec: GroupSpec = group.spec
    k_codec, v_codec = spec.k_codec, spec.v_codec
    k_params, v_params = params_of(group.k_params, slot), params_of(group.v_params, slot)
    q, dtype = chunk.rows, chunk.q.dtype

    def decode_k(codes: Any, tokens: Int[Array, "S"]) -> Array:
        k_t = k_codec.decode_t(codes, k_params, dtype)  # B n K H S
        if k_codec.pre_rope and chunk.how.rope is not None:
            k_t = jnp.moveaxis(k_t, 1, 3)  # B K H n S
            flat = k_t.reshape(*k_t.shape[:3], -1)
            flat = _rope_tile(flat, chunk, spec.paged_token(tokens, chunk.length))
            k_t = jnp.moveaxis(flat.reshape(k_t.shape), 3, 1)
        return k_t

    plain = type(v_codec).finish_output is Codec.finish_output
    part = paged_partial(
        k_codec.prepare_query(q, k_params).astype(dtype),
        group.k_pages,
        group.v_pages,
        layer_of(group.table, slot),
        spec.used_pages(chunk.length),
        decode_k=decode_k,
        decode_v=lambda codes, tokens: v_codec.decode(codes, v_params, dtype),
        page_size=spec.page_size,
        scale=chunk.how.scale,
        softcap=chunk.how.softcap,
        mask=pages_seen(spec, chunk),
        start=others if plain else None,
    )
    if plain:
        return part
    acc = v_codec.finish_output(part.acc, v_params).astype(jnp.float32)
    return merge(others, part._replace(acc=acc))


def _rope_tile(
    k_t: Float[Array, "B K H S"], chunk: Chunk, positions: Int[Array, "B S"]
) -> Float[Array, "B K H S"]:
    rows = jnp.moveaxis(k_t, 3, 1)
    turned = apply_rope(rows, *chunk.angles(positions), interleave=chunk.how.interleave)
    return jnp.moveaxis(turned, 1, 3)


def params_of(params: Params, slot: Any) -> Params:
    return jax.tree.map(lambda x: layer_of(x, slot), params)


def layer_of(x: Array, slot: Any) -> Array:
    return jax.lax.dynamic_index_in_dim(x, slot, keepdims=False)
