"""The kernel of `tpu.py`: a walk over blocks of pages in three overlapped stages.

A program walks the blocks of all its sequences as one list, so short and long rows follow each
other without a gap. A block is C pages. Three stages, each at another block, share a step, so that
the matrix unit's latency (200 cycles) and the lane reductions' (130) hide behind the other stages:

    scores of block t  |  softmax of block t - 1  |  values of block t - 2

They stand in the reverse order, so each reads what the previous step left before it is overwritten,
and one buffer each is enough. Pages come by manual copies, a few blocks ahead.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.codes.base import LANES, ROWS_BY_LANES, Code, fold, matmul
from pallas_kernels.codes.uniform import BFloat16, Float8
from pallas_kernels.pages import KeyPart, PageFormat
from pallas_kernels.softmax import MASKED
from pallas_kernels.turn import turned

#: Running maximum before any key. Above MASKED by so much that a masked score's weight is 0.
EMPTY = MASKED / 2


@dataclasses.dataclass(frozen=True)
class Options:
    """Static choices of a call. factor, softcap: in units of log2; queries: T of `Q = (G, T)`."""

    fmt: PageFormat
    factor: float
    softcap: float | None
    window: int | None
    causal: bool
    queries: int
    pages: int  # of a block, C
    buffers: int
    batch: int  # sequences of a program
    scored: int  # blocks of a row in the output of scores; 0: it is not asked for
    half: int = 0  # pairs of channels that are turned, in keys stored before RoPE

    @property
    def tokens(self) -> int:
        return self.pages * LANES

    @property
    def ahead(self) -> int:
        """Blocks between a copy's start and its first use; a block is used for three steps."""
        return self.buffers - 3


@dataclasses.dataclass
class Cursor:
    """A block in the list of all sequences' blocks: sequence of the program, block of its row."""

    row: Any
    block: Any

    def next(self, first: Any, count: Any, batch: int) -> Cursor:
        last = self.block + 1 >= first(self.row) + count(self.row)
        row = jnp.where(last, jnp.minimum(self.row + 1, batch - 1), self.row)
        return Cursor(row, jnp.where(last, first(row), self.block + 1))


def paged_attention_kernel(*refs, o: Options):
    """The walk over all blocks; `Step` has the stages."""
    step = Step(o, *refs)
    start = Cursor(jnp.int32(0), step.first(0))
    fetch = start
    for j in range(o.ahead):
        pl.when(j < step.total)(functools.partial(step.copy, fetch, j, "start"))
        fetch = step.after(fetch)
    step.reset()  # while the first pages are under way

    def body(t, carry):
        fetch, *cursors = [Cursor(*c) for c in carry]
        ahead, slot = t + o.ahead, functools.partial(lax.rem, y=jnp.int32(o.buffers))
        pl.when(ahead < step.total)(lambda: step.copy(fetch, slot(ahead), "start"))
        at = cursors[0]
        pl.when(t < step.total)(lambda: step.copy(at, slot(t), "wait"))
        if isinstance(o.fmt.v, BFloat16 | Float8):
            pl.when(t < step.total)(lambda: step.zero_past_end(at, slot(t)))
        if o.scored:
            pl.when(t > 2)(lambda: step.await_kept(t - 2))
        step.values(cursors[2], slot(jnp.maximum(t - 2, 0)))
        step.softmax(cursors[1], t)
        step.scores(at, slot(t))
        step.write(cursors[2])  # a branch: at the end, as the stages cannot move across one
        if o.scored:
            pl.when((t > 0) & (t <= step.total))(lambda: step.send_kept(cursors[1], t))
        return [(c.row, c.block) for c in (step.after(fetch), step.after(at), at, cursors[1])]

    lax.fori_loop(0, step.total + 2, body, [(c.row, c.block) for c in (fetch, start, start, start)])
    if o.scored:
        step.await_kept(step.total)


