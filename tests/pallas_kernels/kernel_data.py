"""Random pages of every code, with the plain values they stand for."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.codes import (
    Asymmetric,
    BFloat16,
    Code,
    Codebook,
    Float8,
    KiviKey,
    OutlierKey,
    OutlierValue,
    Signs,
    Smooth,
    Symmetric,
)
from pallas_kernels.pages import LatentFormat, PageFormat

HALF = (0.1284, 0.3880, 0.6568, 0.9423, 1.2562, 1.6181, 2.0690, 2.7326)
BOOKS = {
    2: (-1.51, -0.45, 0.45, 1.51),
    3: (-2.0, -1.3, -0.7, -0.2, 0.3, 0.8, 1.4, 2.2),
    4: (-2.7, -2.1, -1.6, -1.3, -0.9, -0.7, -0.4, -0.1, 0.1, 0.4, 0.7, 0.9, 1.3, 1.6, 2.1, 2.7),
}


#: optimal levels of N(0, 1)
NORMAL = {
    2: (-1.5104, -0.4528, 0.4528, 1.5104),
    3: (-2.1519, -1.3439, -0.7560, -0.2451, 0.2451, 0.7560, 1.3439, 2.1519),
    4: tuple(-x for x in HALF[::-1]) + HALF,
}


def book(bits: int) -> Codebook:
    return Codebook(bits, table=BOOKS[bits])


#: (key code, value code) by name; "-pairs" is the order of older chips
CODES: dict[str, tuple[Code, Code]] = {
    "bf16": (BFloat16(), BFloat16()),
    "int8": (Symmetric(8), Symmetric(8)),
    "int4": (Symmetric(4), Symmetric(4)),
    "int4-pairs": (Symmetric(4, order="pairs"), Symmetric(4, order="pairs")),
    "int4-low": (Asymmetric(4), Asymmetric(4)),
    "int4-low-pairs": (Asymmetric(4, order="pairs"), Asymmetric(4, order="pairs")),
    "int8-narrow": (Symmetric(8, narrow=True), Symmetric(8)),
    "int4-low-narrow": (Asymmetric(4, narrow=True), Asymmetric(4)),
    "int4-groups": (Asymmetric(4, groups=2), Symmetric(4, groups=2)),
    "fp8-e4m3": (Float8(), Float8()),
    "fp8-e5m2": (Float8(format="float8_e5m2"), Float8(format="float8_e5m2")),
    "kivi2": (KiviKey(2), Asymmetric(2, groups=4)),
    "kivi2-pairs": (KiviKey(2, order="pairs"), Asymmetric(2, groups=4, order="pairs")),
    "kivi4": (KiviKey(4, span=64), Asymmetric(4, groups=2)),
    "turboquant2": (book(2), book(2)),
    "turboquant3": (book(3), book(3)),
    "turboquant4": (book(4), book(4)),
    **{f"smooth{b}": (Smooth(b, table=NORMAL[b]),) * 2 for b in (2, 3, 4)},
    **{f"kvquant{b}": (OutlierKey(b, outliers=2), OutlierValue(b, outliers=2)) for b in (2, 3, 4)},
    "kvquant3-narrow": (
        OutlierKey(3, outliers=2, narrow=True),
        OutlierValue(3, outliers=2, narrow=True),
    ),
    "qjl": (Signs(groups=2, rows=256), Asymmetric(2, groups=4)),
    "mixed": (Symmetric(8), book(3)),
}


#: one of each kind, for the default run; `-m slow` has the others
EACH_KIND = (
    "bf16", "int8", "int4-low-pairs", "fp8-e4m3", "kivi2", "turboquant3", "smooth3", "kvquant3",
    "qjl", "mixed",
)  # fmt: skip


def all_codes(quick: Collection[str] = EACH_KIND, *, skip: str = "?") -> list:
    """Parameters for pytest: every code whose name does not have `skip`."""
    return [
        pytest.param(name, marks=[] if name in quick else pytest.mark.slow)
        for name in CODES
        if skip not in name
    ]


@dataclasses.dataclass
class Plain:
    """Leaves of a code, and the values they stand for, `[..., T, D]` float64."""

    leaves: dict
    values: np.ndarray
    params: dict = dataclasses.field(default_factory=dict)


def random_leaves(code: Code, rng, lead: tuple[int, ...], head_dim: int, *, mean: float) -> Plain:
    """Values of mean about `mean`: keys and values get unlike ones, so that a swap is seen."""
    if code.calibrated:
        return _outlier_leaves(code, rng, lead, head_dim, mean)
    D = code.width(head_dim)
    shape = (*lead, 128, D)
    if isinstance(code, BFloat16 | Float8):
        kind = jnp.bfloat16 if isinstance(code, BFloat16) else jnp.dtype(code.format)
        q = jnp.asarray(rng.normal(size=shape) + mean, jnp.float32).astype(kind)
        scale = _half(rng.uniform(0.5, 1.5, size=(*lead, 1, 128)))
        level = np.asarray(q.astype(jnp.float32), np.float64)
        wide = np.swapaxes(scale, -1, -2) if code.has_scale else 1.0
        return Plain({"q": q, "scale": jnp.asarray(scale)}, level * wide)
    signed = type(code) is Symmetric
    q = rng.integers(-(2 ** (code.bits - 1)) if signed else 0, 2**code.bits // (1 + signed), shape)
    level = _levels(code, q)
    if isinstance(code, KiviKey):
        side, repeat, axis = (*lead, 128 // code.span, D), code.span, -2
    else:
        side, repeat, axis = (*lead, code.groups, 128), D // code.groups, -1
    scale = _half(rng.uniform(0.5, 1.5, size=side) * 2 / np.abs(level).max())
    low = _half(rng.normal(size=side) * 0.3 + mean)

    def spread(x):
        x = x if isinstance(code, KiviKey) else np.swapaxes(x, -1, -2)
        return np.repeat(x.astype(np.float64), repeat, axis=axis)

    values = level * spread(scale) + (spread(low) if _has_low(code) else 0)
    return Plain(
        {"q": jnp.asarray(q), "scale": jnp.asarray(scale), "low": jnp.asarray(low)}, values
    )


def _outlier_leaves(code, rng, lead, H: int, mean: float) -> Plain:
    """Each head has levels of its own, and no two channels or tokens one range."""
    K, n = lead[-1], code.outliers
    levels = np.sort(rng.uniform(-1, 1, size=(K, 2**code.bits)), axis=1).astype(np.float32)
    q = rng.integers(0, 2**code.bits, (*lead, 128, H))
    own = (K, H) if isinstance(code, OutlierKey) else (*lead, 128)
    side = {
        "range": _half(rng.uniform(0.5, 1.5, size=own)),
        "offset": _half(rng.normal(size=own) * 0.3 + mean),
    }
    index = np.argsort(rng.random((*lead, 128, H)), axis=-1)[..., :n]
    outlier = _half(rng.normal(size=index.shape) * 3 + mean)
    axis = -2 if isinstance(code, OutlierKey) else -1
    spread, offset = (np.expand_dims(x.astype(np.float64), axis) for x in side.values())
    values = levels[np.arange(K)[:, None, None], q] * spread + offset
    np.put_along_axis(values, index, outlier.astype(np.float64), axis=-1)
    leaves = {"q": q, "outlier": outlier, "outlier_index": index.astype(np.uint8)}
    leaves |= {name: np.swapaxes(leaves[name], -1, -2) for name in ("outlier", "outlier_index")}
    params = {"levels": levels}
    if isinstance(code, OutlierKey):
        params |= {name: x.astype(np.float32) for name, x in side.items()}
    else:
        leaves |= side
    return Plain(jax.tree.map(jnp.asarray, leaves), values, jax.tree.map(jnp.asarray, params))


def _has_low(code: Code) -> bool:
    return isinstance(code, Asymmetric)


def _levels(code: Code, q: np.ndarray) -> np.ndarray:
    if isinstance(code, Smooth):
        return np.asarray(code.table)[q]
    if isinstance(code, Codebook):
        table = jnp.asarray(code.table, jnp.bfloat16).astype(jnp.float32)
        return np.asarray(table, np.float64)[q]
    return 2.0 * q - 1 if isinstance(code, Signs) else q.astype(np.float64)


def _half(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16)


@dataclasses.dataclass
class Pool:
    """A pool of pages in random places, and its rows' keys and values in order."""

    fmt: PageFormat
    pages: jnp.ndarray
    table: jnp.ndarray
    k: np.ndarray  # B K S D
    v: np.ndarray  # B K S H
    params: tuple[dict, dict] = ({}, {})


