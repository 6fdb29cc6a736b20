"""What the entries of a kernel page are made of, one family a file."""

from __future__ import annotations

import dataclasses

from pallas_kernels.codes.base import LANES, Code
from pallas_kernels.codes.codebook import Codebook, Signs, Smooth, meets
from pallas_kernels.codes.kivi import KiviKey
from pallas_kernels.codes.outliers import OutlierKey, OutlierValue
from pallas_kernels.codes.uniform import Asymmetric, BFloat16, Float8, Symmetric

__all__ = [
    "LANES", "Code", "Asymmetric", "BFloat16", "Codebook", "Float8", "KiviKey", "OutlierKey",
    "OutlierValue", "Signs", "Smooth", "Symmetric", "for_generation",
]  # fmt: skip


def for_generation(code: Code, generation: int) -> Code:
    """The code in the form that TPUs of this generation unpack with the fewest instructions.

    A pool's pages keep the form they were packed in, so this is a choice at allocation.
    """
    if type(code) is Codebook and generation >= 6 and meets(code.table):
        return Smooth(code.bits, table=code.table)
    if type(code) in (Symmetric, Asymmetric, KiviKey) and code.bits < 8:
        code = dataclasses.replace(code, order="adjacent" if generation >= 6 else "pairs")
    if type(code) in (Symmetric, Asymmetric, Float8, OutlierKey, OutlierValue) and code.groups == 1:
        code = dataclasses.replace(code, narrow=generation >= 6)
    return code
