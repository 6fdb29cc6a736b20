"""Text of a running generation: tokens become text row by row, and nothing half done is shown.

Held back until it is decided: bytes of a character whose other bytes have not come, and text that a
stop string may begin with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kvjax.config import need
from kvjax.engine.generate import Generation
from kvjax.engine.programs import MAX_STEPS

#: decode steps a call when someone reads along
STREAM_STEPS = 4


class StopStrings:
    """Ends one text before the stop string that is completed first (of two, the longer)."""

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Text that is certain to come before any stop string."""
        if self.found:
            return ""
        text, self._held = self._held + text, ""
        hits = [(at + len(s), at) for s in self._stops if (at := text.find(s)) >= 0]
        if hits:
            self.found = True
            return text[: min(hits)[1]]
        certain = len(text) - self._possible_start(text)
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """What was held back for a stop string that never came whole."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = max(map(len, self._stops), default=1) - 1
        for n in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-n:]) for stop in self._stops):
                return n
        return 0


class RowText:
    """One row: its tokens come in any portions, its text goes out."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], eos_ids: Iterable[int], inside: bool):
        self._stream = tokenizer.stream(inside=inside)
        self._stops = StopStrings(stops)
        self._eos = frozenset(eos_ids)
        self._open = True
        self.text = ""
        self.tokens = 0  # used, up to the one that completed a stop string

    @property
    def stopped(self) -> bool:
        return self._stops.found

    def push(self, tokens: Iterable[int]) -> str:
        """The text that these tokens make certain. An end-of-sequence token has none."""
        fresh = ""
        for token in tokens:
            if self.stopped:
                break
            self.tokens += 1
            if token not in self._eos:
                fresh += self._stops.push(self._stream.push([token]))
        self.text += fresh
        return fresh

    def finish(self) -> str:
        """The rest, once no more tokens come. A character that never came whole is dropped."""
        if not self._open:
            return ""
        self._open = False
        fresh = self._stops.push(self._stream.finish()) + self._stops.finish()
        self.text += fresh
        return fresh


class TextGeneration:
    """A `Generation` read as text.

    `for fresh in generation` gives the new text of every row, after every few steps; `finish` what
    was held back. Rows that meet a stop string end there and cost nothing more.
    """

    def __init__(
        self,
        run: Generation,
        tokenizer: Any,
        *,
        stop: Sequence[str] = (),
        steps: int = MAX_STEPS,
        inside: bool = False,
    ):
        """stop: strings that end a row, not shown. inside: the text continues the prompt's."""
        need(all(stop), "stop", "strings that are not empty", list(stop))
        self.run = run
        self.steps = steps
        eos_ids = run.engine.eos_ids
        self.rows = [RowText(tokenizer, stop, eos_ids, inside) for _ in run.prompts]

    def __iter__(self) -> Iterator[list[str]]:
        yield self._take(self.run.tokens)
        while not self.run.done:
            yield self._take(self.run.step(self.steps))

    def finish(self) -> list[str]:
        """Ends the texts, also those that were still growing; the text that was held back."""
        return [row.finish() for row in self.rows]

    @property
    def texts(self) -> list[str]:
        return [row.text for row in self.rows]

    def _take(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        fresh = []
        for i, (row, chosen) in enumerate(zip(self.rows, tokens, strict=True)):
            was = row.stopped
            fresh.append(row.push(list(chosen)))
            if row.stopped and not was:
                self.run.stop(i, keep=row.tokens)
        return fresh
