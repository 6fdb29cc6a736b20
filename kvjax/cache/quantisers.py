"""How the codecs of a group quantise inside the TPU's seal kernel: their own arithmetic, on 128
tokens of a head with channels down the rows."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array

from kvjax.cache.spec import GroupSpec
from kvjax.codecs import fp8, rotation, turboquant
from kvjax.codecs.base import Codec
from kvjax.codecs.fp8 import Fp8
from kvjax.codecs.int_codec import Int, Int8
from kvjax.codecs.kivi import KiviKey, KiviValue
from kvjax.codecs.raw import Raw, RawKey
from kvjax.codecs.turboquant import TurboQuant
from kvjax.codecs.uniform import affine, symmetric
from pallas_kernels.seal import Quantiser
from pallas_kernels.words import as_half, float_bits


def quantisers(spec: GroupSpec) -> tuple[Quantiser, Quantiser] | None:
    """What the seal kernel does for the keys and the values of a group; None where plain XLA does
    it: for pages that are not the TPU's, QJL, KVQuant, and exact tokens that are not bfloat16."""
    if spec.packed is None or spec.dtype != jnp.bfloat16:
        return None
    both = ((spec.k_codec, spec.head_dim), (spec.v_codec, spec.v_head_dim))
    k, v = (_KNOWN[type(c)](c, dim) if type(c) in _KNOWN else None for c, dim in both)
    return None if k is None or v is None else (k, v)


def _raw(codec: Codec, dim: int) -> Quantiser:
    return Quantiser(lambda x: (x, None))


def _int8(codec: Int8, dim: int) -> Quantiser:
    def quantise(x: Array) -> tuple[Array, Array]:
        q, scale = symmetric(x, bits=8, axis=0, store=as_half)
        return q.astype(jnp.int32), scale

    return Quantiser(quantise)


def _int(codec: Int, dim: int) -> Quantiser:
    turn = rotation.hadamard(dim, codec.seed).T if codec.hadamard else None
    if not codec.symmetric:
        return Quantiser(functools.partial(_affine, bits=codec.bits, group=codec.group), turn)

    def quantise(x: Array) -> tuple[Array, Array]:
        parts = _groups(x, codec.group)
        q, scale = symmetric(parts, bits=codec.bits, axis=1, store=as_half)
        return q.reshape(x.shape).astype(jnp.int32), scale[:, 0]

    return Quantiser(quantise, turn)


def _kivi_value(codec: KiviValue, dim: int) -> Quantiser:
    return Quantiser(functools.partial(_affine, bits=codec.bits, group=codec.group))


def _kivi_key(codec: KiviKey, dim: int) -> Quantiser:
    return Quantiser(functools.partial(_affine, bits=codec.bits, group=codec.group), by_tokens=True)


def _affine(x: Array, *, bits: int, group: int | None) -> tuple[Array, Array]:
    q, scale, low = affine(_groups(x, group), bits=bits, axis=1, store=as_half)
    numbers = jnp.concatenate([scale[:, 0], low[:, 0]], axis=0)
    return q.reshape(x.shape).astype(jnp.int32), numbers


def _groups(x: Array, group: int | None) -> Array:
    """Groups of `group` rows, the second axis."""
    return x.reshape(-1, group or x.shape[0], x.shape[1])


def _fp8(codec: Fp8, dim: int) -> Quantiser:
    exponent, mantissa = {"e4m3": (4, 3), "e5m2": (5, 2)}[codec.format]

    def quantise(x: Array) -> tuple[Array, Array]:
        scaled, scale = fp8.scaled(x, axis=0, store=as_half)
        return float_bits(scaled, exponent=exponent, mantissa=mantissa), scale

    return Quantiser(quantise)


def _turboquant(codec: TurboQuant, dim: int) -> Quantiser:
    def quantise(y: Array) -> tuple[Array, Array]:
        q, scale = turboquant.quantise(y, bits=codec.bits, scale=codec.scale, axis=0)
        return q.astype(jnp.int32), as_half(scale)

    return Quantiser(quantise, rotation.hadamard(dim, codec.seed).T)


_KNOWN: dict[type[Codec], Callable[..., Quantiser]] = {
    Raw: _raw,
    RawKey: _raw,
    Int8: _int8,
    Int: _int,
    Fp8: _fp8,
    KiviKey: _kivi_key,
    KiviValue: _kivi_value,
    TurboQuant: _turboquant,
}
