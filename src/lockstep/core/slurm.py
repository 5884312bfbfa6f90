"""What SLURM says of the job that this process is in. Imports no torch.

`srun python train.py` starts a rank in each task. A job that `launcher=slurm` has submitted starts one command on
each machine, which starts the ranks.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess

# Names the job of SLURM in which `launcher=slurm` has started this process.
SUBMITTED = "LOCKSTEP_SLURM_JOB"
# Ports for the ranks to meet at: below those that Linux gives out by itself.
PORTS = range(10_000, 30_000)
# What `srun` tells each task of a step.
NEEDED = {
    *("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"),
    *("SLURM_JOB_ID", "SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID"),
}


def is_submitted() -> bool:
    """Whether `launcher=slurm` has submitted the job that this process is in."""
    return os.environ.get(SUBMITTED) == os.environ.get("SLURM_JOB_ID", "")


def adopt_srun() -> None:
    """In one of several tasks of `srun`, set the variables of a rank that other launchers set."""
    environ = os.environ
    if "RANK" in environ or not environ.keys() >= NEEDED or int(environ["SLURM_STEP_NUM_TASKS"]) < 2:
        return
    environ["RANK"] = environ["SLURM_PROCID"]
    environ["WORLD_SIZE"] = environ["SLURM_STEP_NUM_TASKS"]
    environ["LOCAL_RANK"] = environ["SLURM_LOCALID"]
    environ["LOCAL_WORLD_SIZE"] = str(
        tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])[int(environ["SLURM_NODEID"])]
    )
    environ.setdefault("MASTER_ADDR", address_of(first_host(environ["SLURM_STEP_NODELIST"])))
    environ.setdefault("MASTER_PORT", str(port(int(environ["SLURM_JOB_ID"]), int(environ["SLURM_STEP_ID"]))))


def node_rank() -> int:
    """Which machine of its job this is."""
    return int(os.environ["SLURM_NODEID"])


def rendezvous() -> str:
    """Where the machines of this job meet: on its first one, at a port that is the job's own."""
    job = int(os.environ["SLURM_JOB_ID"])
    return f"{address_of(first_host(os.environ['SLURM_JOB_NODELIST']))}:{port(job, 0)}"


def port(job: int, step: int) -> int:
    """A port for a step of a job: another for each of those that are likely to run beside each other."""
    return PORTS[(17 * job + step) % len(PORTS)]


def tasks_per_node(text: str) -> list[int]:
    """The tasks on each machine, which SLURM writes as `2(x3),1`."""
    sizes: list[int] = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        sizes += [int(tasks)] * int(times or 1)
    return sizes


def first_host(hosts: str) -> str:
    """The first name of a list as SLURM writes it: `gpu[03-05,9],login` begins with `gpu03`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first is not None else hosts)


def address_of(node: str) -> str:
    """The name of a machine, or the address that SLURM has for it where the name alone is not known."""
    try:
        socket.getaddrinfo(node, None)
        return node
    except OSError:
        pass
    if shutil.which("scontrol") is None:
        return node
    said = subprocess.run(["scontrol", "show", "node", node], capture_output=True, text=True, check=False).stdout
    address = re.search(r"NodeAddr=(\S+)", said)
    return address[1] if address is not None else node
