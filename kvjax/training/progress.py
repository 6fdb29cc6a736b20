"""What a run tells its user: a progress bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import sys
from typing import Any, Protocol

import rich.console
import rich.progress


class Report(Protocol):
    """Where a run's messages go. `every` thins the lines of a report that has no bar."""

    def note(self, text: str) -> None: ...
    def start(self, step: int, total: int) -> None: ...
    def update(self, step: int, record: dict[str, float]) -> None: ...
    def stop(self) -> None: ...


class PlainReport:
    """One line each, flushed, for files and pipes."""

    def note(self, text: str) -> None:
        print(text, flush=True)

    def start(self, step: int, total: int) -> None:
        self._total = total

    def update(self, step: int, record: dict[str, float]) -> None:
        self.note(f"step {step}/{self._total}  {line(record)}")

    def stop(self) -> None:
        pass


class BarReport:
    """A bar with the newest numbers; evaluations and notes scroll above it."""

    def __init__(self, console: rich.console.Console):
        columns = (
            rich.progress.MofNCompleteColumn(),
            rich.progress.BarColumn(bar_width=24),
            rich.progress.TimeRemainingColumn(),
            rich.progress.TextColumn("{task.description}"),
        )
        self._bar = rich.progress.Progress(*columns, console=console)

    def note(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)

    def start(self, step: int, total: int) -> None:
        self._task = self._bar.add_task("compiling", total=total, completed=step)
        self._bar.start()

    def update(self, step: int, record: dict[str, float]) -> None:
        self._bar.update(self._task, completed=step, description=line(record))
        if "heldout" in record:
            self.note(f"step {step}  {line(record)}")

    def stop(self) -> None:
        self._bar.stop()


def make_report() -> Report:
    """The report that suits standard output."""
    console = rich.console.Console(file=sys.stdout)
    return BarReport(console) if console.is_terminal else PlainReport()


_FORMATS: dict[str, Any] = {
    "loss": "loss {:.3f}",
    "heldout": "held-out {:.3f}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "lr": "lr {:.2e}",
    "grad_norm": "grad {:.2f}",
}


def line(record: dict[str, float]) -> str:
    """A record as text."""
    return "  ".join(text.format(record[key]) for key, text in _FORMATS.items() if key in record)
