"""Integers, rounded per token: int8, and 2 to 8 bits with groups of channels.

With `hadamard`, heads are rotated first (QuaRot, https://arxiv.org/abs/2404.00456), which spreads
the outlier channels that ruin per-token groups: the strongest cheap baseline at 4 bits.

Bytes per token and head: int8 H + 2; int-b asymmetric H*b/8 + 4*H/group, symmetric
H*b/8 + 2*H/group (float16 scales; group None is the whole head).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.codecs import packing, rotation
from kvjax.codecs.base import Codec, Codes, Params, need_bits, need_divides, stored_as
from kvjax.codecs.uniform import affine, split_channels, symmetric, to_columns, to_rows, unaffine


@dataclasses.dataclass(frozen=True)
class Int8(Codec):
    """Symmetric, one scale absmax/127 per token and head, always from the token itself."""

    name: ClassVar[str] = "int8"
    single: ClassVar[bool] = True
    scale_dtype: str = "float16"

    def encode(self, x: Float[Array, "*lead T H"], params: Params) -> Codes:
        q, scale = symmetric(
            x.astype(jnp.float32), bits=8, axis=-1, store=stored_as(self.scale_dtype)
        )
        return {"x": q.astype(jnp.int8), "scale": scale[..., 0]}

    def decode(self, codes: Codes, params: Params, dtype: Any) -> Float[Array, "*lead T H"]:
        scale = codes["scale"].astype(jnp.float32)[..., None]
        return (codes["x"].astype(jnp.float32) * scale).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Int(Codec):
    """Packed integers of `bits`, per token in groups of `group` channels (None: the whole head)."""

    name: ClassVar[str] = "int"
    single: ClassVar[bool] = True
    bits: int = 4
    symmetric: bool = False
    group: int | None = None
    hadamard: bool = False
    seed: int = 0
    scale_dtype: str = "float16"

    def __post_init__(self):
        need_bits(self.bits, 2, 8, self.name)

    def check(self, *, head_dim: int, page_size: int, role: str) -> None:
        packing.check(self.bits, page_size)
        need_divides(self.group or head_dim, head_dim, "int: group", "head_dim")
        if self.hadamard:
            rotation.check(head_dim)

    def encode(self, x: Float[Array, "*lead T H"], params: Params) -> Codes:
        return packing.pack_leaves(self.quantise(x, params), self.bits)

    def quantise(self, x: Float[Array, "*lead T H"], params: Params) -> Codes:
        x = self._rotate(x.astype(jnp.float32))
        parts = split_channels(x, self.group or x.shape[-1])
        if self.symmetric:
            q, scale = symmetric(parts, bits=self.bits, axis=-1, store=stored_as(self.scale_dtype))
            codes, side = q + self._zero, {"scale": to_rows(scale)}
        else:
            codes, scale, low = affine(
                parts, bits=self.bits, axis=-1, store=stored_as(self.scale_dtype)
            )
            side = {"scale": to_rows(scale), "low": to_rows(low)}
        return {"words": codes.astype(jnp.uint32).reshape(x.shape), **side}

    def decode(self, codes: Codes, params: Params, dtype: Any) -> Float[Array, "*lead T H"]:
        q = packing.unpack(codes["words"], self.bits)
        scale = to_columns(codes["scale"]).astype(jnp.float32)
        low = -self._zero * scale if self.symmetric else to_columns(codes["low"])
        parts = split_channels(q, q.shape[-1] // scale.shape[-2])
        return unaffine(parts, scale, low).reshape(q.shape).astype(dtype)

    def prepare_query(self, q: Float[Array, "*lead H"], params: Params) -> Float[Array, "*lead H"]:
        return self._rotate(q)

    def finish_output(self, o: Float[Array, "*lead H"], params: Params) -> Float[Array, "*lead H"]:
        return rotation.unrotate(o, self.seed) if self.hadamard else o

    @property
    def _zero(self) -> int:
        """The unsigned code that stands for 0 when symmetric."""
        return 2 ** (self.bits - 1) - 1

    def _rotate(self, x: Float[Array, "*lead H"]) -> Float[Array, "*lead H"]:
        return rotation.rotate(x, self.seed) if self.hadamard else x
