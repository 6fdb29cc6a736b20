"""Pages quantised, packed and written in place, with the plain XLA reference beside the kernel."""

from pallas_kernels.seal.entry import seal
from pallas_kernels.seal.quantiser import Quantiser

__all__ = ["Quantiser", "seal"]
