"""One run of `lockstep prove`: the real command in new processes, killed and resumed if its case asks for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from lockstep.checkpoint import MODEL, latest_valid
from lockstep.core.errors import InputError, LockstepError
from lockstep.core.run_dir import RunDir

# Becomes a command that the kernel ends with process `argv[1]`.
TIED = """
import os, sys
from lockstep.runtime.signals import die_with_parent
die_with_parent(int(sys.argv[1]))
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True)
class Case:
    """One run.

    Fields:
        name: the name of the run in the table.
        overrides: the overrides of the run, besides the common ones.
        reference: the name of the earlier run with which it is compared.
        exact: whether the two runs must agree to the bit.
        killed: whether the run is killed halfway and resumed.
    """

    name: str
    overrides: tuple[str, ...]
    reference: str
    exact: bool = False
    killed: bool = False


@dataclass(frozen=True)
class RunResult:
    """The results of a run.

    Fields:
        losses: the training loss of each step.
        weights: the final weights.
        samples: (epoch, step, index, hash of pixels) of each example.
    """

    losses: list[float]
    weights: dict[str, Tensor]
    samples: list[tuple[int, int, int, int]]


def run(case: Case, folder: Path, overrides: list[str], steps: int) -> RunResult:
    """Run a case to its end, with a kill and a resume if it asks for them, and read its results."""
    words = [*overrides, *case.overrides, f"hydra.run.dir={folder}", f"output_root={folder.parent}"]
    command = [sys.executable, "-m", "lockstep", "train", *words]
    run_dir = RunDir(folder)
    if case.killed:
        _kill_halfway(command, run_dir, steps)
    with running(command) as process:
        error = process.communicate()[1].strip()
    if process.returncode == InputError.exit_code:
        raise InputError(error.removeprefix("lockstep: "))
    if process.returncode:
        raise LockstepError(f"{case.name} ended with exit code {process.returncode}: {error}")
    lines = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]
    newest = latest_valid(run_dir.checkpoints)
    assert newest is not None
    samples = [
        (record["epoch"], record["step"], record["index"], record["hash"])
        for path in run_dir.logs.glob("rank*.samples.jsonl")
        for record in map(json.loads, path.read_text().splitlines())
    ]
    return RunResult(
        [line["loss/train"] for line in lines if "loss/train" in line], load_file(newest / MODEL), samples
    )


def _kill_halfway(command: list[str], run_dir: RunDir, steps: int) -> None:
    """Start a run and kill all its processes once half of the steps are saved."""
    half = run_dir.checkpoints / f"step-{max(1, steps // 2):08d}"
    with running(command) as process:
        while process.poll() is None and not half.exists():
            time.sleep(0.01)
        if process.poll() is not None:
            raise LockstepError(f"the run in {run_dir.path} ended before it could be killed; use more --steps")


@contextmanager
def running(command: list[str], *, capture: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A running command. All its processes are killed at the end of the context, and it ends with this process.

    Its errors are kept for `communicate`. With `capture`, it is a script of the user: what it prints is kept too, and
    it imports the modules beside it, which Lockstep's own processes do not.
    """
    with subprocess.Popen(
        [sys.executable, "-P", "-c", TIED, str(os.getpid()), *command],
        # `command_line` has set HYDRA_FULL_ERROR for this process; the run must fail with its sentence only.
        env={name: value for name, value in os.environ.items() if not (capture and name == "PYTHONSAFEPATH")}
        | {"HYDRA_FULL_ERROR": "0"},
        stdout=subprocess.PIPE if capture else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            if process.returncode is None:  # nobody has waited for it: its number is still its own
                os.killpg(process.pid, signal.SIGKILL)
