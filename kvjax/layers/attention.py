"""Multi-head, grouped-query (2305.13245) and multi-query (1911.02150) attention.

The head counts of the config choose the kind. Query head n reads KV head n // (N / K): the queries
are reshaped to `[B, T, K, G, H]` and K and V are never repeated.
"""

from __future__ import annotations

import functools
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from kvjax.config import ModelConfig
from kvjax.layers.linear import Linear
from kvjax.layers.rope import apply_rope


@runtime_checkable
class Attend(Protocol):
    """Attention of a chunk's queries to what they may see; the cache or a plain chunk gives it.

    plain: the keys before RoPE. Returns the output and the keys that a cache is to store.
    """

    def __call__(
        self,
        q: Float[Array, "B T K G H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        *,
        plain: Float[Array, "B T K H"],
    ) -> tuple[Float[Array, "B T K G H"], Float[Array, "B T K H"]]: ...


class Attention(nnx.Module):
    """Projections around an `Attend`; returns the keys and values to store in a cache too."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        D, N, K, H = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        linear = functools.partial(Linear, std=config.initializer_range, dtype=dtype, rngs=rngs)
        self.q_proj = linear(D, N * H, bias=config.attention_bias)
        self.k_proj = linear(D, K * H, bias=config.attention_bias)
        self.v_proj = linear(D, K * H, bias=config.attention_bias)
        self.o_proj = linear(N * H, D, bias=config.attention_out_bias)
        self.shape = (N, K, H)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        rope: tuple[Float[Array, "B T half"], Float[Array, "B T half"]],
        attend: Attend,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        B, T, _ = x.shape
        N, K, H = self.shape
        q = apply_rope(self.q_proj(x).reshape(B, T, N, H), *rope)
        plain = self.k_proj(x).reshape(B, T, K, H)
        v = self.v_proj(x).reshape(B, T, K, H)
        q = q.reshape(B, T, K, N // K, H)
        out, stored = attend(q, apply_rope(plain, *rope), v, plain=plain)
        return self.o_proj(out.reshape(B, T, N * H)), stored, v
