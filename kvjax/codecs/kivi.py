"""KIVI: tuning-free asymmetric low bits, keys per channel and values per token.

https://arxiv.org/abs/2402.02750, section 3. Keys have outliers in fixed channels, so a group is
`group` consecutive tokens of one channel; values have none and attention mixes tokens, so a group
is `group` channels of one token. The residual of recent full-precision tokens is the cache's recent
buffer: a page is sealed whole, and groups never cross a page.

Bytes per token and head, keys and values alike: H*bits/8 + 4*H/group (float16 scale and minimum).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.codecs import packing
from kvjax.codecs.base import Codec, Codes, Params, need_bits, need_divides, stored_as
from kvjax.codecs.uniform import affine, split_channels, to_columns, to_rows, unaffine


@dataclasses.dataclass(frozen=True)
class KiviKey(Codec):
    """Per channel: scale and minimum of `group` tokens, stored `[..., T/group, H]`."""

    name: ClassVar[str] = "kivi"
    bits: int = 2
    group: int = 32
    scale_dtype: str = "float16"

    def __post_init__(self):
        need_bits(self.bits, 1, 8, self.name)

    def check(self, *, head_dim: int, page_size: int, role: str) -> None:
        need_divides(
            self.group, page_size, "kivi: group", "page_size", "Key groups run along tokens."
        )
        packing.check(self.bits, page_size)

    def encode(self, x: Float[Array, "*lead T H"], params: Params) -> Codes:
        return packing.pack_leaves(self.quantise(x, params), self.bits)

    def quantise(self, x: Float[Array, "*lead T H"], params: Params) -> Codes:
        *lead, T, H = x.shape
        blocks = x.astype(jnp.float32).reshape(*lead, T // self.group, self.group, H)
        codes, scale, low = affine(
            blocks, bits=self.bits, axis=-2, store=stored_as(self.scale_dtype)
        )
        words = codes.astype(jnp.uint32).reshape(x.shape)
        return {"words": words, "scale": scale[..., 0, :], "low": low[..., 0, :]}

    def decode(self, codes: Codes, params: Params, dtype: Any) -> Float[Array, "*lead T H"]:
        q = packing.unpack(codes["words"], self.bits)
        *lead, T, H = q.shape
        blocks = q.reshape(*lead, T // self.group, self.group, H)
        x = unaffine(blocks, codes["scale"][..., None, :], codes["low"][..., None, :])
        return x.reshape(q.shape).astype(dtype)


@dataclasses.dataclass(frozen=True)
class KiviValue(Codec):
    """Per token: scale and minimum of `group` channels, stored `[..., H/group, T]`."""

    name: ClassVar[str] = "kivi"
    bits: int = 2
    group: int = 32
    scale_dtype: str = "float16"

    def __post_init__(self):
        need_bits(self.bits, 1, 8, self.name)

    def check(self, *, head_dim: int, page_size: int, role: str) -> None:
        need_divides(
            self.group, head_dim, "kivi: group", "head_dim", "Value groups run along channels."
        )
        packing.check(self.bits, page_size)

    def encode(self, x: Float[Array, "*lead T H"], params: Params) -> Codes:
        return packing.pack_leaves(self.quantise(x, params), self.bits)

    def quantise(self, x: Float[Array, "*lead T H"], params: Params) -> Codes:
        parts = split_channels(x.astype(jnp.float32), self.group)
        codes, scale, low = affine(
            parts, bits=self.bits, axis=-1, store=stored_as(self.scale_dtype)
        )
        words = codes.astype(jnp.uint32).reshape(x.shape)
        return {"words": words, "scale": to_rows(scale), "low": to_rows(low)}

    def decode(self, codes: Codes, params: Params, dtype: Any) -> Float[Array, "*lead T H"]:
        q = packing.unpack(codes["words"], self.bits)
        parts = split_channels(q, self.group)
        x = unaffine(parts, to_columns(codes["scale"]), to_columns(codes["low"]))
        return x.reshape(q.shape).astype(dtype)
