"""The generation loop: prefill in a few bucket lengths, then many decode steps a call.

`Engine` fixes the limits (batch, length, cache); within them nothing compiles after warm-up.
`Generation` is one batch on its way; `kvjax.generate` is both in one call.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from kvjax.cache import KVCache, cache_report
from kvjax.config import CacheConfig, need
from kvjax.engine import programs
from kvjax.engine.sampling import Sampling, SamplingParams
from kvjax.model import Transformer, padding

#: chunk lengths that prompts are fed in; each compiles once a batch size
PREFILL_BUCKETS = (32, 128, 512)


GREEDY = SamplingParams()


@dataclasses.dataclass(frozen=True)
class Generated:
    """What came out, one entry a row.

    tokens: chosen tokens, an end-of-sequence token included. finish_reasons: "stop" (an
    end-of-sequence token or a stop string) or "length". stats: prompt and new tokens, seconds of
    prefill and decode (compilation included when it happened), cache report.
    """

    tokens: list[list[int]]
    finish_reasons: list[str]
    stats: dict[str, Any]


class Engine:
    """A model with fixed limits: up to `batch` rows of up to `max_model_len` tokens."""

    def __init__(
        self,
        model: Transformer,
        *,
        batch: int,
        max_model_len: int,
        cache_config: CacheConfig | None = None,
        eos_ids: Sequence[int] | None = None,
    ):
        limit = model.config.max_position_embeddings
        config = CacheConfig() if cache_config is None else cache_config
        if config.stream is not None and config.stream.moves:  # positions stay small for ever
            limit = 2**31 - 1
        self.limit = limit
        need(
            0 < max_model_len <= limit,
            "max_model_len",
            f"1 to {limit}, the model's max_position_embeddings",
            max_model_len,
        )
        self.model = model
        self.batch = batch
        self.max_model_len = max_model_len
        self.cache_config = config
        self.eos_ids = model.config.eos_token_ids if eos_ids is None else tuple(eos_ids)
        # padded with an id that no token has, so that their number compiles nothing new
        padded = [*self.eos_ids, *[-1] * (8 - len(self.eos_ids) % 8)]
        self.eos = jnp.asarray(padded, jnp.int32)
        self.graphdef, self.state = nnx.split(model)
        top = max(PREFILL_BUCKETS[0], max_model_len)
        if config.policy is None:
            most = top if config.stream is None else min(top, config.stream.recent)
            fitting = tuple(b for b in PREFILL_BUCKETS if b <= most)
            self.buckets = fitting or (most,)
        else:  # a policy judges a whole prompt: one call, of the next power of two
            sizes = range(PREFILL_BUCKETS[0].bit_length() - 1, next_power_of_two(top).bit_length())
            self.buckets = tuple(min(1 << n, max_model_len) for n in sizes)

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
    ) -> Generation:
        """Prefills the prompts and chooses each row's first token."""
        need(isinstance(max_tokens, int) and max_tokens > 0, "max_tokens", "an int > 0", max_tokens)
        self.check_prompts(prompts)
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        need(len(each) == len(prompts), "sampling", f"{len(prompts)} entries", len(each))
        return Generation(self, [list(p) for p in prompts], max_tokens, each)

    def check_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        """Raises ValueError on prompts that do not fit these limits."""
        need(0 < len(prompts) <= self.batch, "prompts", f"1 to {self.batch} rows", len(prompts))
        for i, prompt in enumerate(prompts):
            need(
                0 < len(prompt) < self.max_model_len,
                f"prompt {i}",
                f"1 to {self.max_model_len - 1} tokens (max_model_len is {self.max_model_len})",
                f"{len(prompt)} tokens",
                "Raise max_model_len or shorten the prompt."
                if self.max_model_len < self.limit
                else "Shorten the prompt: this is the model's limit.",
            )
            bad = [t for t in prompt if not 0 <= t < self.model.config.vocab_size]
            need(not bad, f"prompt {i}", f"ids below {self.model.config.vocab_size}", bad[:5])

    def warmup(self, buckets: Iterable[int] | None = None) -> float:
        """Compiles every program of these limits; returns the seconds it took.

        buckets: lengths of prefill chunks to compile for; None for all. No layer runs: the calls
        have no tokens and no steps.
        """
        began = time.perf_counter()
        cache, logits = self.empty()
        none = jnp.asarray(np.zeros((self.batch,), np.int32))
        for size in sorted(set(self.buckets if buckets is None else buckets)):
            tokens = jnp.asarray(np.zeros((self.batch, size), np.int32))
            if cache.policy is not None:
                cache, _ = self.empty()
            cache, logits = programs.prefill_chunk(
                self.graphdef, self.state, cache, logits, tokens, none
            )
        sampling = Sampling.of([SamplingParams()] * self.batch)
        rows = programs.first_token(logits, sampling, cache.length, none, self.eos)
        _, rows, out, _ = programs.decode(
            self.graphdef, self.state, cache, rows, sampling, self.eos, jnp.int32(0)
        )
        programs.stop_rows(rows, jnp.asarray(np.zeros((self.batch,), bool)))
        jax.block_until_ready(out)
        return time.perf_counter() - began

    def empty(self) -> tuple[KVCache, Array]:
        """A cache without tokens, and the logits `[B, V]` that prefill writes over."""
        cache = self.model.init_cache(
            batch=self.batch, max_len=self.max_model_len, config=self.cache_config
        )
        return cache, jnp.zeros((self.batch, self.model.config.vocab_size), jnp.float32)

    def room(self, length: int) -> int:
        """Tokens that can follow a prompt of this length."""
        room, policy = self.max_model_len - length, self.cache_config.policy
        if policy is None or policy.decodes:
            return room
        return min(room, self.cache_config.max_new + 1)  # the last token chosen is never written

    def chunks(self, longest: int) -> list[int]:
        """Bucket lengths that cover a prompt: the largest as long as it fits, then the rest."""
        out: list[int] = []
        while longest > 0:
            out.append(next((b for b in self.buckets if b >= longest), self.buckets[-1]))
            longest -= out[-1]
        return out


