"""Compiled programs kept between runs, and what compiling costs.

JAX's persistent cache serves CPU, GPU and TPU programs. Its key holds the program, the versions and
the processor's features, so a cache folder shared by unlike machines is safe.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from kvjax.checkpoints.download import cache_dir


def compilation_cache_dir() -> Path:
    """JAX_COMPILATION_CACHE_DIR, or `xla` in kvjax's cache folder."""
    return Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or cache_dir() / "xla")


def keep_compiled_programs(folder: Path | None = None) -> Path:
    """Turns JAX's persistent compilation cache on for every program; returns its folder."""
    folder = compilation_cache_dir() if folder is None else folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise ValueError(
            f"compilation cache: expected a folder that can be written, got {folder}. Set"
            " KVJAX_CACHE to another one, or pass --no-compilation-cache."
        )
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return folder


@dataclasses.dataclass
class Compiled:
    """What happened inside `watch_compilation`: programs compiled or loaded, and wall seconds."""

    compiled: int = 0
    loaded: int = 0
    seconds: float = 0.0


@contextlib.contextmanager
def watch_compilation() -> Iterator[Compiled]:
    """Counts the programs that are compiled, or loaded from the persistent cache, inside."""
    seen = Compiled()
    began = time.perf_counter()

    def on_event(event: str, **_: Any) -> None:
        seen.loaded += event == "/jax/compilation_cache/cache_hits"

    def on_duration(event: str, duration_secs: float, **_: Any) -> None:
        seen.compiled += event == "/jax/core/compile/backend_compile_duration"  # hits included

    jax.monitoring.register_event_listener(on_event)
    jax.monitoring.register_event_duration_secs_listener(on_duration)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_listener(on_event)
        jax.monitoring.unregister_event_duration_listener(on_duration)
        seen.compiled -= seen.loaded
        seen.seconds = time.perf_counter() - began
