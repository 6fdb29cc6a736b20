"""The training loop: resume, train, evaluate, checkpoint, export; stop cleanly when asked."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from kvjax.attending import attended_by
from kvjax.checkpoints.export import export
from kvjax.config import need
from kvjax.training.checkpoint import RECORD, Checkpoints, changed_fields, write_record
from kvjax.training.config import TrainConfig
from kvjax.training.data import Batches, Dataset, heldout_batches, load_dataset
from kvjax.training.optimizer import make_optimizer
from kvjax.training.progress import PlainReport, Report
from kvjax.training.state import TrainState, graphdef_of, init_state
from kvjax.training.step import make_eval_step, make_train_step


@dataclasses.dataclass(frozen=True)
class Result:
    """step: updates done. finished: whether that is all. heldout: the last evaluation, if any."""

    step: int
    finished: bool
    heldout: float | None


def train(config: TrainConfig, run: str | Path, *, report: Report | None = None) -> Result:
    """Trains in the folder `run`, from its newest checkpoint if there is one.

    Leaves a model folder that `kvjax.load` opens, as of the newest checkpoint. Ctrl-C and SIGTERM
    end it after the current step, with a checkpoint; a second Ctrl-C ends it at once.
    Raises ValueError when the folder belongs to another configuration, and when the loss is no
    number.
    """
    run, report = Path(run), report or PlainReport()
    _check_folder(run)
    data = load_dataset(config.data, config.model)
    facts = data.facts()
    attention = attended_by(config.model, dtype=config.training.dtype, tokens=config.data.context)
    report.note(
        f"{config.model.num_params():,} parameters; {facts['train_tokens']:,} training and"
        f" {facts['heldout_tokens']:,} held-out tokens of {data.files[0]} and {data.files[1]}"
        f" files; attention by {attention}"
    )
    checkpoints = Checkpoints(run)
    try:
        state = _start(config, run, checkpoints, facts, report)
        with _stop_signals() as asked:
            return _Loop(config, run, checkpoints, data, report).run(state, asked)
    finally:
        checkpoints.close()


def _check_folder(run: Path) -> None:
    foreign = (run / "config.json").exists() and not (run / RECORD).exists()
    need(not foreign, "--run", "a new folder or that of an earlier run", f"a model folder, {run}")
    run.mkdir(parents=True, exist_ok=True)


def _start(
    config: TrainConfig, run: Path, checkpoints: Checkpoints, facts: dict[str, Any], report: Report
) -> TrainState:
    optimizer, _ = make_optimizer(config.optimizer, decay_steps=config.decay_steps)
    init = jax.jit(lambda: init_state(config.model, optimizer, seed=config.training.seed))
    step = checkpoints.latest()
    if step is None:
        write_record(run, config, facts)
        return init()
    changed = changed_fields(run, config, facts)
    report.note(f"resuming {run} at step {step}" + "".join(f"\n  changed: {c}" for c in changed))
    state = checkpoints.restore(jax.eval_shape(init))
    write_record(run, config, facts)
    return state


class _Loop:
    def __init__(
        self,
        config: TrainConfig,
        run: Path,
        checkpoints: Checkpoints,
        data: Dataset,
        report: Report,
    ):
        self.config, self.folder, self.checkpoints, self.report = config, run, checkpoints, report
        shape = {"batch_size": config.data.batch_size, "context": config.data.context}
        self.batches = Batches(data.train, seed=config.training.seed, **shape)
        self.heldout = heldout_batches(data.heldout, count=config.training.eval_batches, **shape)
        self.tokenizer = data.tokenizer
        self.graphdef = graphdef_of(config.model)
        self.train_step = make_train_step(config)
        self.eval_step = make_eval_step(config)

    def run(self, state: TrainState, asked: Callable[[], bool]) -> Result:
        options, step, heldout = self.config.training, int(state.step), None
        self.report.start(step, options.steps)
        clock = _Clock(self.config.data.batch_size * self.config.data.context)
        metrics: dict[str, Any] = {}
        try:
            while step < options.steps and not asked():
                running = metrics
                state, metrics = self.train_step(state, self.batches(step))
                # one step ahead of the device, not many: else Ctrl-C waits for all of them
                jax.block_until_ready(running)
                step += 1
                clock.count()
                last = step == options.steps
                save = last or step % options.save_every == 0
                evaluate = last or step % options.eval_every == 0
                if not (save or evaluate or step % options.log_every == 0 or clock.first):
                    continue
                record = {key: float(value) for key, value in metrics.items()}  # waits for the step
                _check_finite(step, record)
                record["tokens_per_second"] = clock.rate()
                if evaluate:
                    record["heldout"] = heldout = self.evaluate(state)
                self.report.update(step, record)
                if save:
                    self.save(state)
                clock.restart()
            self.save(state)
        finally:
            self.report.stop()
        return Result(step, step >= options.steps, heldout)

    def evaluate(self, state: TrainState) -> float:
        losses = [self.eval_step(state.params, batch) for batch in self.heldout]
        return sum(map(float, losses)) / len(losses)

    def save(self, state: TrainState) -> None:
        """The checkpoint, then the model folder, which is made from it."""
        self.checkpoints.save(state)
        export(nnx.merge(self.graphdef, state.params), self.folder, self.tokenizer)


def _check_finite(step: int, record: dict[str, float]) -> None:
    need(
        math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"]),
        f"step {step}",
        "a finite loss and gradient",
        record,
        "Nothing was saved since the last checkpoint. Lower optimizer.lr or raise warmup_steps.",
    )


class _Clock:
    """Tokens a second between reports; the first step, which compiles, is reported alone."""

    def __init__(self, tokens: int):
        self.tokens, self.steps, self.first = tokens, 0, True
        self.began = time.perf_counter()

    def count(self) -> None:
        self.steps += 1

    def rate(self) -> float:
        return self.steps * self.tokens / (time.perf_counter() - self.began)

    def restart(self) -> None:
        self.steps, self.first, self.began = 0, False, time.perf_counter()


@contextlib.contextmanager
def _stop_signals() -> Iterator[Callable[[], bool]]:
    """Turns the first SIGINT or SIGTERM into an answer of the function it gives.

    A second one acts as before. Outside the main thread, where Python allows no handlers, signals
    stay as they are.
    """
    asked: list[int] = []
    old: dict[int, Any] = {}

    def handle(number, frame):
        asked.append(number)
        for each, handler in old.items():
            signal.signal(each, handler)

    with contextlib.suppress(ValueError):
        for number in (int(signal.SIGINT), int(signal.SIGTERM)):
            old[number] = signal.signal(number, handle)
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
