"""The seal kernel: one page of all heads a step, made in on-chip memory and copied into the pool.

Tokens come as rows; a product with the codec's rotation, or with the identity, turns them channels
down, where a scale is a reduction down the rows and its numbers lie on lanes, as pages keep them.
A second product packs the codes (`words.py`), turned back where values lie tokens down.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import words as packing
from pallas_kernels.codes.base import LANES, ROWS_BY_LANES, Code, matmul
from pallas_kernels.pages import PageFormat, Section
from pallas_kernels.seal import words as product
from pallas_kernels.seal.quantiser import Quantiser

VMEM_LIMIT = 64 * 2**20

#: heads whose tokens lie in one tile
_GROUP = 8


def seal_tpu(
    pool: Int[Array, "P rows 128"],
    ids: Int[Array, "N n"],
    k: Float[Array, "N T K H"],
    v: Float[Array, "N T K R"],
    start: Int[Array, "N"],
    *,
    fmt: PageFormat,
    quantisers: tuple[Quantiser, Quantiser],
    interpret: Any = False,
) -> Int[Array, "P rows 128"]:
    """See `seal`."""
    plan = make_plan(fmt, quantisers)
    k, v = (_in_tiles(x) for x in (k, v))
    call = pl.pallas_call(
        functools.partial(seal_kernel, plan=plan),
        grid_spec=grid_spec(plan, steps=ids.size, k=k.shape, v=v.shape),
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        input_output_aliases={4 + len(plan.matrices): 0},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_LIMIT),
        interpret=interpret,
        name="seal",
    )
    matrices = [jnp.asarray(m, jnp.bfloat16) for m in plan.matrices.values()]
    scalars = ids.reshape(-1).astype(jnp.int32), start.astype(jnp.int32)
    return call(*scalars, k, v, *matrices, pool)


def _in_tiles(x: Float[Array, "N T K H"]) -> Float[Array, "N T L W"]:
    """Room for as many heads as tiles of words of two bfloat16 hold, 2, 4, or a multiple of 8, and
    for whole tiles of lanes."""
    heads, width = x.shape[2:]
    room = next(n for n in (2, 4, -(-heads // _GROUP) * _GROUP) if n >= heads)
    return jnp.pad(x, [(0, 0), (0, 0), (0, room - heads), (0, _room(width) - width)])


def _room(width: int) -> int:
    return width if width <= LANES else -(-width // LANES) * LANES


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is static about a call. matrices: by what they are for, exact in bfloat16; the kernel
    has them in the same order. factors: of the products that turn keys and values."""

    fmt: PageFormat
    quantisers: tuple[Quantiser, Quantiser]
    matrices: dict[Any, np.ndarray]
    factors: tuple[float, float]


def make_plan(fmt: PageFormat, quantisers: tuple[Quantiser, Quantiser]) -> Plan:
    matrices: dict[Any, np.ndarray] = {}
    factors = [1.0, 1.0]
    for source, quantiser in enumerate(quantisers):
        if not quantiser.by_tokens:
            width = fmt.width_of(source)
            turn, factors[source] = _turn(quantiser, width)
            matrices["turn", source] = np.pad(turn, [(0, 0), (0, _room(width) - width)])
    for s in fmt.sections:
        entries = s.code.width(s.stop - s.start) if s.channels_first else LANES
        for bits, order in _planes(s.code):
            matrices[entries, bits, order] = product.places(entries, bits, order)
    return Plan(fmt, quantisers, matrices, (factors[0], factors[1]))


def _turn(quantiser: Quantiser, width: int) -> tuple[Float[np.ndarray, "nR H"], float]:
    """What tokens are multiplied by, in bfloat16 numbers, and a factor besides: the rotation over
    its largest entry where that is exact (a Hadamard matrix has one size of entries), else n = 3
    numbers for each of its own, which add up to it, largest first."""
    if quantiser.rotation is None:
        return np.eye(width, dtype=np.float32), 1.0
    rest = np.asarray(quantiser.rotation, np.float32)
    factor = float(np.abs(rest).max())
    one = _rounded(rest / np.float32(factor))
    if np.array_equal(one * np.float32(factor), rest):
        return one, factor
    parts = []
    for _ in range(3):
        parts.append(_rounded(rest))
        rest = rest - parts[-1]
    return np.concatenate(parts), 1.0


