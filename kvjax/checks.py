"""How every refusal reads: the field, what was expected, what came, and the fix."""

from __future__ import annotations

import difflib
from typing import Any


def need(condition: bool, field: str, expected: str, got: Any, fix: str = "") -> None:
    """Raises ValueError naming the field, what was expected, what came, and the fix."""
    if not condition:
        raise ValueError(f"{field}: expected {expected}, got {got!r}." + (f" {fix}" if fix else ""))


def near(word: str, words: Any) -> str:
    """`did you mean ...?` for a word that is not among `words`, or an empty string."""
    hits = difflib.get_close_matches(word, list(words), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(map(repr, hits))}?" if hits else ""


def positive(field: str, value: Any) -> None:
    """Needs a positive int."""
    ok = isinstance(value, int) and not isinstance(value, bool) and value > 0
    need(ok, field, "a positive int", value)


def among(field: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Needs one of some names."""
    need(value in allowed, field, f"one of {allowed}", value, near(str(value), allowed).strip())
