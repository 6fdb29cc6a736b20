"""Attention to a cached row: exact tokens, sealed pages and the chunk itself, merged exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache.spec import GroupSpec
from pallas_kernels.flash_attention import causal_partial
from pallas_kernels.paged_attention import paged_partial
from pallas_kernels.softmax import Partial, attend_tile, finish, merge

if TYPE_CHECKING:
    from kvjax.cache.kv_cache import LayerGroup


def attend_group(
    group: LayerGroup,
    slot: int | Int[Array, ""],
    q: Float[Array, "B T K G H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    length: Int[Array, "B"],
    new: Int[Array, "B"],
    scale: float,
) -> Float[Array, "B T K G H"]:
    """See `KVCache.attend`. The chunk's tokens are attended as they came, whatever the codec."""
    B, T, K, G, H = q.shape
    rows = jnp.moveaxis(q, 1, 3).reshape(B, K, G * T, H)  # all queries of a KV head see the same
    history = _exact_part(group, slot, rows, length, scale)
    if group.spec.pages_per_row:
        history = _paged_part(group, slot, rows, length, scale, history)
    chunk = _chunk_part(q, rows, k, v, new, scale)
    out = finish(merge(history, chunk)).astype(q.dtype).reshape(B, K, G, T, H)
    return jnp.moveaxis(out, 3, 1)  # B T K G H


def _exact_part(group: LayerGroup, slot: Any, q: Array, length: Array, scale: float) -> Partial:
    valid = group.spec.exact_valid(length)  # B E
    k, v = _layer(group.k_exact, slot), _layer(group.v_exact, slot)  # B K H E, B K E H
    v = jnp.where(valid[:, None, :, None], v, 0)  # an unused slot may hold anything
    return attend_tile(q, k, v, valid[:, None, None, :], scale=scale)


def _chunk_part(q: Array, rows: Array, k: Array, v: Array, new: Array, scale: float) -> Partial:
    if q.shape[1] > 1:
        part = causal_partial(q, k, v, lengths=new, scale=scale)  # B K G T ...
        return jax.tree.map(lambda x: x.reshape(*rows.shape[:3], *x.shape[4:]), part)
    # One token sees itself; a row without a new token has no use for its output.
    k, v = (jnp.moveaxis(x, 1, 2).astype(jnp.float32) for x in (k, v))  # B K 1 H
    score = jnp.sum(rows.astype(jnp.float32) * k, axis=-1) * scale
    return Partial(jnp.broadcast_to(v, rows.shape), score, jnp.ones_like(score))


def _paged_part(
    group: LayerGroup, slot: Any, q: Array, length: Array, scale: float, others: Partial
) -> Partial:
    """The pages' part merged into `others`."""
    spec: GroupSpec = group.spec
    k_codec, v_codec = spec.k_codec, spec.v_codec
    part = paged_partial(
        k_codec.prepare_query(q, {}),
        group.k_pages,
        group.v_pages,
        _layer(group.table, slot),
        spec.sealed_pages(length),
        decode_k=lambda codes: k_codec.decode_t(codes, {}, q.dtype),
        decode_v=lambda codes: v_codec.decode(codes, {}, q.dtype),
        out_dim=spec.head_dim,
        page_size=spec.page_size,
        scale=scale,
    )
    return merge(others, part._replace(acc=v_codec.finish_output(part.acc, {})))


def _layer(x: Array, slot: Any) -> Array:
    return jax.lax.dynamic_index_in_dim(x, slot, keepdims=False)
