"""Which command, and how it ends: 0 done, 2 wrong usage or input, 130 interrupted."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from kvjax.cli import options


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; returns its exit code. argv: without the program's name."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(argv)
        sys.stdout.flush()
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # `| head` has seen enough
            _forget_stdout()
            return 0
        print(f"kvjax: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nkvjax: interrupted", file=sys.stderr)
        return 130
    return code


def _run(argv: list[str]) -> int:
    """The first word is a command only if it is exactly that; all else is a prompt."""
    if argv[:1] == ["bench"]:
        from kvjax.cli import bench

        return bench.run(options.parse_bench(argv[1:]))
    from kvjax.cli import generate

    return generate.run(options.parse_generate(argv))


def _forget_stdout() -> None:
    """Python flushes stdout once more at exit, which would complain about the closed pipe."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)
