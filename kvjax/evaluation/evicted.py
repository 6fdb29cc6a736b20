"""What eviction costs: passkeys and needles asked inside and outside of the compressed prompt, and
how well the text goes on after it.

Inside, the question is the end of the prompt that the policy judges; outside, the context is judged
before the question is known, and the question follows (kvpress's protocol). Continuation: the first
part of a window is the prompt, the rest is teacher-forced through the cache.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from kvjax.cache import KVCache, cache_report
from kvjax.config import CacheConfig
from kvjax.evaluation import passkey
from kvjax.evaluation.quality import quality, share
from kvjax.evaluation.reading import compare, dense_states, step
from kvjax.model import Transformer
from kvjax.plan import cache_bytes


@dataclasses.dataclass(frozen=True, eq=False)
class EvictTask:
    """tokens `[B, S]`: windows whose first `prompt` tokens are judged; cases: passkeys and
    needles."""

    tokens: Int[np.ndarray, "B S"]
    prompt: int
    cases: list[passkey.Case]


class EvictBench:
    """A model on a task: `row(config)` measures one policy and codec."""

    def __init__(self, model: Transformer, task: EvictTask):
        self.model, self.task = model, task
        self.dense = dense_states(model, task.tokens)

    def row(self, config: CacheConfig) -> dict[str, Any]:
        """What is right inside and outside, and the losses of the continuation."""
        began, task = time.perf_counter(), self.task
        prompts = np.full((task.tokens.shape[0],), task.prompt)
        states, cache = states_after(self.model, task.tokens, prompts, config=config)
        first = task.prompt + 1  # the first token that attends to what is left predicts it
        losses = compare(self.model, task.tokens, self.dense, states, first=first)
        report = cache_report(cache)
        return {
            "evict": config.evict,
            "codec": config.k if config.k == config.v else f"{config.k}+{config.v}",
            **self._found(config),
            **quality(losses),
            "constants": dataclasses.asdict(config.policy or config.stream),  # type: ignore[arg-type]
            "rows": [group["rows"][0] for group in report["codecs"]],
            "layers": [group["layers"] for group in report["codecs"]],
            "total_bytes": report["total_bytes"],
            "ratio": report["ratio"],
            "prompt_ratio": self._prompt_ratio(config),
            "seconds": time.perf_counter() - began,
        }

    def _prompt_ratio(self, config: CacheConfig) -> float:
        """How many times smaller the cache of the prompt alone is than its keys and values as one
        dense array."""
        model, prompt, dtype = self.model.config, self.task.prompt, self.model.dtype
        alone = dataclasses.replace(config, max_new=1)
        small = cache_bytes(model, batch=1, max_len=prompt, config=alone, dtype=dtype)
        heads, k_dim, v_dim = model.cache_shape
        dense = len(model.owners) * heads * (k_dim + v_dim) * prompt * jnp.dtype(dtype).itemsize
        return dense / sum(small.values())

    def _found(self, config: CacheConfig) -> dict[str, Any]:
        """Which passkeys and needles are right, with the question in the judged prompt and after
        it: all in one batch."""
        cases = self.task.cases
        judged = [case.tokens.size - case.answer for case in cases]  # inside
        judged += [case.tokens.size - case.question for case in cases]
        both = self._right([*cases, *cases], np.asarray(judged), config)
        out = {}
        for kind, needle in (("passkey", False), ("needle", True)):
            for place, right in (("inside", both[: len(cases)]), ("outside", both[len(cases) :])):
                mine = [i for i, case in enumerate(cases) if case.needle == needle]
                ok = [right[i] for i in mine]
                cells = passkey.by_cell([cases[i] for i in mine], ok)
                out[f"{kind}_{place}"] = share(ok) | {"cells": cells}
        return out

    def _right(
        self, cases: list[passkey.Case], prompts: Int[np.ndarray, "B"], config: CacheConfig
    ) -> list[bool]:
        """Whose digits are the model's choices after its first tokens, so many, were judged."""
        if not cases:
            return []
        lengths = np.asarray([case.tokens.size for case in cases])
        tokens = np.zeros((len(cases), lengths.max()), np.int32)
        for row, case in enumerate(cases):
            tokens[row, : case.tokens.size] = case.tokens
        states, _ = states_after(self.model, tokens, prompts, config=config, lengths=lengths)
        return passkey.verdicts(self.model, cases, states)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of `EvictBench` as a Markdown table, a line a policy and codec."""
    kinds = ("passkey_inside", "needle_inside", "passkey_outside", "needle_outside")
    found = [kind for kind in kinds if rows[0][kind]["n"]]
    heads = ["evict", "codec", "tokens left", "prompt smaller", "all"]
    heads += [kind.replace("_", " ") for kind in found] + ["perplexity", "KL"]
    lines = [heads, ["---"] * len(heads)]
    for row in rows:
        left = row["rows"] if len(set(row["rows"])) > 1 else row["rows"][:1]
        lines.append([
            *(row["evict"], row["codec"], ", ".join(map(str, left))),
            *(f"{row['prompt_ratio']:.2f}", f"{row['ratio']:.2f}"),
            *(_by_depth(row[kind]) for kind in found),
            *(f"{row['perplexity']:.2f}", f"{row['kl']:.3f} ± {row['kl_se']:.3f}"),
        ])  # fmt: skip
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _by_depth(found: Mapping[str, Any]) -> str:
    """Right of n, and of each length and depth."""
    cells = [cell["right"] for cell in found["cells"]]
    return f"{sum(cells)}/{found['n']} ({' '.join(map(str, cells))})"


def states_after(
    model: Transformer,
    tokens: Int[np.ndarray, "B S"],
    prompts: Int[np.ndarray, "B"],
    *,
    config: CacheConfig,
    lengths: Any = None,
    chunk: int = 32,
) -> tuple[Float[np.ndarray, "B S D"], KVCache]:
    """Final states of every token: those of each row's prompt densely, of the rest through what
    eviction left of it. A stream has no prompt: all of its tokens go through the cache. lengths:
    real tokens of each row; None: all. chunk: tokens of a call, one where h2o decodes."""
    B, S = tokens.shape
    lengths = np.full((B,), S) if lengths is None else np.asarray(lengths)
    graphdef, state = nnx.split(model)
    config = dataclasses.replace(config, max_new=int((lengths - prompts).max()))
    cache = model.init_cache(batch=B, max_len=S, config=config)
    out = np.zeros((B, S, model.config.hidden_size), np.float32)
    if cache.pending:
        new = jnp.asarray(prompts, jnp.int32)
        x, cache = step(graphdef, state, cache, jnp.asarray(tokens), new)
        out = np.array(x.astype(jnp.float32))
    else:
        prompts = np.zeros_like(prompts)
    rest, chunk = int((lengths - prompts).max()), min(chunk, cache.longest_call or chunk)
    for at in range(0, rest, chunk):
        new = np.clip(lengths - prompts - at, 0, chunk)
        where = np.minimum(prompts[:, None] + at + np.arange(chunk)[None], S - 1)
        part = np.take_along_axis(tokens, where, axis=1)
        x, cache = step(graphdef, state, cache, jnp.asarray(part), jnp.asarray(new, jnp.int32))
        got = np.asarray(x.astype(jnp.float32))
        for row in range(B):
            out[row, where[row, : new[row]]] = got[row, : new[row]]
    return out, cache
