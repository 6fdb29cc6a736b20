"""A checkpoint goes straight onto the devices that it is to live on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import jax, numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
import kvjax

mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

def place(path, shape):
    axes = [None] * len(shape)
    if path[-1] == "kernel" and shape[-1] % 4 == 0:
        axes[-1] = "x"
    return NamedSharding(mesh, PartitionSpec(*axes))

for name in ("gemma3", "deepseek_v3"):
    folder = f"{sys.argv[1]}/{name}"
    model, _ = kvjax.load(folder, form="stacked", sharding=place)
    split = 0
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        array = variable[...]
        assert array.sharding == place(tuple(path), array.shape), path
        parts = {shard.data.size for shard in array.addressable_shards}
        split += parts == {array.size // 4}
    assert split > 8, split
    golden = np.load(f"{folder}/golden.npz")
    logits = np.asarray(model(golden["ids"])[0])
    assert np.abs(logits - golden["logits"]).max() / golden["logits"].std() < 1e-4
"""


@pytest.mark.slow
def test_onto_four_devices():
    root = Path(__file__).parents[2]
    env = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(root),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(root / "tests/data/goldens")],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
