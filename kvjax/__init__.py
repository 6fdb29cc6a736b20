"""kvjax: JAX/Flax language models with a KV cache that is small by design."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvjax.cache import KVCache, cache_report
    from kvjax.checkpoints.load import load
    from kvjax.config import CacheConfig, MLAConfig, ModelConfig, MoEConfig, RopeConfig
    from kvjax.engine.generate import Engine, Generated, generate
    from kvjax.engine.sampling import SamplingParams
    from kvjax.model import Transformer

__version__ = "0.1.0"

# Names are imported on first use: the command line must set JAX's environment before jax is
# imported, and `--help` must not wait for it.
_HOMES = {
    "CacheConfig": "kvjax.config",
    "Engine": "kvjax.engine.generate",
    "Generated": "kvjax.engine.generate",
    "KVCache": "kvjax.cache",
    "MLAConfig": "kvjax.config",
    "ModelConfig": "kvjax.config",
    "MoEConfig": "kvjax.config",
    "RopeConfig": "kvjax.config",
    "SamplingParams": "kvjax.engine.sampling",
    "Transformer": "kvjax.model",
    "cache_report": "kvjax.cache",
    "generate": "kvjax.engine.generate",
    "load": "kvjax.checkpoints.load",
}

__all__ = [
    "CacheConfig",
    "Engine",
    "Generated",
    "KVCache",
    "MLAConfig",
    "MoEConfig",
    "ModelConfig",
    "RopeConfig",
    "SamplingParams",
    "Transformer",
    "cache_report",
    "generate",
    "load",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvjax' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
