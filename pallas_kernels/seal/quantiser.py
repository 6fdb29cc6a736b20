"""What `seal` is told of a codec."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Array


class Quantiser(NamedTuple):
    """How a codec makes codes of a head's 128 tokens; pure, of elementwise operations and
    reductions down the rows, so that it runs in a kernel.

    quantise: of `[R, 128]` float32, channels down (with by_tokens of `[128, R]`), the codes, as
    the code of the page knows them (int32; numbers for bfloat16; a float8's bits), and the float16
    numbers beside them, rounded by `words.as_half`: `[n, 128]`, scales of the groups, then lows;
    (with by_tokens `[2 spans, R]`); None where there are none. rotation: `[R, H]` float32, applied
    to each token first.
    """

    quantise: Callable[[Array], tuple[Array, Array | None]]
    rotation: np.ndarray | None = None
    by_tokens: bool = False
