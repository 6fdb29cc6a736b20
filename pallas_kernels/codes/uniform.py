"""Floats as they are, and integers on a uniform grid."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import words as packing
from pallas_kernels.codes.base import Code, need

#: bfloat16 0x4300 is 128, and its low mantissa bits count units: 0x4300 | n is 128 + n.
MAGIC = 128.0

INTEGERS = {8: jnp.int8, 4: jnp.int4, 2: jnp.int2}


@dataclasses.dataclass(frozen=True)
class BFloat16(Code):
    """Leaf: `q [..., T, H]`, rounded to bfloat16."""

    bits: int = 16
    has_scale: ClassVar[bool] = False

    def planes(self, q):
        return super().planes(lax.bitcast_convert_type(q.astype(jnp.bfloat16), jnp.uint16))

    def numbers(self, words):
        return pltpu.bitcast(words, jnp.bfloat16)

    def levels(self, words):
        x = packing.unpack(words, 16, self.order).astype(jnp.uint16)
        return lax.bitcast_convert_type(x, jnp.bfloat16).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Float8(Code):
    """Leaves: `q [..., T, H]`, a float8 or its bits as uint8; `scale [..., T]`."""

    bits: int = 8
    format: str = "float8_e4m3fn"

    def planes(self, q):
        is_float = jnp.issubdtype(q.dtype, jnp.floating)
        return super().planes(lax.bitcast_convert_type(q, jnp.uint8) if is_float else q)

    def numbers(self, words):
        return pltpu.bitcast(words, jnp.dtype(self.format))

    def levels(self, words):
        x = packing.unpack(words, 8, self.order).astype(jnp.uint8)
        return lax.bitcast_convert_type(x, jnp.dtype(self.format)).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Symmetric(Code):
    """value = scale * q, q signed, of 2, 4 or 8 bits. Leaves: `q [..., T, H]`, `scale [..., (n,)
    T]`."""

    bits: int = 8

    def __post_init__(self):
        super().__post_init__()
        need(self.bits in INTEGERS, "bits", "2, 4 or 8", self.bits)
        need(
            self.order == "adjacent" or (self.order == "pairs" and self.bits < 8),
            "order",
            "'adjacent', or 'pairs' under 8 bits",
            self.order,
        )

    @property
    def bias(self) -> float:
        return 0.0 if self.order == "adjacent" else -MAGIC - 2.0 ** (self.bits - 1)

    def stored(self, q: Int[Array, "*q"]) -> Int[Array, "*q"]:
        return q if self.order == "adjacent" else q + 2 ** (self.bits - 1)

    def numbers(self, words):
        if self.order == "adjacent":
            return pltpu.bitcast(words, INTEGERS[self.bits])
        return above_magic(words, self.bits)

    def levels(self, words):
        q, half = packing.unpack(words, self.bits, self.order), 2 ** (self.bits - 1)
        q = q - half if self.order == "pairs" else jnp.where(q >= half, q - 2 * half, q)
        return q.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Asymmetric(Symmetric):
    """value = scale * q + low, q in 0 .. 2^bits - 1. Leaves: as `Symmetric`'s, and `low`."""

    bits: int = 4
    has_low: ClassVar[bool] = True

    @property
    def bias(self) -> float:
        return 2.0 ** (self.bits - 1) if self.order == "adjacent" else -MAGIC

    def stored(self, q: Int[Array, "*q"]) -> Int[Array, "*q"]:
        return q - 2 ** (self.bits - 1) if self.order == "adjacent" else q

    def levels(self, words):
        return super().levels(words) + 2.0 ** (self.bits - 1)


def above_magic(words: Int[Array, "W L"], bits: int) -> Float[Array, "n L"]:
    """128 + code of each field, bfloat16, from the order "pairs": three operations for two numbers
    where a chip without bfloat16 arithmetic would take a dozen to convert them."""
    mask = jnp.int32((2**bits - 1) * 0x10001)
    planes = []
    for j in range(16 // bits):
        x = lax.shift_right_logical(words, jnp.int32(bits * j)) if j else words
        planes.append(pltpu.bitcast((x & mask) | jnp.int32(0x43004300), jnp.bfloat16))
    return jnp.concatenate(planes, axis=0)
