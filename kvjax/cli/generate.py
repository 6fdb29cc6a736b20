"""The default command: prompts in, text out."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax.cli.session import Session, open_session, warm_up
from kvjax.cli.status import rate, say

if TYPE_CHECKING:
    from kvjax.engine.compilation import Compiled
    from kvjax.engine.generate import Engine, Generated
    from kvjax.engine.text import TextGeneration


def run(args: argparse.Namespace) -> int:
    """Generates as the options say; returns the exit code."""
    prompts = _read_prompts(args)
    session = open_session(args)
    from kvjax.engine.text import STREAM_STEPS, TextGeneration

    rows = [_encode(session, args, prompt) for prompt in prompts]
    engine = _engine(session, args, rows)
    compiled = warm_up(engine, max(map(len, rows)), kept=not args.no_compilation_cache)
    generation = engine.start(rows, max_tokens=args.max_tokens, sampling=_sampling(args, len(rows)))
    streaming = len(rows) == 1 and not args.json
    steps = {"steps": STREAM_STEPS} if streaming or args.stop else {}
    text = TextGeneration(generation, session.tokenizer, stop=args.stop, inside=args.raw, **steps)
    with _interruptible() as interrupted:
        for fresh in text:
            if streaming:
                _write(fresh[0])
            if interrupted:
                break
    rest = text.finish()
    if streaming:
        _write(rest[0] + ("" if text.texts[0].endswith("\n") else "\n"))
    _finish(session, args, prompts, text, compiled, aborted=bool(interrupted))
    return 130 if interrupted else 0


# -- input ---------------------------------------------------------------------------------------


def _read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts: words, a file, or stdin."""
    if args.prompts:
        return args.prompts
    if args.prompt_file not in (None, "-"):
        data, source = Path(args.prompt_file).expanduser().read_bytes(), args.prompt_file
    elif args.prompt_file == "-" or not sys.stdin.isatty():
        data, source = sys.stdin.buffer.read(), "stdin"
    else:
        raise ValueError(
            'prompt: expected one, such as kvjax "Why is the sky blue?", got none. See --help.'
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source}: expected UTF-8 text, got {error}.") from error
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise ValueError(f"{source}: expected a prompt, got no text.")
    return [text]


def _encode(session: Session, args: argparse.Namespace, prompt: str) -> list[int]:
    """Token ids of a prompt, in the model's chat template unless --raw."""
    tokenizer = session.tokenizer
    if tokenizer is None:
        raise ValueError(
            f"tokenizer: expected tokenizer.json in {session.name}, got none: the command line"
            " needs text. Add it, or use kvjax.generate with token ids."
        )
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"prompt: expected UTF-8 text, got {prompt!r}.") from error
    if args.raw:
        return tokenizer.encode(prompt)
    if tokenizer.chat_template is None:
        raise ValueError(
            f"chat_template: expected one in {session.name}, got none: it is a base model, which"
            " continues text. Pass --raw."
        )
    messages = [{"role": "user", "content": prompt}]
    if args.system is not None:
        messages.insert(0, {"role": "system", "content": args.system})
    return tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)


def _engine(session: Session, args: argparse.Namespace, rows: list[list[int]]) -> Engine:
    from kvjax.config import need
    from kvjax.engine.generate import (
        Engine,
        default_max_model_len,
        next_power_of_two,
        with_room,
    )

    need(args.max_tokens > 0, "max_tokens", "an int > 0", args.max_tokens)
    need(all(args.stop), "stop", "strings that are not empty", args.stop)
    limit = args.max_model_len
    if limit is None:
        config = session.cache_config
        limit = default_max_model_len(session.model, rows, args.max_tokens, config)
    engine = Engine(
        session.model,
        batch=next_power_of_two(len(rows)),
        max_model_len=limit,
        cache_config=with_room(session.cache_config, args.max_tokens),
        eos_ids=_eos_ids(session, args.stop),
    )
    engine.check_prompts(rows)  # before minutes of compiling
    return engine


