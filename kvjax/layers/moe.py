"""A mixture of experts with shared ones (DeepSeekMoE 2401.06066; V2 2405.04434; V3 2412.19437).

Tokens are sorted by expert and each expert multiplies its own rows (`jax.lax.ragged_dot`): the work
is that of the chosen experts, and no token is dropped.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kvjax.config import ModelConfig
from kvjax.layers.linear import Linear
from kvjax.layers.mlp import ACTIVATIONS, GatedMLP

# Shapes: n tokens, X experts, c experts of a token, D model dim, F an expert's dim.


class Experts(nnx.Module):
    """Kernels `[X, in, out]` of one projection of all experts."""

    def __init__(
        self, count: int, d_in: int, d_out: int, *, std: float, dtype: jnp.dtype, rngs: nnx.Rngs
    ):
        kernel = jax.random.normal(rngs.params(), (count, d_in, d_out), jnp.float32) * std
        self.kernel = nnx.Param(kernel.astype(dtype))

    def __call__(self, x: Float[Array, "m d_in"], rows: Int[Array, "X"]) -> Float[Array, "m d_out"]:
        """rows: how many of the sorted rows are each expert's."""
        return jax.lax.ragged_dot(x, self.kernel[...], rows)


class MoE(nnx.Module):
    """Chosen experts' outputs, weighted, and the shared experts' beside them."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        moe = config.moe
        assert moe is not None
        D, F, X = config.hidden_size, moe.intermediate_size, moe.num_experts
        std = config.initializer_range
        experts = functools.partial(Experts, X, std=std, dtype=dtype, rngs=rngs)
        self.router = Linear(D, X, bias=False, std=std, dtype=dtype, rngs=rngs)
        zeros = jnp.zeros((X,), jnp.float32).astype(dtype)
        self.correction = nnx.Param(zeros) if moe.correction_bias else None
        self.gate_proj, self.up_proj = experts(D, F), experts(D, F)
        self.down_proj = experts(F, D)
        width = F * moe.num_shared_experts
        self.shared = GatedMLP(config, width=width, dtype=dtype, rngs=rngs) if width else None
        self.act = ACTIVATIONS[config.hidden_act]
        self.moe = moe

    def __call__(self, x: Float[Array, "*lead D"]) -> Float[Array, "*lead D"]:
        flat = x.reshape(-1, x.shape[-1])
        chosen, weights = self.route(flat)
        X, c = self.moe.num_experts, self.moe.num_experts_per_tok
        order = jnp.argsort(chosen.reshape(-1), stable=True)  # n c
        rows = jnp.sum(jax.nn.one_hot(chosen.reshape(-1), X, dtype=jnp.int32), axis=0)
        mine = flat[order // c]
        hidden = self.act(self.gate_proj(mine, rows)) * self.up_proj(mine, rows)
        out = self.down_proj(hidden, rows)[jnp.argsort(order)]  # back in the tokens' order
        out = jnp.einsum("ncd,nc->nd", out.reshape(-1, c, flat.shape[1]), weights.astype(x.dtype))
        if self.shared is not None:
            out = out + self.shared(flat)
        return out.reshape(x.shape)

    def route(self, x: Float[Array, "n D"]) -> tuple[Int[Array, "n c"], Float[Array, "n c"]]:
        """Each token's experts and their weights, in float32."""
        moe = self.moe
        logits = x.astype(jnp.float32) @ self.router.kernel[...].astype(jnp.float32)
        score = jax.nn.softmax if moe.scoring == "softmax" else jax.nn.sigmoid
        scores = score(logits)  # n X
        choice = scores
        if self.correction is not None:
            choice = scores + self.correction[...].astype(jnp.float32)[None]
        if moe.num_groups > 1:
            choice = self._best_groups(choice)
        _, chosen = jax.lax.top_k(choice, moe.num_experts_per_tok)
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if moe.normalize:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return chosen, weights * moe.scale

    def _best_groups(self, choice: Float[Array, "n X"]) -> Float[Array, "n X"]:
        """Scores outside the best groups become the least possible."""
        moe = self.moe
        groups = choice.reshape(choice.shape[0], moe.num_groups, -1)
        best = jax.lax.top_k(groups, 1 if moe.group_score == "max" else 2)[0].sum(-1)  # n groups
        _, kept = jax.lax.top_k(best, moe.topk_groups)
        keep = jnp.any(jax.nn.one_hot(kept, moe.num_groups, dtype=jnp.bool), axis=1)
        return jnp.where(keep[..., None], groups, -jnp.inf).reshape(choice.shape)
