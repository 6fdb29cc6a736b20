"""Attention operations on plain arrays: a plain-XLA form each beside its TPU and GPU kernels.

This package knows arrays, shapes and tile functions, not kvjax.
"""
