"""Blockwise causal attention on TPU, forward and backward (FlashAttention 2205.14135, 2307.08691).

Rows of a block are all query heads of a KV head at BQ tokens, so keys and values are never
repeated. Blocks that no query of a block may see are neither fetched nor computed: above the
diagonal, before the window, past the row's length. The log-sum-exp of a row is kept for the
backward pass, tokens on lanes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.softmax import MASKED

LANES = 128
TRANSPOSED = (((1,), (1,)), ((), ()))  # a @ b.T


@dataclasses.dataclass(frozen=True)
class Flash:
    """Static choices. offset: position of the first query among the keys. Blocks of `rows` query
    tokens by `keys` keys."""

    scale: float
    offset: int = 0
    window: int | None = None
    softcap: float | None = None
    rows: int = 256
    keys: int = 512
    interpret: Any = False

    def needed(self, i, j, length):
        """Whether any query of block i may see any key of block j."""
        first, last = self.offset + i * self.rows, self.offset + (i + 1) * self.rows - 1
        seen = (j * self.keys <= last) & (j * self.keys < length)
        return (
            seen if self.window is None else seen & ((j + 1) * self.keys > first - self.window + 1)
        )

    def key_block(self, i, j, length):
        """Block j, or the nearest that is needed: a block not needed then costs no copy."""
        last = jnp.minimum(self.offset + (i + 1) * self.rows - 1, jnp.maximum(length - 1, 0))
        last = last // self.keys
        if self.window is None:
            return jnp.minimum(j, last)
        first = jnp.maximum(self.offset + i * self.rows - self.window + 1, 0) // self.keys
        return jnp.minimum(jnp.maximum(j, first), last)

    def row_block(self, i, j):
        """Query block i, or the first that sees key block j."""
        return jnp.maximum(i, jnp.maximum(j * self.keys - self.offset, 0) // self.rows)

    def scores(self, s: Array) -> Array:
        s = s * self.scale
        return s if self.softcap is None else self.softcap * jnp.tanh(s / self.softcap)

    def mask(self, shape, i, j, length, *, transposed: bool = False) -> Array:
        """`[G BQ, BK]`, or its transpose."""
        key = lax.broadcasted_iota(jnp.int32, shape, 0 if transposed else 1) + j * self.keys
        row = lax.broadcasted_iota(jnp.int32, shape, 1 if transposed else 0)
        own = self.offset + i * self.rows + lax.rem(row, jnp.int32(self.rows))
        seen = (key <= own) & (key < length)
        return seen if self.window is None else seen & (key > own - self.window)


def forward(
    q: Float[Array, "B K G T H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S R"],
    lengths: Int[Array, "B"],
    f: Flash,
) -> tuple[Float[Array, "B K G T R"], Float[Array, "B K G T"]]:
    """Output, float32, and log-sum-exp; T and S whole blocks. MASKED where a row sees no key."""
    B, K, G, T, H = q.shape
    S, R = v.shape[2:]
    rows = pl.BlockSpec((None, None, G, f.rows, H), lambda b, h, i, j, n: (b, h, 0, i, 0))
    out = pl.BlockSpec((None, None, G, f.rows, R), lambda b, h, i, j, n: (b, h, 0, i, 0))
    lse = pl.BlockSpec((None, None, G, f.rows), lambda b, h, i, j, n: (b, h, 0, i))

    def keys(width):
        return pl.BlockSpec(
            (None, None, f.keys, width), lambda b, h, i, j, n: (b, h, f.key_block(i, j, n[b]), 0)
        )

    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(B, K, T // f.rows, S // f.keys),
        in_specs=[rows, keys(H), keys(R)],
        out_specs=[out, lse],
        scratch_shapes=[
            *[pltpu.VMEM((G * f.rows, LANES), jnp.float32)] * 2,
            pltpu.VMEM((G * f.rows, R), jnp.float32),
        ],
    )
    shapes = [jax.ShapeDtypeStruct((B, K, G, T, *s), jnp.float32) for s in ((R,), ())]
    return pl.pallas_call(
        functools.partial(_forward, f=f),
        grid_spec=grid,
        out_shape=shapes,
        compiler_params=compiler_params(),
        name="flash_attention",
        interpret=f.interpret,
    )(lengths, q, k, v)


def compiler_params() -> pltpu.CompilerParams:
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
        vmem_limit_bytes=100 * 2**20,
    )


def _forward(lengths, q, k, v, out, lse, top, mass, acc, *, f: Flash):
    b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    G, _, H = q.shape
    length = lengths[b]

    @pl.when(j == 0)
    def _start():
        top[...] = jnp.full_like(top, MASKED / 2)
        mass[...], acc[...] = jnp.zeros_like(mass), jnp.zeros_like(acc)

    @pl.when(f.needed(i, j, length))
    def _block():
        s = f.scores(product(q[...].reshape(G * f.rows, H), k[...], TRANSPOSED))
        s = jnp.where(f.mask(s.shape, i, j, length), s, MASKED)
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


def finite_values(v: Array, start, length) -> Array:
    """Zeros past the row's length, which may hold NaN."""
    token = lax.broadcasted_iota(jnp.int32, v.shape, 0) + start
    return jnp.where(token < length, v.astype(jnp.float32), 0.0).astype(v.dtype)


def product(a: Array, b: Array, dims=(((1,), (0,)), ((), ()))) -> Array:
    return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def widen(x: Float[Array, "r 128"], width: int) -> Float[Array, "r W"]:
    """Whole lane tiles are repeated for nothing."""
    return jnp.concatenate([x] * math.ceil(width / LANES), axis=1)[:, :width]
