"""Exact bytes of a cache, by part: what is counted is what is in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from kvjax import codecs

if TYPE_CHECKING:
    from kvjax.cache.kv_cache import KVCache


def cache_report(cache: KVCache) -> dict[str, Any]:
    """Bytes of each part of a cache, and the tokens that it can hold.

    total_bytes is the sum of the leaves' `nbytes`. pages: sealed keys and values with their scales
    (null page included); exact: sinks and recent tokens; tables: page ids and lengths.
    bytes_per_token: total over the tokens of all rows at capacity. raw_bytes: the same capacity as
    one dense array in the model's dtype.
    """
    parts = {"pages": 0, "exact": 0, "calibration": 0, "tables": cache.length.nbytes}
    for group in cache.groups:
        parts["pages"] += _nbytes((group.k_pages, group.v_pages))
        parts["exact"] += _nbytes((group.k_exact, group.v_exact))
        parts["calibration"] += _nbytes((group.k_params, group.v_params))
        parts["tables"] += group.table.nbytes
    total = _nbytes(cache)
    capacity = cache.batch * cache.max_len
    raw = sum(
        2 * len(g.spec.layers) * g.spec.num_kv_heads * g.spec.head_dim * g.spec.dtype.itemsize
        for g in cache.groups
    )
    return {
        "total_bytes": total,
        "bytes": parts,
        "batch": cache.batch,
        "max_len": cache.max_len,
        "tokens": [int(n) for n in np.asarray(cache.length)],
        "bytes_per_token": total / capacity,
        "raw_bytes": raw * capacity,
        "codecs": [
            {
                "layers": list(g.spec.layers),
                "k": codecs.name_of(g.spec.k_codec),
                "v": codecs.name_of(g.spec.v_codec),
                "page_size": g.spec.page_size,
                "sinks": g.spec.sinks,
                "recent": g.spec.recent,
            }
            for g in cache.groups
        ],
    }


def format_report(report: dict[str, Any]) -> str:
    """The report as lines of text."""
    lines = [f"cache  {human(report['total_bytes'])}  for {report['batch']} x {report['max_len']}"]
    lines += [f"  {name:<7}{human(n)}" for name, n in report["bytes"].items()]
    lines.append(f"  per token {human(report['bytes_per_token'])}")
    return "\n".join(lines)


def human(n: float) -> str:
    """Bytes in the largest binary unit that leaves at least one."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.2f} {unit}"
        n /= 1024
    raise AssertionError


def _nbytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
