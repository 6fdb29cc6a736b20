"""Config files and typed overrides."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from kvjax.training import TrainConfig, load_config
from kvjax.training.overrides import fields, override, values

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.py"))


def test_values_have_the_type_of_their_field(config):
    new = override(
        config,
        [
            "--training.steps=1_000",
            "--optimizer.lr=3e-4",
            "--training.remat=true",
            "--data.corpus=stdlib",
            "--data.exclude=a, b",
            "--training.loss_chunk=none",
            "--model.pad_token_id=none",
            "--model.eos_token_ids=1,5",
            "--model.rope.theta=1e6",
        ],
    )
    assert new.training.steps == 1000
    assert new.optimizer.lr == 3e-4
    assert new.training.remat is True
    assert new.data.corpus == "stdlib"
    assert new.data.exclude == ("a", "b")
    assert new.training.loss_chunk is None
    assert new.model.pad_token_id is None
    assert new.model.eos_token_ids == (1, 5)
    assert new.model.rope.theta == 1e6
    assert override(config, ["--data.exclude="]).data.exclude == ()


def test_fields_that_depend_are_checked_together(config):
    new = override(config, ["--model.num_heads=6", "--model.num_kv_heads=3"])
    assert (new.model.num_heads, new.model.num_kv_heads) == (6, 3)


def test_values_read_back(config):
    arguments = [f"--{key}={value}" for key, value in values(config)]
    assert len(arguments) == len(list(fields(config)))
    assert override(config, arguments) == config


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--optimizer.lrr=1", r"--optimizer.lrr: .*unknown.*'optimizer.lr'"),
        ("--lr=1", r"--lr: .*unknown.*Did you mean 'optimizer.lr'"),
        ("--model=1", r"--model: .*group: model.vocab_size, "),
        ("--training.steps=many", r"--training.steps: expected int, got 'many'"),
        ("--training.steps=1.5", r"--training.steps: expected int, got '1.5'"),
        ("--training.remat=1", r"--training.remat: expected true or false, got '1'"),
        ("--training.loss_chunk=x", r"--training.loss_chunk: expected int or none, got 'x'"),
        ("--model.eos_token_ids=1,x", r"comma-separated ints"),
        ("--model.rope.type=yarnn", r"--model.rope.type: expected one of \('default'"),
        ("--training.steps", r"override: expected --a.b=value, got '--training.steps'"),
        ("training.steps=1", r"override: expected --a.b=value"),
        ("--training.steps=0", r"training.steps: expected a positive int, got 0"),
        ("--model.num_kv_heads=3", r"num_kv_heads: expected a divisor"),
        ("--data.context=128", r"data.context: expected at most .*=64, got 128"),
        ("--optimizer.warmup_steps=20", r"warmup_steps: expected less than the 20 steps"),
    ],
)
def test_wrong_overrides_say_what_is_wrong(config, argument, message):
    with pytest.raises(ValueError, match=message):
        override(config, [argument])


def test_a_key_twice(config):
    with pytest.raises(ValueError, match="expected once, got twice"):
        override(config, ["--training.steps=1", "--training.steps=2"])


def test_config_files_that_are_not(tmp_path):
    (tmp_path / "tiny.py").write_text("config = 3\n")
    with pytest.raises(ValueError, match=r"tiny_.py.*Its folder has tiny.py"):
        load_config(tmp_path / "tiny_.py")
    with pytest.raises(ValueError, match=r"config: expected .*TrainConfig.*got 'int'"):
        load_config(tmp_path / "tiny.py")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_config_of_the_repository_loads_and_says_how_to_run_it(path):
    assert isinstance(load_config(path), TrainConfig)
    assert f"python train/pretrain.py configs/{path.name}" in runpy.run_path(str(path))["__doc__"]
