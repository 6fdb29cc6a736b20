"""Whole runs: learning, resuming, refusing."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import kvjax
from kvjax.training import TrainConfig, init_state, load_config, make_optimizer, train
from kvjax.training.checkpoint import Checkpoints
from kvjax.training.progress import PlainReport

ROOT = Path(__file__).parents[2]


class Record(PlainReport):
    """Keeps what is reported; `at` is called after the report of each step."""

    def __init__(self, at=lambda step: None):
        self.notes, self.records, self.at = [], {}, at

    def note(self, text):
        self.notes.append(text)

    def update(self, step, record):
        self.records[step] = record
        self.at(step)


def restored(config: TrainConfig, run: Path):
    optimizer, _ = make_optimizer(config.optimizer, decay_steps=config.decay_steps)
    like = jax.eval_shape(lambda: init_state(config.model, optimizer, seed=0))
    checkpoints = Checkpoints(run)
    try:
        return checkpoints.restore(like)
    finally:
        checkpoints.close()


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_loss_falls_and_the_run_folder_is_a_model(steps, tmp_path):
    report = Record()
    result = train(steps(40), tmp_path, report=report)
    assert (result.step, result.finished) == (40, True)
    first, last = report.records[1], report.records[40]
    assert first["loss"] == pytest.approx(np.log(320), abs=0.3)
    assert last["loss"] < first["loss"] - 2
    assert last["heldout"] == result.heldout < first["loss"] - 2
    model, tokenizer = kvjax.load(tmp_path)
    out = kvjax.generate(model, [tokenizer.encode("def ")], max_tokens=8)
    assert tokenizer.decode(out.tokens[0])
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["30", "40"]


def test_ten_then_ten_more_is_twenty_bit_for_bit(steps, tmp_path):
    """Case 119."""
    one, two = Record(), Record()
    train(steps(20), tmp_path / "straight", report=one)
    train(steps(10), tmp_path / "pieces", report=Record())
    train(steps(20), tmp_path / "pieces", report=two)
    a, b = (restored(steps(20), tmp_path / name) for name in ("straight", "pieces"))
    same(a, b)
    counts = [x for x in jax.tree.leaves(b.opt_state) if x.ndim == 0]
    assert int(b.step) == 20
    assert [int(x) for x in counts] == [20] * len(counts)
    assert counts
    weights = [(tmp_path / n / "model.safetensors").read_bytes() for n in ("straight", "pieces")]
    assert weights[0] == weights[1]
    for step in (15, 20):
        assert one.records[step]["loss"] == two.records[step]["loss"]
    assert min(two.records) == 11


def test_ctrl_c_saves_and_the_run_goes_on_exactly(steps, tmp_path):
    handler = signal.getsignal(signal.SIGINT)

    def interrupt(step):
        if step == 5:
            os.kill(os.getpid(), signal.SIGINT)

    result = train(steps(20), tmp_path / "cut", report=Record(interrupt))
    assert not result.finished
    assert 5 <= result.step < 20
    assert signal.getsignal(signal.SIGINT) is handler
    train(steps(20), tmp_path / "cut", report=Record())
    train(steps(20), tmp_path / "straight", report=Record())
    same(*(restored(steps(20), tmp_path / name) for name in ("cut", "straight")))


def test_a_killed_save_is_never_loaded(steps, tmp_path):
    train(steps(10), tmp_path, report=Record())
    half = tmp_path / "checkpoints" / "15.orbax-checkpoint-tmp"
    (half / "default").mkdir(parents=True)
    report = Record()
    train(steps(20), tmp_path, report=report)
    assert "at step 10" in report.notes[1]
    assert not half.exists()


def test_another_configuration_is_refused_by_name(config, steps, tmp_path):
    train(steps(5), tmp_path, report=Record())
    before = (tmp_path / "train_config.json").read_bytes()
    for part, change in {
        "model": {"rms_norm_eps": 1e-6, "intermediate_size": 64},
        "data": {"batch_size": 2},
        "training": {"seed": 1},
    }.items():
        other = dataclasses.replace(
            config, **{part: dataclasses.replace(getattr(config, part), **change)}
        )
        with pytest.raises(ValueError, match=r"Use another --run folder") as error:
            train(other, tmp_path, report=Record())
        for key, value in change.items():
            assert f"{part}.{key}: {getattr(getattr(config, part), key)} -> {value}" in str(
                error.value
            )
        assert (tmp_path / "train_config.json").read_bytes() == before


def test_what_may_change_is_said(config, steps, tmp_path):
    train(steps(5), tmp_path, report=Record())
    report = Record()
    slower = dataclasses.replace(config.optimizer, lr=1e-3)
    train(dataclasses.replace(steps(6), optimizer=slower), tmp_path, report=report)
    assert "changed: optimizer.lr: 0.01 -> 0.001" in report.notes[1]


def test_a_foreign_model_folder_is_refused(config, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="--run: expected a new folder"):
        train(config, tmp_path, report=Record())


def test_a_loss_that_is_no_number_stops_and_keeps_the_last_checkpoint(config, steps, tmp_path):
    train(steps(5), tmp_path, report=Record())
    weights = (tmp_path / "model.safetensors").read_bytes()
    wild = dataclasses.replace(config.optimizer, lr=1e30, final_lr=1e30)
    with pytest.raises(ValueError, match="expected a finite loss"):
        train(dataclasses.replace(steps(20), optimizer=wild), tmp_path, report=Record())
    assert (tmp_path / "model.safetensors").read_bytes() == weights
    assert int(restored(config, tmp_path).step) == 5


def test_bfloat16_computation_learns_with_float32_parameters(steps, tmp_path):
    config = steps(20)
    mixed = dataclasses.replace(config.training, dtype="bfloat16", remat=True, loss_chunk=8)
    report = Record()
    train(dataclasses.replace(config, training=mixed), tmp_path, report=report)
    assert report.records[20]["loss"] < report.records[1]["loss"] - 1
    assert {x.dtype.name for x in jax.tree.leaves(restored(config, tmp_path).params)} == {"float32"}


@pytest.mark.slow
@pytest.mark.parametrize("graph", ["true", "false"])
def test_the_program(corpus, token_cache, tmp_path, graph):
    """The command line, from another folder, with and without NNX's graph mode."""
    small = (
        "--model.hidden_size=32 --model.intermediate_size=48 --model.num_layers=2"
        " --model.vocab_size=320 --model.num_heads=4 --model.head_dim=8 --optimizer.warmup_steps=2"
        f" --training.steps=4 --data.context=32 --training.loss_chunk=none --data.heldout=0.2"
        f" --data.corpus={corpus} --run=run"
    )
    command = [
        sys.executable,
        ROOT / "train/pretrain.py",
        ROOT / "configs/tiny_gqa.py",
        *small.split(),
    ]
    env = {**os.environ, "KVJAX_CACHE": str(token_cache), "NNX_GRAPH_MODE": graph}
    env["PYTHONPATH"] = str(ROOT)

    def call(*more):
        return subprocess.run(
            [*command, *more], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )

    done = call()
    assert done.returncode == 0, done.stderr
    assert "step 4/4" in done.stdout
    assert 'python -m kvjax.infer --model run --raw "def "' in done.stdout
    assert (tmp_path / "run" / "model.safetensors").is_file()
    wrong = call("--optimizer.lrr=1")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: --optimizer.lrr")
    assert "Traceback" not in wrong.stderr


def test_the_config_of_the_repository_is_of_a_size_for_a_cpu():
    config = load_config(ROOT / "configs/tiny_gqa.py")
    assert config.model.num_kv_heads < config.model.num_heads
    assert 3e6 < config.model.num_params() < 6e6
