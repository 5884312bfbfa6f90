"""The arguments of the commands: words that were meant for a flag, and keys that a command sets itself."""

import sys
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from lockstep.api import compose
from lockstep.cli.arguments import ONE_PROCESS, arguments
from lockstep.config.commands import OF_RUN
from lockstep.config.composition import without_keys
from lockstep.core.errors import InputError
from lockstep.diagnostics.ladder import OF_RUNGS
from lockstep.diagnostics.lr_find import OF_TEST, lr_find
from lockstep.diagnostics.prove import OF_RUNS
from lockstep.job.resume import refuse_resume

# A command that trained a run, with a key of each kind that says where and how.
OF_MACHINES = ("logger=wandb", "launcher=slurm", "launcher.ranks=2", "sweep.halving=3")
TRAINED = ["epochs=3", "schedule=step", "schedule.warmup=3", *OF_MACHINES]
OF_JOBS: dict[str, Callable[[list[str]], object]] = {
    "lr-find": lambda words: lr_find(words, steps=2, low=1e-3, high=1.0, out=None),
    "lockstep.compose": compose,
}


USED = [({*OF_RUN, *OF_TEST}, []), (OF_RUN, TRAINED[:3]), (OF_RUNS, TRAINED[1:3]), (OF_RUNGS, TRAINED[:3])]


@pytest.mark.parametrize(("keys", "used"), USED)
def test_a_command_takes_the_line_that_trained_without_the_keys_that_it_does_not_use(
    keys: Collection[str], used: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert without_keys(["model=linear", *TRAINED], keys, "it draws") == ["model=linear", *used]
    ignored = [word for word in TRAINED if word not in used]
    assert capsys.readouterr().err == f"it draws; ignored: {' '.join(ignored)}\n"
    assert without_keys(["model=linear"], keys, "it draws") == ["model=linear"]
    assert not capsys.readouterr().err
    with pytest.raises(InputError, match=r"Did you mean .launcher\.ranks"):
        without_keys(["launcher=spawn", "launcher.rank=2"], keys, "it draws")


@pytest.mark.parametrize("command", ["evaluate", "predict", "export", "demo", "runs", "compare", "report", "watch"])
def test_a_command_that_takes_no_job_ignores_the_line_that_trained(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [command, "RUN", *["a.png"] * (command == "predict")]
    words += ["--by", "epochs=3"] if command == "compare" else []
    monkeypatch.setattr(sys, "argv", ["lockstep", *words])
    expected = arguments()
    monkeypatch.setattr(sys, "argv", ["lockstep", *words[:2], *TRAINED, *words[2:], "model=linear"])
    used = [word for word in TRAINED if command == "evaluate" and word.startswith("launcher")]
    vars(expected).update({"overrides": used} if used else {})
    assert arguments() == expected
    ignored = [word for word in TRAINED if word not in used]
    assert f"ignored: {' '.join(ignored)} model=linear" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["lockstep", *words, "epohcs=3"])
    with pytest.raises(InputError, match=r"Did you mean .*epochs"):
        arguments()


def test_an_evaluation_takes_the_data_and_the_ranks_of_the_line_that_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "argv", ["lockstep", "evaluate", "RUN", "dataset=fake", "epochs=3", "launcher.ranks=2", "device=cpu"]
    )
    assert arguments().overrides == ["dataset=fake", "launcher.ranks=2", "device=cpu"]


def test_a_run_to_resume_is_not_left_out_where_it_says_the_job() -> None:
    with pytest.raises(InputError, match=r"^resume=latest: it trains; remove it, and type the overrides"):
        refuse_resume(["seed=1", "resume=latest"], "it trains")


def test_words_that_are_left_out_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["dataset.path=no/such", "dataset=folder", "epochs=2", f"hydra.run.dir={tmp_path}", "schedule=step"]
    for run in (OF_JOBS["lr-find"], OF_JOBS["lockstep.compose"]):
        with pytest.raises(InputError, match="no/such"):  # and not of the other words
            run(line)
    assert f"ignored: epochs=2 hydra.run.dir={tmp_path} schedule=step" in capsys.readouterr().err


@pytest.mark.parametrize("command", ONE_PROCESS)
def test_a_command_that_starts_ranks_is_refused_as_a_rank(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lockstep", command])
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=f"^lockstep {command} is one process .*; start it without torchrun or srun"):
        arguments()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert arguments().command == command
