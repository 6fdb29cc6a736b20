"""Attention of queries to sealed pages, read through a page table."""

from pallas_kernels.paged_attention.xla import paged_partial, pool_partial

__all__ = ["paged_partial", "pool_partial"]
