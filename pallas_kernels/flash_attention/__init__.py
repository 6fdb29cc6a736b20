"""Causal attention of a chunk to itself, blockwise: memory does not grow with its square."""

from pallas_kernels.flash_attention.entry import flash_attention, unsupported
from pallas_kernels.flash_attention.xla import causal_partial

__all__ = ["causal_partial", "flash_attention", "unsupported"]
