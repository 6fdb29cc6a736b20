"""What a policy is: a pure scorer of a prompt's tokens, and a budget of how many stay.

Prompt policies run once, inside prefill: each layer attends densely, scores its own keys and hands
only the survivors to the cache, so the full keys of more than one layer never exist. Logits of the
prompt are those of the dense model; eviction shows from the next step on. Scores reduce over a KV
head's query group, so each KV head keeps tokens of its own. With latent attention all heads share
what is cached, so they keep one set: votes are taken together, other scores averaged over heads.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
import re
from typing import Any, ClassVar, NamedTuple, Self

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.checks import need

# Shapes: B batch, T prompt tokens (padded on the right), K KV heads, G query heads a KV head,
# H head dim, C tokens that stay.


class Prompt(NamedTuple):
    """What one layer knows of a prompt."""

    q: Float[Array, "B T K G H"]  # as they meet the keys: after RoPE
    k: Float[Array, "B T K H"]
    v: Float[Array, "B T K H"]
    lengths: Int[Array, "B"]  # real tokens of each row
    rope: tuple[Float[Array, "B T half"], Float[Array, "B T half"]] | None  # cos, sin of each token
    scale: float
    softcap: float | None
    joint: bool = False  # the heads share what stays (MLA: K heads of one query, expanded)

    @property
    def real(self) -> Bool[Array, "B T"]:
        return jnp.arange(self.k.shape[1])[None] < self.lengths[:, None]


#: of budgets in bytes
UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "GB": 10**9, "MB": 10**6, "kB": 10**3, "B": 1}


class Budget(NamedTuple):
    """How much of a prompt stays: a number of tokens, a share of its length, or what makes the
    whole cache of a row no larger than some bytes (`kvjax.cache.build` finds the tokens)."""

    tokens: int | None = None
    share: float | None = None
    bytes: int | None = None

    @classmethod
    def parse(cls, text: str) -> Budget:
        """`1024` tokens, `25%` or `64MiB`. Raises ValueError on anything else."""
        if text.endswith("%"):
            try:
                share = float(text[:-1]) / 100
            except ValueError:
                share = math.nan
            need(0 < share <= 1, "evict", "a share from 0% (excluded) to 100%", text)
            return cls(share=share)
        size = re.fullmatch(rf"([0-9]{{1,12}}(?:\.[0-9]{{1,3}})?)({'|'.join(UNITS)})", text)
        if size is not None:
            amount = int(float(size[1]) * UNITS[size[2]])
            need(amount > 0, "evict", "a budget of at least one byte", text)
            return cls(bytes=amount)
        ok = re.fullmatch(r"[0-9]{1,9}", text) is not None and int(text) > 0
        need(ok, "evict", "a budget as tokens (1024), 25% or bytes (64MiB)", text)
        return cls(tokens=int(text))

    def __str__(self) -> str:
        if self.bytes is not None:
            unit = next(name for name, size in UNITS.items() if self.bytes % size == 0)
            return f"{self.bytes // UNITS[unit]}{unit}"
        return str(self.tokens) if self.share is None else f"{100 * self.share:g}%"


@dataclasses.dataclass(frozen=True)
class Policy(abc.ABC):
    """Base of all prompt policies: frozen and hashable, so static under `jit`.

    sinks: first tokens that always stay; window: last tokens that always stay.
    """

    name: ClassVar[str]
    #: scores depend on the queries at the prompt's end: the cache is no good for another question
    query_aware: ClassVar[bool] = False
    budget: Budget
    sinks: int = 4
    window: int = 32

    def __post_init__(self):
        for field in ("sinks", "window"):
            value = getattr(self, field)
            need(isinstance(value, int) and value >= 0, f"evict {field}", "an int >= 0", value)
        need(
            self.budget.tokens is None or self.budget.tokens >= self.protected + 1,
            f"evict {self.name} budget",
            f"at least {self.protected + 1} tokens: {self.sinks} sinks, the last {self.window} and"
            " one more",
            self.budget.tokens,
        )

    @property
    def protected(self) -> int:
        """Tokens that stay whatever their scores."""
        return self.sinks + self.window

    @property
    def least(self) -> int:
        """Tokens of the smallest budget."""
        return self.protected + 1

    @abc.abstractmethod
    def scores(self, prompt: Prompt) -> Float[Array, "B K T"]:
        """How much each token matters to each KV head: higher stays. Padding may score anything."""

    @property
    def decodes(self) -> bool:
        """Evicts while decoding too: single tokens, so only from exact slots."""
        return False

    def of_tokens(self, tokens: int) -> Self:
        """This policy with its budget, in bytes or a share of the cache, known in tokens."""
        return dataclasses.replace(self, budget=self.budget._replace(tokens=tokens))

    def factors(self, layers: int) -> tuple[float, ...]:
        """Each layer's share of the mean budget; their mean is at most 1."""
        return (1.0,) * layers

    def kept(self, length: int, factor: float = 1.0) -> int:
        """Tokens of a prompt of this length that stay in a layer.

        Never more than the budget, save that a prompt always keeps its protected tokens; a layer's
        budget no smaller than the prompt keeps all. Grows with the length, so that what the
        longest prompt needs is room for any.
        """
        total = self.budget.tokens
        if total is None:
            assert self.budget.share is not None
            total = math.ceil(self.budget.share * length - 1e-9)  # bytes have become tokens
        if (factor >= 1 and total >= length) or self.budget.share == 1:
            return length
        mean = max(total, self.protected + 1)
        return min(length, self.protected + math.floor(factor * (mean - self.protected) + 1e-9))

    def keep(
        self, lengths: Int[Array, "B"], *, longest: int, factor: float = 1.0
    ) -> Int[Array, "B"]:
        """`kept` of traced lengths, from a table of all up to `longest`."""
        return jnp.asarray(_kept_table(self, longest, factor))[lengths]


