"""Measuring what a cache does to a model: `infer/quality.py` is the program."""
