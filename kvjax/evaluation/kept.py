"""Which tokens of a prompt a policy keeps, layer by layer and head by head."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int

from kvjax.attending import attending
from kvjax.cache.kv_cache import Kept
from kvjax.config import CacheConfig, need
from kvjax.model import Transformer


def kept(
    model: Transformer,
    tokens: Int[np.ndarray, "B T"],
    config: CacheConfig,
    *,
    lengths: Int[np.ndarray, "B"] | None = None,
) -> Int[np.ndarray, "O B K C"]:
    """Places in the text of the tokens that stay, for each of the O layers that own keys, in order;
    T where a layer keeps fewer than C. Raises ValueError without a prompt policy in `config`."""
    need(config.policy is not None, "evict", "a policy that judges prompts", config.evict)
    B, T = tokens.shape
    lengths = np.full((B,), T, np.int32) if lengths is None else np.asarray(lengths, np.int32)
    cache = model.init_cache(batch=B, max_len=T + config.max_new, config=config)
    graphdef, state = nnx.split(model)
    return np.asarray(_kept(graphdef, state, cache, jnp.asarray(tokens), jnp.asarray(lengths)))


@functools.partial(jax.jit, static_argnums=0)
def _kept(graphdef, state, cache, tokens, lengths):
    model = nnx.merge(graphdef, state)
    ropes = model.ropes(jnp.zeros_like(lengths), tokens.shape[1], lengths)
    attend = attending(model.config, lengths, cache)
    _, made = model.stack(model.embed(tokens), ropes, attend)
    assert isinstance(made.k, Kept)
    return made.k.at
