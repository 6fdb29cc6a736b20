"""What must be set before jax is imported, and what must be checked right after."""

from __future__ import annotations

import argparse
import os
import sys


def prepare(args: argparse.Namespace) -> str:
    """Sets JAX up as the options say and imports it; returns the platform's name.

    XLA reads its memory settings when jax starts its GPU client, JAX_PLATFORMS when it is imported:
    set later, both do nothing (jax#19213).
    """
    variables = {}
    if args.mem_fraction is not None:
        if not 0 < args.mem_fraction <= 1:
            raise ValueError(
                f"--mem-fraction: expected a number in (0, 1], got {args.mem_fraction}."
            )
        variables["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(args.mem_fraction)
    if args.platform is not None:
        variables["JAX_PLATFORMS"] = args.platform
    if variables and "jax" in sys.modules:
        names = ", ".join(variables)
        raise ValueError(f"{names}: expected to be set before jax is imported, but it already is.")
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" in variables:
        os.environ.pop("XLA_CLIENT_MEM_FRACTION", None)  # its newer name: XLA refuses both
    os.environ.update(variables)
    platform = _start_jax()
    if args.mem_fraction is not None and platform != "gpu":
        raise ValueError(
            f"--mem-fraction: expected a GPU, got {platform}, where JAX takes memory as it needs"
            " it. Leave the option out."
        )
    if not args.no_compilation_cache:
        from kvjax.engine.compilation import keep_compiled_programs

        keep_compiled_programs()
    return platform


def _start_jax() -> str:
    import jax

    try:
        return jax.default_backend()
    except RuntimeError as error:
        asked = os.environ.get("JAX_PLATFORMS")
        raise ValueError(
            f"platform: expected one that JAX can start, got {asked!r}: {error}"
        ) from error
