"""The command by which the user started the program, for messages that propose a command."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

_WORDS = ["lockstep", "train"]


def started_as(program: str) -> None:
    """Set the command from `sys.argv[0]` of this process: `python train.py` or `lockstep train`."""
    name = Path(program).name
    if name.endswith(".py") and name != "__main__.py":
        _WORDS[:] = ["python", name]


def program_words() -> list[str]:
    """The two words before the overrides of the user's command."""
    return [*_WORDS]


def program_name() -> str:
    """The two words before the overrides, as one text."""
    return " ".join(_WORDS)


def command_of_program() -> list[str]:
    """The words that start this program in a fresh interpreter."""
    if Path(sys.argv[0]).suffix == ".py" and Path(sys.argv[0]).name != "__main__.py":
        return [sys.executable, str(Path(sys.argv[0]).absolute())]
    return [sys.executable, "-m", "lockstep", "train"]


def words_of(command: str) -> list[str]:
    """The two words before the overrides of `command`, the command of a run."""
    return shlex.split(command)[:2]
