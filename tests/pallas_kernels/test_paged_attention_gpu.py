"""The GPU kernel without a GPU: values in Triton's interpreter, cubins for three generations."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import programs
import pytest

from kvjax import codecs
from kvjax.cache.gpu_leaf import gpu_leaf
from pallas_kernels.paged_attention.gpu import Leaf, constants, unsupported

HERE = Path(__file__).parent
SLOW = pytest.mark.slow
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, of the extra kvjax[triton]"
)


@needs_triton
@pytest.mark.parametrize(
    "names",
    [
        ["raw", "kivi2"],
        pytest.param(["int8", "int4", "kivi4", "turboquant2", "turboquant4"], marks=SLOW),
    ],
    ids=" ".join,
)
def test_values_in_the_interpreter(names):
    """Ragged rows, one of them empty, in two splits: the plain-XLA path's numbers."""
    roots = os.pathsep.join([str(HERE.parents[1]), str(HERE)])
    environment = {**os.environ, "PYTHONPATH": roots, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(HERE / "triton_stand_in.py"), *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    errors = dict(line.split() for line in done.stdout.splitlines())
    assert set(errors) == set(names)
    assert max(map(float, errors.values())) < 1e-4, errors


LEAVES = {
    "raw": (Leaf(tokens_last=True), Leaf(), "*bf16"),
    "int8": (Leaf(mode="token", group=128), Leaf(mode="token", group=128), "*i8"),
    "int4": (Leaf("uniform", 4, mode="token", group=128, low=True),) * 2 + ("*i32",),
    "kivi2": (
        Leaf("uniform", 2, mode="channel", group=32, low=True),
        Leaf("uniform", 2, mode="token", group=32, low=True),
        "*i32",
    ),
    "turboquant4": (
        *[Leaf("codebook", 4, table=tuple(float(i) for i in range(16)), mode="token", group=128)]
        * 2,
        "*i32",
    ),
}


QUICK = [("raw", 90), ("int8", 80), ("int8", 90), ("int8", 100), ("int4", 90)]


@needs_triton
@pytest.mark.parametrize(
    ("name", "capability"),
    [
        pytest.param(name, capability, marks=[] if (name, capability) in QUICK else SLOW)
        for name in LEAVES
        for capability in (80, 90, 100)
    ],
)
def test_compiles_at_the_size_of_llama_3_8b(name, capability, monkeypatch):
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # unset, 3.9 warns
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pallas_kernels.paged_attention.gpu_kernel import paged_attention_kernel

    k, v, entries = LEAVES[name]
    static = constants(k, v, heads=8, rows=16, head_dim=128, page_size=128, pages=64, splits=8) | {
        "FACTOR": 0.1,
        "CT": tl.bfloat16,
    }
    side = entries if k.mode == "none" else "*fp16"
    types = ["*bf16", *[entries, side, side if k.low else entries] * 2, "*i32", "*i32"]
    types += ["*fp32"] * 3
    signature = dict(zip(paged_attention_kernel.arg_names, types, strict=False))
    signature |= dict.fromkeys(static, "constexpr")
    source = ASTSource(fn=paged_attention_kernel, signature=signature, constexprs=static)
    options = {"num_warps": 4, "num_stages": 2}
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert built.asm["cubin"]
    assert built.metadata.shared <= 96 * 1024  # every generation has that


def test_what_it_does_not_take():
    words = Leaf("uniform", 4)
    assert "must be equal" in unsupported(words, Leaf(), page_size=128)
    assert "bits: need" in unsupported(*[Leaf("uniform", 3)] * 2, page_size=120)
    assert "page_size" in unsupported(words, words, page_size=12)
    assert unsupported(words, words, page_size=128) == ""


def test_codecs_that_it_reads():
    for name in ("raw", "int8", "int4", "int4-hadamard", "kivi2", "kivi4", "turboquant4"):
        k, v = (gpu_leaf(codec, 128) for codec in codecs.pair(name))
        assert unsupported(k, v, page_size=128) == ""
    for name in ("fp8", "turboquant3", "pca2", "qjl"):
        with pytest.raises(NotImplementedError, match="no GPU kernel reads"):
            gpu_leaf(codecs.get(name), 128)


def test_the_check_of_a_gpu_wants_one():
    root = HERE.parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(root / "infer/gpu_check.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "expected a GPU, got cpu" in done.stdout


def test_its_decode_step_is_the_models(tiny):
    """The part of the check that needs no GPU: a step over a cache said to be full."""
    check = programs.load("infer/gpu_check.py")
    row = check.decode(tiny(form="stacked"), "int8", "xla", batch=2, tokens=256, steps=3)
    assert row["seconds"] > 0
    assert row["bytes"] > row["cache"] > 0
