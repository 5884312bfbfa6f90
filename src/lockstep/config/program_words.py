"""How the user called the program, for sentences that propose a command."""

from __future__ import annotations

import shlex
from pathlib import Path

_WORDS = ["lockstep", "train"]


def started_as(program: str) -> None:
    """Tell how this process was started, by its `sys.argv[0]`: as `python train.py`, or as `lockstep train`."""
    name = Path(program).name
    if name.endswith(".py") and name != "__main__.py":
        _WORDS[:] = ["python", name]


def program_words() -> list[str]:
    """The two words before the overrides."""
    return [*_WORDS]


def program_name() -> str:
    """The same as one text."""
    return " ".join(_WORDS)


def words_of(command: str) -> list[str]:
    """The two words before the overrides of a run's command."""
    return shlex.split(command)[:2]
