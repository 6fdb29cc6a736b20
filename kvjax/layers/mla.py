"""Multi-head latent attention (DeepSeek-V2 2405.04434, section 2.1; V3 2412.19437).

A token is cached as its normed latent c and one rotated key k_r that all heads share. Keys and
values are c times per-head matrices W_uk, W_uv; how the product is bracketed is the attention's
choice (`LatentAttend`): few queries go to the latent, many make the latent keys and values.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from kvjax.config import ModelConfig
from kvjax.layers.attention import KV, Rope
from kvjax.layers.kinds import LayerKind
from kvjax.layers.linear import Linear
from kvjax.layers.norm import RMSNorm
from kvjax.layers.rope import apply_rope

# Shapes: C latent channels, R rotated channels, U channels of a head's key without position,
# W channels of a head's value.

#: of the norms on the latents, whatever the model's
LATENT_EPS = 1e-6


class Up(NamedTuple):
    """What makes a head's key and value of the latent."""

    key: Float[Array, "C N U"]
    value: Float[Array, "C N W"]


@runtime_checkable
class LatentAttend(Protocol):
    """Latent attention of a chunk's queries; the cache or a plain chunk gives it."""

    def fresh(self, k: Array, v: Array, plain: Array) -> KV:
        """An owner's latents `k` and rotated keys `v`; plain: those before RoPE."""
        ...

    def keep(self, q: Array, q_rope: Array, kv: KV, rope: Rope | None, *, up: Up) -> KV:
        """What an owner leaves to the cache."""
        ...

    def __call__(
        self, q: Float[Array, "B A N U"], q_rope: Float[Array, "B A N R"], kv: KV, *, up: Up
    ) -> Float[Array, "B A N W"]: ...


class LatentAttention(nnx.Module):
    """Projections around a `LatentAttend`. Layers that share a latent have matrices of their own to
    make keys and values of it."""

    def __init__(self, config: ModelConfig, kind: LayerKind, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        mla = config.mla
        assert mla is not None
        self.mla, self.heads = mla, config.num_heads
        D, N, bias = config.hidden_size, config.num_heads, config.attention_bias
        linear = functools.partial(Linear, std=config.initializer_range, dtype=dtype, rngs=rngs)
        norm = functools.partial(RMSNorm, eps=LATENT_EPS, dtype=dtype)
        width, rank = N * mla.qk_head_dim, mla.q_lora_rank
        self.q_proj = linear(D, width, bias=False) if rank is None else None
        self.q_a_proj = None if rank is None else linear(D, rank, bias=bias)
        self.q_a_norm = None if rank is None else norm(rank)
        self.q_b_proj = None if rank is None else linear(rank, width, bias=False)
        C, R = mla.kv_lora_rank, mla.qk_rope_head_dim
        self.kv_a_proj = linear(D, C + R, bias=bias) if kind.owns else None
        self.kv_a_norm = norm(C) if kind.owns else None
        self.kv_b_proj = linear(C, N * (mla.qk_nope_head_dim + mla.v_head_dim), bias=False)
        self.o_proj = linear(N * mla.v_head_dim, D, bias=config.attention_out_bias)
        self.interleave = config.rope_interleave

    def __call__(
        self,
        x: Float[Array, "B A D"],
        rope: Rope | None,
        attend: LatentAttend,
        *,
        source: Float[Array, "B T D"],
        source_rope: Rope | None,
        shared: KV | None,
    ) -> tuple[Float[Array, "B A D"], KV]:
        """As `Attention`."""
        kv = self._make(source, source_rope, attend) if shared is None else shared
        q = self._queries(x).reshape(*x.shape[:2], self.heads, self.mla.qk_head_dim)
        q, q_rope = jnp.split(q, [self.mla.qk_nope_head_dim], axis=-1)
        q_rope, up = self._turn(q_rope, rope), self._up()
        out = attend(q, q_rope, kv, up=up)
        if shared is None:
            kv = attend.keep(q, q_rope, kv, rope, up=up)
        return self.o_proj(out.reshape(*x.shape[:2], -1)), kv

    def _queries(self, x: Float[Array, "B A D"]) -> Float[Array, "B A NH"]:
        if self.q_proj is not None:
            return self.q_proj(x)
        assert self.q_a_proj is not None
        assert self.q_a_norm is not None
        assert self.q_b_proj is not None
        return self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))

    def _make(self, x: Float[Array, "B T D"], rope: Rope | None, attend: LatentAttend) -> KV:
        assert self.kv_a_proj is not None
        assert self.kv_a_norm is not None
        latent, key = jnp.split(self.kv_a_proj(x), [self.mla.kv_lora_rank], axis=-1)
        latent = self.kv_a_norm(latent)[:, :, None]  # B T 1 C
        key = key[:, :, None]  # B T 1 R
        return attend.fresh(latent, self._turn(key, rope), key)

    def _up(self) -> Up:
        kernel = self.kv_b_proj.kernel[...]
        kernel = kernel.reshape(kernel.shape[0], self.heads, -1)  # C N U+W
        return Up(*jnp.split(kernel, [self.mla.qk_nope_head_dim], axis=-1))

    def _turn(self, x: Array, rope: Rope | None) -> Array:
        return x if rope is None else apply_rope(x, *rope, interleave=self.interleave)
