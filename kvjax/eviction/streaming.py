"""StreamingLLM: the first tokens and a window of recent ones, for ever in fixed memory.

https://arxiv.org/abs/2309.17453, section 3.2. Keys are kept before RoPE and turned when they are
read, by their places in the cache: recent tokens keep their distances, and the sinks stay as near
as the full cache is long, so no position ever exceeds what the model was trained on. Pages that the
window has left behind are written over.
"""

from __future__ import annotations

import dataclasses
import re
from typing import ClassVar

from kvjax.checks import need

POSITIONS = ("cache", "text")


@dataclasses.dataclass(frozen=True)
class Streaming:
    """A token sees the first `sinks`, the `recent` before it, and itself.

    positions: "cache", the paper's; or "text": as in the text, so an unbounded stream leaves the
    trained length.
    """

    name: ClassVar[str] = "streaming"
    sinks: int = 4
    recent: int = 1020
    positions: str = "cache"

    def __post_init__(self):
        need(self.sinks >= 0, "evict sinks", "an int >= 0", self.sinks)
        need(self.recent > 0, "evict recent", "an int > 0", self.recent)
        ok = self.positions in POSITIONS
        need(ok, "evict positions", f"one of {POSITIONS}", self.positions)

    @classmethod
    def parse(cls, budget: str, **options: str) -> Streaming:
        """`4+1020`. Raises ValueError on anything else."""
        match = re.fullmatch(r"([0-9]{1,9})\+([0-9]{1,9})", budget)
        need(match is not None, "evict streaming", "SINKS+RECENT, such as 4+1020", budget)
        assert match is not None
        for option in options:
            need(option == "positions", "evict streaming", "the option positions", option)
        return cls(int(match[1]), int(match[2]), **options)

    @property
    def moves(self) -> bool:
        """Keys are turned by their places in the cache."""
        return self.positions == "cache"

    def __str__(self) -> str:
        tail = "" if self.moves else f"/positions={self.positions}"
        return f"{self.name}:{self.sinks}+{self.recent}{tail}"