def random_pool(name: str, *, K: int, H: int, B: int, M: int, seed: int = 0) -> Pool:
    """Page 0 is zeros; pages that no row points to hold all ones: NaN as bfloat16 and float8."""
    rng = np.random.default_rng(seed)
    k_code, v_code = CODES[name]
    fmt = PageFormat(k_code, v_code, K, H)
    k = random_leaves(k_code, rng, (B * M, K), H, mean=0.0)
    v = random_leaves(v_code, rng, (B * M, K), H, mean=1.0)
    pool = _scattered(fmt, k, v, k.values, v.values, rng, B)
    return dataclasses.replace(pool, params=(k.params, v.params))


def latent_pool(name: str, *, C: int, R: int, B: int, M: int, rope: Code | None = None) -> Pool:
    """The same of latents and rotated keys."""
    rng = np.random.default_rng(0)
    code = CODES[name][0]
    fmt = LatentFormat(code, code, 1, C, rope=BFloat16() if rope is None else rope, rope_dim=R)
    latent = random_leaves(code, rng, (B * M, 1), C, mean=0.3)
    turned = random_leaves(fmt.rope, rng, (B * M, 1), R, mean=0.0)
    keys = np.concatenate([latent.values, turned.values], axis=-1)
    return _scattered(fmt, latent, turned, keys, latent.values, rng, B)


