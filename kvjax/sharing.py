"""Which layers read which layers' keys and values: maps for `ModelConfig.kv_source`.

    ModelConfig(..., num_layers=6, **cla(6))          # (0, 0, 2, 2, 4, 4): half the cache
    ModelConfig(..., num_layers=8, **yoco(8, window=1024))
    ModelConfig(..., num_layers=8, **yoco(8, self_decoder="gated_retention"))
    print(describe(config))

A reader owns no cache and has no key or value projections. Owners come before their readers; the
config refuses other maps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvjax.checks import among, positive
from kvjax.config import ModelConfig, need

FULL, SLIDING, RETENTION = "full_attention", "sliding_attention", "gated_retention"


def cla(num_layers: int, factor: int = 2) -> dict[str, Any]:
    """Cross-layer attention (2405.12981): of each `factor` layers the first owns, the others read.

    The last group is smaller where `factor` does not divide `num_layers`.
    """
    need(isinstance(factor, int) and factor > 0, "factor", "a positive int", factor)
    return {"kv_source": tuple(layer // factor * factor for layer in range(num_layers))}


def yoco(
    num_layers: int,
    *,
    window: int | None = None,
    self_layers: int | None = None,
    self_decoder: str = SLIDING,
) -> dict[str, Any]:
    """YOCO (2405.05254): the first half, the self-decoder, has sliding-window attention or gated
    retention; the other, the cross-decoder, reads one global pair of keys and values, made from the
    state between them through a norm of its own.

    The pair belongs to the first cross layer. self_layers: how many come before it; None for half.
    self_decoder: "sliding_attention", which needs a window, or "gated_retention", which has none.
    """
    among("self_decoder", self_decoder, (SLIDING, RETENTION))
    if self_decoder == RETENTION:
        need(window is None, "window", "None with gated_retention", window)
    else:
        positive("window", window)
    first = num_layers // 2 if self_layers is None else self_layers
    need(0 < first < num_layers, "self_layers", f"1 to {num_layers - 1}", first)
    cross = num_layers - first
    return {
        "layer_types": (self_decoder,) * first + (FULL,) * cross,
        "sliding_window": window,
        "kv_source": (*range(first), *(first,) * cross),
        "kv_norm": cross > 1,
    }


def shared_tail(layer_types: Sequence[str], num_kv_shared_layers: int) -> dict[str, Any]:
    """Gemma 3n's `num_kv_shared_layers`: each of the last layers reads the last one before them
    that has its type."""
    n, first = len(layer_types), len(layer_types) - num_kv_shared_layers
    need(0 < first <= n, "num_kv_shared_layers", f"0 to {n - 1}", num_kv_shared_layers)
    last = {kind: layer for layer, kind in enumerate(layer_types[:first])}
    for kind in layer_types[first:]:
        fix = "Share fewer layers."
        need(kind in last, "num_kv_shared_layers", f"an owner of type {kind!r}", sorted(last), fix)
    return {"kv_source": (*range(first), *(last[kind] for kind in layer_types[first:]))}


def describe(config: ModelConfig) -> str:
    """A line for each layer: what it sees, and whose keys and values it reads."""
    lines = []
    for layer in range(config.num_layers):
        window, owner = config.window_of(layer), config.source_of(layer)
        sees = "all tokens" if window is None else f"the last {window} tokens"
        rope = "" if config.rope_of(layer) is not None else ", no RoPE"
        reads = "its own keys and values" if owner == layer else f"layer {owner}'s"
        if layer in config.retaining:
            sees, reads = "all tokens by gated retention", "its own state"
        lines.append(f"layer {layer}: sees {sees}{rope}; reads {reads}")
    return "\n".join(lines)
