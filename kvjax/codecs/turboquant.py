"""TurboQuant: rotate, then quantise every coordinate with one Lloyd-Max codebook.

https://arxiv.org/abs/2504.19874, algorithms 1 (mse) and 2 (prod). A rotated vector's coordinates
are nearly N(0, |x|^2/H), whatever x was, so one table for N(0, 1) and one scale per vector do.
Codes decode in rotated space: the query is rotated once per step, the output un-rotated once.

Bytes per token and head: TurboQuant H*bits/8 + 2; mixed (o*(bits+1) + (H-o)*bits)/8 + 4 with o
channels at one bit more; prod H*(bits-1)/8 + H/8 + 4.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.codecs import codebook, packing, rotation
from kvjax.codecs.base import Codec, Codes, Params, Shapes, as_scale, divide, need_bits, per_head
from kvjax.codecs.sketch import project, projection, sign_bits, sign_values, sketch_constant

SCALES = ("unbiased", "norm", "corrected")


@dataclasses.dataclass(frozen=True)
class TurboQuant(Codec):
    """One fp16 scale per vector, so x^ = scale * levels[code] in rotated space. scale:

    * "unbiased" (default): |x|^2 / <y, levels> (EDEN, https://arxiv.org/abs/2108.08842), for which
      E <q, x^> = <q, x>; mean squared error D/(1-D);
    * "norm": |x| / sqrt(H), the paper's mse variant: shrinks scores by 1-D;
    * "corrected": |x| / |levels|, keeps the norm (vLLM's `nc` presets).
    """

    name: ClassVar[str] = "turboquant"
    single: ClassVar[bool] = True
    bits: int = 4
    scale: str = "unbiased"
    seed: int = 0
    scale_dtype: str = "float16"

    def __post_init__(self):
        need_bits(self.bits, 1, 8, self.name)
        if self.scale not in SCALES:
            raise ValueError(f"turboquant: scale: expected one of {SCALES}, got {self.scale!r}.")

    def check(self, *, head_dim: int, page_size: int, role: str) -> None:
        packing.check(self.bits, page_size)
        rotation.check(head_dim)

    def encode(self, x: Float[Array, "*lead T H"], params: Params) -> Codes:
        return packing.pack_leaves(self.quantise(x, params), self.bits)

    def quantise(self, x: Float[Array, "*lead T H"], params: Params) -> Codes:
        y = rotation.rotate(x.astype(jnp.float32), self.seed)
        codes, scale = quantise(y, bits=self.bits, scale=self.scale)
        scale = as_scale(scale[..., 0], self.scale_dtype)
        return {"words": codes, "scale": scale}

    def decode(self, codes: Codes, params: Params, dtype: Any) -> Float[Array, "*lead T H"]:
        levels = codebook.lookup(
            packing.unpack(codes["words"], self.bits), codebook.lloyd_max(self.bits)
        )
        return (levels * codes["scale"].astype(jnp.float32)[..., None]).astype(dtype)

    def prepare_query(self, q: Float[Array, "*lead H"], params: Params) -> Float[Array, "*lead H"]:
        return rotation.rotate(q, self.seed)

    def finish_output(self, o: Float[Array, "*lead H"], params: Params) -> Float[Array, "*lead H"]:
        return rotation.unrotate(o, self.seed)


def quantise(y: Float[Array, "*y"], *, bits: int, scale: str, axis: int = -1):
    """Codes of each coordinate and the scale of each vector (its coordinates along `axis`, which is
    kept, of length 1), 0 for a zero vector. Runs in a kernel."""

    def mean(x: Array) -> Array:
        return jnp.mean(x, axis=axis, keepdims=True)

    levels = codebook.lloyd_max(bits)
    rms = jnp.sqrt(mean(y * y))
    u = divide(y, rms)
    codes, c = codebook.quantise(u, levels)
    if scale == "norm":
        return codes, rms
    if scale == "corrected":
        return codes, rms / jnp.sqrt(mean(c * c))
    # <u, c> > 0 unless u = 0, as a level has the sign of what it stands for
    along = mean(u * c)
    return codes, divide(rms * mean(u * u), along)


@dataclasses.dataclass(frozen=True)
class TurboQuantMixed(Codec):
    """A quarter of the channels, the outliers, at bits+1, the rest at bits: two independent
    TurboQuants (section 4.3; 32 of 128 channels, "2.5 bit" with both scales counted).

    params: `order [K, H]`, channels with the largest mean |x| first; by default as they come.
    """

    name: ClassVar[str] = "turboquant-mixed"
    single: ClassVar[bool] = True
    bits: int = 2
    scale: str = "unbiased"
    seed: int = 0
    scale_dtype: str = "float16"

    def __post_init__(self):
        need_bits(self.bits, 1, 7, self.name)
        self._parts()

    def check(self, *, head_dim: int, page_size: int, role: str) -> None:
        outliers = self.num_outliers(head_dim)
        for part, width in zip(self._parts(), (outliers, head_dim - outliers), strict=True):
            part.check(head_dim=width, page_size=page_size, role=role)

    @staticmethod
    def num_outliers(head_dim: int) -> int:
        """A quarter of the head, in whole eights, which a rotation needs."""
        return max(8, 8 * round(head_dim / 32))

    def encode(self, x: Float[Array, "*lead T H"], params: Params) -> Codes:
        codes: Codes = {}
        for part, tag, piece in self._split(self._ordered(x, params)):
            codes |= {f"{leaf}_{tag}": v for leaf, v in part.encode(piece, {}).items()}
        return codes

    def decode(self, codes: Codes, params: Params, dtype: Any) -> Float[Array, "*lead T H"]:
        pieces = []
        for part, tag in zip(self._parts(), ("high", "low"), strict=True):
            own = {"words": codes[f"words_{tag}"], "scale": codes[f"scale_{tag}"]}
            pieces.append(part.decode(own, {}, dtype))
        return jnp.concatenate(pieces, axis=-1)

    def prepare_query(self, q: Float[Array, "*lead H"], params: Params) -> Float[Array, "*lead H"]:
        pieces = self._split(self._ordered(q, params))
        return jnp.concatenate([part.prepare_query(v, {}) for part, _, v in pieces], axis=-1)

    def finish_output(self, o: Float[Array, "*lead H"], params: Params) -> Float[Array, "*lead H"]:
        pieces = [part.finish_output(v, {}) for part, _, v in self._split(o)]
        back = per_head(jnp.argsort(params["order"], axis=-1), o)
        return jnp.take_along_axis(jnp.concatenate(pieces, axis=-1), back, axis=-1)

    def param_shapes(self, *, num_kv_heads: int, head_dim: int) -> Shapes:
        return {"order": jax.ShapeDtypeStruct((num_kv_heads, head_dim), jnp.int32)}

    def init_params(self, *, num_kv_heads: int, head_dim: int) -> Params:
        order = jnp.arange(head_dim, dtype=jnp.int32)[None]
        return {"order": jnp.repeat(order, num_kv_heads, axis=0)}

    def calibrate(self, samples: np.ndarray, weights: np.ndarray | None = None) -> Params:
        self.refuse_weights(weights)
        order = np.argsort(-np.abs(samples).mean(1), axis=-1, kind="stable")
        return {"order": jnp.asarray(order, jnp.int32)}

    def _parts(self) -> tuple[TurboQuant, TurboQuant]:
        make = dataclasses.replace
        low = TurboQuant(self.bits, self.scale, self.seed, self.scale_dtype)
        return make(low, bits=self.bits + 1), low

    def _ordered(self, x: Float[Array, "*lead H"], params: Params) -> Float[Array, "*lead H"]:
        return jnp.take_along_axis(x, per_head(params["order"], x), axis=-1)

    def _split(self, x: Float[Array, "*lead H"]):
        n = self.num_outliers(x.shape[-1])
        high, low = self._parts()
        return (high, "high", x[..., :n]), (low, "low", x[..., n:])


@dataclasses.dataclass(frozen=True)
class TurboQuantProd(Codec):
    """bits-1 for the vector (stored norm) and a 1-bit sketch of the residual (QJL): unbiased.

    At equal bits TurboQuant's "unbiased" scale is unbiased too and its error 1.8 to 5.7 times
    smaller; this is the paper's algorithm 2, to compare with. sketch: "orthogonal" or "gaussian"
    (the paper's, 2.75 times the sketch's variance). Decodes to 2H channels: levels and signs.
    """

    name: ClassVar[str] = "turboquant-prod"
    single: ClassVar[bool] = True
    bits: int = 3
    sketch: str = "orthogonal"
    seed: int = 0
    scale_dtype: str = "float16"

    def __post_init__(self):
        need_bits(self.bits, 2, 8, self.name)
        projection(self.sketch, 8, 8, self.seed)

    def check(self, *, head_dim: int, page_size: int, role: str) -> None:
        packing.check(self.bits - 1, page_size)
        packing.check(1, page_size)
        rotation.check(head_dim)

    def encode(self, x: Float[Array, "*lead T H"], params: Params) -> Codes:
        H = x.shape[-1]
        y = rotation.rotate(x.astype(jnp.float32), self.seed)
        codes, scale = quantise(y, bits=self.bits - 1, scale="norm")
        residual = y - scale * codebook.lookup(codes, codebook.lloyd_max(self.bits - 1))
        signs = sign_bits(project(self._matrix(H), residual))
        gamma = jnp.sqrt(jnp.mean(residual**2, axis=-1))
        return {
            "words": packing.pack(codes, self.bits - 1),
            "words_sign": packing.pack(signs, 1),
            "scale": as_scale(scale[..., 0], self.scale_dtype),
            "gamma": as_scale(gamma, self.scale_dtype),
        }

    def decode(self, codes: Codes, params: Params, dtype: Any) -> Float[Array, "*lead T R"]:
        levels = codebook.lookup(
            packing.unpack(codes["words"], self.bits - 1), codebook.lloyd_max(self.bits - 1)
        )
        levels *= codes["scale"].astype(jnp.float32)[..., None]
        signs = sign_values(packing.unpack(codes["words_sign"], 1))
        signs *= codes["gamma"].astype(jnp.float32)[..., None]
        return jnp.concatenate([levels, signs], axis=-1).astype(dtype)

    def prepare_query(self, q: Float[Array, "*lead H"], params: Params) -> Float[Array, "*lead R"]:
        q = rotation.rotate(q, self.seed)
        return jnp.concatenate([q, project(self._scaled(q.shape[-1]), q)], axis=-1)

    def finish_output(self, o: Float[Array, "*lead R"], params: Params) -> Float[Array, "*lead H"]:
        H = o.shape[-1] // 2
        y = o[..., :H] + project(self._scaled(H).T, o[..., H:])
        return rotation.unrotate(y, self.seed)

    def _matrix(self, H: int) -> np.ndarray:
        return projection(self.sketch, H, H, self.seed)

    def _scaled(self, H: int) -> np.ndarray:
        """The sketch times its constant; sqrt(H) as gamma is stored per coordinate."""
        constant = sketch_constant(self.sketch, H, H) * np.sqrt(H)
        return (self._matrix(H) * constant).astype(np.float32)
