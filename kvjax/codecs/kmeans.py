"""Weighted k-means of numbers: the codebooks of KVQuant (https://arxiv.org/abs/2401.18079, 3.3).

On sorted numbers a cell is a range, and prefix sums give its mean: an iteration costs
2^bits log n. It starts from the weighted quantiles, so it is deterministic.
"""

from __future__ import annotations

import numpy as np


def weighted_kmeans(
    x: np.ndarray, weights: np.ndarray, n: int, *, iterations: int = 50
) -> tuple[np.ndarray, list[float]]:
    """n ascending centres that locally minimise sum w (x - c)^2, and that sum after each step."""
    x, w = np.ravel(x).astype(np.float64), np.ravel(weights).astype(np.float64)
    if x.size == 0 or x.shape != w.shape:
        raise ValueError(f"k-means: expected as many numbers as weights, got {x.size}, {w.size}.")
    order = np.argsort(x, kind="stable")
    x, w = x[order], w[order]
    if w.sum() <= 0:
        w = np.ones_like(w)  # a layer the loss does not see: all errors count alike
    sums = np.concatenate([np.zeros((1, 3)), np.cumsum(np.stack([w, w * x, w * x * x], 1), 0)])
    quantiles = (np.arange(n) + 0.5) / n * sums[-1, 0]
    centres = x[np.minimum(np.searchsorted(sums[1:, 0], quantiles), x.size - 1)]
    objectives = []
    for _ in range(iterations):
        cells = _cells(x, sums, centres)
        mass, first = cells[:, 0], cells[:, 1]
        centres = np.where(mass > 0, first / np.where(mass > 0, mass, 1), centres)
        objectives.append(_objective(cells, centres))
        if len(objectives) > 1 and objectives[-2] - objectives[-1] <= 1e-9 * objectives[-2]:
            break
    return np.sort(centres), objectives  # equal centres may have swapped by an ulp


def _cells(x: np.ndarray, sums: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Sums of w, w x and w x^2 over the numbers nearest to each centre."""
    inner = np.searchsorted(x, (centres[1:] + centres[:-1]) / 2, side="right")
    edges = np.concatenate([[0], inner, [x.size]])
    return sums[edges[1:]] - sums[edges[:-1]]


def _objective(cells: np.ndarray, centres: np.ndarray) -> float:
    mass, first, second = cells.T
    return float(np.sum(second - 2 * centres * first + centres**2 * mass))
