"""The size formula of a cache, from its config alone: nothing is allocated.

Per group of layers with the same codecs, with n layers, B rows, K KV heads of dim H, E exact slots
and M sealed pages a row:

    codes        n B M (bytes of a key page + bytes of a value page), without
    scales       what travels with them, likewise
    exact        2 n B K H E itemsize,       E = sinks + recent + page_size
    calibration  the codecs' calibrated arrays
    tables       4 n B M + 4 B
"""

from __future__ import annotations

from typing import Any

from kvjax.cache.kv_cache import group_specs
from kvjax.cache.report import PARTS, split_bytes
from kvjax.cache.spec import GroupSpec
from kvjax.codecs.base import Codec, code_bytes
from kvjax.config import CacheConfig, ModelConfig


def cache_bytes(
    model: ModelConfig, *, batch: int, max_len: int, config: CacheConfig, dtype: Any
) -> dict[str, int]:
    """Bytes by part of the cache that `init_cache` would make; same keys as `cache_report`."""
    parts = dict.fromkeys(PARTS, 0) | {"tables": 4 * batch}
    for spec in group_specs(model, max_len=max_len, config=config, dtype=dtype):
        n, M = len(spec.layers), spec.pages_per_row
        K, H = spec.num_kv_heads, spec.head_dim
        pool = n * batch * M
        for codec in (spec.k_codec, spec.v_codec):
            code, side = _page(spec, codec)
            parts["codes"] += pool * code
            parts["scales"] += pool * side
        parts["exact"] += 2 * n * batch * K * H * spec.exact_slots * spec.dtype.itemsize
        parts["tables"] += 4 * n * batch * M
        for codec in (spec.k_codec, spec.v_codec):
            parts["calibration"] += n * code_bytes(codec.param_shapes(num_kv_heads=K, head_dim=H))
    return parts


def _page(spec: GroupSpec, codec: Codec) -> tuple[int, int]:
    shapes = codec.code_shapes(
        tokens=spec.page_size,
        head_dim=spec.head_dim,
        num_kv_heads=spec.num_kv_heads,
        dtype=spec.dtype,
    )
    return split_bytes(shapes)
