"""What layers of one model differ in, and how a stack of them is cut into runs of equal layers.

`lax.scan` runs over a run: the layers `start`, ..., each period of `kinds` compiled once and
repeated. Gemma 3's five local layers and a global one are a period of six; CLA's owner and reader
are one of two.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

from kvjax.config import ModelConfig, RopeConfig

#: the longest period that is looked for
MAX_PERIOD = 12


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """What is static about a layer. Layers of one kind have parameters of one shape."""

    window: int | None  # tokens back that it sees, itself included
    rope: RopeConfig | None
    owns: bool  # makes keys and values
    kv_norm: bool  # through a norm of their own
    moe: bool
    retention: bool = False  # a state in place of keys and values


class Place(NamedTuple):
    """A layer in the stack as it runs: `index` may be traced and is one of `among`."""

    kind: LayerKind
    index: Any
    among: tuple[int, ...]
    source: Any  # the owner it reads, likewise
    sources: tuple[int, ...]
    at: Any = None  # positions [B, A] of this call that attend, if not all


@dataclasses.dataclass(frozen=True)
class Run:
    """`repeats` periods of layers. sources: of each layer of a period, the owner it reads: an
    offset in the period, or -1 - layer for a layer before the run."""

    start: int
    kinds: tuple[LayerKind, ...]
    sources: tuple[int, ...]
    repeats: int

    @property
    def period(self) -> int:
        return len(self.kinds)

    def layers(self, j: int) -> tuple[int, ...]:
        """The layers at place j of the period."""
        return tuple(range(self.start + j, self.start + self.period * self.repeats, self.period))


def layer_kind(config: ModelConfig, layer: int) -> LayerKind:
    """The kind of one layer."""
    owns = config.source_of(layer) == layer
    return LayerKind(
        window=config.window_of(layer),
        rope=config.rope_of(layer),
        owns=owns,
        kv_norm=config.kv_norm and layer in config.shared_owners,
        moe=config.is_moe(layer),
        retention=layer in config.retaining,
    )


def exit_layer(config: ModelConfig) -> int | None:
    """The last layer that makes something of every token (keys and values, a state), if others
    follow it: from its attention on, a call needs to run only for the tokens whose logits are asked
    (YOCO 2405.05254, section 2.3). None where the last layer does."""
    last = max((*config.owners, *config.retaining))
    return None if last == config.num_layers - 1 else last


@functools.lru_cache(maxsize=64)
def runs_of(config: ModelConfig, *, scan: bool) -> tuple[Run, ...]:
    """The runs of a model's layers, of which the fewest bodies are compiled; without scan, each
    layer alone. The exit layer is a run of its own."""
    n, leave = config.num_layers, exit_layer(config)
    if not scan:
        return tuple(_run(config, layer, 1, 1) for layer in range(n))
    cuts = [0, n] if leave is None else [0, leave, leave + 1, n]
    spans = itertools.pairwise(cuts)
    return tuple(run for first, end in spans for run in _cut(config, first, end))


def _cut(config: ModelConfig, first: int, end: int) -> list[Run]:
    """The layers from first to before end as runs: least compiled layers, then fewest runs."""
    best: dict[int, tuple[tuple[int, int], list[Run]]] = {end: ((0, 0), [])}
    for start in range(end - 1, first - 1, -1):
        options = []
        for period in range(1, min(MAX_PERIOD, end - start) + 1):
            repeats = _repeats(config, start, period, end)
            for count in {1, repeats}:
                (bodies, runs), rest = best[start + period * count]
                run = _run(config, start, period, count)
                options.append(((bodies + period, runs + 1), [run, *rest]))
        best[start] = min(options, key=lambda option: option[0])
    return best[first][1]


def _run(config: ModelConfig, start: int, period: int, repeats: int) -> Run:
    layers = range(start, start + period)
    sources = tuple(_source(config, layer, start) for layer in layers)
    return Run(start, tuple(layer_kind(config, n) for n in layers), sources, repeats)


def _source(config: ModelConfig, layer: int, start: int) -> int:
    owner = config.source_of(layer)
    return owner - start if owner >= start else -1 - owner


def _repeats(config: ModelConfig, start: int, period: int, end: int) -> int:
    """How often the period at `start` repeats, at least once."""
    first, count = _run(config, start, period, 1), 1
    while start + (count + 1) * period <= end:
        other = _run(config, start + count * period, period, 1)
        outside = any(s < 0 and -1 - s >= start for s in other.sources)
        if outside or other.kinds != first.kinds or other.sources != first.sources:
            break
        count += 1
    return count
