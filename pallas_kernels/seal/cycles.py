"""Static cycle estimates of the seal kernel: `python -m pallas_kernels.seal.cycles`.

See `pallas_kernels.cycles`, whose simulator and caveats are these. Needs kvjax, whose codecs
quantise. All numbers are for a page of eight heads of 128 in one layer; floor: its tokens read and
its bytes written, over the memory's bandwidth.
"""

from __future__ import annotations

import argparse
import functools
import sys
from typing import Any

from pallas_kernels import aot
from pallas_kernels.cycles import (
    BANDWIDTH,
    CHIPS,
    CLOCK,
    GENERATION,
    Estimate,
    Known,
    profile_command,
)

CODECS = ("raw", "int8", "int4", "int4-hadamard", "fp8", "kivi4", "kivi2", "turboquant4",
         "turboquant3", "turboquant2")  # fmt: skip
HEADS, WIDTH, PAGES = 8, 128, 32


def _compile(chip: str, name: str) -> None:
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    from pallas_kernels.seal import tpu

    fmt, quantisers = _of_codec(chip, name)
    plan = tpu.make_plan(fmt, quantisers)
    tokens = (1, 128 * PAGES, HEADS, WIDTH)
    ids, start = Known(lambda i: i, (PAGES,)), Known(lambda i: 0, (1,))
    call = pl.pallas_call(
        functools.partial(tpu.seal_kernel, ids, start, plan=plan),
        grid_spec=tpu.grid_spec(plan, steps=PAGES, k=tokens, v=tokens, scalars=0),
        out_shape=jax.ShapeDtypeStruct((PAGES, fmt.rows, 128), jnp.int32),
        input_output_aliases={2 + len(plan.matrices): 0},
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=tpu.VMEM_LIMIT, disable_bounds_checks=True
        ),
        name="kernel",
    )
    shapes = [jax.ShapeDtypeStruct(tokens, jnp.bfloat16)] * 2
    shapes += [jax.ShapeDtypeStruct(m.shape, jnp.bfloat16) for m in plan.matrices.values()]
    pool = jax.ShapeDtypeStruct((PAGES, fmt.rows, 128), jnp.int32)
    aot.compile_for(chip, call, *shapes, pool, donate_argnums=len(shapes))


def _of_codec(chip: str, name: str) -> tuple[Any, Any]:
    import dataclasses

    import jax.numpy as jnp

    from kvjax import codecs
    from kvjax.cache.packed import page_format
    from kvjax.cache.quantisers import quantisers
    from kvjax.cache.spec import GroupSpec

    k, v = codecs.pair(name)
    spec = GroupSpec(
        layers=(0,), num_kv_heads=HEADS, head_dim=WIDTH, v_head_dim=WIDTH, k_codec=k, v_codec=v,
        page_size=128, sinks=4, recent=64, max_len=1024, dtype=jnp.dtype(jnp.bfloat16),
    )  # fmt: skip
    fmt = page_format(spec, generation=GENERATION[chip])
    return fmt, quantisers(dataclasses.replace(spec, packed=fmt))


def profile(chip: str, name: str) -> Estimate:
    """Cycles of a page; see `pallas_kernels.cycles.profile`."""
    command = [sys.executable, "-m", "pallas_kernels.seal.cycles", "--one", chip, name]
    return profile_command(command, units=PAGES)


def floor(chip: str, name: str) -> float:
    moved = 2 * 128 * HEADS * WIDTH * 2 + _of_codec(chip, name)[0].page_bytes
    return moved / BANDWIDTH[chip] * CLOCK[chip]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--codecs", help="only these, by comma", default=",".join(CODECS))
    parser.add_argument("--chips", help="only these, by comma", default=",".join(CHIPS))
    arguments = parser.parse_args()
    if arguments.one:
        _compile(*arguments.one)
        print(1)  # a page a step
        return
    print(f"a page of {HEADS} heads of {WIDTH}; estimates of libtpu, not measurements")
    print("chip codec | cycles floor | bundles VALU MATPUSH spills")
    for chip in arguments.chips.split(","):
        for name in arguments.codecs.split(","):
            e = profile(chip, name)
            print(
                f"{chip} {name:14s} | {e.cycles:5.0f} {floor(chip, name):5.0f} | "
                f"{e.bundles:5.0f} {e.valu:5.0f} {e.matpush:5.0f} {e.spills:3d}",
                flush=True,
            )


if __name__ == "__main__":
    main()
