"""What the entries of a kernel page are made of, one family a file."""

from __future__ import annotations

import dataclasses

from pallas_kernels.codes.base import LANES, Code
from pallas_kernels.codes.codebook import CUBIC, Codebook, Cubic, Signs
from pallas_kernels.codes.kivi import KiviKey
from pallas_kernels.codes.uniform import Asymmetric, BFloat16, Float8, Symmetric

__all__ = [
    "LANES", "CUBIC", "Code", "Asymmetric", "BFloat16", "Codebook", "Cubic", "Float8", "KiviKey",
    "Signs", "Symmetric", "for_generation",
]  # fmt: skip


def for_generation(code: Code, generation: int) -> Code:
    """The code in the order that TPUs of this generation unpack with the fewest instructions.

    A pool's pages keep the order they were packed in, so this is a choice at allocation.
    """
    if type(code) in (Symmetric, Asymmetric, KiviKey, Cubic) and code.bits < 8:
        return dataclasses.replace(code, order="adjacent" if generation >= 6 else "pairs")
    return code
