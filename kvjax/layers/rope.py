"""Rotary position embedding (RoFormer 2104.09864), half-split pairs (i, i + H/2) as in HF Llama;
interleaved pairs where a model has them.

Angles are float32 whatever the model's dtype: bf16 angles are wrong from a few hundred tokens on.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from kvjax.config import RopeConfig
from pallas_kernels.turn import turned


def rope_tables(
    rope: RopeConfig,
    head_dim: int,
    positions: Int[Array, "B T"],
    seq_lengths: Int[Array, "B"],
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """cos and sin of each position, `[B, T, head_dim/2]`.

    seq_lengths: tokens of each row after this call; only "dynamic" depends on it.
    """
    if rope.type == "dynamic":
        inv_freq = _dynamic(rope, head_dim, seq_lengths)[:, None, :]  # B 1 half
    else:
        inv_freq = jnp.asarray(inverse_frequencies(rope, head_dim), jnp.float32)[None, None]
    angles = positions[..., None].astype(jnp.float32) * inv_freq
    factor = attention_factor(rope)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def apply_rope(
    x: Float[Array, "B T heads H"],
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    *,
    interleave: bool = False,
) -> Float[Array, "B T heads H"]:
    """Turns each pair of channels by its angle, in float32; x's dtype is kept. See `turn_pairs`."""
    return turn_pairs(x, cos[:, :, None, :], sin[:, :, None, :], interleave=interleave)


def turn_pairs(
    x: Float[Array, "*x"],
    cos: Float[Array, "*half"],
    sin: Float[Array, "*half"],
    *,
    interleave: bool = False,
    axis: int = -1,
) -> Float[Array, "*x"]:
    """`apply_rope` with channels along `axis`; cos, sin: of x's shape, or such that they broadcast
    to it, with half of the channels.

    interleave: pairs are neighbours (0, 1), (2, 3); they come out as halves, the first of each pair
    before the second of each, which leaves scores as they are if keys and queries both do it.
    """
    wide = x.astype(jnp.float32)
    if interleave:
        n, at = x.shape[axis], x.ndim + axis
        halves = [lax.slice_in_dim(wide, first, n, stride=2, axis=at) for first in (0, 1)]
        wide = jnp.concatenate(halves, axis=axis)
    return turned(wide, cos, sin, axis=axis).astype(x.dtype)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians per position of each pair, `[head_dim/2]` float64, for the static types."""
    freq = _base_frequencies(rope.theta, head_dim)
    if rope.type == "linear":
        return freq / rope.factor
    if rope.type == "llama3":
        return _llama3(rope, freq)
    if rope.type == "yarn":
        return _yarn(rope, freq, head_dim)
    return freq


def attention_factor(rope: RopeConfig) -> float:
    """YaRN's multiplier of cos and sin (2309.00071, eq. 22); 1 for every other type."""
    if rope.type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    return yarn_mscale(rope.factor, 1.0)


def score_factor(rope: RopeConfig) -> float:
    """What YaRN in DeepSeek multiplies latent attention's scores by: mscale squared."""
    if rope.type != "yarn" or not rope.mscale_all_dim:
        return 1.0
    return yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 mscale ln(factor) + 1 (DeepSeek-V2 2405.04434, section 3.1.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _base_frequencies(theta: float, head_dim: int) -> np.ndarray:
    return theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def _dynamic(rope: RopeConfig, head_dim: int, seq_lengths: Array) -> Array:
    """NTK-aware scaling whose base grows once a row is longer than the trained length."""
    trained = rope.trained_length
    length = jnp.maximum(seq_lengths, trained).astype(jnp.float32)
    growth = rope.factor * length / trained - (rope.factor - 1)
    base = rope.theta * growth ** (head_dim / (head_dim - 2))
    exponent = jnp.asarray(np.arange(0, head_dim, 2) / head_dim, jnp.float32)
    return base[:, None] ** -exponent[None]


def _llama3(rope: RopeConfig, freq: np.ndarray) -> np.ndarray:
    """Slow pairs are slowed by `factor`, fast ones kept, those between blended (Llama 3.1)."""
    turns = rope.trained_length * freq / (2 * math.pi)  # over the trained length
    low, high = rope.low_freq_factor, rope.high_freq_factor
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return freq * (keep + (1 - keep) / rope.factor)


def _yarn(rope: RopeConfig, freq: np.ndarray, head_dim: int) -> np.ndarray:
    """Blend by the number of turns over the trained length (2309.00071, section 3.2)."""

    def dim_of(turns: float) -> float:
        span = rope.trained_length / (turns * 2 * math.pi)
        return head_dim * math.log(span) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = max(high - low, 1e-3)
    ramp = np.clip((np.arange(head_dim // 2) - low) / span, 0.0, 1.0)
    return freq * (1 - ramp) + freq / rope.factor * ramp