class Generation:
    """One batch being generated. `step` runs decode steps; `tokens` holds what was chosen."""

    def __init__(
        self,
        engine: Engine,
        prompts: list[list[int]],
        max_tokens: int,
        sampling: list[SamplingParams],
    ):
        self.engine = engine
        self.prompts = prompts
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self._halted = [False] * len(prompts)
        pad = engine.batch - len(prompts)
        self.sampling = Sampling.of(sampling + [SamplingParams()] * pad)
        room = [engine.room(len(p)) for p in prompts]
        budget = [min(max_tokens, n) for n in room] + [0] * pad
        self.decode_seconds = 0.0
        self.decode_steps = 0
        began = time.perf_counter()
        self.cache, logits = engine.empty()
        logits = self._prefill(prompts + [[]] * pad, logits)
        self.rows = programs.first_token(
            logits, self.sampling, self.cache.length, jnp.asarray(budget, jnp.int32), engine.eos
        )
        for row, token in enumerate(np.asarray(self.rows.token)[: len(prompts)]):
            self.tokens[row].append(int(token))
        self.prefill_seconds = time.perf_counter() - began

    @property
    def done(self) -> bool:
        return all(self.done_rows())

    def done_rows(self) -> list[bool]:
        """Which rows choose no more tokens."""
        return np.asarray(self.rows.done)[: len(self.prompts)].tolist()

    def step(self, steps: int = programs.MAX_STEPS) -> list[list[int]]:
        """Runs up to `steps` decode steps; returns the tokens each row chose in them."""
        need(1 <= steps <= programs.MAX_STEPS, "steps", f"1 to {programs.MAX_STEPS}", steps)
        began = time.perf_counter()
        engine = self.engine
        self.cache, self.rows, out, ran = programs.decode(
            engine.graphdef,
            engine.state,
            self.cache,
            self.rows,
            self.sampling,
            engine.eos,
            jnp.int32(steps),
        )
        fresh = [[int(t) for t in row if t >= 0] for row in np.asarray(out)[: len(self.prompts)]]
        self.decode_seconds += time.perf_counter() - began
        self.decode_steps += int(ran)
        for row, chosen in enumerate(fresh):
            self.tokens[row].extend(chosen)
        return fresh

    def stop(self, row: int, *, keep: int | None = None) -> None:
        """Ends a row for a reason that only the caller sees; it reports "stop".

        keep: how many of its tokens belong to the answer; a call may have run past its end.
        """
        self._halted[row] = True
        del self.tokens[row][len(self.tokens[row]) if keep is None else keep :]
        which = np.zeros((self.engine.batch,), bool)
        which[row] = True
        self.rows = programs.stop_rows(self.rows, jnp.asarray(which))

    def result(self) -> Generated:
        """What was generated so far."""
        stopped = np.asarray(self.rows.stopped)
        reasons = [
            "stop" if stopped[row] or self._halted[row] else "length"
            for row in range(len(self.prompts))
        ]
        stats = {
            "prompt_tokens": [len(p) for p in self.prompts],
            "new_tokens": [len(t) for t in self.tokens],
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds": self.decode_seconds,
            "decode_steps": self.decode_steps,
            "cache": cache_report(self.cache),
        }
        return Generated(self.tokens, reasons, stats)

    def _prefill(self, prompts: list[list[int]], logits: Array) -> Array:
        engine, at = self.engine, 0
        for size in engine.chunks(max(map(len, prompts))):
            parts = [p[at : at + size] for p in prompts]
            tokens = np.zeros((engine.batch, size), np.int32)
            for row, part in enumerate(parts):
                tokens[row, : len(part)] = part
            new = jnp.asarray([len(p) for p in parts], jnp.int32)
            self.cache, logits = programs.prefill_chunk(
                engine.graphdef, engine.state, self.cache, logits, jnp.asarray(tokens), new
            )
            at += size
        return logits


