"""Keys stored before RoPE, turned as they are read (RoFormer 2104.09864, section 3.4.2).

Token t of a row stands at `start + t`. Rotations of a pair of channels commute and keep products,
so a kernel need not turn a key by all of its angle: the query goes back by what a page's tokens
share, and keys forward by their places in the page, which are the same in every page and row.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


class Turn(NamedTuple):
    """How the keys of a call are turned. Channel c is paired with c + half; those from 2 half on
    stay."""

    start: Int[Array, "B"]  # position of each row's first token; the others follow one by one
    frequencies: Float[Array, "half"]  # radians a token
    factor: float = 1.0  # of the turned channels (YaRN 2309.00071, eq. 22)


def cos_sin(
    turn: Turn, positions: Int[Array, "*lead"]
) -> tuple[Float[Array, "*lead half"], Float[Array, "*lead half"]]:
    """Of each pair's angle at these positions, without the factor."""
    each = turn.frequencies.astype(jnp.float32).reshape((1,) * positions.ndim + (-1,))
    angles = positions[..., None].astype(jnp.float32) * each
    return jnp.cos(angles), jnp.sin(angles)


def turned(x: Float[Array, "*x"], cos: Array, sin: Array, *, axis: int) -> Float[Array, "*x"]:
    """x with its pairs of channels along `axis` turned; cos and sin have `half` of them there."""
    half, size = cos.shape[axis], x.shape[axis]
    a, b = (lax.slice_in_dim(x, i * half, (i + 1) * half, axis=axis) for i in range(2))
    parts = [a * cos - b * sin, b * cos + a * sin]
    if size > 2 * half:
        parts.append(lax.slice_in_dim(x, 2 * half, size, axis=axis))
    return jnp.concatenate(parts, axis=axis)


def turned_back(q: Float[Array, "B K Q D"], turn: Turn) -> Float[Array, "B K Q D"]:
    """Queries that meet keys turned by their places in the row as if the row began at 0; `factor`
    is in them."""
    cos, sin = (x[:, None, None] * turn.factor for x in cos_sin(turn, turn.start))
    return turned(q, cos, -sin, axis=-1)
