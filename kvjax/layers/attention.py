"""Multi-head, grouped-query (2305.13245) and multi-query (1911.02150) attention.

The head counts of the config choose the kind. Query head n reads KV head n // (N / K): the queries
are reshaped to `[B, T, K, G, H]` and K and V are never repeated.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from kvjax.config import ModelConfig
from kvjax.layers.kinds import LayerKind
from kvjax.layers.linear import Linear
from kvjax.layers.norm import norm_of
from kvjax.layers.rope import apply_rope

#: cos and sin of each position
Rope = tuple[Float[Array, "B T half"], Float[Array, "B T half"]]


class KV(NamedTuple):
    """What one owner makes of a chunk. Of MLA: the latent and the rotated key, one head each."""

    k: Float[Array, "B T K H"]  # as queries meet them
    v: Float[Array, "B T K R"]
    stored: Any  # keys as the cache wants them `[B, T, K, H]`; what eviction leaves of them
    v_stored: Any = None  # values likewise; None: all

    @property
    def made(self) -> tuple[Any, Any]:
        """Keys and values for the cache."""
        return self.stored, self.v if self.v_stored is None else self.v_stored


@runtime_checkable
class Attend(Protocol):
    """Attention of a chunk's queries to what they may see; the cache or a plain chunk gives it."""

    def fresh(
        self, k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], plain: Float[Array, "B T K H"]
    ) -> KV:
        """An owner's keys and values; plain: the keys before RoPE."""
        ...

    def __call__(self, q: Float[Array, "B A K G H"], kv: KV, *, sinks: Any = None) -> Array:
        """Output `[B, A, K, G, H]` of A queries. sinks `[K, G]`: learned logits that take a share
        of the softmax."""
        ...

    def keep(self, q: Float[Array, "B A K G H"], kv: KV, rope: Rope | None) -> KV:
        """What an owner leaves to the cache."""
        ...


class Attention(nnx.Module):
    """Projections around an `Attend`; a layer that owns no keys reads those it is given."""

    def __init__(self, config: ModelConfig, kind: LayerKind, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        D, N, K, H = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        linear = functools.partial(Linear, std=config.initializer_range, dtype=dtype, rngs=rngs)
        self.q_proj = linear(D, N * H, bias=config.attention_bias)
        self.k_proj = linear(D, K * H, bias=config.attention_bias) if kind.owns else None
        self.v_proj = linear(D, K * H, bias=config.attention_bias) if kind.owns else None
        self.o_proj = linear(N * H, D, bias=config.attention_out_bias)
        q_dim, k_dim = {"none": (0, 0), "head": (H, H), "full": (N * H, K * H)}[config.qk_norm]
        self.q_norm = norm_of(config, q_dim, dtype=dtype) if q_dim else None
        self.k_norm = norm_of(config, k_dim, dtype=dtype) if k_dim and kind.owns else None
        self.sinks = nnx.Param(jnp.zeros((N,), dtype)) if config.attention_sinks else None
        self.shape = (N, K, H)
        self.full_norm = config.qk_norm == "full"
        self.interleave = config.rope_interleave

    def __call__(
        self,
        x: Float[Array, "B A D"],
        rope: Rope | None,
        attend: Attend,
        *,
        source: Float[Array, "B T D"],
        source_rope: Rope | None,
        shared: KV | None,
    ) -> tuple[Float[Array, "B A D"], KV]:
        """x: states of the tokens that attend. source, source_rope: states and angles of all the
        call's tokens, from which an owner makes keys and values. shared: the owner's, if another
        layer is it."""
        B, A, _ = x.shape
        N, K, H = self.shape
        kv = self._make(source, source_rope, attend) if shared is None else shared
        q = self._turn(self._heads(self.q_proj(x), N, self.q_norm), rope)
        sinks = None if self.sinks is None else self.sinks[...].reshape(K, N // K)
        q = q.reshape(B, A, K, N // K, H)
        out = attend(q, kv, sinks=sinks)
        if shared is None:
            kv = attend.keep(q, kv, rope)
        return self.o_proj(out.reshape(B, A, N * H)), kv

    def _make(self, x: Float[Array, "B T D"], rope: Rope | None, attend: Attend) -> KV:
        assert self.k_proj is not None
        assert self.v_proj is not None
        _, K, _ = self.shape
        plain = self._heads(self.k_proj(x), K, self.k_norm)
        v = self._heads(self.v_proj(x), K, None)
        return attend.fresh(self._turn(plain, rope), v, plain)

    def _heads(self, y: Array, heads: int, norm: Any) -> Float[Array, "B T heads H"]:
        if norm is not None and self.full_norm:
            y = norm(y)
        y = y.reshape(*y.shape[:2], heads, self.shape[2])
        return y if norm is None or self.full_norm else norm(y)

    def _turn(self, x: Array, rope: Rope | None) -> Array:
        return x if rope is None else apply_rope(x, *rope, interleave=self.interleave)
