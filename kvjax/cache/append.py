"""Append: pages that a call completes are sealed (`seal.py`), then its tokens go to the ring."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache.seal import seal_group

if TYPE_CHECKING:
    from kvjax.cache.kv_cache import LayerGroup


def append_group(
    group: LayerGroup,
    k: Float[Array, "slots B T K H"],
    v: Float[Array, "slots B T K R"],
    *,
    length: Int[Array, "B"],
    new: Int[Array, "B"],
) -> LayerGroup:
    """The group with each row's first `new[b]` tokens of the chunk appended to `length[b]`."""
    k, v = k.astype(group.spec.dtype), v.astype(group.spec.dtype)
    if group.spec.pages_per_row:
        group = seal_group(group, k, v, length=length, new=new)
    write = _write_token if k.shape[2] == 1 else _write_chunk
    return dataclasses.replace(
        group,
        k_exact=write(group.spec, group.k_exact, k, length, new, tokens_last=True),
        v_exact=write(group.spec, group.v_exact, v, length, new, tokens_last=False),
    )


def _write_token(spec, exact, x, length, new, *, tokens_last: bool) -> Array:
    slot = jnp.where(new > 0, spec.exact_slot(length), spec.exact_slots)  # past the end: dropped
    rows = jnp.arange(exact.shape[1])
    update = jnp.moveaxis(x[:, :, 0], 1, 0)  # B slots K H: indexed axes go first
    where = (slice(None), rows, slice(None), slice(None), slot)
    at = exact.at[where] if tokens_last else exact.at[(*where[:3], slot)]
    return at.set(update, mode="drop", unique_indices=True)


def _write_chunk(spec, exact, x, length, new, *, tokens_last: bool) -> Array:
    token = spec.token_in_slot(length + new)  # B E
    at = token - length[:, None]
    index = jnp.clip(at, 0, x.shape[2] - 1)[None, :, :, None, None]
    fresh = jnp.take_along_axis(x, index, axis=2)  # slots B E K H
    fresh = jnp.moveaxis(fresh, 2, 4 if tokens_last else 3)
    shape = (1, -1, 1, 1, at.shape[1]) if tokens_last else (1, -1, 1, at.shape[1], 1)
    return jnp.where((at >= 0).reshape(1, at.shape[0], 1, *shape[3:]), fresh, exact)