def _rounded(x: Float[np.ndarray, "R H"]) -> Float[np.ndarray, "R H"]:
    return x.astype(jnp.bfloat16).astype(np.float32)


def _planes(code: Code) -> list[tuple[int, str]]:
    """Bits and order of what a code keeps in its words; 16 bits as they are."""
    if code.bits == 16:
        return [(16, code.order)]
    return [(p.bits, p.order) for p in code.planes(jnp.zeros((1, 1), jnp.int32))]


def grid_spec(
    plan: Plan, *, steps: int, k: tuple[int, ...], v: tuple[int, ...], scalars: int = 2
) -> pltpu.PrefetchScalarGridSpec:
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    whole = [pl.BlockSpec(m.shape, lambda i, *_: (0, 0)) for m in plan.matrices.values()]
    return pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=scalars,
        grid=(steps,),
        in_specs=[anywhere, anywhere, *whole, anywhere],
        out_specs=anywhere,
        scratch_shapes=[
            *[_tokens_buffer(*shape[2:]) for shape in (k, v)],
            pltpu.VMEM((2, plan.fmt.rows, LANES), jnp.int32),
            pltpu.SemaphoreType.DMA((2, 2)),
            pltpu.SemaphoreType.DMA((2,)),
        ],
    )


def _tokens_buffer(heads: int, width: int) -> Any:
    """For the tokens of two pages, up to eight heads and 128 channels together: their places are
    then static, and strided loads take one register's lanes."""
    each, lanes = min(heads, _GROUP), min(width, LANES)
    return pltpu.VMEM((2, heads // each, width // lanes, LANES, each, lanes), jnp.bfloat16)


def seal_kernel(ids, start, k, v, *refs, plan: Plan):
    """Step i makes page i, while the tokens of the next come and the page before goes."""
    *matrices, _, pool, k_tokens, v_tokens, made, came, gone = refs
    matrix = dict(zip(plan.matrices, matrices, strict=True))
    step, last = pl.program_id(0), pl.num_programs(0) - 1
    each = ids.shape[0] // start.shape[0]

    def tokens_of(i):
        first = start[i // each] + i % each * LANES
        at = pl.ds(jnp.clip(first, 0, k.shape[1] - LANES), LANES)
        copies = []
        for j, (x, into) in enumerate(((k, k_tokens), (v, v_tokens))):
            _, groups, tiles, _, heads, lanes = into.shape
            for g, tile in itertools.product(range(groups), range(tiles)):
                some = x.at[i // each, at, pl.ds(g * heads, heads), pl.ds(tile * lanes, lanes)]
                to = into.at[i % 2, g, tile]
                copies.append(pltpu.make_async_copy(some, to, came.at[i % 2, j]))
        return copies

    def page_of(i):
        return pltpu.make_async_copy(made.at[i % 2], pool.at[ids[i]], gone.at[i % 2])

    def for_page(i, act):
        """act, if there is a step i and its page is wanted."""
        inside = jnp.clip(i, 0, last)
        wanted = (inside == i) & (ids[inside] >= 0) & (ids[inside] < pool.shape[0])
        pl.when(wanted)(lambda: act(inside))

    def fetch(i):
        for copy in tokens_of(i):
            copy.start()

    def make(i):
        for copy in tokens_of(i):
            copy.wait()
        _make_page((k_tokens.at[i % 2], v_tokens.at[i % 2]), made.at[i % 2], matrix, plan)
        page_of(i).start()

    def await_written(i):
        page_of(i).wait()

    def finish():
        for_page(step - 1, await_written)
        for_page(step, await_written)

    pl.when(step == 0)(lambda: for_page(step, fetch))
    for_page(step + 1, fetch)
    for_page(step - 2, await_written)
    for_page(step, make)
    pl.when(step == last)(finish)


def _make_page(tokens, page, matrix, plan: Plan) -> None:
    fmt, heads = plan.fmt, plan.fmt.num_kv_heads
    used = fmt.side_row + fmt.side_pairs * heads
    if used < fmt.rows:
        page[used:] = jnp.zeros((fmt.rows - used, LANES), jnp.int32)

    def heads_of(g, some):
        for p in range(-(-some // 2)):
            words = [_pair(x.at[g], p) for x in tokens]
            for upper in range(min(2, some - 2 * p)):
                own = [_half(w, upper=bool(upper)) for w in words]
                yield _make_head(g * _GROUP + 2 * p + upper, own, page, matrix, plan)

    def group(g, some):
        _staggered(heads_of(g, some))

    def full(g, carry):
        group(g, _GROUP)
        return carry

    if heads >= _GROUP:
        lax.fori_loop(0, heads // _GROUP, full, 0)
    if heads % _GROUP:
        group(heads // _GROUP, heads % _GROUP)


def _staggered(works: Iterator[Iterator[None]]) -> None:
    """Each work a stage behind the one before it: what one waits for is hidden by the others."""
    running: list[Iterator[None]] = []
    while True:
        running += itertools.islice(works, 1)
        if not running:
            return
        running = [work for work in running if next(work, True) is None]


def _pair(tokens, p: int) -> Int[Array, "128 W"]:
    """Words of the heads 2p and 2p + 1 of 128 tokens: bfloat16 lies in pairs down the heads."""
    tiles, _, heads, lanes = tokens.shape
    parts = []
    for tile in range(tiles):
        flat = tokens.at[tile].bitcast(jnp.int32).reshape(LANES * heads // 2, lanes)
        parts.append(flat[...] if heads == 2 else flat[pl.ds(p, LANES, stride=heads // 2)])
    return parts[0] if tiles == 1 else jnp.concatenate(parts, axis=1)


def _half(words: Int[Array, "128 W"], *, upper: bool) -> Float[Array, "128 W"]:
    """One head of a pair, bfloat16 numbers as float32."""
    bits = words & jnp.int32(-65536) if upper else words << 16
    return lax.bitcast_convert_type(bits, jnp.float32)


def _make_head(head, tokens, page, matrix, plan: Plan) -> Iterator[None]:
    """Three stages: tokens turned, quantised, packed."""
    fmt, side = plan.fmt, []
    turned = [
        x[:, : fmt.width_of(i)]
        if quantiser.by_tokens
        else _channels_down(x, matrix["turn", i], plan.factors[i], rows=fmt.width_of(i))
        for i, (x, quantiser) in enumerate(zip(tokens, plan.quantisers, strict=True))
    ]
    yield
    coded = []
    for x, quantiser in zip(turned, plan.quantisers, strict=True):
        q, numbers = quantiser.quantise(x)
        halves = None
        if numbers is not None:
            halves = packing.float_bits(numbers, exponent=5, mantissa=10)
        coded.append((q, halves))
    yield
    for s in fmt.sections:
        q, halves = coded[s.source]
        rows = list(_words(s, q, plan.quantisers[s.source].by_tokens, matrix))
        if halves is not None:
            rows += s.code.below(halves)
            if s.start == 0:
                side += [halves[i : i + 1] for i in range(s.code.halves)]
        row = head * fmt.head_rows + s.row
        for part in rows:
            page[pl.ds(row, part.shape[0])] = part
            row = row + part.shape[0]
    for j in range(0, len(side), 2):
        pair = side[j] if j + 1 == len(side) else side[j] | (side[j + 1] << 16)
        page[pl.ds(fmt.side_row + j // 2 * fmt.num_kv_heads + head, 1)] = pair


def _channels_down(
    x: Float[Array, "128 W"], turn, factor: float, *, rows: int
) -> Float[Array, "rows 128"]:
    """A head's tokens times the matrix of `_turn`."""
    y = matmul(turn[...], x.astype(jnp.bfloat16), ROWS_BY_LANES)
    parts = [y[i : i + rows] for i in range(0, y.shape[0], rows)]
    y = functools.reduce(operator.add, parts[::-1])  # the smallest first
    return y if factor == 1.0 else y * factor


def _words(s: Section, q, by_tokens: bool, matrix) -> Iterator[Int[Array, "W 128"]]:
    """The words of a section, plane by plane."""
    at = slice(s.start, s.stop)
    if s.stop - s.start < q.shape[by_tokens]:
        q = q[:, at] if by_tokens else q[at]
    planes = [(q, 16, s.code.order)] if s.code.bits == 16 else s.code.planes(q)
    turned = by_tokens == s.channels_first
    entries = q.shape[1] if turned else q.shape[0]
    for x, bits, order in planes:
        yield product.pack(x, matrix[entries, bits, order][...], bits, turned=turned)
