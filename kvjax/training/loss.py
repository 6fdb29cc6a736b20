"""Next-token cross-entropy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.config import need
from kvjax.model import Transformer

# Shapes: B batch, T tokens that are predicted, T1 = T + 1, C chunk, D model dim, V vocabulary.


def next_token_loss(
    model: Transformer,
    tokens: Int[Array, "B T1"],
    mask: Bool[Array, "B T"] | None = None,
    *,
    chunk: int | None = None,
    z_loss: float = 0.0,
    remat: bool = False,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(loss to minimise, mean cross-entropy in nats a token), both float32. For use inside `jit`.

    mask: which targets `tokens[:, 1:]` count; all by default. chunk: tokens of each row whose
    logits live at once (a divisor of T): `[B, C, V]` instead of `[B, T, V]`, computed again in the
    backward pass; the batch axis stays apart, so that it can be sharded. z_loss: weight of
    log(Z)^2 (PaLM, 2204.02311, section 5), which keeps logits from drifting. remat: recompute
    layers in the backward pass.
    """
    B, T = tokens.shape[0], tokens.shape[1] - 1
    x, _ = model.hidden(tokens[:, :-1], None, jnp.full((B,), T, jnp.int32), remat=remat)
    targets = tokens[:, 1:]
    weight = jnp.ones((B, T), jnp.float32) if mask is None else mask.astype(jnp.float32)

    def sums(part) -> tuple[Array, Array]:
        x, targets, weight = part
        logits = model.logits(x)  # B C V
        log_z = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jnp.sum((log_z - chosen) * weight), jnp.sum(log_z**2 * weight)

    parts = (x, targets, weight)
    if chunk is None or chunk >= T:
        nll, z = sums(parts)
    else:
        need(T % chunk == 0, "training.loss_chunk", f"a divisor of the context {T}", chunk)
        parts = jax.tree.map(lambda a: _chunks(a, chunk), parts)
        nll, z = jax.tree.map(jnp.sum, jax.lax.map(jax.checkpoint(sums), parts))
    count = jnp.maximum(jnp.sum(weight), 1.0)
    return (nll + z_loss * z) / count, nll / count


def _chunks(x: Array, chunk: int) -> Array:
    x = x.reshape(x.shape[0], -1, chunk, *x.shape[2:])  # B T/C C ...
    return jnp.moveaxis(x, 1, 0)
