"""PyramidKV: SnapKV's votes, with more of the budget in early layers.

https://arxiv.org/abs/2406.02069, section 4.2: budgets fall linearly with depth, from
2 C - C/beta to C/beta beyond the protected tokens. Layers with equal budgets share one array here,
so depth is cut into `levels` steps (the number of layers gives the paper's line; more arrays take
longer to compile). The sum never exceeds layers x budget; a late layer's budget
bounds it for short prompts too, as its arrays have no room for more.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from kvjax.checks import need
from kvjax.eviction.snapkv import SnapKV


@dataclasses.dataclass(frozen=True)
class PyramidKV(SnapKV):
    """beta: the last layer's budget is the mean's beta-th part."""

    name: ClassVar[str] = "pyramidkv"
    window: int = 8
    beta: float = 20.0
    levels: int = 5

    def __post_init__(self):
        super().__post_init__()
        need(1 <= self.beta < float("inf"), "evict beta", "a number >= 1", self.beta)
        need(isinstance(self.levels, int) and self.levels > 0, "evict levels", ">= 1", self.levels)

    def factors(self, layers: int) -> tuple[float, ...]:
        last = 1 / self.beta
        line = np.linspace(2 - last, last, layers) if layers > 1 else np.ones(1)
        steps = np.array_split(line, min(self.levels, layers))
        return tuple(float(step.mean()) for step in steps for _ in step)
