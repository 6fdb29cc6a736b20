"""kvjax: JAX/Flax language models with a KV cache that is small by design."""

from kvjax.cache import KVCache, cache_report
from kvjax.checkpoints.load import load
from kvjax.config import CacheConfig, ModelConfig, RopeConfig
from kvjax.engine.generate import Engine, Generated, generate
from kvjax.engine.sampling import SamplingParams
from kvjax.model import Transformer

__version__ = "0.1.0"

__all__ = [
    "CacheConfig",
    "Engine",
    "Generated",
    "KVCache",
    "ModelConfig",
    "RopeConfig",
    "SamplingParams",
    "Transformer",
    "cache_report",
    "generate",
    "load",
]
