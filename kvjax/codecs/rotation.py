"""Random orthonormal maps: they spread a channel's outlier over the whole head.

Randomised Hadamard (QuaRot, https://arxiv.org/abs/2404.00456; TurboQuant,
https://arxiv.org/abs/2504.19874 section 3.1): signs, then a Walsh-Hadamard transform. A head dim
that is no power of two is cut into powers of two (96 = 64 + 32) and mixed twice, the second time
with a shuffle between and the blocks in the other order, as one block-diagonal pass would leave an
outlier in its block. At head dims up to 256 a constant matrix beats a butterfly on every device.
"""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def check(head_dim: int) -> None:
    if head_dim % 8:
        raise ValueError(f"head_dim: a rotation needs a multiple of 8, got {head_dim}.")


def blocks(head_dim: int) -> list[int]:
    """`head_dim` as a sum of powers of two, the largest first."""
    return [1 << i for i in reversed(range(head_dim.bit_length())) if head_dim >> i & 1]


@functools.lru_cache(maxsize=64)
def hadamard(head_dim: int, seed: int = 0) -> np.ndarray:
    """Orthonormal float32 `[H, H]`, the same on every machine (RandomState's stream is frozen)."""
    check(head_dim)
    rng = np.random.RandomState([seed, head_dim])
    sizes = blocks(head_dim)
    matrix = _signs(rng, head_dim)[:, None] * _block_hadamard(sizes)
    if len(sizes) > 1:
        matrix = matrix[:, rng.permutation(head_dim)] * _signs(rng, head_dim)
        matrix = matrix @ _block_hadamard(sizes[::-1])
    return _constant(matrix)


@functools.lru_cache(maxsize=64)
def haar(head_dim: int, rows: int, seed: int = 0) -> np.ndarray:
    """`[rows, H]` of orthonormal rows, uniformly random; past H rows, independent chunks of H."""
    rng = np.random.RandomState([seed, head_dim, 1])
    chunks = [
        _orthonormal(rng.standard_normal((head_dim, head_dim)))
        for _ in range(math.ceil(rows / head_dim))
    ]
    return _constant(np.concatenate(chunks)[:rows])


@functools.lru_cache(maxsize=64)
def gaussian(head_dim: int, rows: int, seed: int = 0) -> np.ndarray:
    """`[rows, H]` of independent N(0, 1)."""
    rng = np.random.RandomState([seed, head_dim, 2])
    return _constant(rng.standard_normal((rows, head_dim)))


def apply(matrix: np.ndarray, x: Float[Array, "*lead H"]) -> Float[Array, "*lead R"]:
    """`matrix [R, H]` times each vector, in float32 (a TPU would round to bfloat16 by default)."""
    y = jnp.einsum("...h,rh->...r", x.astype(jnp.float32), matrix, precision="highest")
    return y.astype(x.dtype)


def rotate(x: Float[Array, "*lead H"], seed: int = 0) -> Float[Array, "*lead H"]:
    return apply(hadamard(x.shape[-1], seed).T, x)


def unrotate(y: Float[Array, "*lead H"], seed: int = 0) -> Float[Array, "*lead H"]:
    return apply(hadamard(y.shape[-1], seed), y)


def _constant(matrix: np.ndarray) -> np.ndarray:
    matrix = np.ascontiguousarray(matrix, np.float32)
    matrix.setflags(write=False)
    return matrix


def _orthonormal(rows: np.ndarray) -> np.ndarray:
    """Gram-Schmidt, each row twice: uniform for Gaussian rows. Unlike LAPACK's QR it has no sign
    to fix, no threads to wait for, and the same result on every machine."""
    out = np.zeros_like(rows)
    for i, row in enumerate(rows):
        for _ in range(2):
            row = row - np.einsum("j,jh->h", np.einsum("jh,h->j", out[:i], row), out[:i])
        out[i] = row / np.sqrt(np.sum(row * row))
    return out


def _signs(rng: np.random.RandomState, n: int) -> np.ndarray:
    return rng.randint(0, 2, n) * 2.0 - 1.0


def _block_hadamard(sizes: list[int]) -> np.ndarray:
    out = np.zeros((sum(sizes), sum(sizes)))
    start = 0
    for n in sizes:
        h = np.ones((1, 1))
        while len(h) < n:
            h = np.block([[h, h], [h, -h]])
        out[start : start + n, start : start + n] = h / math.sqrt(n)
        start += n
    return out
