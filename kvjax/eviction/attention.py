"""Attention that prompts pay to their own tokens, block by block: never a T x T matrix."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.eviction.base import Prompt
from pallas_kernels.softmax import soft_cap


def window_mass(prompt: Prompt, window: int) -> Float[Array, "B _ _ T"]:
    """Attention that each token gets from the row's last `window` tokens, summed over them.

    Of a joint prompt `[B, 1, K, T]`. Memory grows with window x T. Queries of rows shorter than
    the window count once.
    """
    T = prompt.k.shape[1]
    window = min(window, T)
    at = prompt.lengths[:, None] - window + jnp.arange(window)[None]  # B w
    q = jnp.take_along_axis(prompt.q, jnp.maximum(at, 0)[:, :, None, None, None], axis=1)
    return _groups(prompt, _mass(prompt, q, at))


def column_mass(prompt: Prompt, *, block: int = 128) -> Float[Array, "B _ _ T"]:
    """Attention that each token gets from all of the prompt's queries, summed (H2O 2306.14048)."""
    B, T, K, G, _ = prompt.q.shape
    block = min(block, T)
    pad = -T % block
    q = jnp.pad(prompt.q, ((0, 0), (0, pad), (0, 0), (0, 0), (0, 0)))
    q = jnp.moveaxis(q.reshape(B, -1, block, *q.shape[2:]), 1, 0)  # n B C K G H

    def add(total, xs):
        i, q_i = xs
        at = jnp.broadcast_to(i * block + jnp.arange(block)[None], (B, block))
        return total + _mass(prompt, q_i, at), None

    zero = jnp.zeros((B, K, G, T), jnp.float32)
    return _groups(prompt, jax.lax.scan(add, zero, (jnp.arange(q.shape[0]), q))[0])


def _groups(prompt: Prompt, mass: Float[Array, "B K G T"]) -> Float[Array, "B _ _ T"]:
    """Votes by those who share what stays: heads that keep one set are one group."""
    return jnp.swapaxes(mass, 1, 2) if prompt.joint else mass


def _mass(
    prompt: Prompt, q: Float[Array, "B C K G H"], at: Int[Array, "B C"]
) -> Float[Array, "B K G T"]:
    """Softmax weights of queries at positions `at`, summed over them; padding pays nothing."""
    token = jnp.arange(prompt.k.shape[1])
    scores = jnp.einsum("bckgh,btkh->bkgct", q, prompt.k, preferred_element_type=jnp.float32)
    scores = soft_cap(scores * prompt.scale, prompt.softcap)
    paying = (at >= 0) & (at < prompt.lengths[:, None])  # B C
    seen = (token[None, None] <= at[:, :, None]) & paying[:, :, None]  # B C T
    seen = seen[:, None, None]
    top = jnp.max(jnp.where(seen, scores, -1e30), axis=-1, keepdims=True)
    weights = jnp.where(seen, jnp.exp(scores - top), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return jnp.sum(weights / jnp.where(total == 0, 1.0, total), axis=3)
