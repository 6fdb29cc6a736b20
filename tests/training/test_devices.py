"""Case 118: a checkpoint is restored onto another number of devices, as the target says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import NamedSharding, PartitionSpec
from kvjax.training.checkpoint import Checkpoints
from kvjax.training.state import TrainState

devices, action, run = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
assert len(jax.devices()) == devices
mesh = jax.make_mesh((devices,), ("x",))
params = {"kernel": jnp.arange(64.0).reshape(16, 4), "bias": jnp.arange(3.0)}
state = TrainState(jnp.int32(7), params, optax.adam(1e-3).init(params))

def place(x):
    return NamedSharding(mesh, PartitionSpec("x") if x.ndim == 2 else PartitionSpec())

target = jax.tree.map(place, state)
checkpoints = Checkpoints(run)
if action == "save":
    checkpoints.save(jax.device_put(state, target))
else:
    like = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, target
    )
    got = checkpoints.restore(like)
    jax.tree.map(np.testing.assert_array_equal, got, state)
    assert jax.tree.map(lambda x: x.sharding, got) == target
    assert len(got.params["kernel"].sharding.device_set) == devices
    plain = checkpoints.restore(jax.eval_shape(lambda: state))
    assert {len(x.sharding.device_set) for x in jax.tree.leaves(plain)} == {1}
checkpoints.close()
"""


@pytest.mark.slow
def test_save_on_8_restore_on_1_and_4(tmp_path):
    root = str(Path(__file__).parents[2])
    for devices, action in ((8, "save"), (1, "restore"), (4, "restore")):
        flags = f"--xla_force_host_platform_device_count={devices}"
        env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": root}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(devices), action, str(tmp_path)],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
