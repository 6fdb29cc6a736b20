"""Compiling for TPUs without one: libtpu, from the package index, has the whole compiler.

Set `environment()` before jax is imported: libtpu reads it once. `pip install kvjax[aot]` brings
libtpu. What is proven so is that Mosaic accepts a kernel and that it fits, not what it computes.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}


def environment() -> Mapping[str, str]:
    """Variables that let libtpu load, several times over, on a machine without a TPU."""
    return {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5e-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
        "TPU_MIN_LOG_LEVEL": "3",  # where its simulator gives up it logs gigabytes
    }


def available() -> bool:
    return importlib.util.find_spec("libtpu") is not None


@functools.lru_cache(maxsize=8)
def mesh(chip: str) -> Any:
    """One device of a chip that need not be there. Raises ValueError on an unknown chip."""
    if chip not in TOPOLOGIES:
        raise ValueError(f"chip: expected one of {sorted(TOPOLOGIES)}, got {chip!r}.")
    from jax.experimental import topologies
    from jax.sharding import Mesh

    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip])
    return Mesh(np.array(topology.devices[:1]), ("x",))


def compile_for(chip: str, f: Callable[..., Any], *args: Any, **jit_options: Any) -> Any:
    """`f` compiled for the chip; args: arrays or their shapes. The mesh is also what
    `pltpu.get_tpu_info` then describes."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    sharding = NamedSharding(mesh(chip), PartitionSpec())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    with jax.set_mesh(mesh(chip)):
        return jax.jit(f, **jit_options).lower(*shapes).compile()
