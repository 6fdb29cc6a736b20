"""Non-uniform scalar quantisers: Lloyd-Max levels, nearest level, look-up.

Lloyd-Max for N(0, 1) (Max 1960, https://doi.org/10.1109/TIT.1960.1057548; the codebook of
TurboQuant, https://arxiv.org/abs/2504.19874 section 3.1). Levels are found once per width by
Newton's method on "each level is the mean of its cell", a tridiagonal system.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt32

_TREE_BITS = 5  # up to here a tree of selects beats a gather (CPU, 4 bits: half the time)
_COMPARE_BITS = 6  # up to here comparing with every bound beats a search (CPU: a tenth of the time)


@functools.lru_cache(maxsize=8)
def lloyd_max(bits: int) -> tuple[float, ...]:
    """The 2**bits levels that quantise N(0, 1) with the least squared error, ascending."""
    n = 2**bits
    # the density of optimal levels goes as pdf**(1/3), a normal three times as wide
    levels = np.array([NormalDist(0, math.sqrt(3)).inv_cdf((i + 0.5) / n) for i in range(n)])
    for step in range(40):
        mean, pull_low, pull_high = _cells(levels)
        if np.abs(mean - levels).max() < 1e-12:
            break
        if step < 10:  # a few plain Lloyd steps bring Newton near
            levels = mean
            continue
        levels = levels - _tridiagonal(pull_low, pull_low + pull_high - 1, pull_high, mean - levels)
    levels = (levels - levels[::-1]) / 2
    return tuple(float(v) for v in levels)


@functools.lru_cache(maxsize=8)
def distortion(bits: int) -> float:
    """Mean squared error of `lloyd_max(bits)` on N(0, 1): 1 - sum of p c^2."""
    levels = np.array(lloyd_max(bits))
    return float(1 - np.sum(_masses(_edges(levels)) * levels**2))


def midpoints(levels: Sequence[float]) -> tuple[float, ...]:
    """Decision boundaries between ascending levels."""
    return tuple((a + b) / 2 for a, b in itertools.pairwise(levels))


def nearest(x: Float[Array, "*x"], bounds: Sequence[Any]) -> UInt32[Array, "*x"]:
    """The cell of each number: how many of the ascending bounds it exceeds.

    A bound is a number, or an array that broadcasts with x at equal rank.
    """
    if isinstance(bounds[0], float) and len(bounds) >= 2**_COMPARE_BITS:
        table = jnp.asarray(bounds, jnp.float32)
        return jnp.searchsorted(table, x, side="left").astype(jnp.uint32)
    code = jnp.zeros(x.shape, jnp.uint32)
    for bound in bounds:
        code += (x > bound).astype(jnp.uint32)
    return code


def quantise(
    x: Float[Array, "*x"], levels: Sequence[float]
) -> tuple[UInt32[Array, "*x"], Float[Array, "*x"]]:
    """`nearest` by the midpoints of levels, and `lookup` of it. Levels that mirror each other about
    0 take half of the work, and a number between two of them goes to the smaller."""
    half = len(levels) // 2
    mirrored = all(a == -b for a, b in zip(levels, levels[::-1], strict=True))
    if len(levels) > 2**_TREE_BITS or not mirrored:
        codes = nearest(x, midpoints(levels))
        return codes, lookup(codes, levels)
    size = jnp.abs(x)
    code, level = jnp.zeros(x.shape, jnp.int32), jnp.full(x.shape, levels[half], jnp.float32)
    for i, bound in enumerate(midpoints(levels[half:]), start=1):
        beyond = size > bound
        code, level = jnp.where(beyond, i, code), jnp.where(beyond, levels[half + i], level)
    above = x > 0
    code = jnp.where(above, half + code, half - 1 - code)
    return code.astype(jnp.uint32), jnp.where(above, level, -level)


def lookup(codes: UInt32[Array, "*x"], levels: Sequence[Any]) -> Float[Array, "*x"]:
    """levels[codes], as a tree of selects on the bits of the code: no gather, so it also lowers in
    a kernel. A level is a number, or an array that broadcasts with the codes at equal rank."""
    if isinstance(levels[0], float) and len(levels) > 2**_TREE_BITS:
        table = jnp.asarray(levels, jnp.float32)
        return table.at[codes].get(mode="promise_in_bounds")
    nodes, bit = [jnp.asarray(level, jnp.float32) for level in levels], 0
    while len(nodes) > 1:
        odd = (codes & (1 << bit)) != 0
        pairs = zip(nodes[::2], nodes[1::2], strict=True)
        nodes, bit = [jnp.where(odd, high, low) for low, high in pairs], bit + 1
    return nodes[0]


def _tridiagonal(low: np.ndarray, mid: np.ndarray, high: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Solves low[i] x[i-1] + mid[i] x[i] + high[i] x[i+1] = y[i]."""
    mid, x = mid.copy(), y.copy()
    for i in range(1, len(x)):
        ratio = low[i] / mid[i - 1]
        mid[i] -= ratio * high[i - 1]
        x[i] -= ratio * x[i - 1]
    for i in reversed(range(len(x))):
        x[i] = (x[i] - (high[i] * x[i + 1] if i + 1 < len(x) else 0)) / mid[i]
    return x


def _edges(levels: np.ndarray) -> np.ndarray:
    return np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])


def _masses(edges: np.ndarray) -> np.ndarray:
    """Probability of each cell, from whichever tail is the smaller, so that none cancels."""
    upper = np.array([math.erfc(e / math.sqrt(2)) / 2 for e in edges])
    lower = np.array([math.erfc(-e / math.sqrt(2)) / 2 for e in edges])
    return np.where(edges[:-1] >= 0, upper[:-1] - upper[1:], lower[1:] - lower[:-1])


def _cells(levels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean of each cell, and its derivative by the level below and by the level above."""
    edges = _edges(levels)
    finite = np.where(np.isfinite(edges), edges, 0)
    pdf = np.where(np.isfinite(edges), np.exp(-(finite**2) / 2) / math.sqrt(2 * math.pi), 0)
    mass = _masses(edges)
    mean = (pdf[:-1] - pdf[1:]) / mass
    by_low = pdf[:-1] * (mean - finite[:-1]) / mass
    by_high = pdf[1:] * (finite[1:] - mean) / mass
    return mean, by_low / 2, by_high / 2