class Step:
    """The stages on the refs of one program."""

    def __init__(self, o, table, lengths, positions, first, count, total, q, pages, *rest):
        self.o, self.fmt = o, o.fmt
        g = pl.program_id(0)
        self._table, self._lengths, self._positions = table, lengths, positions
        self._base = g * o.batch
        self.first = lambda row: first[self._base + row]
        self._count = lambda row: count[self._base + row]
        self.total = total[g]
        self.q, self.pages = q, pages
        if o.half:  # cos and sin of pages' first tokens, and of the places in a page
            (self.page_angles, self.place_angles), rest = rest[:2], rest[2:]
        columns = iter(rest[: len(o.fmt.calibrated)])  # references [K, n, 128]
        self.k_columns, self.v_columns = (
            next(columns) if code.calibrated else None for code in (o.fmt.k, o.fmt.v)
        )
        rest = rest[len(o.fmt.calibrated) :]
        if o.scored:
            self.scores_out, self.kept, self.kept_sems = rest[3], *rest[-2:]
            rest = (*rest[:3], *rest[4:-2])
        self.acc_out, self.stats_out, self.loose_out, self.buffer, self.sems = rest[:5]
        self.s, self.p, self.top, self.mass, self.decay = rest[5:10]
        # top and mass as they were after the block that `values` is at
        self.top_then, self.mass_then, self.acc, self.loose = rest[10:]
        self.K, self.R = q.shape[1], q.shape[2]

    def reset(self) -> None:
        self.s[...] = jnp.full_like(self.s, MASKED)
        self.top[...] = jnp.full_like(self.top, EMPTY)
        self.decay[...] = jnp.ones_like(self.decay)
        for ref in (self.p, self.mass, self.acc, self.loose):
            ref[...] = jnp.zeros_like(ref)

    def after(self, at: Cursor) -> Cursor:
        return at.next(self.first, self._count, self.o.batch)

    def _end(self, row):
        return self._lengths[self._base + row]

    # --- copies -----------------------------------------------------------------------------------

    def copy(self, at: Cursor, slot, what: str) -> None:
        """Starts or awaits the copies of a block's pages; pages past the row's end are left out."""
        used = pl.cdiv(self._end(at.row), LANES)
        first, pages = at.block * self.o.pages, range(self.o.pages)
        full = first + self.o.pages <= used

        def some(i):
            copy = self._page_copy(at.row, first + i, slot, i)
            pl.when(first + i < used)(copy.start if what == "start" else copy.wait)

        @pl.when(full)  # nearly always: no branch for each page, and one wait for all bytes
        def _all():
            if what == "start":
                for i in pages:
                    self._page_copy(at.row, first + i, slot, i).start()
            else:
                block = self.buffer.at[slot]
                pltpu.make_async_copy(block, block, self.sems.at[slot]).wait()

        @pl.when(jnp.logical_not(full))
        def _partly():
            for i in pages:
                some(i)

    def _page_copy(self, row, page, slot, i: int):
        # a page past the table is never copied, but its id would be read
        page_id = self._page_id(row, jnp.minimum(page, self._table.shape[1] - 1))
        return pltpu.make_async_copy(
            self.pages.at[page_id], self.buffer.at[slot, i], self.sems.at[slot]
        )

    def _page_id(self, row, page):
        """A page id outside of the pool reads the null page, never a foreign one."""
        page_id = self._table[self._base + row, page]
        inside = (page_id >= 0) & (page_id < self.pages.shape[0])
        return jnp.where(inside, page_id, 0)

    def zero_past_end(self, at: Cursor, slot) -> None:
        """Zeros the values of tokens past the end: a float there may be NaN, and 0 * NaN is NaN."""
        for i in range(self.o.pages):
            real = self._end(at.row) - (at.block * self.o.pages + i) * LANES
            pl.when(real < LANES)(functools.partial(self._zero_page, slot, i, real))

    def _zero_page(self, slot, i, real) -> None:
        fmt, fields = self.fmt, 32 // self.fmt.v.bits
        shape = (fmt.value_tile_rows, LANES)
        lanes = lax.broadcasted_iota(jnp.int32, shape, 1)
        rows = lax.broadcasted_iota(jnp.int32, shape, 0)
        keep = jnp.zeros(shape, jnp.int32)
        for f in range(fields):
            token = lanes if fmt.values_channels_first else rows * fields + f
            field = (2**fmt.v.bits - 1) << (fmt.v.bits * f)
            field = field - 2**32 if field >= 2**31 else field
            keep = keep | jnp.where(token < real, jnp.int32(field), jnp.int32(0))
        for k in range(self.K):
            for j in range(fmt.value_tiles):
                at = pl.ds(self._value_row(k, j), fmt.value_tile_rows)
                self.buffer[slot, i, at] = self.buffer[slot, i, at] & keep

    # --- reading a block --------------------------------------------------------------------------

    def _value_row(self, k: int, tile: int) -> int:
        return k * self.fmt.head_rows + self.fmt.value_row(tile)

    def _across(self, slot, row: int, rows: int) -> Int[Array, "rows S"]:
        """Rows of all pages of a block, side by side."""
        pages = [self.buffer[slot, i, pl.ds(row, rows)] for i in range(self.o.pages)]
        return jnp.concatenate(pages, axis=1)

    def _side(self, slot, start: int, code: Code) -> list[list[Array]]:
        """`[K][halves]` numbers of the tokens for a code, rows `[1, S]`, from number `start` on."""
        bits = []
        for n in range(start, start + code.halves):
            pair = self._across(slot, self.fmt.side_row + n // 2 * self.K, self.K)
            bits.append(lax.shift_right_logical(pair, jnp.int32(16)) if n % 2 else pair)
        numbers = code.from_bits(bits)
        return [[x[k : k + 1] for x in numbers] for k in range(self.K)]

    # --- stages -----------------------------------------------------------------------------------

    def scores(self, at: Cursor, slot) -> None:
        o = self.o
        parts = [(part, self._side(slot, part.side, part.code)) for part in o.fmt.key_parts]
        out = []
        for k in range(self.K):
            each = [self._part_scores(part, at, k, side[k], slot) for part, side in parts]
            out.append(functools.reduce(operator.add, each))
        s = jnp.concatenate(out, axis=0)
        if o.softcap is not None:
            s = o.softcap * jnp.tanh(s * (1.0 / o.softcap))
        self.s[...] = s

    def _part_scores(self, part: KeyPart, at: Cursor, k: int, side: list[Array], slot) -> Array:
        if self.o.half:
            return self._turned_scores(part, at, k, side, slot)
        code, q = part.code, self.q[at.row, k][:, part.start : part.stop]
        words = self._across(slot, k * self.fmt.head_rows + part.row, part.rows)
        sums = _channel_sums(q, code.groups) if code.needs_sums else []
        return code.scores(q, sums, words, side, self.o.factor, _of_head(self.k_columns, k))

    def _turned_scores(self, part: KeyPart, at: Cursor, k: int, side: list[Array], slot) -> Array:
        """Of each page the queries go back by its first token's angles, and its keys forward by
        their places in it."""
        code, R, pages = part.code, self.R, range(self.o.pages)
        cos, sin = self.place_angles[0], self.place_angles[1]
        queries, sums, out = [self._query(at, k, i) for i in pages], None, []
        fixed = {"factor": self.o.factor, "columns": _of_head(self.k_columns, k)}
        if code.needs_turned_sums:
            ones = turned(jnp.ones((part.stop - part.start, LANES)), cos, sin, axis=0)
            every = jnp.concatenate(queries, axis=0).astype(jnp.bfloat16)
            sums = matmul(every, ones.astype(jnp.bfloat16))
        for i in pages:
            words = self.buffer[slot, i, pl.ds(k * self.fmt.head_rows + part.row, part.rows)]
            own = [x[:, i * LANES : (i + 1) * LANES] for x in side]
            total = None if sums is None else sums[i * R : (i + 1) * R]
            q = queries[i].astype(jnp.bfloat16)
            out.append(code.turned_scores(q, total, words, own, cos, sin, **fixed))
        return jnp.concatenate(out, axis=1)

    def _query(self, at: Cursor, k: int, i: int) -> Float[Array, "R H"]:
        page = jnp.minimum(at.block * self.o.pages + i, self.page_angles.shape[1] - 1)
        cos, sin = (self.page_angles[j, pl.ds(page, 1)] for j in range(2))
        return turned(self.q[at.row, k], cos, -sin, axis=1)

    def softmax(self, at: Cursor, t) -> None:
        s = jnp.where(self._seen(at), self.s[...], MASKED)
        if self.o.scored:
            self.kept[lax.rem(t, 2)] = s
        fresh = at.block == self.first(at.row)
        before = jnp.where(fresh, EMPTY, self.top[...])
        tiles = [s[:, i : i + LANES] for i in range(0, s.shape[1], LANES)]
        highest = jnp.max(functools.reduce(jnp.maximum, tiles), axis=-1, keepdims=True)
        top = jnp.maximum(before, highest)
        # a row without any key has top = EMPTY too: only the 0 makes it forget the row before
        decay = jnp.where(fresh, 0.0, jnp.exp2(before - top))
        p = jnp.exp2(s - jnp.concatenate([top] * self.o.pages, axis=1))
        self.mass[...] = self.mass[...] * decay + fold(p)
        self.top[...], self.decay[...], self.p[...] = top, decay, p

    def _seen(self, at: Cursor) -> Array:
        o = self.o
        shape = (self.K * self.R, o.tokens)
        token = lax.broadcasted_iota(jnp.int32, shape, 1) + at.block * o.tokens
        seen = token < self._end(at.row)
        if o.causal:
            row = lax.broadcasted_iota(jnp.int32, (shape[0], LANES), 0)
            own = self._positions[self._base + at.row] + lax.rem(row, jnp.int32(o.queries))
            own = jnp.concatenate([own] * o.pages, axis=1)
            seen = seen & (token <= own)
            if o.window is not None:
                seen = seen & (token > own - o.window)
        return seen

    def values(self, at: Cursor, slot) -> None:
        fmt, R = self.fmt, self.R
        side = self._side(slot, fmt.value_side, fmt.v)
        decay = self.decay[...]
        out, loose = [], []
        for k in range(self.K):
            weights, rest = fmt.v.weights(self.p[k * R : (k + 1) * R], side[k])
            out.append(fmt.v.gather_groups(self._weighted(weights, k, slot, side[k])))
            loose += rest
        wide = jnp.concatenate([decay] * -(-fmt.head_dim // LANES), axis=1)[:, : fmt.head_dim]
        self.acc[...] = self.acc[...] * wide + jnp.concatenate(out, axis=0)
        if loose:
            spread = [
                decay[k * R : (k + 1) * R] for k in range(self.K) for _ in range(fmt.v.groups)
            ]
            decays = jnp.concatenate(spread, axis=0)
            self.loose[...] = self.loose[...] * decays + jnp.concatenate(loose, axis=0)
        self.top_then[...], self.mass_then[...] = self.top[...], self.mass[...]

    def _weighted(self, weights: Array, k: int, slot, side: list[Array]) -> Array:
        fmt, pages = self.fmt, range(self.o.pages)
        if fmt.values_channels_first:
            words = self._across(slot, self._value_row(k, 0), fmt.value_tile_rows)
            tile = fmt.v.across_tile(words, side, _of_head(self.v_columns, k))
            return matmul(weights, tile, ROWS_BY_LANES)
        out = []
        for j in range(fmt.value_tiles):
            at = pl.ds(self._value_row(k, j), fmt.value_tile_rows)
            tile = fmt.v.tiles([self.buffer[slot, i, at] for i in pages])
            out.append(matmul(weights, tile))
        return jnp.concatenate(out, axis=1)

    def send_kept(self, at: Cursor, t) -> None:
        """Starts the copy of a block's scores, which `softmax` kept at step t."""
        block = jnp.minimum(at.block, self.o.scored - 1)  # a window past the end begins later
        start, slot = pl.multiple_of(block * self.o.tokens, LANES), lax.rem(t, 2)
        target = self.scores_out.at[self._base + at.row, :, pl.ds(start, self.o.tokens)]
        pltpu.make_async_copy(self.kept.at[slot], target, self.kept_sems.at[slot]).start()

    def await_kept(self, t) -> None:
        kept = self.kept.at[lax.rem(t, 2)]
        pltpu.make_async_copy(kept, kept, self.kept_sems.at[lax.rem(t, 2)]).wait()

    def write(self, at: Cursor) -> None:
        """A row's results after its last block. Lane 0 of `stats` is top, the others are mass."""

        @pl.when(at.block + 1 == self.first(at.row) + self._count(at.row))
        def _():
            self.acc_out[at.row] = self.acc[...]
            mass = jnp.sum(self.mass_then[...], axis=-1, keepdims=True)
            lane = lax.broadcasted_iota(jnp.int32, self.top.shape, 1)
            self.stats_out[at.row] = jnp.where(lane == 0, self.top_then[...], mass)
            self.loose_out[at.row] = self.loose[...]


def _of_head(columns: Any, k: int) -> Any:
    return None if columns is None else columns.at[k]


def _channel_sums(q: Float[Array, "R D"], groups: int) -> list[Float[Array, "R 1"]]:
    each, q = q.shape[-1] // groups, q.astype(jnp.float32)
    if groups == 1:
        return [jnp.sum(q, axis=-1, keepdims=True)]
    lane = lax.broadcasted_iota(jnp.int32, q.shape, 1) // each
    return [jnp.sum(jnp.where(lane == g, q, 0.0), axis=-1, keepdims=True) for g in range(groups)]
