"""KVQuant: calibrated non-uniform levels, with the largest 1 % of each token kept exactly.

https://arxiv.org/abs/2401.18079, sections 3.1 to 3.4. Keys are stored before RoPE, normalised per
channel by calibrated offset and range; values per token by their own. One codebook for a layer's
keys and one for its values come from k-means weighted by the Fisher information. The outliers are
the ceil(0.01*H) largest deviations of each token, by rank, so that their number is static (the
paper's threshold gives a ragged 1 %); float16 holds a bfloat16 entry exactly.

Bytes per token and head, n = ceil(0.01*H): keys H*bits/8 + 3*n, values 4 more (offset and range);
an index takes 1 byte up to H = 256, 2 beyond.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvjax.codecs import codebook, kmeans, packing
from kvjax.codecs.base import (
    Codec,
    Codes,
    Params,
    Shapes,
    as_scale,
    divide,
    need_bits,
    need_calibration,
    need_role,
    per_head,
)


@dataclasses.dataclass(frozen=True)
class _KVQuant(Codec):
    """outliers: the share of a token's channels kept exactly. q_norm: levels are shifted and
    stretched so that what is read has the mean and spread of what was written (its Q-Norm)."""

    name: ClassVar[str] = "kvquant"
    uses_weights: ClassVar[bool] = True
    bits: int = 4
    outliers: float = 0.01
    q_norm: bool = False

    def __post_init__(self):
        need_bits(self.bits, 1, 5, self.name)
        if not 0 <= self.outliers <= 1:
            raise ValueError(f"kvquant: outliers: expected 0 to 1, got {self.outliers}.")

    def num_outliers(self, head_dim: int) -> int:
        return math.ceil(self.outliers * head_dim)

    def init_params(self, *, num_kv_heads: int, head_dim: int) -> Params:
        raise need_calibration(self)

    def param_shapes(self, *, num_kv_heads: int, head_dim: int) -> Shapes:
        n = 2**self.bits
        return _shapes(num_kv_heads, levels=n, bounds=n - 1)

    def encode(self, x: Float[Array, "*lead T H"], params: Params) -> Codes:
        return packing.pack_leaves(self.quantise(x, params), self.bits)

    def _codes(self, u: Float[Array, "*lead T H"], params: Params) -> Codes:
        bounds = [per_head(b, u) for b in _columns(params["bounds"])]
        return {"words": codebook.nearest(u, bounds)}

    def _levels(self, codes: Codes, params: Params) -> Float[Array, "*lead T H"]:
        q = packing.unpack(codes["words"], self.bits)
        return codebook.lookup(q, [per_head(c, q) for c in _columns(params["levels"])])

    def _codebook(self, u: np.ndarray, weights: np.ndarray, num_kv_heads: int) -> Params:
        """Levels, and the bounds between them, of normalised inliers; the same for every head."""
        levels, _ = kmeans.weighted_kmeans(u, weights, 2**self.bits)
        bounds = (levels[1:] + levels[:-1]) / 2
        if self.q_norm:
            read = levels[np.searchsorted(bounds, u)]
            levels = (levels - read.mean()) * (u.std() / max(read.std(), 1e-9)) + u.mean()
        tile = {"levels": levels, "bounds": bounds}
        return {k: jnp.asarray(np.tile(v, (num_kv_heads, 1)), jnp.float32) for k, v in tile.items()}


@dataclasses.dataclass(frozen=True)
class KVQuantKey(_KVQuant):
    """params, calibrated: offset and range `[K, H]`, levels `[K, 2^bits]`, bounds between them."""

    pre_rope: ClassVar[bool] = True

    def check(self, *, head_dim: int, page_size: int, role: str) -> None:
        need_role(role, "k", "KVQuantKey", "KVQuantValue")
        packing.check(self.bits, page_size)

    def quantise(self, x: Float[Array, "*lead T H"], params: Params) -> Codes:
        x = x.astype(jnp.float32)
        u = divide(x - per_head(params["offset"], x), per_head(params["range"], x))
        index = _largest(jnp.abs(u), self.num_outliers(x.shape[-1]))
        return self._codes(u, params) | _take_outliers(x, index)

    def decode(self, codes: Codes, params: Params, dtype: Any) -> Float[Array, "*lead T H"]:
        u = self._levels(codes, params)
        x = u * per_head(params["range"], u) + per_head(params["offset"], u)
        return _put_outliers(x, codes).astype(dtype)

    def param_shapes(self, *, num_kv_heads: int, head_dim: int) -> Shapes:
        own = _shapes(num_kv_heads, offset=head_dim, range=head_dim)
        return own | super().param_shapes(num_kv_heads=num_kv_heads, head_dim=head_dim)

    def calibrate(self, samples: np.ndarray, weights: np.ndarray | None = None) -> Params:
        """From keys before RoPE, sink tokens left out. Outliers: beyond percentiles 0.5 and 99.5
        of their channel, for the default share."""
        samples = np.asarray(samples, np.float32)
        weights = np.ones_like(samples) if weights is None else weights
        tail = 50 * self.outliers
        low, high = np.percentile(samples, [tail, 100 - tail], axis=1)
        offset, spread = (high + low) / 2, np.maximum((high - low) / 2, 1e-6)
        u = (samples - offset[:, None]) / spread[:, None]
        keep = np.abs(u) <= 1
        own = {
            "offset": jnp.asarray(offset, jnp.float32),
            "range": jnp.asarray(spread, jnp.float32),
        }
        return own | self._codebook(u[keep], weights[keep], samples.shape[0])


@dataclasses.dataclass(frozen=True)
class KVQuantValue(_KVQuant):
    """params, calibrated: levels `[K, 2^bits]` and the bounds between them."""

    def check(self, *, head_dim: int, page_size: int, role: str) -> None:
        need_role(role, "v", "KVQuantValue", "KVQuantKey")
        packing.check(self.bits, page_size)

    def quantise(self, x: Float[Array, "*lead T H"], params: Params) -> Codes:
        x = x.astype(jnp.float32)
        index, offset, spread = self._normaliser(x)
        offset, spread = as_scale(offset), as_scale(spread)
        u = divide(x - offset.astype(jnp.float32), spread)
        side = {"offset": offset[..., 0], "range": spread[..., 0]}
        return self._codes(u, params) | side | _take_outliers(x, index)

    def decode(self, codes: Codes, params: Params, dtype: Any) -> Float[Array, "*lead T H"]:
        spread, offset = (codes[k].astype(jnp.float32)[..., None] for k in ("range", "offset"))
        return _put_outliers(self._levels(codes, params) * spread + offset, codes).astype(dtype)

    def calibrate(self, samples: np.ndarray, weights: np.ndarray | None = None) -> Params:
        """From values, sink tokens left out."""
        x = jnp.asarray(samples, jnp.float32)
        weights = np.ones(x.shape, np.float32) if weights is None else weights
        index, offset, spread = self._normaliser(x)
        keep = ~np.asarray(_mask(index, x.shape[-1]))
        u = np.asarray(divide(x - offset, spread))
        return self._codebook(u[keep], weights[keep], x.shape[0])

    def _normaliser(self, x: Float[Array, "*lead T H"]):
        """Outliers' channels, and offset and range of the rest."""
        median = jnp.median(x, axis=-1, keepdims=True)
        index = _largest(jnp.abs(x - median), self.num_outliers(x.shape[-1]))
        inliers = jnp.where(_mask(index, x.shape[-1]), median, x)
        low = jnp.min(inliers, axis=-1, keepdims=True)
        high = jnp.max(inliers, axis=-1, keepdims=True)
        return index, (high + low) / 2, (high - low) / 2


