"""The SLURM job of this process, from the variables that SLURM sets. Imports no torch.

`srun python train.py` starts a rank in each task. A job that `launcher=slurm` has submitted starts one command on
each machine, and this command starts the ranks.
"""

import os
import re
import shutil
import socket
import subprocess

from lockstep.core.errors import InputError

# The variable with the number of the SLURM job in which `launcher=slurm` has started this process.
SUBMITTED = "LOCKSTEP_SLURM_JOB"
# The ports at which ranks can meet: below the ports that Linux assigns by itself.
PORTS = range(10_000, 30_000)
# The variables that `srun` sets for each task of a step.
STEP_VARIABLES = {
    *("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"),
    *("SLURM_JOB_ID", "SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID"),
}


def is_submitted() -> bool:
    """Whether `launcher=slurm` has submitted the job that this process is in."""
    return os.environ.get(SUBMITTED) == os.environ.get("SLURM_JOB_ID", "")


def adopt_srun() -> None:
    """In one of several tasks of `srun`, set the variables of a rank that other launchers set.

    Raises:
        InputError: a variable of SLURM is not what SLURM sets.
    """
    environ = os.environ
    if "RANK" in environ or not environ.keys() >= STEP_VARIABLES:
        return
    try:
        environ.update(_rank_variables())
    except (ValueError, IndexError):
        shown = " ".join(f"{name}={environ[name]!r}" for name in sorted(STEP_VARIABLES))
        raise InputError(
            f"the environment looks like that of a task of srun, but its variables do not fit together ({shown}); "
            "start the ranks with srun, or leave the task: env -u SLURM_STEP_ID"
        ) from None


def _rank_variables() -> dict[str, str]:
    """The variables of a rank for this task; none if it is the only one of its step.

    Raises:
        ValueError, IndexError: a variable is not a number, or too large.
    """
    environ = os.environ
    if int(environ["SLURM_STEP_NUM_TASKS"]) < 2:
        return {}
    sizes = tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])
    step = port(int(environ["SLURM_JOB_ID"]), int(environ["SLURM_STEP_ID"]))
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(sizes[int(environ["SLURM_NODEID"])]),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or address_of(first_host(environ["SLURM_STEP_NODELIST"])),
        "MASTER_PORT": environ.get("MASTER_PORT") or str(step),
    }


def rendezvous() -> str:
    """The address at which the machines of this job meet: the first machine, and a port from the job's number."""
    job = int(os.environ["SLURM_JOB_ID"])
    return f"{address_of(first_host(os.environ['SLURM_JOB_NODELIST']))}:{port(job, 0)}"


def port(job: int, step: int) -> int:
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
    try:
        socket.getaddrinfo(node, None)
        return node
    except OSError:
        pass
    if shutil.which("scontrol") is None:
        return node
    facts = subprocess.run(["scontrol", "show", "node", node], capture_output=True, text=True, check=False).stdout
    address = re.search(r"NodeAddr=(\S+)", facts)
    return address[1] if address is not None else node
