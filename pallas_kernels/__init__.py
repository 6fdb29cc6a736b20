"""Attention operations on plain arrays: a plain-XLA form each, with TPU and GPU kernels to come.

This package knows arrays, shapes and tile functions, not kvjax.
"""
