"""Attention of queries to sealed pages, read through a page table."""

from pallas_kernels.paged_attention.entry import (
    check_table,
    choose,
    paged_attention,
    paged_attention_logits,
    unsupported,
    unturnable,
)
from pallas_kernels.paged_attention.xla import paged_partial, pool_partial

__all__ = [
    "check_table",
    "choose",
    "paged_attention",
    "paged_attention_logits",
    "paged_partial",
    "pool_partial",
    "unsupported",
    "unturnable",
]
