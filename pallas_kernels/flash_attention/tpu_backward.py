"""The backward pass of `tpu.py`: weights are computed again from the log-sum-exp (2205.14135, B.4).

With p the weights and dp = do v^T: ds = p (dp - delta), where delta is the sum of do o over
channels less the log-sum-exp's own cotangent. One kernel walks keys for dq; one walks queries for
dk and dv, on transposed scores, where what belongs to a query lies along lanes.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels.flash_attention.tpu import (
    LANES,
    TRANSPOSED,
    Flash,
    compiler_params,
    finite_values,
    id_scratch,
    id_specs,
    operands,
    product,
    result,
    to_rows,
    widen,
)


def backward(q, k, v, lengths, documents, lse, delta, do, f: Flash) -> tuple[Array, Array, Array]:
    """dq `[B K G T H]`, dk `[B K S H]`, dv `[B K S R]`, float32. lse, delta: `[B K G T]`."""
    scalars, ids = operands(lengths, documents)
    arrays = (q, k, v, lse, delta, do)
    return _dq(scalars, ids, *arrays, f), *_dkv(scalars, ids, *arrays, f)


def _dq(scalars, ids, q, k, v, lse, delta, do, f: Flash) -> Array:
    B, K, G, T, H = q.shape
    S, R = v.shape[2:]

    def rows(*width):
        zeros = (0,) * len(width)
        return pl.BlockSpec(
            (None, None, G, f.rows, *width), lambda b, h, i, j, *n: (b, h, 0, i, *zeros)
        )

    def key_at(b, h, i, j, *n):
        return f.key_block(b, i, j, *n)

    def keys(width):
        return pl.BlockSpec((None, None, f.keys, width), lambda *at: (*at[:2], key_at(*at), 0))

    blocks = [rows(H), keys(H), keys(R), rows(), rows(), rows(R)]
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(scalars),
        grid=(B, K, T // f.rows, S // f.keys),
        in_specs=[*id_specs(f, lambda b, h, i, *_: i, key_at), *blocks],
        out_specs=rows(H),
        scratch_shapes=[
            pltpu.VMEM((G * f.rows, H), jnp.float32),
            *[pltpu.VMEM((G * f.rows, LANES), jnp.float32)] * 2,
            *id_scratch(f, G * f.rows),
        ],
    )
    return pl.pallas_call(
        functools.partial(_dq_kernel, f=f),
        grid_spec=grid,
        out_shape=result(q.shape, q),
        compiler_params=compiler_params(),
        name="flash_attention_dq",
        interpret=f.interpret,
    )(*scalars, *ids, q, k, v, lse, delta, do)


def _dq_kernel(*refs, f: Flash):
    n, ids, (q, k, v, lse, delta, do, dq, acc, lse_rows, delta_rows) = f.split(refs)
    b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    G, _, H = q.shape

    @pl.when(j == 0)
    def _start():
        acc[...] = jnp.zeros_like(acc)
        for g in range(G):
            to_rows(lse[g][None], lse_rows, g * f.rows)
            to_rows(delta[g][None], delta_rows, g * f.rows)
            if ids:
                to_rows(ids.q[...], ids.rows, g * f.rows)

    @pl.when(f.needed(b, i, j, *n))
    def _block():
        length = n[0][b]
        key, value = (finite_values(x[...], j * f.keys, length) for x in (k, v))
        s = f.scores(product(q[...].reshape(G * f.rows, H), key, TRANSPOSED))
        seen = f.mask(s.shape, i, j, length, ids)
        p = jnp.where(seen, jnp.exp(s - widen(lse_rows[...], f.keys)), 0.0)
        dp = product(do[...].reshape(G * f.rows, -1), value, TRANSPOSED)
        ds = _uncapped(p * (dp - widen(delta_rows[...], f.keys)), s, f)
        acc[...] += product(ds.astype(key.dtype), key)

    @pl.when(j == pl.num_programs(3) - 1)
    def _end():
        dq[...] = acc[...].reshape(dq.shape)


def _dkv(scalars, ids, q, k, v, lse, delta, do, f: Flash) -> tuple[Array, Array]:
    B, K, G, T, H = q.shape
    S, R = v.shape[2:]

    def row_at(b, h, j, i, *n):
        return jnp.minimum(f.row_block(b, i, j, *n), T // f.rows - 1)

    def rows(*width):
        zeros = (0,) * len(width)
        return pl.BlockSpec(
            (None, None, G, f.rows, *width), lambda *at: (*at[:2], 0, row_at(*at), *zeros)
        )

    def keys(width):
        return pl.BlockSpec((None, None, f.keys, width), lambda b, h, j, i, *n: (b, h, j, 0))

    blocks = [rows(H), keys(H), keys(R), rows(), rows(), rows(R)]
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(scalars),
        grid=(B, K, S // f.keys, T // f.rows),
        in_specs=[*id_specs(f, row_at, lambda b, h, j, *_: j), *blocks],
        out_specs=[keys(H), keys(R)],
        scratch_shapes=[
            *[pltpu.VMEM((f.keys, width), jnp.float32) for width in (H, R)],
            *id_scratch(f, f.keys),
        ],
    )
    return pl.pallas_call(
        functools.partial(_dkv_kernel, f=f),
        grid_spec=grid,
        out_shape=[result(x.shape, x) for x in (k, v)],
        compiler_params=compiler_params(),
        name="flash_attention_dkv",
        interpret=f.interpret,
    )(*scalars, *ids, q, k, v, lse, delta, do)


def _dkv_kernel(*refs, f: Flash):
    n, ids, (q, k, v, lse, delta, do, dk, dv, dk_acc, dv_acc) = f.split(refs)
    b, j, i = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    G, _, H = q.shape

    @pl.when(i == 0)
    def _start():
        dk_acc[...], dv_acc[...] = jnp.zeros_like(dk_acc), jnp.zeros_like(dv_acc)
        if ids:
            to_rows(ids.k[...], ids.rows, 0)

    @pl.when(f.needed(b, i, j, *n))
    def _block():
        length = n[0][b]
        key, value = (finite_values(x[...], j * f.keys, length) for x in (k, v))
        rows = q[...].reshape(G * f.rows, H)
        s = f.scores(product(key, rows, TRANSPOSED))  # BK, G BQ
        seen = f.mask(s.shape, i, j, length, ids, transposed=True)
        p = jnp.where(seen, jnp.exp(s - _along_lanes(lse)), 0.0)
        gradient = do[...].reshape(G * f.rows, -1)
        dv_acc[...] += product(p.astype(gradient.dtype), gradient)
        dp = product(value, gradient, TRANSPOSED)
        ds = _uncapped(p * (dp - _along_lanes(delta)), s, f)
        dk_acc[...] += product(ds.astype(rows.dtype), rows)

    @pl.when(i == pl.num_programs(3) - 1)
    def _end():
        dk[...], dv[...] = dk_acc[...], dv_acc[...]


def _along_lanes(x) -> Array:
    """`[G, BQ]` to `[1, G BQ]`."""
    return jnp.concatenate([x[g][None] for g in range(x.shape[0])], axis=1)


def _uncapped(ds: Array, s: Array, f: Flash) -> Array:
    """The gradient by <q, k>, from that by the (capped) score."""
    if f.softcap is not None:
        ds = ds * (1.0 - (s / f.softcap) ** 2)
    return ds * f.scale
