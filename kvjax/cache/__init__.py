"""The KV cache: a pool of pages and tables that point into it, and the exact tokens beside it."""

from kvjax.cache.build import LowBitKeysWarning, init_cache
from kvjax.cache.kv_cache import KVCache, LayerGroup
from kvjax.cache.report import cache_report, format_report

__all__ = [
    "KVCache",
    "LayerGroup",
    "LowBitKeysWarning",
    "cache_report",
    "format_report",
    "init_cache",
]