def _eos_ids(session: Session, stops: list[str]) -> list[int]:
    """Ids that end a row: the model's, the tokenizer's, and stop strings that are special tokens,
    which have no text."""
    tokenizer = session.tokenizer
    ids = [*session.model.config.eos_token_ids, *tokenizer.eos_ids]
    for stop in stops:
        token = tokenizer.token_id(stop)
        if token is not None and not tokenizer.decode([token]):
            ids.append(token)
    return list(dict.fromkeys(ids))


def _sampling(args: argparse.Namespace, rows: int) -> list[Any]:
    from kvjax.engine.sampling import SamplingParams

    return [
        SamplingParams(
            args.temperature, args.top_k, args.top_p, args.min_p, _row_seed(args.seed, row)
        )
        for row in range(rows)
    ]


def _row_seed(seed: int, row: int) -> int:
    """Rows draw differently; a seed out of range is left for SamplingParams to refuse."""
    return seed if row == 0 else (seed + row) % 2**32


# -- output --------------------------------------------------------------------------------------


@contextlib.contextmanager
def _interruptible() -> Iterator[list[int]]:
    """Within, the first Ctrl-C only fills the list, so that no call into jax is torn apart."""
    seen: list[int] = []

    def note(number: int, _: Any) -> None:
        seen.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second one ends at once

    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _finish(
    session: Session,
    args: argparse.Namespace,
    prompts: list[str],
    text: TextGeneration,
    compiled: Compiled,
    *,
    aborted: bool,
) -> None:
    """The answers of a batch, and the line of numbers."""
    result = text.run.result()
    done = text.run.done_rows()
    reasons = [
        reason if ended or not aborted else "abort"
        for reason, ended in zip(result.finish_reasons, done, strict=True)
    ]
    if args.json:
        for row, prompt in enumerate(prompts):
            record = _record(session, prompt, text.texts[row], reasons[row], result, row, compiled)
            _write(json.dumps(record, ensure_ascii=False) + "\n")
    elif len(prompts) > 1:
        for row, prompt in enumerate(prompts):
            _write(f"=== {row + 1}/{len(prompts)}: {_one_line(prompt)}\n{text.texts[row]}\n\n")
    if args.report:
        from kvjax.attending import attended_by
        from kvjax.cache import format_report

        print(format_report(result.stats["cache"]), file=sys.stderr)
        chunk = text.run.engine.chunks(max(result.stats["prompt_tokens"]))[0]
        by = attended_by(session.model.config, dtype=session.dtype, tokens=chunk)
        print(f"  a prompt's {chunk} tokens attend to each other by {by}", file=sys.stderr)
    say(_summary(result, reasons, compiled))


def _record(
    session: Session,
    prompt: str,
    text: str,
    reason: str,
    result: Generated,
    row: int,
    compiled: Compiled,
) -> dict[str, Any]:
    """One prompt's JSON. Seconds and cache are those of the whole batch."""
    stats = result.stats
    return {
        "prompt": prompt,
        "text": text,
        "finish_reason": reason,
        "prompt_tokens": stats["prompt_tokens"][row],
        "new_tokens": stats["new_tokens"][row],
        "model": session.name,
        "dtype": session.dtype,
        "platform": session.platform,
        "batch": len(stats["prompt_tokens"]),
        "seconds": {
            "load": round(session.load_seconds, 4),
            "compile": round(compiled.seconds, 4),
            "prefill": round(stats["prefill_seconds"], 4),
            "decode": round(stats["decode_seconds"], 4),
        },
        "decode_steps": stats["decode_steps"],
        "compiled_programs": compiled.compiled,
        "cache": stats["cache"],
    }


def _summary(result: Generated, reasons: list[str], compiled: Compiled) -> str:
    from kvjax.cache.report import human

    stats = result.stats
    prompt, new = sum(stats["prompt_tokens"]), sum(stats["new_tokens"])
    decoded = new - len(reasons)  # prefill chooses the first token of each row
    counts = ", ".join(
        reason if len(reasons) == 1 else f"{reasons.count(reason)} {reason}"
        for reason in dict.fromkeys(reasons)
    )
    return (
        f"prompt {prompt} tokens ({rate(prompt, stats['prefill_seconds'])});"
        f" new {new} tokens ({rate(decoded, stats['decode_seconds'])}), end: {counts};"
        f" preparing {compiled.seconds:.1f} s; cache {human(stats['cache']['total_bytes'])}"
    )


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:57] + "..."
