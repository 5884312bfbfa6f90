"""Callbacks of a user's own, in a package of theirs: the same run on any ranks, through a kill, and to a stop."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

import lockstep
from helpers import FAKE, Done, forked, largest_difference, own_project, records, train_in, weights
from lockstep.core.run import Run
from lockstep.core.run_dir import RunDir

pytestmark = [pytest.mark.slow, pytest.mark.numerics]

PACKAGE = '''
import os
import signal
from pathlib import Path
from typing import ClassVar

import lockstep
import torch


@lockstep.option("callback")
class Noise(lockstep.Callback):
    """Adds noise to the gradients, from a generator whose state is saved, and counts in Python."""

    every_rank = True
    figures: ClassVar[tuple[str, ...]] = ("noise/steps",)

    std: float = 0.01

    def run_start(self, run):
        self.generator, self.steps = torch.Generator().manual_seed(7), 0

    def epoch_start(self, run):
        self.steps += 100

    def after_backward(self, run):
        self.steps += 1
        for parameter in run.model.parameters():
            parameter.grad += self.std * torch.randn(parameter.shape, generator=self.generator)

    def evaluation_start(self, run):
        self.steps += 1000

    def evaluation_end(self, run, scores):
        assert 0 <= scores["acc/val_top1"] <= 100
        run.log("noise/steps", self.steps)

    def state_dict(self):
        return {"generator": self.generator.get_state(), "steps": self.steps}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])
        self.steps = state["steps"]


@lockstep.option("callback")
class Bound(lockstep.Callback):
    """Bounds each number of the gradient, also of a part of it."""

    every_rank = True

    def after_backward(self, run):
        for parameter in run.model.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-0.01, 0.01)


@lockstep.option("callback")
class StopAt(lockstep.Callback):
    step: int = 4
    moment: str = "step_end"

    def when(self, run, moment):
        if moment == self.moment and run.step >= self.step:
            run.stop(f"enough at step {run.step}, epoch {run.epoch}")

    def epoch_start(self, run):
        self.when(run, "epoch_start")

    def after_backward(self, run):
        self.when(run, "after_backward")

    def step_end(self, run):
        self.when(run, "step_end")

    def evaluation_end(self, run, scores):
        self.when(run, "evaluation_end")

    def epoch_end(self, run):
        self.when(run, "epoch_end")


@lockstep.option("callback")
class Told(lockstep.Callback):
    """Writes what it is told and sees, by rank."""

    every_rank = True

    def tell(self, run, moment):
        with Path(f"told-{run.folder.name}-{run.world.rank}").open("a") as file:
            print(moment, run.step, run.epoch, f"{run.lr:g}", len(run.outputs), file=file)

    def run_start(self, run):
        self.tell(run, "run_start")

    def epoch_start(self, run):
        self.tell(run, "epoch_start")

    def after_backward(self, run):
        self.tell(run, "after_backward")

    def step_end(self, run):
        assert run.loss > 0
        self.tell(run, "step_end")

    def evaluation_start(self, run):
        self.tell(run, "evaluation_start")

    def evaluation_end(self, run, scores):
        self.tell(run, "evaluation_end")

    def epoch_end(self, run):
        self.tell(run, "epoch_end")

    def run_end(self, run):
        self.tell(run, "run_end")


@lockstep.option("callback")
class Kill(lockstep.Callback):
    """Kills its rank, or stops the run, once."""

    step: int = 5
    moment: str = "step_end"
    number: int = 9

    def step_end(self, run):
        self.once(run, "step_end")

    def evaluation_start(self, run):
        self.once(run, "evaluation_start")

    def once(self, run, moment):
        mark = run.folder / "killed"
        if (moment, run.step) == (self.moment, self.step) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), self.number)


@lockstep.option("callback")
class Broken(lockstep.Callback):
    kind: str = "raises"

    def step_end(self, run):
        if self.kind == "raises":
            torch.zeros(2).view(3)  # the line
        if self.kind == "logs":
            run.log("nobody/knows", 1)

    def evaluated(self, step, scores, best):
        if self.kind == "observes":
            scores["nobody/knows"]

    def state_dict(self):
        return {"lists": [{"sets": set()}]} if self.kind == "keeps" else {}
'''
JOB = (
    *(*FAKE, "augment=none", "dataset.examples=90", "batch=30", "epochs=3", "precision=fp64", "device=cpu"),
    *("optimizer=sgd", "optimizer.lr=0.1", "telemetry.interval=3", "model=linear", "logger=jsonl"),
    *("telemetry.report=never", "train.eval_every=3", "checkpoint.every=2"),
)
TWO = ("strategy=ddp", "launcher.ranks=2", "launcher.threads=1")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return own_project(tmp_path_factory.mktemp("project"), PACKAGE)


def train(project: Path, name: str, *words: str, code: int = 0) -> Done:
    return train_in(project, name, *JOB, *words, code=code)


def same(project: Path, first: str, second: str, tolerance: float = 0.0) -> bool:
    return largest_difference(weights(project / first), weights(project / second)) <= tolerance


def test_a_callback_is_told_all_moments_in_their_order_on_each_rank(project: Path) -> None:
    train(project, "told", "callback=[told]", *TWO, "epochs=2", "train.micro_batches=2", "optimizer.lr=0.5")
    lines = [(project / f"told-told-{rank}").read_text().splitlines() for rank in range(2)]
    assert lines[0] == lines[1]
    words = [line.split() for line in lines[0]]
    step = ["after_backward", "step_end"]
    epoch = ["epoch_start", *step * 3, "evaluation_start", "evaluation_end", "epoch_end"]
    assert [word for word, *_ in words] == ["run_start", *epoch * 2, "run_end"]
    assert [tuple(place) for word, *place, _, outputs in words if word == "epoch_start"] == [("1", "0"), ("4", "1")]
    assert {outputs for word, *_, outputs in words if word == "step_end"} == {"2"}


def test_a_callback_with_state_is_the_same_run_on_two_ranks_and_through_kills(project: Path) -> None:
    noise = ("callback=[noise]",)
    train(project, "whole", *noise)
    train(project, "plain")
    assert not same(project, "whole", "plain", 1e-6)
    train(project, "two", *noise, *TWO)
    assert same(project, "whole", "two", 1e-12)
    logged = [line["noise/steps"] for line in records(RunDir(project / "whole")) if "noise/steps" in line]
    assert logged == [1103, 2206, 3309]
    for name, words in {"killed": (), "killed-two": TWO}.items():
        killed = ("callback=[noise,kill]", *words)
        done = forked("train.py", *JOB, f"hydra.run.dir={name}", *killed, cwd=project)
        assert done.code != 0, name
        train(project, name, *killed)
        assert same(project, "two" if words else "whole", name), name
        assert [line["noise/steps"] for line in records(RunDir(project / name)) if "noise/steps" in line] == logged


@pytest.mark.parametrize("words", [(), TWO])
def test_a_stop_in_an_evaluation_leaves_no_trace_in_the_state(project: Path, words: tuple[str, ...]) -> None:
    name = f"in-evaluation-{len(words)}"
    stopped = (
        *("callback=[noise,kill]", "callback.kill.moment=evaluation_start", "callback.kill.step=6"),
        *(f"callback.kill.number={int(signal.SIGTERM)}", "train.eval_batch=5", *words),
    )
    train(project, f"whole-{name}", "callback=[noise]", "train.eval_batch=5", *words)
    train(project, name, *stopped, code=75)
    train(project, name, *stopped)
    assert same(project, f"whole-{name}", name)
    steps = [line["noise/steps"] for line in records(RunDir(project / name)) if "noise/steps" in line]
    assert steps == [1103, 2206, 3309]


@pytest.mark.parametrize("strategy", ["fsdp", "zero", "pipeline", "allreduce_hooks", "strict"])
def test_gradients_are_complete_after_backward_under_each_strategy(project: Path, strategy: str) -> None:
    job = ("callback=[bound]", "model=basicnet", "steps=3", "train.eval_every=3")
    if not (project / "bound").exists():
        train(project, "bound", *job)
    own = "repro=strict" if strategy == "strict" else f"strategy={strategy}"
    train(project, f"bound-{strategy}", *job, own, *TWO[1:], *["train.micro_batches=2"] * (strategy == "pipeline"))
    assert same(project, "bound", f"bound-{strategy}", 1e-12)


@pytest.mark.parametrize(
    ("moment", "step", "last"),
    [
        ("after_backward", 4, 4),
        ("step_end", 4, 4),
        ("epoch_start", 4, 4),
        ("evaluation_end", 2, 3),
        ("epoch_end", 5, 6),
    ],
)
def test_a_callback_ends_the_run_at_its_step_on_any_ranks(project: Path, moment: str, step: int, last: int) -> None:
    for number, words in enumerate(((), TWO)):
        name = f"stop-{moment}-{number}"
        stop = ("callback=[stop_at]", f"callback.stop_at.moment={moment}", f"callback.stop_at.step={step}")
        done = train(project, name, *stop, *words)
        summary = Run(project / name).summary
        reason = f"a callback ends the run: enough at step {last}, epoch {(last - 1) // 3}"
        assert (summary["status"], summary["step"], summary["stopped_early"]) == ("completed", last, reason)
        assert reason in done.out
        assert [line["step"] for line in records(RunDir(project / name)) if "loss/val" in line][-1] == last
        again = forked("train.py", f"resume={name}", cwd=project)
        assert (again.code, Run(project / name).summary["step"]) == (0, last), again.err
    longer = forked("train.py", f"resume={name}", "callback.stop_at.step=7", cwd=project)
    assert longer.code == 0, longer.err
    assert int(Run(project / name).summary["step"]) > last  # type: ignore[call-overload]


def test_a_stop_that_is_killed_before_its_end_ends_at_the_same_step(project: Path) -> None:
    words = ("callback=[stop_at,kill]", "callback.kill.step=4", "callback.kill.moment=evaluation_start")
    words = (*words, f"callback.kill.number={int(signal.SIGTERM)}", "train.eval_batch=5")
    train(project, "stopped-in-stop", *words, code=75)
    train(project, "stopped-in-stop", *words)
    summary = Run(project / "stopped-in-stop").summary
    assert (summary["status"], summary["step"]) == ("completed", 4)
    evaluated = [line["step"] for line in records(RunDir(project / "stopped-in-stop")) if "loss/val" in line]
    assert evaluated == [3, 4]


def test_a_resume_with_other_callbacks_says_so(project: Path) -> None:
    train(project, "changed", "callback=[noise]", "epochs=1")
    done = forked("train.py", "resume=changed", "callback=[bound]", "epochs=2", cwd=project)
    assert done.code == 0, done.err
    assert (
        "resume: the checkpoint has no state of the callbacks bound, which start fresh; the run no longer has the "
        "callbacks noise, whose state is dropped"
    ) in done.out + done.err


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (
            ("callback=[broken]",),
            70,
            r"__init__.py:\d+: callback broken: step_end raised RuntimeError: shape '\[3\]'",
        ),
        (("callback=[broken]", *TWO), 70, r"callback broken: step_end raised RuntimeError: shape '\[3\]'"),
        (
            ("callback=[broken]", "callback.broken.kind=observes"),
            70,
            r"own/__init__.py:\d+: callback broken: evaluated raised KeyError: 'nobody/knows'",
        ),
        (
            ("callback=[broken]", "callback.broken.kind=logs"),
            2,
            "callback: the figure 'nobody/knows' is not declared",
        ),
        (
            ("callback=[broken]", "callback.broken.kind=keeps"),
            2,
            r"callback broken: state_dict\['lists'\]\[0\]\['sets'\] is of type set, expected tensors",
        ),
        (
            ("callback=[bound]", "train.cuda_graph=true"),
            2,
            "train.cuda_graph is true, but no replay calls after_backward of the callbacks bound",
        ),
    ],
)
def test_a_mistake_in_a_callback_is_one_sentence(
    project: Path, words: tuple[str, ...], code: int, sentence: str
) -> None:
    name = re.sub(r"\W", "-", "-".join(words))
    done = train(project, name, *words, code=code)
    assert re.search(sentence, done.err), done.err
    assert "Traceback" not in done.err
    line = next(number for number, text in enumerate(PACKAGE.splitlines(), 1) if "# the line" in text)
    assert code == 2 or "evaluated" in sentence or f"{project}/own/__init__.py:{line}: " in done.err


class Counting(lockstep.Callback):
    def __init__(self) -> None:
        self.steps = 0

    def step_end(self, run: lockstep.TrainingRun) -> None:
        self.steps += 1
        if self.steps == 3:
            run.stop("three are enough")

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def test_an_object_takes_part_in_a_run_from_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counting = Counting()
    words = [*JOB, f"output_root={tmp_path}"]
    result = lockstep.train(words, callbacks=[counting])
    assert (counting.steps, result.summary["step"]) == (3, 3)
    assert result.summary["stopped_early"] == "a callback ends the run: three are enough"
    assert "train longer" not in capsys.readouterr().out, "the callback would end it again"
    with pytest.raises(lockstep.InputError, match="an object of int, which is no"):
        lockstep.train(words, callbacks=[3])  # type: ignore[list-item]
