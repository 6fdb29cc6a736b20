"""A model made ready as the options say; shared by the commands."""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import TYPE_CHECKING, Any

from kvjax.cli.environment import prepare
from kvjax.cli.status import say, stage

if TYPE_CHECKING:
    from kvjax.config import CacheConfig
    from kvjax.engine.compilation import Compiled
    from kvjax.engine.generate import Engine
    from kvjax.model import Transformer


@dataclasses.dataclass
class Session:
    """A loaded model with its tokenizer and the cache it is to have."""

    model: Transformer
    tokenizer: Any
    cache_config: CacheConfig
    name: str
    dtype: str
    platform: str
    load_seconds: float


def open_session(args: argparse.Namespace) -> Session:
    """Starts jax and loads the model. Raises ValueError on options that do not fit."""
    platform = prepare(args)
    from kvjax.checkpoints.download import default_model_path
    from kvjax.checkpoints.load import load
    from kvjax.checkpoints.source import DEFAULT_NAMES
    from kvjax.config import CacheConfig

    fields = {
        "page_size": args.page_size,
        "sinks": args.sinks,
        "recent": args.recent,
        "calibration": args.kv_calibration,
    }
    cache_config = CacheConfig.parse(
        args.kv_cache_dtype,
        k=args.kv_k,
        v=args.kv_v,
        layers=args.kv_layers,
        **{name: value for name, value in fields.items() if value is not None},
    )
    dtype = args.dtype
    if dtype == "auto":
        dtype = "float32" if platform == "cpu" else "bfloat16"
    name = args.model or DEFAULT_NAMES[0]
    if name in DEFAULT_NAMES:
        default_model_path()  # its download has a line of its own
    began = time.perf_counter()
    with stage(f"loading {name} as {dtype} on {platform}"):
        model, tokenizer = load(args.model, dtype=dtype)
    seconds = time.perf_counter() - began
    return Session(model, tokenizer, cache_config, name, dtype, platform, seconds)


def warm_up(engine: Engine, longest: int, *, kept: bool) -> Compiled:
    """Compiles what prompts of up to `longest` tokens need, or loads it, and says so.

    kept: whether the persistent cache is on.
    """
    from kvjax.engine.compilation import compilation_cache_dir, watch_compilation

    shape = f"{engine.batch} x {engine.max_model_len} tokens"
    first = not kept or not any(compilation_cache_dir().iterdir())
    hint = ", the first time up to a minute" if first else ""
    with stage(f"preparing programs for {shape}{hint}"), watch_compilation() as seen:
        engine.warmup(engine.chunks(longest))
    if seen.compiled and kept:
        say(f"compiled {seen.compiled} programs, kept for the next start")
    return seen
