"""Gated retention (YOCO 2405.05254, section 3.1; retention: RetNet 2307.08621).

A head keeps one matrix in place of keys and values, S_n = gamma_n S_(n-1) + k_n^T v_n, and its
output is q_n S_n: a cache of constant size. gamma_n = sigmoid(x W_decay)^(1/16) is a token's own.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from kvjax.config import ModelConfig
from kvjax.layers.attention import Rope
from kvjax.layers.kinds import LayerKind
from kvjax.layers.linear import Linear
from kvjax.layers.rope import apply_rope

# Shapes: N heads, H channels of a head's queries, keys and values, C tokens of a chunk.

#: tokens that are multiplied at once
CHUNK = 256
#: tau: the larger, the longer a head remembers
TEMPERATURE = 16


class State(NamedTuple):
    """What a layer leaves of a call and of all tokens before it."""

    made: Float[Array, "B N H H"]  # float32


@runtime_checkable
class Retain(Protocol):
    """Retention of a chunk; the cache or a plain chunk gives it."""

    def __call__(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T N H"],
        v: Float[Array, "B T N H"],
        log_decay: Float[Array, "B T N"],
    ) -> tuple[Float[Array, "B A N H"], State]:
        """Outputs of the A tokens that are wanted, float32, and the state after the last one."""
        ...


def retain(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T N R"],
    log_decay: Float[Array, "B T N"],
    state: Float[Array, "B N H R"],
    *,
    chunk: int = CHUNK,
) -> tuple[Float[Array, "B T N R"], Float[Array, "B N H R"]]:
    """o_n = q_n S_n of every token, and the last S, in float32.

    log_decay: log gamma, at most 0. A token with k = 0 and log_decay = 0 leaves the state as it is.
    chunk: 1 is the recurrence, T the parallel form; all are equal to rounding.
    """
    B, T, N, _ = q.shape
    size = min(chunk, T)
    count = -(-T // size)

    def cut(x: Array) -> Array:  # chunks first; what is padded leaves the state as it is
        rest = [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x.astype(jnp.float32), [(0, 0), (0, count * size - T), *rest])
        return jnp.moveaxis(x.reshape(B, count, size, *x.shape[2:]), 1, 0)

    state, out = jax.lax.scan(_chunk, state, tuple(cut(x) for x in (q, k, v, log_decay)))
    return jnp.moveaxis(out, 0, 1).reshape(B, count * size, N, -1)[:, :T], state


def _chunk(state: Array, xs: tuple[Array, ...]) -> tuple[Array, Array]:
    """One chunk: its tokens among themselves, and what they see of the state before it."""
    q, k, v, log_decay = xs
    einsum = functools.partial(jnp.einsum, precision="highest")
    total = jnp.cumsum(log_decay, axis=1)  # B C N: from the chunk's start
    order = jnp.arange(q.shape[1])
    seen = (order[:, None] >= order[None])[None, :, :, None]
    between = jnp.where(seen, total[:, :, None] - total[:, None], -jnp.inf)  # B C C N
    scores = einsum("binh,bjnh->bijn", q, k) * jnp.exp(between)
    out = einsum("bijn,bjnr->binr", scores, v)
    out = out + einsum("binh,bnhr->binr", q * jnp.exp(total)[..., None], state)
    left = jnp.exp(total[:, -1:] - total)[..., None]  # of a key at the chunk's end
    state = state * jnp.exp(total[:, -1])[..., None, None]
    return state + einsum("bjnh,bjnr->bnhr", k * left, v), out


class GatedRetention(nnx.Module):
    """Projections around a `Retain`: W_o(silu(x W_gate) * norm(o)), the norm over each head."""

    def __init__(self, config: ModelConfig, kind: LayerKind, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        D, N, H = config.hidden_size, config.num_heads, config.head_dim
        linear = functools.partial(Linear, std=config.initializer_range, dtype=dtype, rngs=rngs)
        self.q_proj = linear(D, N * H, bias=config.attention_bias)
        self.k_proj = linear(D, N * H, bias=config.attention_bias)
        self.v_proj = linear(D, N * H, bias=config.attention_bias)
        self.gate_proj = linear(D, N * H, bias=False)
        self.decay_proj = linear(D, N, bias=False)
        self.o_proj = linear(N * H, D, bias=config.attention_out_bias)
        self.shape = (N, H)
        self.eps, self.interleave = config.rms_norm_eps, config.rope_interleave

    def __call__(
        self,
        x: Float[Array, "B A D"],
        rope: Rope | None,
        attend: Retain,
        *,
        source: Float[Array, "B T D"],
        source_rope: Rope | None,
        shared: Any,
    ) -> tuple[Float[Array, "B A D"], State]:
        """As `Attention`. Queries too are made of `source`: a state goes through every token."""
        assert shared is None
        q, k = (self._turned(p(source), source_rope) for p in (self.q_proj, self.k_proj))
        v = self._heads(self.v_proj(source))
        log_decay = jax.nn.log_sigmoid(self.decay_proj(source).astype(jnp.float32)) / TEMPERATURE
        out, state = attend(q, k, v, log_decay)
        scale = jax.lax.rsqrt(jnp.mean(out * out, axis=-1, keepdims=True) + self.eps)
        out = (out * scale).astype(x.dtype).reshape(*x.shape[:2], -1)
        return self.o_proj(jax.nn.silu(self.gate_proj(x)) * out), state

    def _heads(self, y: Array) -> Float[Array, "B T N H"]:
        return y.reshape(*y.shape[:2], *self.shape)

    def _turned(self, y: Array, rope: Rope | None) -> Float[Array, "B T N H"]:
        y = self._heads(y)
        return y if rope is None else apply_rope(y, *rope, interleave=self.interleave)
