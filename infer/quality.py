"""What a compressed cache costs in quality: every method reads its own stored codes.

    python infer/quality.py --json-out quality.json
    python infer/quality.py --methods raw,int4,kivi2+int4 --text book.txt --windows 4 --tokens 2048

Long text is fed through the cache a few tokens a call, so that each token attends to sealed,
compressed pages, and compared with the dense model: perplexity, KL, top-1 agreement; then passkeys
are asked for. The default table takes about 15 minutes on two cores for the default model. With
--json-out rows are saved as they come, and the same command again goes on after an interruption;
the plot lies beside the JSON. Methods that need calibration are calibrated on another text first.
With --evict policies are measured instead (docs/eviction.md).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

DEFAULT_METHODS = (
    "raw,int8,int8-hadamard,fp8,int4,int4-hadamard,kivi4,kivi2,kvquant3,qjl,turboquant4,turboquant3.5,"
    "turboquant3,turboquant2.5,turboquant2,turboquant-prod3,pca3,pca2,recommended,aggressive"
)
INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    if args.platform:
        os.environ["JAX_PLATFORMS"] = args.platform  # before jax is imported
    try:
        return _run(args)
    except ValueError as error:
        print(f"quality: error: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    import kvjax
    from kvjax.evaluation.quality import Bench
    from kvjax.presets import PRESETS

    if args.evict:
        return _run_evict(args)
    names = list(dict.fromkeys(args.methods.split(",")))
    for name in names:
        if name not in PRESETS:
            kvjax.CacheConfig.parse(name, page_size=args.page_size)
    plot = _plot_path(args)
    # one program a method: the stacked form compiles in a tenth of the time
    model, tokenizer = kvjax.load(args.model, form="stacked")
    task = _task(args, tokenizer)
    about = _about(args, model, task)
    rows = _finished(args.json_out, about)
    for name in names:
        if name in rows:
            _say(f"{name}: kept from {args.json_out}")
    todo = [name for name in names if name not in rows]
    interrupted = False
    try:
        bench = Bench(model, task) if todo else None
        for i, name in enumerate(todo):
            rows[name] = bench.row(name)
            _say(
                f"[{i + 1}/{len(todo)}] {name}: KL {rows[name]['kl']:.2e}, "
                f"{rows[name]['seconds']:.0f} s"
            )
            _write(args.json_out, about, rows)
    except KeyboardInterrupt:
        interrupted = True
    shown = [rows[name] for name in names if name in rows]
    _print_table(shown, about)
    if plot and shown:
        draw(shown, plot, about)
        _say(f"plot: {plot}")
    return INTERRUPTED if interrupted else 0


def _run_evict(args: argparse.Namespace) -> int:
    """Every policy of --evict with every codec of --methods."""
    import numpy as np

    import kvjax
    from kvjax import presets
    from kvjax.evaluation import texts
    from kvjax.evaluation.evicted import EvictBench, EvictTask

    methods = ["raw"] if args.methods == DEFAULT_METHODS else _names(args.methods)
    shape = {"page_size": args.page_size, "sinks": args.sinks, "recent": args.recent}
    policies = ["recent:100%" if p == "none" else p for p in _names(args.evict)]
    pairs = [(m, _fields(p, shape)) for p in policies for m in methods]
    for m, fields in pairs:
        kvjax.CacheConfig.parse("raw" if m in presets.PRESETS else m, **fields)
    model, tokenizer = kvjax.load(args.model, form="stacked")
    cases = _cases(args, tokenizer)
    if args.haystack:
        haystack = np.asarray(tokenizer.encode(texts.read(args.haystack, "haystack")), np.int32)
        cases += _cases(args, tokenizer, haystack=haystack)
    windows = texts.windows(tokenizer, args.text, count=args.windows, length=args.tokens)
    bench = EvictBench(model, EvictTask(windows, args.score_from, cases))
    about = _about_evict(args, model, windows, cases)
    rows = _finished(args.json_out, about)
    for i, (method, fields) in enumerate(pairs):
        name = f"{fields['evict']} {method}"
        if name in rows:
            continue
        if method in presets.PRESETS:
            config = presets.prepare(model, tokenizer, method, **fields)
        else:
            config = kvjax.CacheConfig.parse(method, **fields)
        rows[name] = bench.row(config) | {"codec": method, "method": name}
        _say(f"[{i + 1}/{len(pairs)}] {name}: KL {rows[name]['kl']:.2e}")
        _write(args.json_out, about, rows)
    _print_evicted(list(rows.values()), args)
    return 0


def _names(given: str) -> list[str]:
    return list(dict.fromkeys(name for name in given.split(",") if name))


def _about_evict(
    args: argparse.Namespace, model: Any, windows: Any, cases: list[Any]
) -> dict[str, Any]:
    """As `_about`, of a task of eviction."""
    import numpy as np

    from kvjax.calibration import model_fingerprint
    from kvjax.evaluation.texts import digest

    free = ("json_out", "plot", "no_plot", "evict", "methods")
    tokens = [case.tokens for case in cases] or [np.zeros(0, np.int32)]
    return {k: v for k, v in vars(args).items() if k not in free} | {
        "fingerprint": model_fingerprint(model),
        "text_digest": digest(windows),
        "cases_digest": digest(np.concatenate(tokens)),
    }


def _fields(policy: str, shape: dict[str, Any]) -> dict[str, Any]:
    """Of a cache with this policy; streams and h2o name the first tokens that stay themselves."""
    from kvjax import eviction

    named = eviction.parse(policy)
    own = isinstance(named, eviction.Streaming) or named.decodes
    return {"evict": policy, **shape} | ({"sinks": None} if own else {})


def _print_evicted(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """One line a policy and codec, as a Markdown table."""
    from kvjax.evaluation.evicted import table

    print(table(rows))
    n = rows[0]["tokens"]
    hidden = {"passkey": "passkeys in filler", "needle": f"needles in {args.haystack}"}
    hidden = [text for kind, text in hidden.items() if rows[0][f"{kind}_inside"]["n"]]
    print(
        f"\nPrompts of {args.score_from} tokens of {args.text}, then"
        f" {args.tokens - args.score_from} teacher-forced ({args.windows} windows,"
        f" n = {n}); tokens left: after those. Dense perplexity {rows[0]['dense_perplexity']:.2f}."
    )
    if hidden:
        print(
            f"{' and '.join(hidden).capitalize()}, {args.passkey_lengths} tokens: right of n, and"
            f" of each length and depth ({args.passkey_depths}); the question inside or outside of"
            " the judged prompt."
        )


def _task(args: argparse.Namespace, tokenizer: Any) -> Any:
    from kvjax.config import need
    from kvjax.evaluation import texts
    from kvjax.evaluation.quality import Task

    exact = args.sinks + args.recent + args.page_size
    need(
        exact <= args.score_from < args.tokens,
        "score-from",
        f"{exact} (sinks + recent + a page: past the exact window) to --tokens={args.tokens}",
        args.score_from,
    )
    need(
        args.calibration_text != args.text,
        "calibration-text",
        "another text than --text",
        args.calibration_text,
    )
    return Task(
        tokens=texts.windows(tokenizer, args.text, count=args.windows, length=args.tokens),
        first=args.score_from,
        chunk=args.chunk,
        page_size=args.page_size,
        sinks=args.sinks,
        recent=args.recent,
        cases=_cases(args, tokenizer),
        calibration_rows=texts.windows(tokenizer, args.calibration_text, count=4, length=1024),
    )


def _cases(args: argparse.Namespace, tokenizer: Any, **options: Any) -> list[Any]:
    from kvjax.evaluation import passkey

    return passkey.cases(
        tokenizer,
        lengths=tuple(int(n) for n in args.passkey_lengths.split(",") if n),
        depths=tuple(float(d) for d in args.passkey_depths.split(",")),
        keys=args.passkey_keys,
        **options,
    )


def _about(args: argparse.Namespace, model: Any, task: Any) -> dict[str, Any]:
    """What the numbers depend on; rows of another run with the same are kept."""
    import kvjax
    from kvjax.calibration import model_fingerprint
    from kvjax.evaluation.texts import digest

    return {
        "kvjax": kvjax.__version__,
        "model": args.model or "smollm2",
        "fingerprint": model_fingerprint(model),
        "dtype": model.dtype,
        "text": args.text,
        "text_digest": digest(task.tokens),
        "windows": args.windows,
        "window_tokens": args.tokens,
        "scored_from": args.score_from,
        "calibration_text": args.calibration_text,
        "calibration_digest": digest(task.calibration_rows),
        "calibration_tokens": int(task.calibration_rows.size),
        "page_size": args.page_size,
        "sinks": args.sinks,
        "recent": args.recent,
        "chunk": args.chunk,
        "passkey_lengths": args.passkey_lengths,
        "passkey_depths": args.passkey_depths,
        "passkey_keys": args.passkey_keys,
    }


def _finished(path: str | None, about: dict[str, Any]) -> dict[str, Any]:
    if path is None or not Path(path).is_file():
        return {}
    saved = json.loads(Path(path).read_text())
    changed = {k for k in about if saved.get("about", {}).get(k) != about[k]}
    if changed:
        raise ValueError(
            f"json-out: {path} holds rows of another run (other {', '.join(sorted(changed))})."
            " Give another file, or remove it."
        )
    return {row["method"]: row for row in saved["rows"]}


def _write(path: str | None, about: dict[str, Any], rows: dict[str, Any]) -> None:
    if path is None:
        return
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    data = {"about": about, "machine": machine, "date": time.strftime("%Y-%m-%d")}
    temporary = Path(f"{path}.tmp")
    temporary.write_text(json.dumps(data | {"rows": list(rows.values())}, indent=1) + "\n")
    os.replace(temporary, path)  # whole or not at all


def _print_table(rows: list[dict[str, Any]], about: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("method", no_wrap=True)
    for heading in (
        "bits\nK/V", "bits\nmean", "perplexity", "KL\nnats/token", "top-1\n%", "passkey", "B/token",
        "ratio", "cache\nKiB", "s",
    ):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*cells(row))
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    console.print(table)
    n = rows[0]["tokens"] if rows else 0
    print(
        f"{about['model']}, {about['dtype']}: {about['windows']} windows of"
        f" {about['window_tokens']} tokens of {about['text']}, {n} scored (from position"
        f" {about['scored_from']}), {about['chunk']} a call.\nExact: first {about['sinks']}, last"
        f" {about['recent']} and a page of {about['page_size']} that fills. ± is one standard error"
        f" over tokens.\n* calibrated on {about['calibration_tokens']} tokens of"
        f" {about['calibration_text']}. Passkey: right of n, {about['passkey_lengths']} tokens,"
        f" depths {about['passkey_depths']}.\nB/token: sealed, with scales; ratio: bf16 over it."
        f" Cache: all parts for one row of {rows[0]['capacity'] if rows else 0} tokens, bf16 model."
    )


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    bits, keys = row["effective_bits"], row["passkey"]
    right = round((keys["accuracy"] or 0) * keys["n"])
    return [
        row["method"] + ("*" if row["calibrated"] else ""),
        f"{bits['k']:.4g}/{bits['v']:.4g}",
        f"{bits['mean']:.3f}",
        f"{row['perplexity']:.3f}",
        f"{max(row['kl'], 0):.2e} ± {row['kl_se']:.0e}",
        f"{100 * row['top1']:.1f} ± {100 * row['top1_se']:.1f}",
        f"{right}/{keys['n']}",
        f"{row['sealed_bytes_per_token']:.0f}",
        f"{row['sealed_ratio']:.2f}",
        f"{row['total_bytes'] / 1024:.0f}",
        f"{row['seconds']:.0f}",
    ]


def draw(rows: list[dict[str, Any]], path: Path, about: dict[str, Any]) -> None:
    """KL against effective bits, one labelled point a method; lower left is better."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5.5), layout="constrained")
    kept = [row for row in rows if row["kl"] > 1e-7]  # raw is at 0, off a log axis
    for i, row in enumerate(sorted(kept, key=lambda row: row["effective_bits"]["mean"])):
        x, y = row["effective_bits"]["mean"], row["kl"]
        color = "tab:orange" if row["calibrated"] else "tab:blue"
        axes.errorbar(x, y, yerr=min(row["kl_se"], 0.9 * y), fmt="o", color=color, ms=5, lw=1)
        axes.annotate(
            row["method"],
            (x, y),
            xytext=(5, (4, -10)[i % 2]),
            textcoords="offset points",
            fontsize=8,
        )
    axes.set_yscale("log")
    axes.set_xlabel("effective bits of a sealed number (keys and values, with scales)")
    axes.set_ylabel("KL to the dense model, nats a token")
    axes.set_title(
        f"{about['model']}, {rows[0]['tokens']} tokens of {about['text']}; orange: calibrated",
        fontsize=10,
    )
    axes.grid(alpha=0.3, which="both", lw=0.5)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _plot_path(args: argparse.Namespace) -> Path | None:
    path = args.plot or (args.json_out and Path(args.json_out).with_suffix(".png"))
    if args.no_plot or not path:
        return None
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError(
            "plot: matplotlib is not installed. pip install 'kvjax[plot]', or give --no-plot."
        ) from None
    return Path(path)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", metavar="NAME", help="as for kvjax.infer (default: smollm2)")
    add("--methods", default=DEFAULT_METHODS, metavar="A,B,...",
        help="codecs, or KEYS+VALUES; default: " + DEFAULT_METHODS.replace(",", ", "))  # fmt: skip
    add("--evict", metavar="P,P,...",
        help="measure eviction instead: policies such as snapkv:25%%, or none; --score-from is the"
        " prompt")  # fmt: skip
    add("--text", default="topics", metavar="FILE",
        help="a file, or topics, docstrings, licences (default: topics)")  # fmt: skip
    add("--windows", type=int, default=2, metavar="N", help="default: 2")
    add("--tokens", type=int, default=1024, metavar="N", help="of a window (default: 1024)")
    add("--score-from", type=int, default=256, metavar="N", help="first scored (default: 256)")
    add("--chunk", type=int, default=64, metavar="N", help="tokens of a call (default: 64)")
    add("--page-size", type=int, default=64, metavar="N", help="default: 64")
    add("--sinks", type=int, default=4, metavar="N", help="default: 4")
    add("--recent", type=int, default=64, metavar="N", help="default: 64")
    add("--calibration-text", default="docstrings+licences", metavar="FILE",
        help="other text for methods that need it (default: docstrings+licences)")  # fmt: skip
    add("--passkey-lengths", default="512,1024", metavar="N,...",
        help="empty for none (default: 512,1024)")  # fmt: skip
    add("--passkey-depths", default="0.1,0.3,0.5,0.7,0.9", metavar="D,...")
    add("--passkey-keys", type=int, default=1, metavar="N", help="a length and depth (default: 1)")
    add("--haystack", default="docstrings", metavar="FILE",
        help="with --evict: text of needles; empty for none (default: docstrings)")  # fmt: skip
    add("--json-out", metavar="FILE", help="save rows here as they come; kept by the next run")
    add("--plot", metavar="FILE", help="default: beside --json-out")
    add("--no-plot", action="store_true")
    add("--platform", choices=("cpu", "gpu", "tpu"), help="default: the fastest JAX finds")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
