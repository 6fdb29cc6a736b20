"""Transform coding: along calibrated principal axes, bits where the variance is.

Per layer and KV head, entries are centred and rotated to the principal axes of calibration samples
(KVTC, https://arxiv.org/abs/2511.01815, without its entropy coder). Axis j,
the j-th largest, gets allocation[j] bits: Lloyd-Max levels scaled by the axis's spread. There is no
scale per token, so codes are all that is stored; axes with 0 bits read as their mean.

Bytes per token and head: sum(allocation)/8, that is H*bits/8; 2 more with token_scale.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.codecs import codebook, packing
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

MAX_BITS = 6


def allocate(variances: np.ndarray, bits: int | float) -> tuple[int, ...]:
    """0 to 6 bits an axis, `bits` on average: each next bit goes where it removes most error.

    variances: `[..., H]` descending; the leading axes (heads, layers) share one allocation, so
    shapes are the same for all, and the mean over them decides.
    """
    variances = np.asarray(variances, np.float64).reshape(-1, np.shape(variances)[-1]).mean(0)
    error = np.array([1.0] + [codebook.distortion(b) for b in range(1, MAX_BITS + 1)])
    gain = np.append(error[:-1] - error[1:], 0.0)  # nothing beyond MAX_BITS
    counts = np.zeros(len(variances), int)
    for _ in range(round(min(bits, MAX_BITS) * len(variances))):
        counts[np.argmax(np.where(counts < MAX_BITS, variances * gain[counts], -1.0))] += 1
    return tuple(sorted(map(int, counts), reverse=True))


def need_allocation(codec: str, bits: float, allocation: tuple[int, ...] | None, most: int) -> None:
    """Raises ValueError on a budget or on bits of axes that transform coding cannot spend."""
    given = allocation or ()
    if not 0 < bits <= most:
        raise ValueError(f"{codec}: bits: expected 0 to {most}, got {bits}.")
    if list(given) != sorted(given, reverse=True) or not all(0 <= b <= most for b in given):
        raise ValueError(
            f"{codec}: allocation: expected 0 to {most} bits, not increasing, got {given}."
        )


def need_every_axis(codec: str, allocation: tuple[int, ...] | None, head_dim: int) -> None:
    """Raises ValueError unless an allocation that is given has an entry for each axis."""
    if allocation and len(allocation) != head_dim:
        raise ValueError(
            f"{codec}: allocation: expected one entry for each of head_dim={head_dim} axes, "
            f"got {len(allocation)}."
        )


@dataclasses.dataclass(frozen=True)
class Pca(Codec):
    """Values, or keys after RoPE; decodes along the principal axes.

    bits: the average budget. allocation: non-increasing bits of each axis, from `allocate`; None
    takes one for variances that fall as exp(-decay j / H). token_scale: one fp16 scale a token.
    params, calibrated: basis `[K, H, H]` (axes are columns), offset and spread `[K, H]`: mean and
    standard deviation along each axis.
    """

    name: ClassVar[str] = "pca"
    #: of values, measured on SmolLM2-135M: within 1 % of the error of an allocation of its own
    decay: ClassVar[float] = 2.0
    bits: int | float = 2
    allocation: tuple[int, ...] | None = None
    token_scale: bool = False

    def __post_init__(self):
        need_allocation(self.name, self.bits, self.allocation, MAX_BITS)

    def check(self, *, head_dim: int, page_size: int, role: str) -> None:
        need_every_axis(self.name, self.allocation, head_dim)
        for bits, _ in self._runs(head_dim):
            packing.check(bits, page_size)

    def encode(self, x: Float[Array, "*lead T H"], params: Params) -> Codes:
        z = times_head(x.astype(jnp.float32), params["basis"])
        u = divide(z - per_head(params["offset"], z), per_head(params["spread"], z))
        codes, start = {}, 0
        runs = self._runs(x.shape[-1])
        if self.token_scale:
            coded = u[..., : sum(n for _, n in runs)]
            codes["scale"] = as_scale(jnp.sqrt(jnp.mean(coded**2, axis=-1)))
            u = divide(u, codes["scale"][..., None])
        for bits, n in runs:
            bounds = codebook.midpoints(codebook.lloyd_max(bits))
            index = codebook.nearest(u[..., start : start + n], bounds)
            codes[f"words{bits}"] = packing.pack(index, bits)
            start += n
        return codes

    def decode(self, codes: Codes, params: Params, dtype: Any) -> Float[Array, "*lead T H"]:
        return self._along_axes(codes, params).astype(dtype)

    def prepare_query(self, q: Float[Array, "*lead H"], params: Params) -> Float[Array, "*lead H"]:
        return times_head(q, params["basis"])

    def finish_output(self, o: Float[Array, "*lead H"], params: Params) -> Float[Array, "*lead H"]:
        return times_head(o, jnp.swapaxes(params["basis"], -1, -2))

    def param_shapes(self, *, num_kv_heads: int, head_dim: int) -> Shapes:
        K, H = num_kv_heads, head_dim
        widths = {"basis": (K, H, H), "offset": (K, H), "spread": (K, H)}
        return {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in widths.items()}

    def init_params(self, *, num_kv_heads: int, head_dim: int) -> Params:
        raise need_calibration(self)

    def calibrate(self, samples: np.ndarray, weights: np.ndarray | None = None) -> Params:
        """Principal axes of each head, largest variance first. `spread**2` is for `allocate`."""
        self.refuse_weights(weights)
        x = np.asarray(samples, np.float64)
        mean = x.mean(1, keepdims=True)
        variance, basis = np.linalg.eigh(np.swapaxes(x - mean, 1, 2) @ (x - mean) / x.shape[1])
        variance, basis = variance[:, ::-1], basis[:, :, ::-1]
        spread = np.sqrt(np.maximum(variance, 0))
        params = {"basis": basis, "offset": (mean @ basis)[:, 0], "spread": spread}
        return {k: jnp.asarray(v, jnp.float32) for k, v in params.items()}

    def _runs(self, head_dim: int) -> list[tuple[int, int]]:
        """(bits, number of axes) of each run of equal bits; axes without bits left out."""
        spectrum = np.exp(-self.decay * np.arange(head_dim) / head_dim)
        bits = self.allocation or allocate(spectrum, self.bits)
        return [(b, len(list(run))) for b, run in itertools.groupby(bits) if b]

    def _along_axes(self, codes: Codes, params: Params) -> Float[Array, "*lead T H"]:
        H = params["offset"].shape[-1]
        pieces = []
        for bits, _ in self._runs(H):
            index = packing.unpack(codes[f"words{bits}"], bits)
            pieces.append(codebook.lookup(index, codebook.lloyd_max(bits)))
        u = jnp.concatenate(pieces, axis=-1)
        if self.token_scale:
            u = u * codes["scale"].astype(jnp.float32)[..., None]
        u = jnp.pad(u, [(0, 0)] * (u.ndim - 1) + [(0, H - u.shape[-1])])
        return u * per_head(params["spread"], u) + per_head(params["offset"], u)


@dataclasses.dataclass(frozen=True)
class PcaPreRope(Pca):
    """Keys before RoPE, where their spectrum falls fastest. RoPE turns each key by its position, so
    no one query fits all: keys are taken back to the head's space as they are read."""

    pre_rope: ClassVar[bool] = True
    decay: ClassVar[float] = 4.5

    def check(self, *, head_dim: int, page_size: int, role: str) -> None:
        need_role(role, "k", "PcaPreRope", "Pca")
        super().check(head_dim=head_dim, page_size=page_size, role=role)

    def decode(self, codes: Codes, params: Params, dtype: Any) -> Float[Array, "*lead T H"]:
        z = self._along_axes(codes, params)
        return times_head(z, jnp.swapaxes(params["basis"], -1, -2)).astype(dtype)

    def prepare_query(self, q: Float[Array, "*lead H"], params: Params) -> Float[Array, "*lead H"]:
        return q

    def finish_output(self, o: Float[Array, "*lead H"], params: Params) -> Float[Array, "*lead H"]:
        return o
