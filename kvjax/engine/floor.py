"""The floor of a decode step: every weight matrix read once, as a decode step reads it.

A chain of matrix products with the batch's few rows, each depending on the one before, so that
nothing overlaps that a decoder could not overlap. What a step costs above it is attention, the
cache, norms and sampling.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kvjax.model import Transformer


def weight_matrices(model: Transformer) -> dict[str, Any]:
    """The matrices that a decode step reads whole.

    layers: of each run of layers the kernels `[in, out]`, or stacked `[L, in, out]`; and the
    output's: embedding `[V, D]` if it is tied, head `[D, V]` otherwise. A mixture's experts are all
    counted, though a step with few rows reads the chosen ones.
    """
    layers = []
    for run, modules in zip(model.stack.plan, model.stack.modules(), strict=True):
        flat = [kv for m in modules for kv in nnx.to_flat_state(nnx.state(m, nnx.Param))]
        kernels = [value[...] for path, value in flat if path[-1] == "kernel"]
        if run.repeats > 1:
            layers.append(tuple(kernels))
        else:
            layers.extend((kernel,) for kernel in kernels)
    if model.lm_head is None:
        return {"layers": layers, "embedding": model.embedding[...]}
    return {"layers": layers, "head": model.lm_head.kernel[...]}


def weight_bytes(matrices: dict[str, Any]) -> int:
    """Bytes of all matrices."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(matrices))


@functools.partial(jax.jit, static_argnames="batch")
def read_weights(
    matrices: dict[str, Any], steps: Int[Array, ""], *, batch: int
) -> Float[Array, ""]:
    """Reads all matrices `steps` times through products with `batch` rows."""
    return jax.lax.fori_loop(0, steps, lambda _, x: _once(matrices, x, batch), jnp.float32(0))


def _once(matrices: dict[str, Any], x: Array, batch: int) -> Array:
    for kernels in matrices["layers"]:
        if len(kernels) > 1:  # stacked: scan, as the decoder does
            x, _ = jax.lax.scan(lambda x, each: (_chain(each, x, batch), None), x, kernels)
        else:
            x = _chain(kernels, x, batch)
    if "head" in matrices:
        return _chain([matrices["head"]], x, batch)
    table = matrices["embedding"]
    return _link(jnp.einsum("bd,vd->bv", _rows(x, batch, table.shape[1], table.dtype), table))


def _chain(kernels: list[Array], x: Array, batch: int) -> Array:
    for kernel in kernels:
        rows = _rows(x, batch, kernel.shape[-2], kernel.dtype)
        x = _link(jnp.matmul(rows, kernel) if kernel.ndim == 2 else rows[None] @ kernel)
    return x


def _rows(x: Array, batch: int, width: int, dtype: Any) -> Array:
    """`[batch, width]` of unlike numbers that depend on x."""
    index = jnp.arange(batch * width, dtype=jnp.float32).reshape(batch, width)
    return jnp.cos(index + x).astype(dtype)


def _link(y: Array) -> Array:
    """One number that needs all of y. A maximum: XLA could move a sum into the product."""
    return jnp.tanh(jnp.max(y).astype(jnp.float32))
