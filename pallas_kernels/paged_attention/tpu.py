"""Paged decode attention on TPU: one kernel for every tile code (`tpu_kernel.py`).

PagedAttention (2309.06180) over the pages of `pages.py`, with the online softmax of FlashAttention
(2205.14135).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.codes.base import LANES
from pallas_kernels.paged_attention.packed import seen_tokens
from pallas_kernels.paged_attention.tpu_kernel import EMPTY, Options, paged_attention_kernel
from pallas_kernels.pages import PageFormat, Params
from pallas_kernels.softmax import MASKED, Partial
from pallas_kernels.turn import Turn, cos_sin, turned_back

LOG2E = math.log2(math.e)
#: Bytes of VMEM for a program's queries and outputs; its sequences are limited to fit.
ROW_BYTES = 12 * 2**20
#: Of the 128 MiB of a v5e or v6e core.
VMEM_LIMIT = 100 * 2**20


def paged_attention_tpu(
    q: Float[Array, "B K Q D"],
    pages: Int[Array, "P rows 128"],
    table: Int[Array, "B M"],
    lengths: Int[Array, "B"],
    *,
    fmt: PageFormat,
    scale: float,
    positions: Int[Array, "B"] | None = None,
    queries: int = 1,
    window: int | None = None,
    softcap: float | None = None,
    turn: Turn | None = None,
    params: Params = ({}, {}),
    logits: bool = False,
    block_pages: int | None = None,
    interpret: Any = False,
) -> tuple[Partial, Float[Array, "B K Q S"] | None]:
    """See `paged_attention` and `paged_attention_logits`. block_pages: C, pages of a block."""
    B, K, Q, D = q.shape
    rows = -(-Q // 8) * 8
    q = q.astype(jnp.bfloat16)
    if turn is not None:  # the kernel turns it further, and rounds it then
        q = turned_back(q.astype(jnp.float32), turn)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, rows - Q), (0, 0)))
    batch, programs = _split(B, K * rows * (D + fmt.head_dim) * 8)
    options = make_options(
        fmt, rows, scale=scale, batch=batch, table_pages=table.shape[1], block_pages=block_pages
    )
    options = dataclasses.replace(
        options,
        softcap=None if softcap is None else softcap * LOG2E,
        window=window,
        causal=positions is not None,
        queries=queries,
        scored=-(-table.shape[1] // options.pages) if logits else 0,
        half=0 if turn is None else turn.frequencies.shape[0],
    )
    starts = lengths if positions is None else positions
    scalars = _schedule(table, lengths, starts, options, programs)
    q = jnp.pad(q, ((0, programs * batch - B), (0, 0), (0, 0), (0, 0)))
    angles = () if turn is None else _angles(turn, table.shape[1])
    outputs = _call(q, pages, (*angles, *fmt.columns(params)), scalars, options, interpret)
    acc, stats, loose, *scores = (x[:B].reshape(B, K, -1, *x.shape[2:]) for x in outputs)
    top, mass, acc = stats[..., :Q, 0] / LOG2E, stats[..., :Q, 1], acc[..., :Q, :]
    if fmt.v.needs_sums:
        acc = acc + _loose_sums(loose.reshape(B, K, fmt.v.groups, rows, LANES)[..., :Q, :], fmt)
    part = Partial(acc, jnp.where(top <= EMPTY / LOG2E, MASKED, top), mass)
    if not logits:
        return part, None
    token = jnp.arange(table.shape[1] * LANES)
    seen = seen_tokens(token, lengths, positions, Q, queries, window)
    scores = scores[0][..., :Q, : token.size]  # blocks that were not visited hold anything
    return part, jnp.where(seen, scores / LOG2E, MASKED)


def _loose_sums(loose: Float[Array, "B K n Q 128"], fmt: PageFormat) -> Float[Array, "B K Q H"]:
    """What each group of channels still gets."""
    sums = jnp.moveaxis(jnp.sum(loose, axis=-1), 2, -1)
    return jnp.repeat(sums, fmt.head_dim // fmt.v.groups, axis=-1)


def make_options(
    fmt: PageFormat,
    rows: int,
    *,
    scale: float,
    batch: int,
    table_pages: int,
    block_pages: int | None = None,
) -> Options:
    """Options without mask, for `rows` queries of a KV head and `batch` sequences of a program."""
    pages = block_pages or _block_pages(fmt.num_kv_heads * rows)
    return Options(
        fmt=fmt,
        factor=scale * LOG2E,
        softcap=None,
        window=None,
        causal=False,
        queries=1,
        pages=min(pages, table_pages),
        buffers=6,
        batch=batch,
        scored=0,
    )


def _block_pages(rows: int) -> int:
    """As many as keep a block's scores near the register file: 64 registers of 8 by 128."""
    return max(1, min(32, 64 * 8 // rows))


def _split(batch: int, row_bytes: int) -> tuple[int, int]:
    """(sequences of a program, programs)."""
    programs = -(-batch // max(1, ROW_BYTES // row_bytes))
    return -(-batch // programs), programs


def _schedule(table, lengths, positions, o: Options, programs: int) -> tuple[Array, ...]:
    """Scalars: page table, lengths, positions, each row's first block and number of blocks, and
    each program's number of blocks. A row without tokens has one block, all of it masked."""
    pad = programs * o.batch - lengths.shape[0]
    lengths, positions = (jnp.pad(x.astype(jnp.int32), (0, pad)) for x in (lengths, positions))
    lengths = jnp.clip(lengths, 0, table.shape[1] * LANES)
    end = lengths
    first = jnp.zeros_like(lengths)
    if o.causal:
        end = jnp.minimum(end, positions + o.queries)
        if o.window is not None:
            first = jnp.maximum(positions - o.window + 1, 0) // o.tokens
    count = jnp.maximum(-(-end // o.tokens) - first, 1)
    total = jnp.sum(count.reshape(programs, o.batch), axis=1)
    table = jnp.pad(table.astype(jnp.int32), ((0, pad), (0, 0)))
    return table, end, positions, first, count, total


def _angles(turn: Turn, table_pages: int) -> tuple[Array, Array]:
    """cos and sin of each page's first token, and of the places in a page, tokens last."""
    pages = cos_sin(turn, jnp.arange(table_pages) * LANES)
    places = [x.T for x in cos_sin(turn, jnp.arange(LANES))]
    return jnp.stack(pages), jnp.stack(places)


def grid_spec(
    o: Options, q_shape: tuple[int, ...], *, fixed: int, programs: int, scalars: int
) -> tuple[pltpu.PrefetchScalarGridSpec, list[jax.ShapeDtypeStruct]]:
    """Blocks, buffers and outputs of the kernel: acc, (top, mass), loose sums, and scores. fixed:
    how many arrays stay on chip as a whole, angles and calibrated numbers."""
    _, K, R, D = q_shape
    H, fmt = o.fmt.head_dim, o.fmt
    loose = K * R * (fmt.v.groups if fmt.v.needs_sums else 1)
    outputs = [(K * R, H), (K * R, LANES), (loose, LANES)]

    def whole(*shape):
        return pl.BlockSpec((o.batch, *shape), lambda g, *_: (g,) + (0,) * len(shape))

    out_specs = [whole(*shape) for shape in outputs]
    kept: tuple[Any, ...] = ()
    if o.scored:
        outputs.append((K * R, o.scored * o.tokens))
        out_specs.append(pl.BlockSpec(memory_space=pl.ANY))
        kept = (pltpu.VMEM((2, K * R, o.tokens), jnp.float32), pltpu.SemaphoreType.DMA((2,)))
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=scalars,
        grid=(programs,),
        in_specs=[
            whole(K, R, D),
            pl.BlockSpec(memory_space=pl.ANY),
            *[pl.BlockSpec(memory_space=pltpu.VMEM)] * fixed,
        ],
        out_specs=out_specs,
        scratch_shapes=[
            pltpu.VMEM((o.buffers, o.pages, fmt.rows, LANES), jnp.int32),
            pltpu.SemaphoreType.DMA((o.buffers,)),
            *[pltpu.VMEM((K * R, o.tokens), jnp.float32)] * 2,  # scores, weights
            *[pltpu.VMEM((K * R, LANES), jnp.float32)] * 5,  # top, mass, decay, top and mass then
            pltpu.VMEM((K * R, H), jnp.float32),
            pltpu.VMEM((loose, LANES), jnp.float32),
            *kept,
        ],
    )
    batch = programs * o.batch
    return grid, [jax.ShapeDtypeStruct((batch, *shape), jnp.float32) for shape in outputs]


def _call(q, pages, fixed, scalars, o: Options, interpret):
    programs = scalars[-1].shape[0]
    grid, outputs = grid_spec(o, q.shape, fixed=len(fixed), programs=programs, scalars=len(scalars))
    return pl.pallas_call(
        functools.partial(paged_attention_kernel, o=o),
        grid_spec=grid,
        out_shape=outputs,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            vmem_limit_bytes=VMEM_LIMIT,
            disable_bounds_checks=True,
        ),
        name="paged_attention",
        interpret=interpret,
    )(*scalars, q, pages, *fixed)
