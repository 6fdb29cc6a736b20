"""Static cycle estimates of the TPU kernels, without a TPU: `python -m pallas_kernels.cycles`.

libtpu simulates a compiled kernel: it walks the scalar code, unrolls loops of known length and
models copies and the latencies of the units. What it needs, and data-dependent lengths deny it, is
numbers: so lengths and page tables are Python ints here. Read the results as estimates that compare
kernels and changes: its copies are faster than the memory (which is why the floor stands beside),
and nothing here was timed on a chip.

All numbers are for 1,024 tokens of one KV head. floor: the bytes of the pages, scales and padding
included, over the chip's memory bandwidth. Each profile runs in a process of its own, as libtpu
takes its flags from the environment once and ends the process on what it cannot simulate.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import glob
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from pallas_kernels import aot
from pallas_kernels.codes import (
    Asymmetric,
    BFloat16,
    Code,
    Codebook,
    Float8,
    KiviKey,
    OutlierKey,
    OutlierValue,
    Signs,
    Symmetric,
    for_generation,
)
from pallas_kernels.pages import LatentFormat, PageFormat

CHIPS = ("v5e", "v6e")
#: bytes a second, and the clock that the estimates assume (pallas.md)
BANDWIDTH = {"v5e": 819e9, "v6e": 1640e9}
CLOCK = {"v5e": 1.5e9, "v6e": 1.75e9}
GENERATION = {"v5e": 5, "v6e": 6}

_NORMAL = {
    2: (0.4528, 1.5104),
    3: (0.2451, 0.7560, 1.3439, 2.1520),
    4: (0.1284, 0.3880, 0.6568, 0.9423, 1.2562, 1.6181, 2.0690, 2.7326),
}


def _book(bits: int) -> Codebook:
    half = _NORMAL[bits]
    return Codebook(bits, table=tuple(-x for x in half[::-1]) + half)


#: key and value codes by name
CODES: dict[str, tuple[Code, Code]] = {
    "bf16": (BFloat16(), BFloat16()),
    "int8": (Symmetric(8), Symmetric(8)),
    "fp8-e4m3": (Float8(), Float8()),
    "fp8-e5m2": (Float8(format="float8_e5m2"), Float8(format="float8_e5m2")),
    "int4": (Symmetric(4), Symmetric(4)),
    "int4-low": (Asymmetric(4), Asymmetric(4)),
    "kivi4": (KiviKey(4), Asymmetric(4, groups=4)),
    "kivi2": (KiviKey(2), Asymmetric(2, groups=4)),
    "turboquant4": (_book(4), _book(4)),
    "turboquant3": (_book(3), _book(3)),
    "turboquant2": (_book(2), _book(2)),
    **{f"kvquant{b}": (OutlierKey(b, outliers=2), OutlierValue(b, outliers=2)) for b in (4, 3, 2)},
    "qjl": (Signs(groups=2, rows=512), Asymmetric(2, groups=4)),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One profile. tokens: of each row; rows: so many that all heads of all rows are `heads`, as
    a fixed cost of some 5,000 cycles a call would else weigh on few heads alone. rope_dim: above 0
    the head is a latent of `head_dim` and a rotated key, and `groups` the heads that read it."""

    chip: str
    code: str
    num_kv_heads: int = 8
    groups: int = 4
    head_dim: int = 128
    heads: int = 64
    tokens: int = 4096
    block_pages: int | None = None
    rope_dim: int = 0
    turned: bool = False  # keys stored before RoPE

    @property
    def fmt(self) -> PageFormat:
        k, v = (for_generation(c, GENERATION[self.chip]) for c in CODES[self.code])
        if self.rope_dim:
            return LatentFormat(k, k, 1, self.head_dim, rope_dim=self.rope_dim)
        return PageFormat(k, v, self.num_kv_heads, self.head_dim)

    @property
    def batch(self) -> int:
        return self.heads // self.num_kv_heads

    @property
    def units(self) -> float:
        """Blocks of 1,024 tokens of one KV head."""
        return self.batch * self.tokens * self.num_kv_heads / 1024

    @property
    def floor(self) -> float:
        pages = self.batch * self.tokens / 128
        seconds = pages * self.fmt.page_bytes / BANDWIDTH[self.chip]
        return seconds * CLOCK[self.chip] / self.units


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Per unit. bundles: long instructions, the cycles of a step in which nothing waits; valu and
    matpush: slots of them used, of 4 and of 4 (v5e) or 2 (v6e) in each. spills: of the whole."""

    cycles: float
    bundles: float
    valu: float
    matpush: float
    spills: int


def profile(case: Case) -> Estimate:
    """Compiles in a new process and reads libtpu's dumps. Without cycles (NaN) where its simulator
    gives up; raises RuntimeError with its last words where it does not compile."""
    command = [sys.executable, "-m", "pallas_kernels.cycles"]
    command += ["--one", json.dumps(dataclasses.asdict(case))]
    return profile_command(command, units=case.units)


def profile_command(command: list[str], *, units: float) -> Estimate:
    """What libtpu dumps where the command compiles a kernel that is called "kernel", and prints the
    units of one step of it. units: of the whole."""
    with tempfile.TemporaryDirectory() as folder:
        dumps = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        simulate = f" --xla_jf_dump_static_llo_profile_to={folder}"
        done = _run(command, dumps + simulate)
        if done.returncode:  # its simulator ends the process on some instructions
            for path in glob.glob(f"{folder}/*"):
                os.remove(path)
            done = _run(command, dumps)
        if done.returncode:
            raise RuntimeError(f"{command}: ended with {done.returncode}: {done.stderr[-800:]}")
        return _read(folder, units=units, block_units=json.loads(done.stdout.splitlines()[-1]))


def _run(command: list[str], flags: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **aot.environment(), "LIBTPU_INIT_ARGS": flags}
    environment.pop("XLA_FLAGS", None)  # libtpu ends the process on a flag of the CPU's
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def _compile_one(case: Case) -> float:
    """Compiles the kernel with lengths and tables as ints; units of one step of it."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    from pallas_kernels.paged_attention import tpu
    from pallas_kernels.paged_attention.tpu_kernel import paged_attention_kernel

    fmt, B, M = case.fmt, case.batch, case.tokens // 128
    rows = -(-case.groups // 8) * 8
    o = tpu.make_options(fmt, rows, scale=0.1, batch=B, table_pages=M, block_pages=case.block_pages)
    o = dataclasses.replace(o, half=case.head_dim // 2 if case.turned else 0)
    blocks = M // o.pages
    scalars = [
        Known(lambda at: at[0] * M + at[1], (B, M)),
        *[Known(functools.partial(lambda n, at: n, n)) for n in (case.tokens, 0, 0, blocks)],
        Known(lambda at: B * blocks),
    ]
    q = jax.ShapeDtypeStruct(
        (B, case.num_kv_heads, rows, fmt.query_width),
        jnp.float32 if case.turned else jnp.bfloat16,
    )
    angles = [
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in ((2, M, o.half), (2, o.half, 128))[: 2 * case.turned]
    ]
    pages = jax.ShapeDtypeStruct((B * M, fmt.rows, 128), jnp.int32)
    params = tuple(
        {
            name: jax.ShapeDtypeStruct(shape, jnp.float32)
            for name, shape in code.param_shapes(fmt.num_kv_heads, fmt.head_dim).items()
        }
        for code in (fmt.k, fmt.v)
    )
    fixed = (*angles, *jax.eval_shape(fmt.columns, params))
    grid, shapes = tpu.grid_spec(o, q.shape, fixed=len(fixed), programs=1, scalars=0)
    call = pl.pallas_call(
        functools.partial(paged_attention_kernel, *scalars, o=o),
        grid_spec=grid,
        out_shape=shapes,
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=tpu.VMEM_LIMIT, disable_bounds_checks=True
        ),
        name="kernel",
    )
    aot.compile_for(case.chip, call, q, pages, *fixed)
    return o.tokens * case.num_kv_heads / 1024


class Known:
    """Stands for a scalar array whose numbers are known while tracing."""

    def __init__(self, value, shape=(0, 0)):
        self._value, self.shape = value, shape

    def __getitem__(self, at: Any) -> Any:
        return self._value(at)


def _read(folder: str, *, units: float, block_units: float) -> Estimate:
    def text(pattern: str) -> str:
        paths = glob.glob(f"{folder}/*{pattern}*")
        if not paths:
            return ""
        with open(paths[0]) as file:
            return file.read()

    found = re.findall(r"estimated_cycles: (\d+)", text("static_llo_profile"))
    cycles = sum(map(int, found)) if found else float("nan")
    bundles = re.search(
        r"total scheduled bundles:\s+(\d+)", text("-kernel*schedule-analysis_final_bundles")
    )
    lines = text("-kernel*final_hlo-static-per-bundle-utilization").splitlines()
    names = [name.strip() for name in lines[1].split(",")]
    body = lines[lines.index("== UTILIZATION:") + 1 :]
    counts = [list(map(int, line.split())) for line in body if line[:1].isdigit()]
    slots = dict(zip(names, map(sum, zip(*counts, strict=True)), strict=True))
    assert bundles is not None
    per_unit = int(bundles[1]) / block_units
    if cycles / units < per_unit / 2:  # it lost a loop
        cycles = float("nan")
    return Estimate(
        cycles=cycles / units,
        bundles=per_unit,
        valu=slots["VALU"] / block_units,
        matpush=slots["MATPUSH"] / block_units,
        spills=slots["VSTORE:SPILL"],
    )


def cases() -> Iterator[Case]:
    """What the table shows: every code at eight heads, turned keys, fewer heads, other head dims,
    latents."""
    for chip in CHIPS:
        for code in CODES:
            yield Case(chip, code, turned=code.startswith("kvquant"))  # as its keys always are
        for code in ("bf16", "int8", "int4", "int4-low"):
            yield Case(chip, code, turned=True)
        for heads, head_dim, groups in ((1, 128, 8), (2, 128, 8), (1, 256, 4), (8, 64, 4)):
            for code in ("bf16", "int8", "int4"):
                yield Case(chip, code, heads, groups, head_dim)
        for code in ("bf16", "int8", "int4"):  # DeepSeek-V3's latents
            yield Case(chip, code, 1, 128, 512, heads=8, rope_dim=64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--codes", help="only these, by comma", default="")
    arguments = parser.parse_args()
    if arguments.one:
        print(_compile_one(Case(**json.loads(arguments.one))))
        return
    wanted = set(filter(None, arguments.codes.split(",")))
    print("per 1,024 tokens of a KV head; estimates of libtpu's simulator, not measurements")
    head = "chip code K G H | cycles floor cycles/floor | of bf16 | bundles VALU MATPUSH spills"
    print(head)
    raw: dict[tuple[Any, ...], float] = {}
    for case in cases():
        shape = (case.chip, case.num_kv_heads, case.groups, case.head_dim)
        if wanted and case.code not in wanted | {"bf16"}:
            continue
        e = profile(case)
        raw.setdefault(shape, e.cycles)  # bf16 comes first
        print(
            f"{case.chip} {case.code + ' turned' * case.turned:15s} {case.num_kv_heads} "
            f"{case.groups} {case.head_dim:3d} | "
            f"{e.cycles:5.0f} {case.floor:5.0f} {e.cycles / case.floor:5.2f} | "
            f"{e.cycles / raw[shape]:4.2f} | "
            f"{e.bundles:5.0f} {e.valu:5.0f} {e.matpush:5.0f} {e.spills:3d}",
            flush=True,
        )


if __name__ == "__main__":
    main()
