"""Packed batches: several documents in a row of tokens, each of which sees itself only.

Every token has an id; tokens of equal id are one document, wherever they stand. A block of queries
and a block of keys whose ranges of ids do not meet have nothing to see: where ids only grow along
a row, as packing makes them, this leaves a query block no block of other documents.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Documents(NamedTuple):
    """What the kernels are told: ids of queries and keys in whole blocks, the first block of keys
    that may share a document with each block of queries, and the last of queries with each of keys.
    """

    q: Int[Array, "B 1 T"]
    k: Int[Array, "B 1 S"]
    first: Int[Array, "B n"]
    last: Int[Array, "B m"]


def check(
    documents: Int[Array, "B S"], q: Array, k: Array, *, offset: int, placed: bool = False
) -> None:
    """Raises ValueError unless there is an id for each key, and each query of `q [B T ...]` is one
    of the keys `k [B S ...]`, from `offset` on; placed: they are named otherwise."""
    (B, T), S = q.shape[:2], k.shape[1]
    if documents.shape != (B, S):
        raise ValueError(
            f"documents: expected an id for each key, {(B, S)}, got {documents.shape}."
        )
    if not jnp.issubdtype(documents.dtype, jnp.integer):
        raise ValueError(f"documents: dtype: expected integers, got {documents.dtype}.")
    if not placed and offset + T > S:
        raise ValueError(
            f"documents: offset: expected queries among the {S} keys, got {offset} and {T} queries."
        )


def in_blocks(documents: Int[Array, "B S"], T: int, offset: int, rows: int, keys: int) -> Documents:
    """Of T queries, from `offset` on, in blocks of `rows`, and all keys in blocks of `keys`."""
    ids = documents.astype(jnp.int32)
    q = jnp.pad(ids[:, offset : offset + T], ((0, 0), (0, -T % rows)), mode="edge")
    k = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % keys)), mode="edge")
    B, meet = ids.shape[0], overlap(q, k, rows, keys)
    first = jnp.argmax(meet, axis=2)
    last = meet.shape[1] - 1 - jnp.argmax(meet[:, ::-1], axis=1)
    bounds = (x.astype(jnp.int32) for x in (first, last))
    return Documents(q.reshape(B, 1, -1), k.reshape(B, 1, -1), *bounds)


def overlap(
    q: Int[Array, "B T"], k: Int[Array, "B S"], rows: int, keys: int
) -> Bool[Array, "B n m"]:
    """Whether the ranges of the ids, from the lowest to the highest, of two blocks meet."""
    q, k = (x.reshape(x.shape[0], -1, size) for x, size in ((q, rows), (k, keys)))
    lowest, highest = jnp.min(k, axis=-1)[:, None], jnp.max(k, axis=-1)[:, None]
    return (jnp.min(q, axis=-1)[..., None] <= highest) & (lowest <= jnp.max(q, axis=-1)[..., None])
