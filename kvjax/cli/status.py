"""Lines on stderr about what is going on; stdout belongs to the result."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator


def say(text: str) -> None:
    """One line."""
    print(f"kvjax: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def stage(text: str) -> Iterator[None]:
    """A line that is there while the work is going on, and ends with the seconds it took."""
    print(f"kvjax: {text} ... ", end="", file=sys.stderr, flush=True)
    began = time.perf_counter()
    try:
        yield
    except BaseException:
        print(file=sys.stderr)
        raise
    print(f"{time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)


def rate(tokens: int, seconds: float) -> str:
    """Tokens a second, with three digits or so."""
    value = tokens / seconds if seconds > 0 else 0.0
    return f"{value:.0f} tokens/s" if value >= 100 else f"{value:.1f} tokens/s"
