"""Settings of every test: strict numerics, small shared checkpoints."""

from __future__ import annotations

import importlib.metadata
import json
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # libtpu, of the extra, would look for a TPU

if importlib.metadata.version("jax").startswith("0.10."):
    # XLA's older CPU emitters compile these small programs in half the time; the flag was removed
    # in later releases, where an unknown flag aborts the process.
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_cpu_use_fusion_emitters=false"
    )

import jax
import numpy as np
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

GOLDENS = Path(__file__).parent / "data" / "goldens"


class Golden:
    """A tiny Hugging Face checkpoint with the logits that transformers gives."""

    def __init__(self, name: str):
        self.name = name
        self.path = GOLDENS / name
        data = np.load(self.path / "golden.npz")
        self.ids, self.logits = data["ids"], data["logits"]
        self.config = json.loads((self.path / "config.json").read_text())

    def error(self, logits) -> float:
        """Largest difference over the standard deviation of the expected logits."""
        return float(np.abs(np.asarray(logits) - self.logits).max() / self.logits.std())


@pytest.fixture(scope="session")
def goldens():
    cache: dict[str, Golden] = {}

    def get(name: str) -> Golden:
        return cache.setdefault(name, Golden(name))

    return get


@pytest.fixture(scope="session")
def tiny():
    """Random models by config fields, made once: `tiny(num_kv_heads=1, ...)`."""
    from flax import nnx

    from kvjax import ModelConfig, Transformer

    made: dict[tuple, Transformer] = {}

    def make(*, form: str = "unrolled", dtype: str = "float32", seed: int = 0, **fields):
        base = {
            "vocab_size": 97,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 4096,
            "initializer_range": 0.2,
        }
        config = ModelConfig(**{**base, **fields})
        key = (config, form, dtype, seed)
        if key not in made:
            made[key] = Transformer(config, rngs=nnx.Rngs(seed), dtype=dtype, form=form)
        return made[key]

    return make
