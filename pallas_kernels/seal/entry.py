"""`seal`: pages of 128 tokens, quantised, packed and written into their pool in place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.codes.base import LANES, Code, Leaves
from pallas_kernels.pages import PageFormat
from pallas_kernels.seal.quantiser import Quantiser
from pallas_kernels.seal.tpu import seal_tpu

IMPLEMENTATIONS = ("xla", "tpu", "gpu")


def seal(
    pool: Int[Array, "P rows 128"],
    ids: Int[Array, "N n"],
    k: Float[Array, "N T K H"],
    v: Float[Array, "N T K R"],
    *,
    start: Int[Array, "N"] | None = None,
    fmt: PageFormat,
    quantisers: tuple[Quantiser, Quantiser],
    implementation: str | None = None,
    interpret: Any = False,
) -> Int[Array, "P rows 128"]:
    """The pool with page ids[i, j] made of 128 tokens of sequence i, from start[i] + 128 j on; ids
    outside of the pool are not written, whatever their tokens would be.

    k, v: keys and values (latents and rotated keys, with a LatentFormat), quantised by the first
    and the second of the quantisers. start: 0 by default; the tokens of a page that is written must
    be there. The kernel takes bfloat16, and writes a donated pool in place; one id twice has no
    defined winner, and -0 becomes 0. Raises NotImplementedError on what an implementation does not
    take, ValueError on shapes that do not meet.
    """
    start = jnp.zeros(ids.shape[:1], jnp.int32) if start is None else start
    _check(pool, ids, k, v, start, fmt)
    chosen = implementation or ("tpu" if jax.default_backend() == "tpu" else "xla")
    if chosen not in IMPLEMENTATIONS:
        raise ValueError(f"implementation: expected one of {IMPLEMENTATIONS}, got {chosen!r}.")
    if chosen == "gpu":
        raise NotImplementedError("seal: no GPU kernel; use implementation='xla'.")
    if chosen == "xla":
        return _seal_xla(pool, ids, k, v, start, fmt, quantisers)
    if k.dtype != jnp.bfloat16 or v.dtype != jnp.bfloat16:
        raise NotImplementedError(f"seal: the kernel takes bfloat16, got {k.dtype}, {v.dtype}.")
    return seal_tpu(pool, ids, k, v, start, fmt=fmt, quantisers=quantisers, interpret=interpret)


def _check(pool, ids, k, v, start, fmt: PageFormat) -> None:
    (N, pages), T, K = ids.shape, k.shape[1], fmt.num_kv_heads
    _need(N > 0 and pages > 0, "ids", "one page or more", ids.shape)
    _need(pool.dtype == jnp.int32, "pool", "int32", pool.dtype)
    _need(pool.shape[1:] == (fmt.rows, LANES), "pool", f"[P, {fmt.rows}, {LANES}]", pool.shape)
    _need(T >= LANES, "k", f"{LANES} tokens or more", T)
    _need(start.shape == (N,), "start", (N,), start.shape)
    for source, (name, x) in enumerate((("k", k), ("v", v))):
        shape = (N, T, K, fmt.width_of(source))
        _need(x.shape == shape, name, shape, x.shape)


def _need(ok: bool, field: str, expected: object, got: object) -> None:
    if not ok:
        raise ValueError(f"seal: {field}: expected {expected}, got {got}.")


def _seal_xla(pool, ids, k, v, start, fmt: PageFormat, quantisers) -> Array:
    """The kernel's arithmetic in plain XLA, packed by `PageFormat.pack`."""
    codes = {s.source: s.code for s in fmt.sections}
    leaves = [
        _leaves(_pages(x, start, ids.shape[1]), quantiser, codes[source])
        for source, (x, quantiser) in enumerate(zip((k, v), quantisers, strict=True))
    ]
    page = fmt.pack(*leaves)
    at = jnp.where((ids >= 0) & (ids < pool.shape[0]), ids, pool.shape[0])
    return pool.at[at].set(page, mode="drop")


def _pages(x: Float[Array, "N T K H"], start: Array, n: int) -> Float[Array, "N n K 128 H"]:
    token = start[:, None] + jnp.arange(n * LANES)[None]
    index = jnp.clip(token, 0, x.shape[1] - 1)[:, :, None, None]
    x = jnp.take_along_axis(x, index, axis=1)
    return jnp.swapaxes(x.reshape(x.shape[0], n, LANES, *x.shape[2:]), 2, 3)


def _leaves(x: Float[Array, "*lead K 128 H"], quantiser: Quantiser, code: Code) -> Leaves:
    """What `PageFormat.pack` takes of a quantiser's codes and numbers."""
    x = x.astype(jnp.float32)
    if quantiser.rotation is not None:
        x = jnp.einsum("...h,rh->...r", x, quantiser.rotation, precision="highest")
    x = x if quantiser.by_tokens else jnp.swapaxes(x, -1, -2)
    q, numbers = jax.vmap(jax.vmap(jax.vmap(quantiser.quantise)))(x)
    leaves = {"q": q if quantiser.by_tokens else jnp.swapaxes(q, -1, -2)}
    if code.bits == 16:
        leaves["q"] = leaves["q"].astype(jnp.bfloat16)
    if numbers is None:
        return leaves
    half = numbers.shape[-2] // 2 if code.has_low or quantiser.by_tokens else numbers.shape[-2]
    return leaves | {"scale": numbers[..., :half, :], "low": numbers[..., half:, :]}
