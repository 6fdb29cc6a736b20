"""The options of each command. Parsing needs the standard library only."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from pathlib import Path
from typing import NoReturn

import kvjax

DTYPES = ("auto", "float32", "bfloat16", "float16")
PLATFORMS = ("cpu", "gpu", "tpu")

_EXAMPLES = """\
examples:
  {prog} "Why is the sky blue?"
  {prog} --temperature 0.8 --seed 1 "Write a haiku about rain."
  {prog} --json "What is 2 + 2?" "Name three colours."
  {prog} --model ./my-model --raw "def fibonacci(n):"
  cat notes.txt | {prog} --system "Summarise the text."
  {prog} bench --context 1024   (how fast it decodes)

Prompts may come before, between or after options; what follows `--` is a prompt whatever it looks
like, the word bench too. Text goes to stdout, status to stderr.
exit codes: 0 done, 2 wrong usage or input, 130 interrupted."""


class Parser(argparse.ArgumentParser):
    """argparse with short errors."""

    def __init__(self, **settings: object):
        super().__init__(
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **settings,  # type: ignore[arg-type]
        )

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"kvjax: error: {message}\nTry `{self.prog} --help`.\n")

    def refuse_flags(self, words: list[str]) -> None:
        """Exits if one of the words that no option took looks like an option."""
        known = [name for name in self._option_string_actions if name.startswith("--")]
        for word in words:
            if re.match(r"--?[A-Za-z]", word) and " " not in word:
                hits = difflib.get_close_matches(word.partition("=")[0], known, n=3, cutoff=0.7)
                hint = f" Did you mean {' or '.join(hits)}?" if hits else ""
                self.error(f"unknown option {word}.{hint}")


def program() -> str:
    """How the user started this program."""
    return "kvjax" if Path(sys.argv[0]).stem == "kvjax" else "python -m kvjax.infer"


def parse_generate(argv: list[str]) -> argparse.Namespace:
    """The options of the default command; `prompts` is the list of prompts given as words."""
    parser = _generate_parser()
    at = argv.index("--") if "--" in argv else len(argv)
    # Words are collected here: argparse takes positional words from one place only.
    args, words = parser.parse_known_args(argv[:at])
    parser.refuse_flags(words)
    args.prompts = words + argv[at + 1 :]
    if args.prompts and args.prompt_file is not None:
        parser.error("--prompt-file and prompts as words: give one of the two.")
    if args.raw and args.system is not None:
        parser.error("--system needs the chat template, which --raw leaves out.")
    return args


def parse_bench(argv: list[str]) -> argparse.Namespace:
    """The options of `bench`."""
    parser = _bench_parser()
    args, words = parser.parse_known_args(argv)
    parser.refuse_flags(words)
    if words:
        parser.error(f"bench: expected options only, got {words[0]!r}.")
    return args


def _generate_parser() -> Parser:
    prog = program()
    parser = Parser(
        prog=prog,
        usage=f"{prog} [options] [PROMPT ...]",
        description="Generates text. Several prompts run as one batch; without a prompt, stdin is"
        " the prompt.",
        epilog=_EXAMPLES.format(prog=prog),
    )
    parser.add_argument("--version", action="version", version=f"kvjax {kvjax.__version__}")
    group = parser.add_argument_group("prompt")
    group.add_argument(
        "--prompt-file", metavar="FILE", help="read the prompt from FILE (- is stdin)"
    )
    group.add_argument("--system", metavar="TEXT", help="system message of the chat template")
    group.add_argument(
        "--raw", action="store_true", help="continue the text as it is, without the chat template"
    )
    _add_sampling(parser)
    _add_model(parser).add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="tokens of prompt and answer that the cache holds (default: what this call needs)",
    )
    _add_cache(parser)
    group = parser.add_argument_group("output")
    group.add_argument(
        "--json", action="store_true", help="one JSON object a prompt, instead of streamed text"
    )
    group.add_argument("--report", action="store_true", help="print the cache's bytes by part")
    _add_machine(parser)
    return parser


def _add_sampling(parser: Parser) -> None:
    group = parser.add_argument_group("sampling (greedy unless --temperature is above 0)")
    group.add_argument(
        "--max-tokens", type=int, default=256, metavar="N", help="longest answer (default: 256)"
    )
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0")
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="K likeliest tokens only")
    group.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="the likeliest tokens that hold probability P",
    )
    group.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="tokens at least P times as likely as the likeliest",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text (may be given several times)",
    )


def _add_model(parser: Parser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        metavar="NAME",
        help="a folder (Hugging Face or a kvjax run), a .gguf file, a hub name; default: smollm2"
        " (SmolLM2-135M-Instruct, downloaded once)",
    )
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="of weights and activations; auto: float32 on CPU, bfloat16 elsewhere",
    )
    return group


def _add_cache(parser: Parser) -> None:
    group = parser.add_argument_group("cache")
    group.add_argument(
        "--kv-cache-dtype",
        default="raw",
        metavar="CODEC",
        help="how sealed keys and values are stored: a codec (int8, turboquant4, ...), KEYS+VALUES,"
        " or a preset: recommended (about 4 bits), aggressive (2.25); default: raw, the model's"
        " dtype",
    )
    group.add_argument("--kv-k", metavar="CODEC", help="another codec for keys")
    group.add_argument("--kv-v", metavar="CODEC", help="another codec for values")
    group.add_argument(
        "--kv-layers",
        metavar="RANGES",
        help="other codecs for some layers: 0-1:raw,28-29:int8+int4 (keys+values)",
    )
    group.add_argument(
        "--kv-calibration", metavar="FILE", help="calibrated arrays, for codecs that need them"
    )
    group.add_argument(
        "--evict",
        metavar="POLICY:BUDGET",
        help="which tokens of the prompt stay: snapkv:1024, expected:25%%, keydiff:64MiB,"
        " streaming:4+1020, ... (docs/eviction.md); default: all",
    )
    group.add_argument(
        "--page-size", type=int, metavar="N", help="tokens of a cache page (default: 128)"
    )
    group.add_argument(
        "--sinks", type=int, metavar="N", help="first tokens kept exact (default: 4; raw: 0)"
    )
    group.add_argument(
        "--recent", type=int, metavar="N", help="last tokens kept exact (default: 64; raw: 0)"
    )
    group.add_argument(
        "--kernel",
        metavar="NAME",
        help="what reads sealed pages: auto (on a TPU its kernel, else plain XLA), xla, gpu"
        " (the Triton kernel), tpu-v5e, ...; --report says what does (default: auto)",
    )
    group.add_argument(
        "--mla-rope-bits",
        type=int,
        metavar="BITS",
        help="of the rotated keys of latent attention, 2 to 8 (default: exact)",
    )


def _add_machine(parser: Parser) -> None:
    group = parser.add_argument_group("machine")
    group.add_argument("--platform", choices=PLATFORMS, help="default: the fastest that JAX finds")
    group.add_argument(
        "--mem-fraction",
        type=float,
        metavar="F",
        help="share of GPU memory that JAX takes at start (its default, 0.75, is why a GPU looks"
        " full)",
    )
    group.add_argument(
        "--no-compilation-cache",
        action="store_true",
        help="compile anew; otherwise programs are kept in the user's cache folder",
    )


def _bench_parser() -> Parser:
    parser = Parser(
        prog=f"{program()} bench",
        description="Measures decoding with a filled cache, side by side with its floor: reading"
        " all weight\nmatrices once through the same kind of products. JSON on stdout.",
    )
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--context", type=int, default=1024, metavar="N", help="tokens in the cache (default: 1024)"
    )
    group.add_argument(
        "--steps", type=int, default=64, metavar="N", help="decode steps to measure (default: 64)"
    )
    group.add_argument("--batch", type=int, default=1, metavar="N", help="rows (default: 1)")
    group.add_argument(
        "--attention",
        metavar="CODEC,...",
        help="instead of decode steps: one layer's attention to a cache of --context tokens with"
        " each of these codecs (or KEYS+VALUES), beside raw; --steps turns",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the random tokens")
    _add_model(parser)
    _add_cache(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--json-out", metavar="FILE", help="write the JSON to FILE too")
    _add_machine(parser)
    return parser
