"""Jobs in the background, and their processes: to stop, kill and suspend them, and to see what is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from forks import Fork
from helpers import NARROW, ROOT, forks, records

JOB = ("batch=300", "optimizer=sgd", "telemetry.interval=1", "logger=jsonl", NARROW, "model.dropout=0")
TWO = ("strategy=ddp", "launcher.ranks=2", "launcher.threads=1")
# For ranks that are fresh interpreters: DDP has each of them import torch._dynamo, which is two seconds of a core.
FRESH = ("strategy=allreduce", *TWO[1:])
LONG = ("epochs=1000", "schedule=constant")
SPAWN, ELASTIC, INLINE = (*TWO, "launcher=spawn"), (*FRESH, "launcher=elastic"), ("launcher.threads=1",)
THREADED = ("OPENBLAS_NUM_THREADS", "2")  # a command with it has several threads, and so forks no ranks
FORKS = sys.platform == "linux" and not torch.cuda.is_available()
MARK = "LOCKSTEP_TEST_RUN"
# Seconds after which an event that takes moments is given up: no claim, the last resort on a machine that is slow
# and busy.
PATIENCE = 240

Process = Fork | subprocess.Popen[str]
STARTED: list[Process] = []  # what a test has started, and still has to be closed
SESSIONS: dict[Path, set[int]] = {}  # of the jobs in a folder; what they start themselves has the MARK


def start(
    folder: Path,
    *overrides: str,
    launch: tuple[str, ...] = (sys.executable,),
    afresh: bool = False,
    **environment: str,
) -> Process:
    """`train.py` in the background, its run folder at `folder`.

    With `python`, `python -c` or `MODULE:FUNCTION` for `launch` it is a copy of an interpreter that has imported
    torch, unless it is to begin `afresh`.
    """
    words = ("train.py", *JOB, f"hydra.run.dir={folder}", f"output_root={folder.parent}", *overrides)
    return background(folder, *launch, *words, afresh=afresh, **environment)


def background(folder: Path, *words: str, cwd: Path = ROOT, afresh: bool = False, **environment: str) -> Process:
    """A command in the background, as `start` has it; `processes(folder)` finds it and all that it starts."""
    environment[MARK] = str(folder)
    process: Process
    if (words[0] in (sys.executable, "lockstep") or ":" in words[0]) and not afresh:
        process = forks().start(*(words[1:] if words[0] == sys.executable else words), cwd=cwd, **environment)
    else:
        process = subprocess.Popen(
            words,
            cwd=cwd,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    STARTED.append(process)
    SESSIONS.setdefault(folder, set()).add(process.pid)
    return process


def close(processes: list[Process]) -> None:
    """End what still runs, and let go of it: where a test fails, its processes are no failure of the next one."""
    for process in processes:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def wait_for(condition: Callable[[], object]) -> None:
    """Poll until `condition` holds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + PATIENCE, "waited too long"
        time.sleep(0.05)


def running(folder: Path, *overrides: str, steps: int = 3, afresh: bool = False) -> Process:
    """A job that has finished `steps` steps."""
    process = start(folder, *overrides, afresh=afresh)
    wait_for(lambda: process.poll() is not None or steps_done(folder) >= steps)
    assert process.poll() is None, process.communicate()
    return process


def ended(process: Process) -> tuple[int, str]:
    """The exit code and the standard error of a job that is about to end."""
    _, err = process.communicate(timeout=PATIENCE)
    return process.returncode, err


def steps_done(folder: Path) -> int:
    """The last step in a run's log."""
    return records(folder)[-1]["step"] if (folder / "metrics.jsonl").exists() and records(folder) else 0


def processes(folder: Path) -> set[int]:
    """The living processes of the job at `folder`, its loaders' too: by its session, or by what it hands down."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            state, _, _, session, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if state not in "ZX" and (f"{MARK}={folder}" in environment or int(session) in SESSIONS.get(folder, ())):
            found.add(int(entry.name))
    return found


def children(parent: int) -> list[int]:
    """The process numbers of the children of a process."""
    return [int(child) for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def ranks(folder: Path, process: Process) -> list[int]:
    """The process numbers of the ranks, in order, under `spawn` and `elastic`."""
    helper = "resource_tracker"
    found = children(process.pid)
    return sorted(pid for pid in found if helper not in Path(f"/proc/{pid}/cmdline").read_text())


def summary(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "summary.json").read_text())
    return found


def logged(folder: Path) -> str:
    """What all ranks have in their logs."""
    return "".join(path.read_text() for path in sorted((folder / "logs").glob("rank*.log")))


def send(number: signal.Signals, *pids: int) -> None:
    for pid in pids:
        os.kill(pid, number)
