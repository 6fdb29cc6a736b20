"""Checkpoints of a run with Orbax, and the record of what the run is."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from kvjax.config import need, to_dict
from kvjax.training.config import TrainConfig
from kvjax.training.state import TrainState

RECORD = "train_config.json"
# What a resumed run may not change, since it would no longer be the same run.
FIXED = ("model.", "data.", "training.seed", "training.dtype", "corpus.")


class Checkpoints:
    """The checkpoints of a run folder. A checkpoint gets its name when it is whole, by a rename.

    Saving is synchronous: the train step donates its state, and on a CPU an asynchronous save would
    read the buffers that the next step overwrites.
    """

    def __init__(self, run: Path, *, keep: int = 2):
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        self._manager = ocp.CheckpointManager((run / "checkpoints").resolve(), options=options)

    def latest(self) -> int | None:
        """The step of the newest whole checkpoint."""
        return self._manager.latest_step()

    def save(self, state: TrainState) -> None:
        """Saves unless this step is there already."""
        step = int(state.step)
        if step != self.latest():
            tree = {"step": state.step, "params": state.params, "opt_state": state.opt_state}
            self._manager.save(step, args=ocp.args.StandardSave(tree), force=True)

    def restore(self, like: TrainState, step: int | None = None) -> TrainState:
        """The state of a step (the newest by default), placed as `like` says.

        like: arrays or `jax.ShapeDtypeStruct`s. Their shardings decide the placement, whatever
        devices saved it; without one an array goes to the default device.
        """
        step = self.latest() if step is None else step
        need(step is not None, "checkpoints", "at least one", "none")
        tree = {"step": like.step, "params": like.params, "opt_state": like.opt_state}
        tree = self._manager.restore(
            step, args=ocp.args.StandardRestore(jax.tree.map(_placed, tree))
        )
        state = TrainState(**tree)
        need(int(state.step) == step, "checkpoint", f"the state of step {step}", int(state.step))
        return state

    def close(self) -> None:
        self._manager.close()


def _placed(x: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(x, "sharding", None)
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def write_record(run: Path, config: TrainConfig, facts: dict[str, Any]) -> None:
    """Writes what the run is, atomically."""
    text = json.dumps(_record(config, facts), indent=2) + "\n"
    temporary = run / f".{RECORD}.tmp"
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, run / RECORD)


def changed_fields(run: Path, config: TrainConfig, facts: dict[str, Any]) -> list[str]:
    """How a run that is resumed differs from its record, as `key: old -> new`, where it may.

    Raises ValueError that names every field that differs and may not: of the model, the data, the
    seed, and of the corpus as it was read (another Python has another standard library).
    """
    path = run / RECORD
    need(path.is_file(), f"{path}", "the record of the run to resume", "no file")
    old = dict(_flat(json.loads(path.read_text(encoding="utf-8"))))
    new = dict(_flat(json.loads(json.dumps(_record(config, facts)))))
    differ = [k for k in {**old, **new} if old.get(k, "absent") != new.get(k, "absent")]
    lines = {k: f"{k}: {old.get(k, 'absent')} -> {new.get(k, 'absent')}" for k in differ}
    fixed = [line for k, line in lines.items() if k.startswith(FIXED)]
    if fixed:
        raise ValueError(
            f"--run: expected the configuration that {run} was trained with, got differences in"
            f" {'; '.join(fixed)}. Use another --run folder, or the same configuration."
        )
    return list(lines.values())


def _record(config: TrainConfig, facts: dict[str, Any]) -> dict[str, Any]:
    return {**to_dict(config), "corpus": facts}


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