def _scattered(fmt: PageFormat, k: Plain, v: Plain, keys, values, rng, B: int) -> Pool:
    total, K, spare = keys.shape[0], fmt.num_kv_heads, 3
    ids = 1 + rng.permutation(total + spare)[:total]
    pages = jnp.full((1 + total + spare, fmt.rows, 128), -1, jnp.int32).at[0].set(0)
    pages = pages.at[ids].set(fmt.pack(k.leaves, v.leaves))

    def rows(x):
        x = np.moveaxis(x.reshape(B, -1, K, 128, x.shape[-1]), 1, 2)
        return x.reshape(B, K, -1, x.shape[-1])

    table = jnp.asarray(ids.reshape(B, -1), jnp.int32)
    return Pool(fmt, pages, table, rows(keys), rows(values))


def param_shapes(fmt: PageFormat) -> tuple[dict, dict]:
    """Of a format's calibrated arrays."""

    def shapes(code):
        each = code.param_shapes(fmt.num_kv_heads, fmt.head_dim)
        return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in each.items()}

    return shapes(fmt.k), shapes(fmt.v)


def dense(q, k, v, seen, *, scale: float, softcap: float | None = None):
    """Output and log-sum-exp of plain attention in float64; seen `[B, Q, S]`."""
    q = np.asarray(q.astype(jnp.float32), np.float64)
    s = np.einsum("bkqd,bksd->bkqs", q, k) * scale
    s = s if softcap is None else softcap * np.tanh(s / softcap)
    s = np.where(seen[:, None], s, -np.inf)
    top = np.max(s, axis=-1, keepdims=True)
    p = np.where(np.isfinite(s), np.exp(s - np.where(np.isfinite(top), top, 0)), 0)
    mass = p.sum(-1)
    out = np.einsum("bkqs,bksh->bkqh", p, v) / np.where(mass == 0, 1, mass)[..., None]
    with np.errstate(divide="ignore"):
        return out, top[..., 0] + np.log(mass)
