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
    from kvjax.presets import PRESETS

    preset = args.kv_cache_dtype if args.kv_cache_dtype in PRESETS else None
    cache_config = CacheConfig() if preset else _cache_config(args)
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
    if preset:
        cache_config = _preset(args, preset, model, tokenizer)
    return Session(model, tokenizer, cache_config, name, dtype, platform, seconds)


def _cache_config(args: argparse.Namespace) -> CacheConfig:
    from kvjax.config import CacheConfig

    return CacheConfig.parse(
        args.kv_cache_dtype,
        k=args.kv_k,
        v=args.kv_v,
        layers=args.kv_layers,
        **_given(args, page_size="page_size", sinks="sinks", recent="recent")
        | _given(args, calibration="kv_calibration", mla_rope_bits="mla_rope_bits")
        | _given(args, evict="evict", kernel="kernel"),
    )


def _preset(args: argparse.Namespace, name: str, model: Transformer, tokenizer: Any) -> CacheConfig:
    from kvjax import presets
    from kvjax.config import need

    for option in ("kv_k", "kv_v", "kv_layers", "kv_calibration", "mla_rope_bits"):
        value = getattr(args, option)
        need(value is None, option.replace("_", "-"), f"none with the preset {name!r}", value)
    fields = _given(args, page_size="page_size", sinks="sinks", recent="recent")
    fields |= _given(args, evict="evict", kernel="kernel")
    if presets.kept(model, name).with_suffix(".json").is_file():
        return presets.prepare(model, tokenizer, name, **fields)
    with stage(f"fitting the cache to the model, once ({name}; minutes on a CPU)"):
        return presets.prepare(model, tokenizer, name, **fields)


def _given(args: argparse.Namespace, **options: str) -> dict[str, Any]:
    """Fields whose options were given."""
    values = {field: getattr(args, option) for field, option in options.items()}
    return {field: value for field, value in values.items() if value is not None}


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
