"""The arguments of the commands: words that were meant for a flag, and keys that a command sets itself."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from lockstep.api import compose
from lockstep.cli.arguments import ONE_PROCESS, arguments
from lockstep.cli.doctor import doctor
from lockstep.cli.ladder import OF_RUNGS, ladder
from lockstep.cli.lr_find import OF_TEST, lr_find
from lockstep.cli.prove import OF_RUNS, prove
from lockstep.cli.show import show
from lockstep.config.messages import RUN_FOLDERS, refuse_keys
from lockstep.core.errors import InputError

# The commands that run a job: each with a function that takes the overrides, and the keys that it sets itself.
OF_JOBS: dict[str, tuple[Callable[[list[str]], None], Collection[str]]] = {
    "ladder": (
        lambda words: ladder(words, ranks=None, repeats=1, only=None, scripts=[], form="table"),
        {*OF_RUNGS, *RUN_FOLDERS},
    ),
    "prove": (lambda words: prove(words, steps=2, ranks=None), OF_RUNS),
    "lr-find": (lambda words: lr_find(words, steps=2, low=1e-3, high=1.0, out=None), {*OF_TEST, *RUN_FOLDERS}),
    "show": (lambda words: show(words, images=1, epochs=1, out=None), RUN_FOLDERS),
    "doctor": (lambda words: doctor(words, multirun=False, everything=False, form="table"), ()),
    "lockstep.compose": (compose, RUN_FOLDERS),
    "doctor -m": (lambda words: doctor(words, multirun=True, everything=False, form="table"), ["hydra.run."]),
}


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("export latest", "model.onnx"),
        ("export latest", "new.png"),
        ("evaluate latest", "results"),
        ("show model=linear", "pictures.png"),
        ("lr-find --steps 5 batch=8", "found.svg"),
    ],
)
def test_a_word_that_names_the_file_to_write_is_refused_with_its_flag(
    line: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("photo.png", "model.onnx"):
        Path(name).touch()
    monkeypatch.setattr(sys, "argv", ["lockstep", *line.split(), word])
    with pytest.raises(InputError, match=rf"^{word}: expected .*; what to write has a flag: --out {word}$"):
        arguments()
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-1], "--out", word])
    assert arguments().out == word


def test_inputs_and_overrides_are_taken_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("photo.png").touch()
    for line in ("export latest photo.png .", "show ~logger batch=8", "evaluate latest dataset.path=photos"):
        monkeypatch.setattr(sys, "argv", ["lockstep", *line.split()])
        assert arguments().out is None


@pytest.mark.parametrize("command", OF_JOBS)
def test_no_refusal_names_an_override_that_the_same_command_refuses(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run, keys = OF_JOBS[command]
    ignored = "hydra.run.dir" if command == "doctor -m" else "hydra.sweep.dir"
    for key in {ignored, *(f"{key}dir" if key.endswith(".") else key for key in keys)}:
        with pytest.raises(InputError) as refused:
            run([f"{key}=X"])
        sentence = f"{refused.value} {capsys.readouterr().out}".replace(f"{key}=X", "")
        named = re.findall(r"([a-z_./]+)=", sentence)
        assert (command == "ladder" and key in ("hydra.run.dir", "hydra.sweep.dir")) == (named == ["output_root"])
        refuse_keys([f"{name}=X" for name in named], keys, f"refused after {key}")
    assert not list(tmp_path.iterdir())


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
