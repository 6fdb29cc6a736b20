"""Teacher forcing through a real cache, and what its logits lost against the dense model's.

A text goes through the cache in chunks, so every token attends to sealed pages as they are stored:
a single call would attend to itself exactly and measure nothing (methods.md 19.4). Final hidden
states are kept, not logits: they are a hundred times smaller and give the logits exactly.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from kvjax.cache import KVCache
from kvjax.config import CacheConfig
from kvjax.model import Transformer

# Shapes: B rows, S tokens of a text, T tokens of a call, D model dim.


class Losses(NamedTuple):
    """Per scored token, float64: its negative log-likelihood in nats under the cache and under the
    dense model, KL(dense || cache) of the next token's distributions, whether the best agree."""

    nll: np.ndarray
    dense_nll: np.ndarray
    kl: np.ndarray
    agree: np.ndarray


class Mean(NamedTuple):
    """A mean with its standard error over n samples."""

    mean: float
    se: float
    n: int


def mean(x: np.ndarray) -> Mean:
    """The standard error takes samples as independent."""
    x = np.asarray(x, np.float64).ravel()
    se = float(x.std(ddof=1) / np.sqrt(x.size)) if x.size > 1 else float("nan")
    return Mean(float(x.mean()), se, x.size)


def dense_states(model: Transformer, tokens: Int[np.ndarray, "B S"]) -> Float[np.ndarray, "B S D"]:
    """Normed final states without a cache, row by row."""
    graphdef, state = nnx.split(model)
    rows = [_dense(graphdef, state, jnp.asarray(row[None])) for row in tokens]
    return np.concatenate([np.asarray(x) for x in rows])


def cached_states(
    model: Transformer,
    tokens: Int[np.ndarray, "B S"],
    *,
    config: CacheConfig,
    chunk: int,
    max_len: int,
    lengths: Any = None,
) -> tuple[Float[np.ndarray, "B S D"], KVCache]:
    """The same through a cache, `chunk` tokens a call; one program whatever the lengths.

    lengths: real tokens of each row; None for all. States past them are meaningless.
    """
    B, S = tokens.shape
    lengths = np.full((B,), S) if lengths is None else np.asarray(lengths)
    graphdef, state = nnx.split(model)
    cache = model.init_cache(batch=B, max_len=max_len, config=config)
    out = np.zeros((B, -(-S // chunk) * chunk, model.config.hidden_size), np.float32)
    for at in range(0, S, chunk):
        part = np.zeros((B, chunk), np.int32)
        real = tokens[:, at : at + chunk]
        part[:, : real.shape[1]] = real
        new = jnp.asarray(np.clip(lengths - at, 0, chunk), jnp.int32)
        x, cache = step(graphdef, state, cache, jnp.asarray(part), new)
        out[:, at : at + chunk] = np.asarray(x.astype(jnp.float32))
    return out[:, :S], cache


def compare(
    model: Transformer,
    tokens: Int[np.ndarray, "B S"],
    dense: Float[np.ndarray, "B S D"],
    cached: Float[np.ndarray, "B S D"],
    *,
    first: int,
    chunk: int = 64,
) -> Losses:
    """Losses of predicting tokens from position `first` on."""
    graphdef, state = nnx.split(model)
    out = []
    for row in range(tokens.shape[0]):
        for at in range(first - 1, tokens.shape[1] - 1, chunk):
            n = min(chunk, tokens.shape[1] - 1 - at)
            pads = ((0, chunk - n), (0, 0))
            x = [jnp.asarray(np.pad(a[row, at : at + n], pads)) for a in (dense, cached)]
            target = np.pad(tokens[row, at + 1 : at + 1 + n], (0, chunk - n))
            got = _compare(graphdef, state, *x, jnp.asarray(target))
            out.append([np.asarray(a, np.float64)[:n] for a in got])
    return Losses(*(np.concatenate(parts) for parts in zip(*out, strict=True)))


def best_tokens(model: Transformer, x: Float[np.ndarray, "*lead D"]) -> Int[np.ndarray, "*lead"]:
    """The likeliest next token of each final state."""
    graphdef, state = nnx.split(model)
    return np.asarray(_best(graphdef, state, jnp.asarray(x)))


@functools.partial(jax.jit, static_argnums=0)
def _dense(graphdef, state, tokens: Int[Array, "B S"]):
    model = nnx.merge(graphdef, state)
    lengths = jnp.full((tokens.shape[0],), tokens.shape[1], jnp.int32)
    return model.hidden(tokens, None, lengths)[0].astype(jnp.float32)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def step(graphdef, state, cache, tokens, new):
    return nnx.merge(graphdef, state).hidden(tokens, cache, new)


@functools.partial(jax.jit, static_argnums=0)
def _compare(graphdef, state, dense, cached, targets):
    model = nnx.merge(graphdef, state)
    kind = model.embedding[...].dtype
    logits = [model.logits(x.astype(kind)) for x in (dense, cached)]
    p, q = (jax.nn.log_softmax(x, axis=-1) for x in logits)
    chosen = [-jnp.take_along_axis(x, targets[:, None], axis=-1)[:, 0] for x in (q, p)]
    agree = jnp.argmax(p, axis=-1) == jnp.argmax(q, axis=-1)
    return *chosen, jnp.sum(jnp.exp(p) * (p - q), axis=-1), agree


@functools.partial(jax.jit, static_argnums=0)
def _best(graphdef, state, x):
    model = nnx.merge(graphdef, state)
    return jnp.argmax(model.logits(x.astype(model.embedding[...].dtype)), axis=-1)
