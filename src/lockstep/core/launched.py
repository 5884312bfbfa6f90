"""Whether a launcher (ours, torchrun, srun with the variables set) started this process as a rank, and as which.

Imports no torch: it is asked before that.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from lockstep.core.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of a rank in its job, as its launcher says."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def is_launched() -> bool:
    """Whether a launcher started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launched() -> Place:
    """The place of a launched rank. Where the launcher does not say which ranks share a machine, all do.

    Raises:
        InputError: a variable is no number, or not one of its range.
    """
    size = _number("WORLD_SIZE", 1, 65_536)
    rank = _number("RANK", 0, size - 1)
    return Place(
        rank=rank,
        size=size,
        local_rank=_number("LOCAL_RANK", 0, size - 1, default=rank),
        local_size=_number("LOCAL_WORLD_SIZE", 1, size, default=size),
    )


def local_size(ranks: int) -> int:
    """How many of a job's `ranks` are on this machine: all, unless a launcher says otherwise."""
    return launched().local_size if is_launched() else ranks


def _number(name: str, least: int, most: int, default: int | None = None) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal() or not least <= int(text) <= most:
        raise InputError(
            f"the environment has {name}={text!r}, expected a number from {least} to {most}; let a launcher set it "
            "(torchrun), or leave out RANK and WORLD_SIZE"
        )
    return int(text)
