"""The bytes of a cache, from the shapes of its groups alone: nothing is allocated.

Per group of layers with the same codecs and window, with n layers that own keys and values, B
rows, K KV heads with keys of H and values of R channels, E exact slots and M pages a row:

    codes        n B M (bytes of a key page + bytes of a value page), without
    scales       what travels with them, likewise
    exact        n B K (H + R) E itemsize,   E = sinks + recent + page_size
    calibration  the codecs' calibrated arrays
    states       4 B N H^2 for each layer of gated retention (N query heads, float32)
    tables       4 n B M + 4 B

With eviction a row has at most kept + max_new tokens, and the tables hold 4 B more a group and,
where keys are stored before RoPE, the 4 n B K kept positions. Evicting while decoding, there
are E = kept slots, no pages, and 8 n B K E bytes of positions and scores; with a codec E = window,
the other Z = kept - E tokens are in M = ceil(Z / page_size) pages, and it is 8 n B K (E + Z).

With a window of W, M is at most ceil((W - 1 - recent) / page_size) and sinks is 0; if W - 1 is at
most recent + page_size, M is 0 and E is W - 1. Of latent attention K is 1, H the latent and R the
rotated key, whatever the number of heads. Pages of the TPU kernel are `PageFormat.page_bytes` each,
keys and values together; what pads them counts as scales.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from kvjax.cache.report import PARTS, split_bytes
from kvjax.cache.spec import GroupSpec
from kvjax.codecs.base import Codec, code_bytes


def bytes_of(specs: Sequence[GroupSpec], *, batch: int) -> dict[str, int]:
    """Bytes by part of a cache of these groups; same keys as `cache_report`."""
    parts = dict.fromkeys(PARTS, 0) | {"tables": 4 * batch}
    for spec in specs:
        n, M = len(spec.layers), spec.pages_per_row
        K, E = spec.num_kv_heads, spec.exact_slots
        for codec, dim in _roles(spec):
            parts["exact"] += n * batch * K * dim * E * spec.dtype.itemsize
            params = codec.param_shapes(num_kv_heads=K, head_dim=dim)
            parts["calibration"] += n * code_bytes(params)
        for part, size in zip(("codes", "scales"), _page(spec), strict=True):
            parts[part] += n * batch * M * size
        parts["tables"] += 4 * n * batch * M
        if spec.heavy:  # positions and scores
            parts["tables"] += 8 * n * batch * K * spec.places
        elif spec.kept is not None:
            parts["tables"] += 4 * batch
            parts["tables"] += 4 * n * batch * K * spec.kept * spec.k_codec.pre_rope
    return parts


def _roles(spec: GroupSpec) -> tuple[tuple[Codec, int], tuple[Codec, int]]:
    """The codec and channels of keys, and of values."""
    return (spec.k_codec, spec.head_dim), (spec.v_codec, spec.v_head_dim)


def _page(spec: GroupSpec) -> tuple[int, int]:
    """Bytes of the codes of a page, keys and values together, and of what travels with them."""
    fmt = spec.packed
    if fmt is not None:
        return fmt.code_bytes, fmt.page_bytes - fmt.code_bytes
    shape = (spec.page_size, spec.num_kv_heads, spec.dtype)
    k, v = (_codec_page(codec, dim, *shape) for codec, dim in _roles(spec))
    return k[0] + v[0], k[1] + v[1]


@functools.lru_cache(maxsize=256)  # a budget in bytes asks again and again
def _codec_page(codec: Codec, dim: int, tokens: int, heads: int, dtype: Any) -> tuple[int, int]:
    shapes = codec.code_shapes(tokens=tokens, head_dim=dim, num_kv_heads=heads, dtype=dtype)
    return split_bytes(shapes)
