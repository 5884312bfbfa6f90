"""How the user called the program, for sentences that propose a command."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path


def program_words() -> list[str]:
    """The two words before the overrides: `python train.py`, or `lockstep train`."""
    name = Path(sys.argv[0]).name
    return ["lockstep", "train"] if name in ("lockstep", "__main__.py") else ["python", name]


def program_name() -> str:
    """The same as one text."""
    return " ".join(program_words())


def words_of(command: str) -> list[str]:
    """The two words before the overrides of a run's command."""
    return shlex.split(command)[:2]
