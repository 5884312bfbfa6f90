"""What a run goes on with that begins from a checkpoint: of its own folder, of another, with other callbacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import FAKE, created, run_dir
from lockstep.checkpoint.reading import load_newest
from lockstep.core.observer import Callback
from lockstep.core.run import Run
from lockstep.core.run_dir import RunDir
from lockstep.core.world import World
from lockstep.training import experiment
from lockstep.training.resolved_job import load_job

JOB = (*FAKE, "augment=none", "dataset.examples=40", "batch=10", "model=linear", "device=cpu", "logger=jsonl")
JOB = (*JOB, "train.eval_every=2", "checkpoint.every=1", "checkpoint.keep=9", "telemetry.report=never", "steps=6")


class Ending(Callback):
    """Ends the run after a step, and counts evaluations."""

    def __init__(self, step: int) -> None:
        self.step, self.evaluations = step, 0

    def evaluation_start(self, run: Any) -> None:
        self.evaluations += 1

    def step_end(self, run: Any) -> None:
        if run.step == self.step:
            run.stop("enough")


class Other(Ending):
    """Another class, which does the same."""


def trained(run: RunDir, **callbacks: Callback) -> dict[str, Any]:
    """Train a run to its end, or go on with it; its summary."""
    torch.set_num_threads(1)
    experiment.run(load_job(run.config), run, World.solo(), callbacks=callbacks)
    return Run(run.path).summary


def evaluations(run: RunDir) -> list[int]:
    """The steps of the scores in the newest checkpoint."""
    loaded = load_newest(run)
    assert loaded is not None
    return [step for step, _ in loaded.facts["progress"]["scores"]]


def test_a_run_that_a_callback_has_ended_goes_on_with_other_callbacks_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_dir(tmp_path / "run", *JOB)
    assert trained(run, ending=Ending(3))["step"] == 3
    assert evaluations(run) == [2, 3]
    again = trained(run, ending=(ending := Ending(5)))
    assert (again["step"], again["stopped_early"]) == (3, "a callback ends the run: enough")
    assert (evaluations(run), ending.evaluations) == ([2, 3], 0), "the last one, which a callback asked for, counts"
    capsys.readouterr()
    assert trained(run, other=Other(5))["step"] == 5
    printed = capsys.readouterr()
    assert f" from  {run.checkpoints / 'step-00000003'}, step 3\n" in printed.out
    assert (
        "resume: the checkpoint has no state of the callbacks other, which start fresh; the run no longer has the "
        "callbacks ending, whose state is dropped"
    ) in " ".join((printed.out + printed.err).split())
    assert evaluations(run) == [2, 4, 5], "an evaluation at step 3 is none of this plan"


def test_a_new_run_from_a_checkpoint_has_no_best_weights_of_the_other(tmp_path: Path) -> None:
    first = run_dir(tmp_path / "first", *JOB)
    trained(first)
    checkpoint = first.checkpoints / "step-00000004"
    second, job = created(f"resume={checkpoint}", *JOB, f"hydra.run.dir={tmp_path}/second")
    experiment.run(job, second, World.solo())
    summary = Run(second.path).summary
    assert (summary["step"], summary["best_step"]) == (6, 6), "its first evaluation is its best one so far"
    assert second.weights.exists()