def generate(
    model: Transformer,
    tokens: Any,
    lengths: Any = None,
    mask: Any = None,
    *,
    cache_config: CacheConfig | None = None,
    max_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    eos_ids: Sequence[int] | None = None,
    max_model_len: int | None = None,
) -> Generated:
    """Generates from a batch of prompts.

    tokens: `[B, T]` ids, padded on the right (give `lengths`) or on either side (give `mask`, True
    for real tokens), or a list of rows of any lengths. max_model_len: the cache's capacity; None
    takes the next power of two that holds prompt and answer. eos_ids: None for the model's own.
    Raises ValueError on prompts that do not fit, and on what looks like padding without lengths.
    """
    prompts = _prompts(model, tokens, lengths, mask)
    if max_model_len is None:
        max_model_len = default_max_model_len(model, prompts, max_tokens, cache_config)
    sampling = [
        SamplingParams(temperature, top_k, top_p, min_p, (seed + row) % 2**32)
        for row in range(len(prompts))
    ]
    engine = Engine(
        model,
        batch=next_power_of_two(len(prompts)),
        max_model_len=max_model_len,
        cache_config=with_room(cache_config, max_tokens),
        eos_ids=eos_ids,
    )
    run = engine.start(prompts, max_tokens=max_tokens, sampling=sampling)
    while not run.done:
        run.step()
    return run.result()


def with_room(config: CacheConfig | None, max_tokens: int) -> CacheConfig | None:
    """The config with room for an answer of `max_tokens`, where eviction needs to know."""
    if config is None or config.policy is None:
        return config
    return dataclasses.replace(config, max_new=next_power_of_two(max_tokens))


def default_max_model_len(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    config: CacheConfig | None = None,
) -> int:
    """The power of two, at least 512, that holds the longest prompt and its answer, within the
    model's limit. Few sizes: each compiles once."""
    longest = max(map(len, prompts), default=0) + max_tokens
    room = max(512, next_power_of_two(longest))
    if config is not None and config.stream is not None and config.stream.moves:
        return room  # a stream does not end at the trained length
    return min(model.config.max_position_embeddings, room)


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least n (and 1)."""
    return 1 << max(0, n - 1).bit_length()


def _prompts(model: Transformer, tokens: Any, lengths: Any, mask: Any) -> list[list[int]]:
    if isinstance(tokens, (list, tuple)) and tokens and not np.isscalar(tokens[0]):
        ragged = len({len(row) for row in tokens}) > 1
        if ragged or (lengths is None and mask is None):
            need(
                lengths is None and mask is None, "lengths, mask", "None with ragged rows", "given"
            )
            return [[int(t) for t in row] for row in tokens]
    array = np.asarray(jax.device_get(tokens))
    need(
        array.ndim == 2 and np.issubdtype(array.dtype, np.integer),
        "tokens",
        "integers of shape [B, T], or a list of rows",
        f"{array.dtype} of shape {array.shape}",
    )
    B, T = array.shape
    need(lengths is None or mask is None, "lengths, mask", "one of the two", "both")
    left = np.zeros((B,), np.int32)
    if mask is not None:
        count, left = padding(mask, (B, T))
    elif lengths is not None:
        count = np.asarray(lengths)
        need(
            count.shape == (B,) and bool(((count > 0) & (count <= T)).all()),
            "lengths",
            f"{B} ints from 1 to {T}",
            count.tolist(),
        )
    else:
        _refuse_hidden_padding(model, array)
        count = np.full((B,), T)
    return [array[b, left[b] : left[b] + count[b]].tolist() for b in range(B)]


def _refuse_hidden_padding(model: Transformer, array: np.ndarray) -> None:
    pad = model.config.pad_token_id
    if pad is None or array.shape[0] == 1:
        return
    ends = (array[:, 0] == pad) | (array[:, -1] == pad)
    need(
        not ends.any(),
        "lengths, mask",
        f"one of them, as rows {np.flatnonzero(ends).tolist()} begin or end with"
        f" pad_token_id={pad}",
        "neither",
        "Pass lengths= (right padding) or mask= (either side).",
    )
