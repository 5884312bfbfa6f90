"""The variables of launchers (ours, torchrun, srun, a script): whether this process is a rank, and which one."""

import enum
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from lockstep.core.errors import InputError

# The variables with the number of processes that MPI has started: of Open MPI, of MPICH and Intel's, of MVAPICH.
MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
ATTEMPT = "LOCKSTEP_ATTEMPT"  # the name of an attempt of ranks that another program starts, shared by all of them
RUN_FOLDER = "LOCKSTEP_RUN_FOLDER"  # the run folder of a job on several machines, for main
AGENT = "lockstep"  # the name that our own agents of torch have for a job
# The variable with the number of the SLURM job in which `launcher=slurm` has started this process.
SUBMITTED = "LOCKSTEP_SLURM_JOB"
# The variable with the file in which a sweep writes its folder, for the program that has started it.
SWEEP_FOLDER = "LOCKSTEP_SWEEP_FOLDER"
# The ports at which ranks can meet: below the ports that Linux assigns by itself.
PORTS = range(10_000, 30_000)
# The variables that `srun` sets for each task of a step.
STEP_VARIABLES = {
    *("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"),
    *("SLURM_JOB_ID", "SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID"),
}


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


def follows() -> bool:
    """Whether this process is a rank for which another one, main, decides what is run and in which folder."""
    return launched_place().rank > 0


def in_agent() -> bool:
    """Whether torch's agent has started this rank for `launcher=elastic`, and not for torchrun."""
    return is_launched() and os.environ.get("TORCHELASTIC_RUN_ID") == AGENT


def started_by() -> Starter:
    """The program that started this rank. If torchrun runs in a task of `srun`, the answer is torchrun."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return Starter.torchrun
    return Starter.srun if os.environ.get("SLURM_PROCID") == os.environ.get("RANK") else Starter.script


def check_launched() -> None:
    """Raise InputError for variables that leave open which rank this is: each process would be a separate run."""
    if is_launched():
        return
    size = os.environ.get("WORLD_SIZE", "1")
    if size != "1" or "RANK" in os.environ:
        present, missing = ("RANK", "WORLD_SIZE") if "RANK" in os.environ else ("WORLD_SIZE", "RANK")
        raise InputError(
            f"the environment has {present}={os.environ[present]}, but no {missing}; let a launcher set both "
            f"(torchrun), or remove {present}: env -u {present}"
        )
    for name in MPI_SIZES:
        if (size := os.environ.get(name, "1")) != "1":
            raise InputError(
                f"MPI has started {size} processes ({name}={size}), and each would train alone; start the ranks with "
                f"torchrun or srun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each (not under MPI: "
                f"env -u {name})"
            )


def without_local_rank(words: Sequence[str]) -> list[str]:
    """The words of a rank's command without `--local-rank=N`, which `torch.distributed.launch` adds to LOCAL_RANK."""
    if not is_launched() or "LOCAL_RANK" not in os.environ:
        return list(words)
    return [word for word in words if not word.startswith(("--local-rank=", "--local_rank="))]


def launched_place() -> Place:
    """The place of this process: alone if not launched, on one machine without LOCAL_RANK. Raises InputError."""
    if not is_launched():
        return Place(rank=0, size=1, local_rank=0, local_size=1)
    size = _number("WORLD_SIZE", 1, 65_536)
    rank = _number("RANK", 0, size - 1)
    return Place(
        rank=rank,
        size=size,
        local_rank=_number("LOCAL_RANK", 0, size - 1, default=rank),
        local_size=_number("LOCAL_WORLD_SIZE", 1, size, default=size),
    )


def store_address() -> tuple[str, int]:
    """The host and the port of the store at which launched ranks meet. Raises InputError."""
    if not (host := os.environ.get("MASTER_ADDR")):
        raise InputError(
            "the environment has RANK and WORLD_SIZE, but no MASTER_ADDR, where the ranks meet; set it to "
            "the address of rank 0 and MASTER_PORT to a free port there, or remove RANK and WORLD_SIZE"
        )
    return host, _number("MASTER_PORT", 1, 65_535)


def local_size(ranks: int) -> int:
    """The number of a job's `ranks` that are on this machine: all, unless a launcher says otherwise."""
    return launched_place().local_size if is_launched() else ranks


def _number(name: str, least: int, most: int, default: int | None = None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdecimal()) or not least <= int(text) <= most:
        raise InputError(
            f"the environment has {name}={text!r}, expected a number from {least} to {most}; let a launcher set it "
            "(torchrun), or remove RANK and WORLD_SIZE"
        )
    return int(text)


def is_submitted() -> bool:
    """Whether `launcher=slurm` has submitted the job that this process is in."""
    return os.environ.get(SUBMITTED) == os.environ.get("SLURM_JOB_ID", "")


def adopt_srun() -> None:
    """In one of several tasks of `srun`, set the variables of a rank that other launchers set. Raises InputError."""
    environ = os.environ
    if "RANK" in environ or not environ.keys() >= STEP_VARIABLES:
        return
    try:
        if int(environ["SLURM_STEP_NUM_TASKS"]) == 1:
            return
        sizes = tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])
        step = port_of_step(int(environ["SLURM_JOB_ID"]), int(environ["SLURM_STEP_ID"]))
        local_size = sizes[int(environ["SLURM_NODEID"])]
    except (ValueError, IndexError):
        shown = " ".join(f"{name}={environ[name]!r}" for name in sorted(STEP_VARIABLES))
        raise InputError(
            f"the environment looks like a task of srun, but its variables do not fit together ({shown}); "
            "start the ranks with srun, or leave the task: env -u SLURM_STEP_ID"
        ) from None
    environ |= {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or address_of(first_host(environ["SLURM_STEP_NODELIST"])),
        "MASTER_PORT": environ.get("MASTER_PORT") or str(step),
    }


def rendezvous() -> str:
    """The address at which the machines of this job meet: the first machine, and a port from the job's number."""
    job = int(os.environ["SLURM_JOB_ID"])
    return f"{address_of(first_host(os.environ['SLURM_JOB_NODELIST']))}:{port_of_step(job, 0)}"


def port_of_step(job: int, step: int) -> int:
    """A port for a step of a job. Jobs and steps that are likely to run at the same time get different ports."""
    return PORTS[(17 * job + step) % len(PORTS)]


def tasks_per_node(text: str) -> list[int]:
    """The tasks on each machine, which SLURM writes as `2(x3),1`."""
    sizes: list[int] = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        sizes += [int(tasks)] * int(times or 1)
    return sizes


def first_host(hosts: str) -> str:
    """The first name of a host list in SLURM's format: `gpu03` for `gpu[03-05,9],login`."""
    first_name = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first_name[0] if first_name is not None else hosts)


def address_of(node: str) -> str:
    """The name of a machine, or its address in SLURM if the name cannot be resolved here."""
    with suppress(OSError):
        socket.getaddrinfo(node, None)
        return node
    if shutil.which("scontrol") is None:
        return node
    facts = subprocess.run(["scontrol", "show", "node", node], capture_output=True, text=True, check=False).stdout
    address = re.search(r"NodeAddr=(\S+)", facts)
    return address[1] if address is not None else node
