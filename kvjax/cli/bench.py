"""`bench`: what a decode step costs with a filled cache, beside its floor, as JSON."""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax.cli.session import Session, open_session, warm_up
from kvjax.cli.status import say, stage

if TYPE_CHECKING:
    from kvjax.engine.generate import Engine, Generation

#: decode steps of one timed call; each is followed by as many readings of the weights
STEPS_A_ROUND = 8


def run(args: argparse.Namespace) -> int:
    """Measures, and prints one JSON object."""
    _check(args)
    names = None if args.attention is None else _codec_names(args)  # before a model is loaded
    session = open_session(args)
    if names is not None:
        return _print(_attention(session, names, args), args)
    import numpy as np

    engine = _engine(session, args)
    compiled = warm_up(engine, args.context, kept=not args.no_compilation_cache)
    rng = np.random.default_rng(args.seed)
    shape = (args.batch, args.context)
    prompts = rng.integers(0, session.model.config.vocab_size, shape).tolist()
    with stage(f"filling the cache with {args.batch} x {args.context} random tokens"):
        generation = engine.start(prompts, max_tokens=engine.max_model_len)
    rounds = -(-args.steps // STEPS_A_ROUND)
    with stage(f"measuring {rounds} rounds of {STEPS_A_ROUND} steps"):
        decode, floor, size = _measure(engine, generation, rounds)
    record = {
        "model": session.name,
        "parameters": session.model.config.num_params(),
        "dtype": session.dtype,
        "form": session.model.stack.form,
        "batch": args.batch,
        "context": args.context,
        "steps": rounds * STEPS_A_ROUND,
        **_speeds(decode, floor, size, args.batch),
        "prefill_seconds": generation.prefill_seconds,
        "prefill_tokens_per_second": args.batch * args.context / generation.prefill_seconds,
        "prepare_seconds": compiled.seconds,
        "cache": generation.result().stats["cache"],
        **_machine(),
    }
    _print(record, args)
    say(
        f"decode {record['decode_ms']:.2f} ms/step at {args.context} tokens,"
        f" weights alone {record['floor_ms']:.2f} ms, ratio {record['ratio']:.2f}"
    )
    return 0


def _attention(session: Session, names: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """One layer's attention by codec instead of whole steps."""
    from kvjax.cli.bench_attention import attention_record

    with stage(f"attention of one layer to {args.batch} x {args.context} tokens by codec"):
        found = attention_record(
            session.model,
            names,
            config=session.cache_config,
            batch=args.batch,
            context=args.context,
            turns=args.steps,
            seed=args.seed,
        )
    for name, record in found.items():
        say(f"{name}: {record['ms']:.2f} ms, {record['ratio']:.2f} of raw")
    about = {"model": session.name, "dtype": session.dtype, "batch": args.batch}
    return about | {"context": args.context, "turns": args.steps, "attention": found} | _machine()


def _codec_names(args: argparse.Namespace) -> list[str]:
    """Those of --attention. Raises ValueError on others, and on options that it leaves out."""
    from kvjax.config import CacheConfig, need
    from kvjax.presets import PRESETS

    unused = ("kv_k", "kv_v", "kv_layers", "kv_calibration", "mla_rope_bits", "evict", "kernel")
    for option in unused:
        name = option.replace("_", "-")
        need(getattr(args, option) is None, name, "none beside --attention", getattr(args, option))
    need(
        args.kv_cache_dtype == "raw",
        "kv-cache-dtype",
        "none beside --attention",
        args.kv_cache_dtype,
    )
    names = [name.strip() for name in args.attention.split(",")]
    for name in names:
        expected = "codecs, or KEYS+VALUES (a preset is made of klt1 to klt5)"
        need(bool(name) and name not in PRESETS, "attention", expected, args.attention)
        CacheConfig.parse(name)
    return names


def _print(record: dict[str, Any], args: argparse.Namespace) -> int:
    text = _compact(json.dumps(record, indent=2))
    print(text)
    if args.json_out:
        Path(args.json_out).expanduser().write_text(text + "\n", encoding="utf-8")
    return 0


def _compact(text: str) -> str:
    """Lists of numbers on one line each."""
    return re.sub(r"\[[\s\d.,e+-]*\]", lambda m: " ".join(m[0].split()), text)


def _check(args: argparse.Namespace) -> None:
    for name in ("context", "steps", "batch"):
        value = getattr(args, name)
        if value < 1:
            raise ValueError(f"--{name}: expected an int > 0, got {value}.")


def _engine(session: Session, args: argparse.Namespace) -> Engine:
    from kvjax.config import need
    from kvjax.engine.generate import Engine, with_room

    limit = session.model.config.max_position_embeddings
    length = args.context + args.steps + 4 * STEPS_A_ROUND  # two calls run before the clock does
    need(
        length <= limit,
        "context",
        f"at most {limit - length + args.context}, as the model's limit is {limit} tokens",
        args.context,
    )
    return Engine(
        session.model,
        batch=args.batch,
        max_model_len=length,
        cache_config=with_room(session.cache_config, length - args.context),
        eos_ids=(),
    )


def _measure(
    engine: Engine, generation: Generation, rounds: int
) -> tuple[list[float], list[float], int]:
    """Seconds of a decode step and of reading the weights once, a pair a round; bytes of weights.

    The two take turns, so that a round's pair saw the same state of a machine that others use too.
    """
    import jax
    import jax.numpy as jnp

    from kvjax.engine.floor import read_weights, weight_bytes, weight_matrices

    matrices = weight_matrices(engine.model)
    steps = jnp.int32(STEPS_A_ROUND)

    def step() -> None:
        generation.step(STEPS_A_ROUND)

    def read() -> None:
        jax.block_until_ready(read_weights(matrices, steps, batch=engine.batch))

    for warm in (step, read):
        warm()
    pairs = [(_seconds(step), _seconds(read)) for _ in range(rounds)]
    decode, floor = zip(*pairs, strict=True)
    return list(decode), list(floor), weight_bytes(matrices)


def _seconds(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) / STEPS_A_ROUND


def _speeds(decode: list[float], floor: list[float], size: int, batch: int) -> dict[str, Any]:
    step, read = statistics.median(decode), statistics.median(floor)
    ratios = [d / f for d, f in zip(decode, floor, strict=True)]
    return {
        "decode_ms": 1e3 * step,
        "decode_tokens_per_second": batch / step,
        "floor_ms": 1e3 * read,
        "ratio": statistics.median(ratios),
        "ratios": [round(r, 3) for r in ratios],
        "weight_bytes": size,
        "floor_gb_per_second": size / read / 1e9,
        "decode_gb_per_second": size / step / 1e9,  # weights only
    }


def _machine() -> dict[str, Any]:
    import jax

    import kvjax

    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "device": jax.devices()[0].device_kind,
        "platform": jax.default_backend(),
        "threads": len(affinity(0)) if affinity else os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "jax": jax.__version__,
        "kvjax": kvjax.__version__,
    }
