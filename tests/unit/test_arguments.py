"""The arguments of the commands: words that were meant for a flag."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lockstep.cli.arguments import arguments
from lockstep.core.errors import InputError


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
