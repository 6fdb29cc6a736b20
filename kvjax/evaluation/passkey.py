"""Passkey and needle retrieval: five digits hidden in filler (a passkey) or in a text (a needle),
asked for at its end.

The answer is right when every digit is the model's greedy choice. Greedy decoding gives the digits
exactly when each is the best token after those before it, so the digits are fed as if chosen and
each choice is compared: the same verdict with no program of its own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from kvjax.config import CacheConfig, need
from kvjax.evaluation.reading import best_tokens, cached_states
from kvjax.model import Transformer

INTRO = "There is a pass key hidden in this text. Find it and remember it.\n"
FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
)
NEEDLE = "\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
QUESTION = "\nWhat is the pass key? The pass key is {key}"


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """tokens: the prompt and the answer; answer: how many of the last ones are the digits;
    question: of the last ones, how many are the question and the digits; needle: hidden in a text
    that does not repeat itself."""

    length: int
    depth: float
    key: str
    tokens: Int[np.ndarray, "S"]
    answer: int
    question: int
    needle: bool = False


def cases(
    tokenizer: Any,
    *,
    lengths: tuple[int, ...],
    depths: tuple[float, ...],
    keys: int,
    seed: int = 0,
    haystack: Int[np.ndarray, "N"] | None = None,
) -> list[Case]:
    """`keys` cases for each length (in tokens, the answer included) and depth (0 begin, 1 end).
    haystack: a text at least as long, of which each case has a part of its own; None: filler.
    Raises ValueError on depths out of range and on what is too short."""
    for depth in depths:
        need(0 <= depth <= 1, "passkey depth", "0 (begin) to 1 (end)", depth)
    rng = np.random.RandomState(seed)
    return [
        _case(
            tokenizer, length, depth, f"{rng.randint(10000, 100000)}", _part(haystack, length, rng)
        )
        for length in lengths
        for depth in depths
        for _ in range(keys)
    ]


def _part(
    haystack: Int[np.ndarray, "N"] | None, length: int, rng: np.random.RandomState
) -> list[int] | None:
    if haystack is None:
        return None
    need(haystack.size >= length, "haystack", f"at least {length} tokens", haystack.size)
    at = rng.randint(haystack.size - length + 1)
    return haystack[at : at + length].tolist()


def _case(tokenizer: Any, length: int, depth: float, key: str, haystack: list[int] | None) -> Case:
    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text))

    start, needle, end = ids(INTRO), ids(NEEDLE.format(key=key)), ids(QUESTION.format(key=key))
    open_end = ids(QUESTION.format(key=""))
    answer = len(end) - next(
        (i for i, (a, b) in enumerate(zip(end, open_end, strict=False)) if a != b), len(open_end)
    )
    room = length - len(start) - len(needle) - len(end)
    fixed = length - room
    need(room >= 0, "passkey length", f"at least {fixed} tokens", length)
    filler = ids(FILLER) if haystack is None else haystack
    filler = (filler * (room // len(filler) + 1))[:room]
    at = round(depth * room)
    tokens = [*start, *filler[:at], *needle, *filler[at:], *end]
    return Case(
        length, depth, key, np.asarray(tokens, np.int32), answer, len(end), haystack is not None
    )


def score(
    model: Transformer,
    given: list[Case],
    *,
    config: CacheConfig,
    chunk: int,
    max_len: int,
    batch: int,
) -> list[bool]:
    """Which cases are answered exactly, read through a cache of this config."""
    order = sorted(range(len(given)), key=lambda i: given[i].length)
    right = [False] * len(given)
    for first in range(0, len(order), batch):
        some = order[first : first + batch]
        lengths = [given[i].tokens.size for i in some] + [0] * (batch - len(some))
        tokens = np.zeros((batch, max(lengths)), np.int32)
        for row, i in enumerate(some):
            tokens[row, : lengths[row]] = given[i].tokens
        x, _ = cached_states(
            model, tokens, config=config, chunk=chunk, max_len=max_len, lengths=lengths
        )
        for i, ok in zip(some, verdicts(model, [given[i] for i in some], x), strict=True):
            right[i] = ok
    return right


def verdicts(
    model: Transformer, given: list[Case], states: Float[np.ndarray, "B S D"]
) -> list[bool]:
    """Whose digits are the model's choices, from the final states of each case's tokens, a row
    each; rows past the cases are not looked at."""
    right = []
    for case, x in zip(given, states, strict=False):
        n = case.tokens.size
        chosen = best_tokens(model, x[n - case.answer - 1 : n - 1])
        right.append(bool(np.array_equal(chosen, case.tokens[n - case.answer :])))
    return right


def by_cell(given: list[Case], right: list[bool]) -> list[dict[str, Any]]:
    """Accuracy of each (length, depth)."""
    cells: dict[tuple[int, float], list[bool]] = {}
    for case, ok in zip(given, right, strict=True):
        cells.setdefault((case.length, case.depth), []).append(ok)
    return [
        {"length": length, "depth": depth, "right": sum(ok), "n": len(ok)}
        for (length, depth), ok in cells.items()
    ]
