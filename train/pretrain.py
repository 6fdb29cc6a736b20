"""Trains a model from a Python config file.

    python train/pretrain.py configs/tiny_gqa.py [--run=FOLDER] [--optimizer.lr=1e-3 ...]

The same command again resumes. Any field of the config can be set: `--help` after the config file
lists them with their values.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from kvjax.engine.compilation import keep_compiled_programs
from kvjax.training import TrainConfig, load_config, train
from kvjax.training.overrides import values
from kvjax.training.progress import make_report

INTERRUPTED = 130  # what a shell reports for Ctrl-C


def main(arguments: list[str]) -> int:
    run, config = _parse(arguments)
    again = f"python train/pretrain.py {shlex.join(arguments)}"
    try:
        result = train(config, run, report=make_report())
    except KeyboardInterrupt:
        print(f"\nstopped; nothing new is saved. To go on: {again}")
        return INTERRUPTED
    if not result.finished:
        print(f"stopped at step {result.step}, saved in {run}. To go on: {again}")
        return INTERRUPTED
    print(f"done: step {result.step}, the model is in {run}. To train on, raise --training.steps.")
    print(
        f'try: python -m kvjax.infer --model {shlex.quote(str(run))} --raw "def " --temperature 0.7'
    )
    return 0


def _parse(arguments: list[str]) -> tuple[Path, TrainConfig]:
    parser = argparse.ArgumentParser(
        prog="pretrain.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("config", help="a Python file with `config = TrainConfig(...)`")
    parser.add_argument("--run", type=Path, help="default: runs/ and the config file's name")
    parser.add_argument("-h", "--help", action="store_true")
    if arguments in (["-h"], ["--help"], []):
        parser.print_help()
        raise SystemExit(0 if arguments else 2)
    known, overrides = parser.parse_known_args(arguments)
    config = load_config(known.config, overrides)
    if known.help:
        parser.print_help()
        print("\nfields:", *(f"--{key}={value}" for key, value in values(config)), sep="\n  ")
        raise SystemExit(0)
    return known.run or Path("runs") / Path(known.config).stem, config


if __name__ == "__main__":
    try:
        keep_compiled_programs()  # the next start, or a resume, compiles nothing again
        code = main(sys.argv[1:])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    sys.exit(code)
