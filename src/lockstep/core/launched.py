"""Whether a launcher (ours, torchrun, srun, a script's variables) started this process as a rank, and as which rank.

Imports no torch: other modules need the answer before they import torch.
"""

import enum
import os
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.core.errors import InputError

# The variables with the number of processes that MPI has started: of Open MPI, of MPICH and Intel's, of MVAPICH.
MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
ATTEMPT = "LOCKSTEP_ATTEMPT"  # the name of an attempt of ranks that another program starts, shared by all of them
RUN_FOLDER = "LOCKSTEP_RUN_FOLDER"  # the run folder of a job on several machines, for main
AGENT = "lockstep"  # the name that our own agents of torch have for a job
MOST_DIGITS = 20  # Python refuses to read a number of thousands of digits


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of a rank in its job, from the variables of its launcher."""

    rank: int
    size: int
    local_rank: int
    local_size: int


class Starter(enum.Enum):
    """The program that started the ranks, if no launcher of ours did; the value shows how to set their number."""

    torchrun = "torchrun --nproc-per-node"
    srun = "srun --ntasks"
    script = "by WORLD_SIZE"

    @property
    def label(self) -> str:
        """The name for use in a sentence."""
        return "whoever set RANK and WORLD_SIZE" if self is Starter.script else self.name

    @property
    def cause(self) -> str:
        """The name for a sentence that says that this program did not start the ranks."""
        return "RANK and WORLD_SIZE" if self is Starter.script else self.name


def is_launched() -> bool:
    """Whether a launcher started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def in_agent() -> bool:
    """Whether torch's agent has started this rank for `launcher=elastic`, and not for torchrun."""
    return is_launched() and os.environ.get("TORCHELASTIC_RUN_ID") == AGENT


def started_by() -> Starter:
    """The program that started this rank. If torchrun runs in a task of `srun`, the answer is torchrun."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return Starter.torchrun
    return Starter.srun if os.environ.get("SLURM_PROCID") == os.environ.get("RANK") else Starter.script


def check_launched() -> None:
    """Refuse variables of a launcher that leave open which rank this process is.

    Each of the processes would be a run of its own, with the data of all.

    Raises:
        InputError: one of RANK and WORLD_SIZE is missing, or MPI has started several processes.
    """
    if is_launched():
        return
    size = os.environ.get("WORLD_SIZE", "1")
    if size != "1" or "RANK" in os.environ:
        present, missing = ("RANK", "WORLD_SIZE") if "RANK" in os.environ else ("WORLD_SIZE", "RANK")
        raise InputError(
            f"the environment has {present}={os.environ[present]}, but no {missing}; let a launcher set both "
            f"(torchrun), or leave out {present}: env -u {present}"
        )
    for name in MPI_SIZES:
        if (size := os.environ.get(name, "1")) != "1":
            raise InputError(
                f"MPI has started {size} processes ({name}={size}), and each would train alone; start the ranks with "
                f"torchrun or srun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each (not under MPI: "
                f"env -u {name})"
            )


def without_local_rank(words: Sequence[str]) -> list[str]:
    """The words of a rank's command without `--local-rank=N`.

    `torch.distributed.launch` adds this option, as torchrun once did. LOCAL_RANK has the same number.
    """
    if not is_launched() or "LOCAL_RANK" not in os.environ:
        return list(words)
    return [word for word in words if not word.startswith(("--local-rank=", "--local_rank="))]


def launched() -> Place:
    """The place of a launched rank. If the launcher does not set the local ranks, all ranks are on one machine.

    Raises:
        InputError: a variable is not a number, or is out of range.
    """
    size = _number("WORLD_SIZE", 1, 65_536)
    rank = _number("RANK", 0, size - 1)
    return Place(
        rank=rank,
        size=size,
        local_rank=_number("LOCAL_RANK", 0, size - 1, default=rank),
        local_size=_number("LOCAL_WORLD_SIZE", 1, size, default=size),
    )


def store_address() -> tuple[str, int]:
    """The host and the port of the store at which launched ranks meet.

    Raises:
        InputError: a variable is missing, or the port is not a number or is out of range.
    """
    if not (host := os.environ.get("MASTER_ADDR")):
        raise InputError(
            "the environment has RANK and WORLD_SIZE, but no MASTER_ADDR, where the ranks meet; set it to "
            "the address of rank 0 and MASTER_PORT to a free port there, or leave out RANK and WORLD_SIZE"
        )
    return host, _number("MASTER_PORT", 1, 65_535)


def local_size(ranks: int) -> int:
    """The number of a job's `ranks` that are on this machine: all, unless a launcher says otherwise."""
    return launched().local_size if is_launched() else ranks


def _number(name: str, least: int, most: int, default: int | None = None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < MOST_DIGITS) or not least <= int(text) <= most:
        raise InputError(
            f"the environment has {name}={text!r}, expected a number from {least} to {most}; let a launcher set it "
            "(torchrun), or leave out RANK and WORLD_SIZE"
        )
    return int(text)
