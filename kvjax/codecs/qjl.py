"""QJL: a key is the signs of a random projection and a norm.

https://arxiv.org/abs/2406.03482, section 3. The query is projected once per step and never
quantised: score = |k_in| <S q_in, z_in> + |k_out| <S q_out, z_out>, each with its constant. Outlier
channels (a fixed set per KV head, found from calibration or the prompt) have a sketch and a norm of
their own; the reference code picks them per 32 tokens, which would tie the query's sketch to the
page. Values are KIVI's (`KiviValue`).

Bytes per token and head (keys): m/8 + m_out/8 + 4, with m = m_out = 2H by default.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.codecs import packing
from kvjax.codecs.base import Codec, Codes, Params, Shapes, as_scale, need_role, per_head
from kvjax.codecs.sketch import project, projection, sign_bits, sign_values, sketch_constant


@dataclasses.dataclass(frozen=True)
class QjlKey(Codec):
    """rows, outlier_rows: m and m_out, None for 2H. num_outliers 0: one sketch of m rows.

    params: `outlier [K, H]`, 1 on outlier channels and 0 elsewhere; by default the first ones.
    """

    name: ClassVar[str] = "qjl"
    rows: int | None = None
    outlier_rows: int | None = None
    num_outliers: int = 8
    sketch: str = "orthogonal"
    seed: int = 0
    scale_dtype: str = "float16"

    def __post_init__(self):
        projection(self.sketch, 8, 8, self.seed)

    def check(self, *, head_dim: int, page_size: int, role: str) -> None:
        need_role(role, "k", "qjl (a sketch only gives scores)", "kivi2 for values")
        if not 0 <= self.num_outliers < head_dim:
            raise ValueError(
                f"qjl: num_outliers: expected fewer than head_dim={head_dim}, "
                f"got {self.num_outliers}."
            )
        packing.check(1, page_size)

    def encode(self, x: Float[Array, "*lead T H"], params: Params) -> Codes:
        return packing.pack_leaves(self.quantise(x, params), 1)

    def quantise(self, x: Float[Array, "*lead T H"], params: Params) -> Codes:
        codes = {}
        for tag, piece, rows in self._split(x.astype(jnp.float32), params):
            signs = sign_bits(project(self._matrix(x.shape[-1], rows), piece))
            rms = jnp.sqrt(jnp.mean(piece**2, axis=-1))
            codes[f"words{tag}"] = signs
            codes[f"norm{tag}"] = as_scale(rms, self.scale_dtype)
        return codes

    def decode(self, codes: Codes, params: Params, dtype: Any) -> Float[Array, "*lead T M"]:
        pieces = []
        for tag in ("", "_outlier")[: 1 + (self.num_outliers > 0)]:
            norm = codes[f"norm{tag}"].astype(jnp.float32)[..., None]
            pieces.append(sign_values(packing.unpack(codes[f"words{tag}"], 1)) * norm)
        return jnp.concatenate(pieces, axis=-1).astype(dtype)

    def prepare_query(self, q: Float[Array, "*lead H"], params: Params) -> Float[Array, "*lead M"]:
        H = q.shape[-1]
        pieces = []
        for _, piece, rows in self._split(q, params):
            # sqrt(H) as norms are stored per coordinate
            constant = sketch_constant(self.sketch, H, rows) * np.sqrt(H)
            matrix = (self._matrix(H, rows) * constant).astype(np.float32)
            pieces.append(project(matrix, piece))
        return jnp.concatenate(pieces, axis=-1)

    def param_shapes(self, *, num_kv_heads: int, head_dim: int) -> Shapes:
        return {"outlier": jax.ShapeDtypeStruct((num_kv_heads, head_dim), jnp.float32)}

    def init_params(self, *, num_kv_heads: int, head_dim: int) -> Params:
        first = (jnp.arange(head_dim) < self.num_outliers).astype(jnp.float32)[None]
        return {"outlier": jnp.repeat(first, num_kv_heads, axis=0)}

    def calibrate(self, samples: np.ndarray, weights: np.ndarray | None = None) -> Params:
        """The channels with the largest norm."""
        self.refuse_weights(weights)
        order = np.argsort(-np.square(samples).sum(1), axis=-1, kind="stable")
        outlier = np.zeros((samples.shape[0], samples.shape[2]), np.float32)
        np.put_along_axis(outlier, order[:, : self.num_outliers], 1.0, axis=-1)
        return {"outlier": jnp.asarray(outlier)}

    def _split(self, x: Float[Array, "*lead H"], params: Params):
        """(leaf suffix, the part of x, its sketch's rows); only inliers without outliers."""
        H = x.shape[-1]
        if not self.num_outliers:
            return (("", x, self.rows or 2 * H),)
        outlier = per_head(params["outlier"], x).astype(x.dtype)
        return (
            ("", x * (1 - outlier), self.rows or 2 * H),
            ("_outlier", x * outlier, self.outlier_rows or 2 * H),
        )

    def _matrix(self, H: int, rows: int) -> np.ndarray:
        return projection(self.sketch, H, rows, self.seed)
