"""A tiny corpus and a tiny configuration; the tokenizer cache in a folder of the tests."""

from __future__ import annotations

import dataclasses
import random

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from kvjax.config import ModelConfig
from kvjax.training import DataConfig, OptimizerConfig, TrainConfig, TrainingConfig

FUNCTION = '''

def {verb}_{noun}(self, {noun}, limit={number}):
    """{verb} the {noun}."""
    if {noun} > limit:
        return {noun} - {number}
    return self.{verb}({noun})
'''


@pytest.fixture(scope="session", autouse=True)
def compile_once(tmp_path_factory):
    """Runs compile the same programs again and again: keep them (10 times less time)."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    old = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in old.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """24 Python files; the whole of each file is different."""
    root, draw = tmp_path_factory.mktemp("corpus"), random.Random(0)
    for i in range(24):
        words = {"verb": ("read", "send", "drop"), "noun": ("page", "row", "key", "token")}
        body = "".join(
            FUNCTION.format(
                number=draw.randint(0, 99), **{k: draw.choice(v) for k, v in words.items()}
            )
            for _ in range(12)
        )
        folder = root / f"part{i % 3}"
        folder.mkdir(exist_ok=True)
        (folder / f"module_{i}.py").write_text(f'"""Module {i}."""\n{body}', encoding="utf-8")
    return root


@pytest.fixture(scope="session")
def token_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("kvjax_cache")


@pytest.fixture
def config(corpus, token_cache, monkeypatch):
    """Two layers of 32; 20 steps take a second or two."""
    monkeypatch.setenv("KVJAX_CACHE", str(token_cache))
    model = ModelConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_ids=(1,),
        pad_token_id=2,
    )
    return TrainConfig(
        model=model,
        data=DataConfig(corpus=str(corpus), heldout=0.2, context=32, batch_size=4),
        optimizer=OptimizerConfig(lr=1e-2, warmup_steps=3, decay_steps=20),
        training=TrainingConfig(
            steps=20, log_every=5, eval_every=10, eval_batches=2, save_every=10
        ),
    )


@pytest.fixture
def steps(config):
    """The configuration with another number of steps and the same schedule."""

    def with_steps(count):
        return dataclasses.replace(
            config, training=dataclasses.replace(config.training, steps=count)
        )

    return with_steps
