"""Transform coding in the metric of the loss: axes, bits and outliers chosen by what they cost.

Per layer and KV head, a calibration gives the covariance C of the entries and M = E[g g^T], the
second moment of the loss's gradient by an entry; an error e costs e M e / 2 nats. With z = x
M^(1/2) U, U the principal axes of M^(1/2) C M^(1/2), every axis counts alike and they are
uncorrelated: bits go where z varies most (the Karhunen-Loeve transform under a weighted error). An
axis of b bits is quantised by a trellis along the page's tokens (`trellis.py`).

A fixed range cuts rare entries, and those are the costly ones (on SmolLM2's keys one token in a
thousand makes four fifths of the KL). So of each page and head the `outliers` tokens with the
largest error in z also store that error, as int8; and with `token_scale` each token has a scale.

Bytes per page and head: T*sum(allocation)/8, that is T*H*bits/8; outliers*(H + 3); and T with
token_scale.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt32

from kvjax.codecs import codebook, packing, trellis
from kvjax.codecs.base import (
    Codec,
    Codes,
    Params,
    Shapes,
    as_scale,
    divide,
    need_calibration,
    need_role,
    per_head,
    times_head,
)
from kvjax.codecs.pca import need_allocation, need_every_axis

MAX_BITS = 8
_SCALED = 0.6  # what a scale per token leaves of the cost of values (SmolLM2, 3 bits)
_STEPS = 16  # of a token's scale in a factor of two; a byte spans 2^-8 to 2^8


def allocate(variances: np.ndarray, bits: int | float, trellised: bool = True) -> tuple[int, ...]:
    """0 to 8 bits for each of H axes, `bits` on average: each next bit where it removes most error.

    variances: `[H]`, descending.
    """
    error = np.array([1.0] + [_distortion(b, trellised) for b in range(1, MAX_BITS + 1)])
    saved = np.append(error[:-1] - error[1:], 0.0)  # nothing beyond MAX_BITS
    counts = np.zeros(len(variances), int)
    for _ in range(round(bits * len(variances))):
        counts[np.argmax(np.where(counts < MAX_BITS, variances * saved[counts], -1.0))] += 1
    return tuple(sorted(map(int, counts), reverse=True))


def _distortion(bits: int, trellised: bool) -> float:
    share = trellis.RELATIVE_ERROR[bits] if trellised and bits <= trellis.MAX_BITS else 1.0
    return codebook.distortion(bits) * share


@dataclasses.dataclass(frozen=True)
class Klt(Codec):
    """Values, or keys after RoPE; decodes along the axes z.

    bits: the average budget. decay: axis j is taken to vary as (1 + j)^-decay when bits are
    allocated. allocation: non-increasing bits of each axis instead (`allocate`). trellis: False
    for Lloyd-Max levels, number by number, as more than 6 bits always have.
    params, calibrated: analysis and synthesis `[K, H, H]` (z = x @ analysis, x = z @ synthesis),
    offset, spread and gain `[K, H]` along the axes: what is read is offset + spread gain level.
    """

    name: ClassVar[str] = "klt"
    uses_metric: ClassVar[bool] = True
    bits: int | float = 4
    decay: float = 1.2
    allocation: tuple[int, ...] | None = None
    outliers: int = 0
    token_scale: bool = True
    trellis: bool = True

    def __post_init__(self):
        need_allocation(self.name, self.bits, self.allocation, MAX_BITS)
        if self.outliers < 0:
            raise ValueError(f"klt: outliers: expected 0 or more a page, got {self.outliers}.")

    def check(self, *, head_dim: int, page_size: int, role: str) -> None:
        need_every_axis(self.name, self.allocation, head_dim)
        if self.outliers > page_size or (self.outliers and page_size > 256):
            raise ValueError(
                f"klt: outliers: {self.outliers} of a page need page_size at most 256 and at least "
                f"as many tokens, got {page_size}."
            )
        for bits, _ in self._runs(head_dim):
            packing.check(bits, page_size)

    def encode(self, x: Float[Array, "*lead T H"], params: Params) -> Codes:
        z = times_head(x.astype(jnp.float32), params["analysis"])
        u = divide(z - per_head(params["offset"], z), per_head(params["spread"], z))
        codes, start = {}, 0
        if self.token_scale:
            coded = u[..., : sum(n for _, n in self._runs(x.shape[-1]))]
            power = jnp.log2(jnp.maximum(jnp.mean(coded**2, axis=-1), 1e-12)) / 2
            step = jnp.clip(jnp.round(power * _STEPS) + 128, 0, 255)
            codes["scale_log"] = step.astype(jnp.uint8)
            u = u / _token_scale(codes)
        index = self._indices(u)
        for bits, n in self._runs(x.shape[-1]):
            codes[f"words{bits}"] = packing.pack(index[..., start : start + n], bits)
            start += n
        return codes | self._take_outliers(z, codes, params) if self.outliers else codes

    def decode(self, codes: Codes, params: Params, dtype: Any) -> Float[Array, "*lead T H"]:
        return self._along_axes(codes, params).astype(dtype)

    def prepare_query(self, q: Float[Array, "*lead H"], params: Params) -> Float[Array, "*lead H"]:
        return times_head(q, jnp.swapaxes(params["synthesis"], -1, -2))

    def finish_output(self, o: Float[Array, "*lead H"], params: Params) -> Float[Array, "*lead H"]:
        return times_head(o, params["synthesis"])

    def param_shapes(self, *, num_kv_heads: int, head_dim: int) -> Shapes:
        K, H = num_kv_heads, head_dim
        widths: dict[str, tuple[int, ...]] = {"analysis": (K, H, H), "synthesis": (K, H, H)}
        widths |= {"offset": (K, H), "spread": (K, H), "gain": (K, H)}
        return {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in widths.items()}

    def init_params(self, *, num_kv_heads: int, head_dim: int) -> Params:
        raise need_calibration(self)

    def calibrate(
        self,
        samples: np.ndarray,
        weights: np.ndarray | None = None,
        metric: np.ndarray | None = None,
    ) -> Params:
        """From samples without sink tokens, and the metric `[K, H, H]`, E[g g^T] of the same
        entries' gradients; without it all errors count alike."""
        self.refuse_weights(weights)
        x = np.asarray(samples, np.float64)
        mean = x.mean(1, keepdims=True)
        analysis, synthesis, _ = axes(x, metric)
        z = (x - mean) @ analysis
        spread = np.sqrt(np.mean(z**2, axis=1))
        reach, gain = self._ranges(z, spread)
        params = {
            "analysis": analysis,
            "synthesis": synthesis,
            "offset": (mean @ analysis)[:, 0],
            "spread": spread * reach,
            "gain": gain,
        }
        return {k: jnp.asarray(v, jnp.float32) for k, v in params.items()}

    def _ranges(self, z: np.ndarray, spread: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Per axis: how much wider than the standard deviation its levels reach for the least
        error, as real entries have heavier tails than N(0, 1), and the gain that makes what is read
        unbiased: levels are means of their cells, so they shrink by the share of the error, the
        same way in every token; attention sums over tokens, which averages noise away but not
        that. Both from Lloyd-Max levels, the trellis's error being a known share of theirs."""
        bits = [b for b, n in self._runs(z.shape[-1]) for _ in range(n)]
        u = z / np.maximum(spread, 1e-30)[:, None]
        scale = np.ones((*u.shape[:2], 1))
        if self.token_scale and bits:
            power = np.mean(u[..., : len(bits)] ** 2, axis=-1, keepdims=True)
            scale = np.sqrt(np.maximum(power, 1e-12))
        reach, gain = np.ones(spread.shape), np.ones(spread.shape)
        for j, b in enumerate(bits):
            levels = np.array(codebook.lloyd_max(b))
            bounds = (levels[1:] + levels[:-1]) / 2
            best = np.full(len(z), np.inf)
            for c in np.arange(0.8, 2.01, 0.1):
                read = levels[np.searchsorted(bounds, u[..., j] / (c * scale[..., 0]))]
                read = read * c * scale[..., 0]
                error = np.mean((read - u[..., j]) ** 2, axis=1)
                lost = 1 - np.mean(read * u[..., j], axis=1) / np.mean(
                    u[..., j] ** 2 + 1e-30, axis=1
                )
                better = error < best
                best = np.where(better, error, best)
                reach[:, j] = np.where(better, c, reach[:, j])
                share = trellis.RELATIVE_ERROR[b] if self._trellised(b) else 1
                lost = np.clip(lost * share, 0, 0.4)
                gain[:, j] = np.where(better, 1 / (1 - lost), gain[:, j])
        return reach, gain

    def _indices(self, u: Float[Array, "*lead T H"]) -> UInt32[Array, "*lead T A"]:
        """The codes of all axes that have bits: those of most bits first, which have no trellis."""
        parts, start, rest = [], 0, []
        for bits, n in self._runs(u.shape[-1]):
            if self._trellised(bits):
                rest.append((bits, n))
            else:
                parts.append(_nearest(u[..., start : start + n], bits))
                start += n
        if rest:
            total = start + sum(n for _, n in rest)
            parts.append(trellis.encode(u[..., start:total], rest))
        return jnp.concatenate(parts, axis=-1)

    def _trellised(self, bits: int) -> bool:
        return self.trellis and bits <= trellis.MAX_BITS

    def _runs(self, head_dim: int) -> list[tuple[int, int]]:
        """(bits, number of axes) of each run of equal bits; axes without bits left out."""
        spectrum = (1.0 + np.arange(head_dim)) ** -self.decay
        bits = self.allocation or allocate(spectrum, self.bits, self.trellis)
        return [(b, len(list(run))) for b, run in itertools.groupby(bits) if b]

    def _along_axes(self, codes: Codes, params: Params) -> Float[Array, "*lead T H"]:
        z = self._from_words(codes, params)
        for i in range(self.outliers):
            token = lax.broadcasted_iota(
                jnp.int32, (1,) * (z.ndim - 2) + (z.shape[-2], 1), z.ndim - 2
            )
            at = codes["outlier_index"][..., i, None, None].astype(jnp.int32)
            error = codes["outlier"][..., i, :].astype(jnp.float32)
            error *= codes["outlier_scale"][..., i, None].astype(jnp.float32)
            z += jnp.where(token == at, error[..., None, :], 0)
        return z

    def _from_words(self, codes: Codes, params: Params) -> Float[Array, "*lead T H"]:
        H = params["offset"].shape[-1]
        pieces = []
        for bits, _ in self._runs(H):
            read = trellis.decode if self._trellised(bits) else _lookup
            pieces.append(read(codes[f"words{bits}"], bits))
        u = jnp.concatenate(pieces, axis=-1)
        if self.token_scale:
            u = u * _token_scale(codes)
        u = jnp.pad(u, [(0, 0)] * (u.ndim - 1) + [(0, H - u.shape[-1])])
        width = per_head(params["spread"] * params["gain"], u)
        return u * width + per_head(params["offset"], u)

    def _take_outliers(self, z: Float[Array, "*lead T H"], codes: Codes, params: Params) -> Codes:
        error = z - self._from_words(codes, params)
        index = lax.top_k(jnp.sum(error**2, axis=-1), self.outliers)[1]
        error = jnp.take_along_axis(error, index[..., None], axis=-2)  # ... n H
        scale = as_scale(jnp.max(jnp.abs(error), axis=-1) / 127)
        q = jnp.clip(jnp.round(divide(error, scale[..., None])), -127, 127)
        return {
            "outlier": q.astype(jnp.int8),
            "outlier_scale": scale,
            "outlier_index": index.astype(jnp.uint8),
        }


@dataclasses.dataclass(frozen=True)
class KltKey(Klt):
    """Keys before RoPE, where their spectrum falls fastest. RoPE turns each key by its position, so
    no one query fits all: keys are taken back to the head's space as they are read."""

    pre_rope: ClassVar[bool] = True
    decay: float = 2.0
    outliers: int = 1
    token_scale: bool = False

    def check(self, *, head_dim: int, page_size: int, role: str) -> None:
        need_role(role, "k", "KltKey", "Klt")
        super().check(head_dim=head_dim, page_size=page_size, role=role)

    def decode(self, codes: Codes, params: Params, dtype: Any) -> Float[Array, "*lead T H"]:
        return times_head(self._along_axes(codes, params), params["synthesis"]).astype(dtype)

    def prepare_query(self, q: Float[Array, "*lead H"], params: Params) -> Float[Array, "*lead H"]:
        return q

    def finish_output(self, o: Float[Array, "*lead H"], params: Params) -> Float[Array, "*lead H"]:
        return o


def axes(
    samples: np.ndarray, metric: np.ndarray | None = None, *, floor: float = 0.1
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(analysis, synthesis, variances) `[K, H, H]`, `[K, H, H]`, `[K, H]` descending.

    floor: this share of the metric's mean is added to its diagonal, as a few thousand gradients
    do not tell which directions are free. Variances are in the metric's unit, so they compare
    across heads, layers, keys and values: `plan` spends bits by them.
    """
    x = np.asarray(samples, np.float64)
    K, _, H = x.shape
    x = x - x.mean(1, keepdims=True)
    metric = np.eye(H)[None].repeat(K, 0) if metric is None else np.asarray(metric, np.float64)
    unit = np.maximum(np.trace(metric, axis1=1, axis2=2) / H, 1e-30)[:, None, None]
    weight, turn = np.linalg.eigh(metric / unit)
    weight = np.sqrt(np.maximum(weight, 0) + floor)[:, None, :]
    root, inverse = ((turn * w) @ np.swapaxes(turn, 1, 2) for w in (weight, 1 / weight))
    variance, u = np.linalg.eigh(root @ (np.swapaxes(x, 1, 2) @ x / x.shape[1]) @ root)
    variance, u = np.maximum(variance[:, ::-1], 0), u[:, :, ::-1]
    return root @ u, np.swapaxes(u, 1, 2) @ inverse, variance * unit[:, :, 0]


def plan(
    keys: np.ndarray,
    values: np.ndarray,
    bits: float,
    *,
    low: int = 1,
    high: int = 6,
    paired: bool = False,
) -> list[tuple[int, int]]:
    """(bits of keys, bits of values) of each layer, `bits` on average, for the least cost.

    keys, values: `[L, K, H]`, the variances of `axes` of each layer, all under the loss's metric.
    Outliers and scales come on top: 0.095 bits a number at head dim 64, pages of 128. paired: keys
    and values of a layer get the same bits; layers then form fewer groups, each of which is
    compiled apart.
    """
    spectra = (np.asarray(keys), np.asarray(values))
    H = spectra[0].shape[-1]
    error = np.array([1.0] + [_distortion(b, True) for b in range(1, MAX_BITS + 1)])
    error = np.append(1.5, error[1:] / (1 - error[1:]))  # unbiased; a lost axis is biased
    cost = np.zeros((2, high + 1, len(spectra[0])))
    for role, (codec, spectrum) in enumerate(zip((KltKey, Klt), spectra, strict=True)):
        for b in range(low, high + 1):
            runs = codec(bits=b)._runs(H)
            each = [own for own, n in runs for _ in range(n)]
            each += [0] * (H - len(each))
            cost[role, b] = np.einsum("lkh,h->l", spectrum, error[each])
            if codec().token_scale:
                cost[role, b] *= _SCALED
    if paired:
        cost = cost.sum(axis=0, keepdims=True)
    chosen = np.full((len(cost), len(spectra[0])), low)
    roles, layers = np.indices(chosen.shape)
    for _ in range(int((bits - low) * chosen.size + 1e-6)):
        above = np.minimum(chosen + 1, high)
        saved = cost[roles, chosen, layers] - cost[roles, above, layers]
        best = np.unravel_index(np.argmax(np.where(chosen < high, saved, -1)), chosen.shape)
        chosen[best] += 1
    return [(int(each[0]), int(each[-1])) for each in chosen.T]


def layers_option(plan: list[tuple[int, int]]) -> str:
    """A plan as `CacheConfig.layers` has it: `0-1:klt1+klt2,2:klt3+klt3`."""
    parts, first = [], 0
    for bits, run in itertools.groupby(plan):
        last = first + len(list(run)) - 1
        span = f"{first}-{last}" if last > first else f"{first}"
        parts.append(f"{span}:klt{bits[0]}+klt{bits[1]}")
        first = last + 1
    return ",".join(parts)


def _nearest(u: Float[Array, "*lead T A"], bits: int) -> Array:
    return codebook.nearest(u, codebook.midpoints(codebook.lloyd_max(bits)))


def _lookup(words: UInt32[Array, "*lead W A"], bits: int) -> Float[Array, "*lead T A"]:
    return codebook.lookup(packing.unpack(words, bits), codebook.lloyd_max(bits))


def _token_scale(codes: Codes) -> Float[Array, "*lead T 1"]:
    step = codes["scale_log"].astype(jnp.int32).astype(jnp.float32)
    return jnp.exp2((step - 128) / _STEPS)[..., None]
