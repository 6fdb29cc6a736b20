"""No compression: entries stay in the model's dtype. The identity every other codec is held to.

Bytes per token and head: H * itemsize.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.codecs.base import Codec, Codes, Params


@dataclasses.dataclass(frozen=True)
class Raw(Codec):
    """dtype: None keeps what `encode` is given, which must then be in the cache's dtype."""

    name: ClassVar[str] = "raw"
    single: ClassVar[bool] = True
    in_place: ClassVar[bool] = True
    dtype: str | None = None

    def encode(self, x: Float[Array, "*lead T H"], params: Params) -> Codes:
        return {"x": x.astype(jnp.dtype(self.dtype) if self.dtype else x.dtype)}

    def decode(self, codes: Codes, params: Params, dtype: Any) -> Float[Array, "*lead T H"]:
        return codes["x"].astype(dtype)


@dataclasses.dataclass(frozen=True)
class RawKey(Codec):
    """Raw keys, stored channels by tokens `[..., K, H, T]`: a score is then a plain product.

    XLA's CPU backend takes 2.4 times as long for `q k^T` when tokens are the rows (measured at 1k
    tokens); on TPU tokens on lanes leave no padding for head dims below 128.
    """

    name: ClassVar[str] = "raw"
    tokens_last: ClassVar[bool] = True
    in_place: ClassVar[bool] = True

    def encode(self, x: Float[Array, "*lead T H"], params: Params) -> Codes:
        return {"x": jnp.swapaxes(x, -1, -2)}

    def decode(self, codes: Codes, params: Params, dtype: Any) -> Float[Array, "*lead T H"]:
        return jnp.swapaxes(self.decode_t(codes, params, dtype), -1, -2)

    def decode_t(self, codes: Codes, params: Params, dtype: Any) -> Float[Array, "*lead H T"]:
        return codes["x"].astype(dtype)
