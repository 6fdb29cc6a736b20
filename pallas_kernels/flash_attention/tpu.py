"""Blockwise causal attention on TPU, forward and backward (FlashAttention 2205.14135, 2307.08691).

Rows of a block are all query heads of a KV head at BQ tokens, so keys and values are never
repeated. Blocks that no query of a block may see are neither fetched nor computed: above the
diagonal, before the window, past the row's length, of other documents (`documents.py`). The
log-sum-exp of a row is kept for the backward pass, tokens on lanes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.flash_attention.documents import Documents
from pallas_kernels.softmax import MASKED

LANES = 128
TRANSPOSED = (((1,), (1,)), ((), ()))  # a @ b.T


class Ids(NamedTuple):
    """Refs: documents of a block's queries `[1, BQ]` and keys `[1, BK]`, and those of the side that
    lies along the rows of its scores, `[rows, 128]`, alike on all lanes."""

    q: Any
    k: Any
    rows: Any


@dataclasses.dataclass(frozen=True)
class Flash:
    """Static choices. offset: position of the first query among the keys. Blocks of `rows` query
    tokens by `keys` keys. documents: whether there are ids."""

    scale: float
    offset: int = 0
    window: int | None = None
    softcap: float | None = None
    rows: int = 256
    keys: int = 512
    documents: bool = False
    interpret: Any = False

    def split(self, refs) -> tuple[tuple, Ids | None, tuple]:
        """Of a kernel's refs the scalars (lengths, then `Documents`' bounds), ids, and the rest."""
        if not self.documents:
            return refs[:1], None, refs[1:]
        return refs[:3], Ids(refs[3], refs[4], refs[-1]), refs[5:-1]

    def needed(self, b, i, j, lengths, *bounds):
        """Whether any query of block i may see any key of block j."""
        first, last = self.offset + i * self.rows, self.offset + (i + 1) * self.rows - 1
        seen = (j * self.keys <= last) & (j * self.keys < lengths[b])
        if self.window is not None:
            seen = seen & ((j + 1) * self.keys > first - self.window + 1)
        if not bounds:
            return seen
        return seen & (j >= bounds[0][b, i]) & (i <= bounds[1][b, j])

    def key_block(self, b, i, j, lengths, *bounds):
        """Block j, or the nearest that is needed: a block not needed then costs no copy."""
        last = jnp.minimum(self.offset + (i + 1) * self.rows - 1, jnp.maximum(lengths[b] - 1, 0))
        if self.window is not None:
            first = jnp.maximum(self.offset + i * self.rows - self.window + 1, 0) // self.keys
            j = jnp.maximum(j, first)
        if bounds:
            j = jnp.maximum(j, bounds[0][b, i])
        return jnp.minimum(j, last // self.keys)

    def row_block(self, b, i, j, lengths, *bounds):
        """Query block i, or the nearest of those that may see key block j."""
        i = jnp.maximum(i, jnp.maximum(j * self.keys - self.offset, 0) // self.rows)
        return jnp.minimum(i, bounds[1][b, j]) if bounds else i

    def scores(self, s: Array) -> Array:
        s = s * self.scale
        return s if self.softcap is None else self.softcap * jnp.tanh(s / self.softcap)

    def mask(self, shape, i, j, length, ids: Ids | None, *, transposed: bool = False) -> Array:
        """`[G BQ, BK]`, or its transpose."""
        key = lax.broadcasted_iota(jnp.int32, shape, 0 if transposed else 1) + j * self.keys
        row = lax.broadcasted_iota(jnp.int32, shape, 1 if transposed else 0)
        own = self.offset + i * self.rows + lax.rem(row, jnp.int32(self.rows))
        seen = (key <= own) & (key < length)
        if self.window is not None:
            seen = seen & (key > own - self.window)
        if ids is None:
            return seen
        groups = shape[1] // self.rows
        lanes = jnp.concatenate([ids.q[...]] * groups, axis=1) if transposed else ids.k[...]
        return seen & (widen(ids.rows[...], shape[1]) == lanes)


def forward(
    q: Float[Array, "B K G T H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S R"],
    lengths: Int[Array, "B"],
    documents: Documents | None,
    f: Flash,
) -> tuple[Float[Array, "B K G T R"], Float[Array, "B K G T"]]:
    """Output, float32, and log-sum-exp; T and S whole blocks. MASKED where a row sees no key."""
    B, K, G, T, H = q.shape
    S, R = v.shape[2:]
    scalars, ids = operands(lengths, documents)
    rows = pl.BlockSpec((None, None, G, f.rows, H), lambda b, h, i, j, *n: (b, h, 0, i, 0))
    out = pl.BlockSpec((None, None, G, f.rows, R), lambda b, h, i, j, *n: (b, h, 0, i, 0))
    lse = pl.BlockSpec((None, None, G, f.rows), lambda b, h, i, j, *n: (b, h, 0, i))

    def key_at(b, h, i, j, *n):
        return f.key_block(b, i, j, *n)

    def keys(width):
        return pl.BlockSpec((None, None, f.keys, width), lambda *at: (*at[:2], key_at(*at), 0))

    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(scalars),
        grid=(B, K, T // f.rows, S // f.keys),
        in_specs=[*id_specs(f, lambda b, h, i, *_: i, key_at), rows, keys(H), keys(R)],
        out_specs=[out, lse],
        scratch_shapes=[
            *[pltpu.VMEM((G * f.rows, LANES), jnp.float32)] * 2,
            pltpu.VMEM((G * f.rows, R), jnp.float32),
            *id_scratch(f, G * f.rows),
        ],
    )
    shapes = [result((B, K, G, T, *s), q) for s in ((R,), ())]
    return pl.pallas_call(
        functools.partial(_forward, f=f),
        grid_spec=grid,
        out_shape=shapes,
        compiler_params=compiler_params(),
        name="flash_attention",
        interpret=f.interpret,
    )(*scalars, *ids, q, k, v)


def result(shape: tuple[int, ...], like: Array) -> jax.ShapeDtypeStruct:
    """float32, and in a `shard_map` another on each of the devices on which `like` is."""
    varying = jax.typeof(like).manual_axis_type
    return jax.ShapeDtypeStruct(shape, jnp.float32, manual_axis_type=varying)


def operands(lengths, documents: Documents | None) -> tuple[tuple, tuple]:
    """The scalars and the ids that a kernel is called with."""
    if documents is None:
        return (lengths,), ()
    return (lengths, documents.first, documents.last), (documents.q, documents.k)


def id_specs(f: Flash, row_at: Callable, key_at: Callable) -> list[pl.BlockSpec]:
    """Blocks of the ids of queries and keys. row_at, key_at: a block's place, from the grid's."""
    if not f.documents:
        return []
    sides = ((f.rows, row_at), (f.keys, key_at))
    return [
        pl.BlockSpec((None, 1, size), lambda *at, side=side: (at[0], 0, side(*at)))
        for size, side in sides
    ]


def id_scratch(f: Flash, rows: int) -> list[Any]:
    return [pltpu.VMEM((rows, LANES), jnp.int32)] if f.documents else []


def compiler_params() -> pltpu.CompilerParams:
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
        vmem_limit_bytes=100 * 2**20,
    )


def _forward(*refs, f: Flash):
    n, ids, (q, k, v, out, lse, top, mass, acc) = f.split(refs)
    b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    G, _, H = q.shape
    length = n[0][b]

    @pl.when(j == 0)
    def _start():
        top[...] = jnp.full_like(top, MASKED / 2)
        mass[...], acc[...] = jnp.zeros_like(mass), jnp.zeros_like(acc)
        if ids:
            for g in range(G):
                to_rows(ids.q[...], ids.rows, g * f.rows)

    @pl.when(f.needed(b, i, j, *n))
    def _block():
        s = f.scores(product(q[...].reshape(G * f.rows, H), k[...], TRANSPOSED))
        s = jnp.where(f.mask(s.shape, i, j, length, ids), s, MASKED)
        before = top[...]
        now = jnp.maximum(before, jnp.max(s, axis=-1, keepdims=True))
        p = jnp.exp(s - widen(now, s.shape[1]))
        decay = jnp.exp(before - now)
        top[...] = now
        mass[...] = mass[...] * decay + jnp.sum(p, axis=-1, keepdims=True)
        value = finite_values(v[...], j * f.keys, length)
        acc[...] = acc[...] * widen(decay, acc.shape[1]) + product(p.astype(value.dtype), value)

    @pl.when(j == pl.num_programs(3) - 1)
    def _end():
        total = mass[...]
        some = jnp.where(total == 0.0, 1.0, total)
        out[...] = (acc[...] / widen(some, acc.shape[1])).reshape(out.shape)
        log = jnp.where(total == 0.0, MASKED, top[...] + jnp.log(some))
        for g in range(G):  # from rows to lanes
            lse[g] = jnp.transpose(log[g * f.rows : (g + 1) * f.rows])[0]


def to_rows(x: Array, target: Any, start: int) -> None:
    """`[1, n]` from lanes to n rows of the target, the same on every lane."""
    n = x.shape[1]
    target[start : start + n] = jnp.transpose(jnp.broadcast_to(x, (LANES, n)))


def finite_values(v: Array, start, length) -> Array:
    """Zeros past the row's length, which may hold NaN."""
    token = lax.broadcasted_iota(jnp.int32, v.shape, 0) + start
    return jnp.where(token < length, v.astype(jnp.float32), 0.0).astype(v.dtype)


def product(a: Array, b: Array, dims=(((1,), (0,)), ((), ()))) -> Array:
    return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def widen(x: Float[Array, "r 128"], width: int) -> Float[Array, "r W"]:
    """Whole lane tiles are repeated for nothing."""
    return jnp.concatenate([x] * math.ceil(width / LANES), axis=1)[:, :width]
