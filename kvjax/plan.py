"""The size formula of a cache, from its config alone: nothing is allocated.

`kvjax.cache.size` has the formula.
"""

from __future__ import annotations

from typing import Any

from kvjax.cache.build import group_specs
from kvjax.cache.size import bytes_of
from kvjax.config import CacheConfig, ModelConfig


def cache_bytes(
    model: ModelConfig, *, batch: int, max_len: int, config: CacheConfig, dtype: Any
) -> dict[str, int]:
    """Bytes by part of the cache that `init_cache` would make; same keys as `cache_report`."""
    specs = group_specs(model, max_len=max_len, config=config, dtype=dtype)
    parts = bytes_of(specs, batch=batch)
    parts["states"] = 4 * len(model.retaining) * batch * model.num_heads * model.head_dim**2
    return parts