def _largest(deviation: Float[Array, "*lead T H"], n: int) -> Int[Array, "*lead T n"]:
    """By rank, not by a threshold: ties would make the number of outliers ragged."""
    return lax.top_k(deviation, n)[1]


def _mask(index: Int[Array, "*lead T n"], head_dim: int) -> Bool[Array, "*lead T H"]:
    channel = lax.broadcasted_iota(jnp.int32, (1,) * (index.ndim) + (head_dim,), index.ndim)
    return jnp.any(index[..., None] == channel, axis=-2)


def _take_outliers(x: Float[Array, "*lead T H"], index: Int[Array, "*lead T n"]) -> Codes:
    values = as_scale(jnp.take_along_axis(x, index, axis=-1))
    index = index.astype(jnp.uint8 if x.shape[-1] <= 256 else jnp.uint16)
    return {
        "outlier": jnp.swapaxes(values, -1, -2),
        "outlier_index": jnp.swapaxes(index, -1, -2),
    }


def _put_outliers(x: Float[Array, "*lead T H"], codes: Codes) -> Float[Array, "*lead T H"]:
    """One select per outlier of a token: one to three, no scatter."""
    channel = lax.broadcasted_iota(jnp.int32, (1,) * (x.ndim - 1) + x.shape[-1:], x.ndim - 1)
    for i in range(codes["outlier"].shape[-2]):
        index = codes["outlier_index"][..., i, :, None].astype(jnp.int32)
        value = codes["outlier"][..., i, :, None].astype(jnp.float32)
        x = jnp.where(channel == index, value, x)
    return x


def _columns(p: Float[Array, "K n"]) -> list[Float[Array, "K 1"]]:
    return [p[:, i : i + 1] for i in range(p.shape[1])]


def _shapes(num_kv_heads: int, **widths: int) -> Shapes:
    return {k: jax.ShapeDtypeStruct((num_kv_heads, n), jnp.float32) for k, n in widths.items()}
