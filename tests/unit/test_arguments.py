"""The arguments of the commands: words that were meant for a flag, and keys that a command sets itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from lockstep.api import compose
from lockstep.cli.arguments import ONE_PROCESS, arguments
from lockstep.cli.ladder import OF_RUNGS
from lockstep.cli.lr_find import OF_TEST, lr_find
from lockstep.cli.prove import OF_RUNS
from lockstep.config.commands import RUN_FOLDERS, without_keys
from lockstep.core.errors import InputError

# The keys that commands set themselves, and commands that compose a job.
OF_KEYS: dict[str, Collection[str]] = {
    "ladder": OF_RUNGS,
    "prove": OF_RUNS,
    "lr-find": OF_TEST,
    "show": RUN_FOLDERS,
}
OF_JOBS: dict[str, Callable[[list[str]], object]] = {
    "lr-find": lambda words: lr_find(words, steps=2, low=1e-3, high=1.0, out=None),
    "lockstep.compose": compose,
}


@pytest.mark.parametrize("command", OF_KEYS)
def test_a_command_takes_the_line_that_trained_without_the_keys_that_it_sets_itself(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [f"{key}dir" if key.endswith(".") else key for key in OF_KEYS[command] if key != "resume"]
    words = ["model=linear", *(f"{key}=X" for key in keys), "seed=3"]
    assert without_keys(words, OF_KEYS[command], "it does something") == ["model=linear", "seed=3"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"it does something, so {' '.join(words[1:-1])} is ignored"
    assert without_keys(["model=linear"], OF_KEYS[command], "it does something") == ["model=linear"]
    assert not capsys.readouterr().err


@pytest.mark.parametrize("keys", [OF_RUNS, OF_TEST, OF_RUNGS])
def test_a_run_that_is_resumed_is_not_left_out(keys: Collection[str]) -> None:
    with pytest.raises(InputError, match=r"^resume=latest: it does something; remove it"):
        without_keys(["resume=latest"], keys, "it does something")


def test_words_that_are_left_out_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["dataset.path=no/such", "dataset=folder", "epochs=2", f"hydra.run.dir={tmp_path}", "schedule=step"]
    for run in (OF_JOBS["lr-find"], OF_JOBS["lockstep.compose"]):
        with pytest.raises(InputError, match="no/such"):  # and not of the other words
            run(line)
    assert "epochs=2 schedule=step is ignored" in capsys.readouterr().err


@pytest.mark.parametrize("command", ONE_PROCESS)
def test_a_command_that_starts_ranks_itself_is_refused_as_a_rank(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["lockstep", command])
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=f"^lockstep {command} is one process .*; start it without torchrun or srun"):
        arguments()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert arguments().command == command