@functools.lru_cache(maxsize=64)  # every layer asks, and it has an entry for each length
def _kept_table(policy: Policy, longest: int, factor: float) -> np.ndarray:
    return np.asarray([policy.kept(n, factor) for n in range(longest + 1)], np.int32)


def describe(policy: Policy) -> str:
    """`name:budget`, with every constant that is not the default."""
    extra = [
        f"/{f.name}={getattr(policy, f.name):g}"
        if isinstance(getattr(policy, f.name), float)
        else f"/{f.name}={getattr(policy, f.name)}"
        for f in dataclasses.fields(policy)
        if f.name != "budget" and getattr(policy, f.name) != f.default
    ]
    return f"{policy.name}:{policy.budget}{''.join(extra)}"


def select(
    policy: Any,
    scores: Float[Array, "B K T"],
    lengths: Int[Array, "B"],
    keep: Int[Array, "B"],
    most: int,
) -> Int[Array, "B K C"]:
    """The tokens that stay: the best `keep[b]` of each row and head, in the order of the text.

    most: C, the static size; places past `keep[b]` hold T. The first `sinks` and last `window`
    tokens of each row come first whatever their scores; ties go to the earlier token.
    """
    T = scores.shape[2]
    token = jnp.arange(T)[None]
    real = token < lengths[:, None]
    safe = (token < policy.sinks) | (token >= lengths[:, None] - policy.window)
    scores = jnp.nan_to_num(scores.astype(jnp.float32), nan=-jnp.inf)
    scores = jnp.clip(scores, -1e30, 1e30)
    scores = jnp.where((safe & real)[:, None], jnp.inf, scores)
    scores = jnp.where(real[:, None], scores, -jnp.inf)
    best = jnp.argsort(scores, axis=-1, descending=True, stable=True)[..., :most]  # B K C
    chosen = jnp.arange(most)[None, None] < keep[:, None, None]
    return jnp.sort(jnp.where(chosen, best, T), axis=-1)
