"""The three compiled programs of generation: prefill a chunk, choose the first token, decode.

Each takes the split model (its graph definition is static) and donates the cache. Shapes depend on
the batch, the chunk bucket and the cache only; everything that differs between requests is data.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import KVCache
from kvjax.engine.sampling import Sampling, sample

#: decode steps that one call can run; the number it does run is data
MAX_STEPS = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Where each row of the batch stands."""

    token: Int[Array, "B"]  # chosen, not yet in the cache
    done: Bool[Array, "B"]
    budget: Int[Array, "B"]  # tokens it may still choose
    stopped: Bool[Array, "B"]  # by an end-of-sequence token


@functools.partial(jax.jit, static_argnums=0, donate_argnames=("cache", "logits"))
def prefill_chunk(
    graphdef: Any,
    state: Any,
    cache: KVCache,
    logits: Float[Array, "B V"],
    tokens: Int[Array, "B T"],
    new: Int[Array, "B"],
) -> tuple[KVCache, Float[Array, "B V"]]:
    """Appends `new[b]` tokens to each row; `logits` become those after its last real token."""
    model = nnx.merge(graphdef, state)
    x, cache = model.hidden(tokens, cache, new, at=jnp.maximum(new - 1, 0)[:, None])
    return cache, jnp.where((new > 0)[:, None], model.logits(x[:, 0]), logits)


@jax.jit
def first_token(
    logits: Float[Array, "B V"],
    sampling: Sampling,
    length: Int[Array, "B"],
    budget: Int[Array, "B"],
    eos: Int[Array, "E"],
) -> Rows:
    """The state after prefill: one token chosen for every row with a budget."""
    empty = budget <= 0
    rows = Rows(jnp.zeros_like(length), empty, budget, jnp.zeros_like(empty))
    return _choose(rows, logits, sampling, length, eos)


@functools.partial(jax.jit, static_argnums=0, donate_argnames=("cache", "rows"))
def decode(
    graphdef: Any,
    state: Any,
    cache: KVCache,
    rows: Rows,
    sampling: Sampling,
    eos: Int[Array, "E"],
    steps: Int[Array, ""],
) -> tuple[KVCache, Rows, Int[Array, "B MAX_STEPS"], Int[Array, ""]]:
    """Up to `steps` decode steps in one program; ends early when every row is done.

    Returns the chosen tokens, -1 where a row chose none, and the number of steps run.
    """
    model = nnx.merge(graphdef, state)

    def more(carry):
        i, _, rows, _ = carry
        return (i < steps) & ~jnp.all(rows.done)

    def step(carry):
        i, cache, rows, out = carry
        x, cache = model.hidden(rows.token[:, None], cache, (~rows.done).astype(jnp.int32))
        was_done = rows.done
        rows = _choose(rows, model.logits(x[:, 0]), sampling, cache.length, eos)
        out = out.at[:, i].set(jnp.where(was_done, -1, rows.token))
        return i + 1, cache, rows, out

    out = jnp.full((rows.token.shape[0], MAX_STEPS), -1, jnp.int32)
    ran, cache, rows, out = jax.lax.while_loop(more, step, (jnp.int32(0), cache, rows, out))
    return cache, rows, out, ran


@functools.partial(jax.jit, donate_argnums=0)
def stop_rows(rows: Rows, which: Bool[Array, "B"]) -> Rows:
    """Marks rows as done, for a stop that only the caller can see (a stop string)."""
    return dataclasses.replace(rows, done=rows.done | which)


def _choose(rows: Rows, logits: Array, sampling: Sampling, length: Array, eos: Array) -> Rows:
    token = jnp.where(rows.done, rows.token, sample(logits, sampling, length))
    budget = jnp.where(rows.done, rows.budget, rows.budget - 1)
    ended = ~rows.done & jnp.any(token[:, None] == eos[None], axis=1)
    return Rows(token, rows.done | ended | (budget <= 0), budget, rows.stopped | ended)
