"""Jobs in the background and their processes: start, stop, kill and suspend them, and find those that are left."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import torch

import forks
import helpers
from forks import Fork
from helpers import NARROW, ROOT, records
from lockstep.launcher.elastic import Elastic
from lockstep.launcher.spawn import Spawn

JOB = ("batch=300", "optimizer=sgd", "telemetry.interval=1", "logger=jsonl", NARROW, "model.dropout=0")
TWO = ("strategy=ddp", "launcher.ranks=2", "launcher.threads=1")
# For ranks that are fresh interpreters: DDP has each of them import torch._dynamo, which is two seconds of a core.
FRESH = ("strategy=allreduce", *TWO[1:])
LONG = ("epochs=1000", "schedule=constant")
SPAWN, ELASTIC, INLINE = (*TWO, "launcher=spawn"), (*FRESH, "launcher=elastic"), ("launcher.threads=1",)
# `start(..., launch=FORKING)`: the elastic launcher forks its ranks too. `test_launchers.py` shows that fresh ones,
# which each spend four seconds of a core on imports, give the same run.
FORKING = ("processes:forking",)
TORCHRUN = (sys.executable, "-c", "from torch.distributed.run import main; main()")
FORKS = sys.platform == "linux" and not torch.cuda.is_available()
MARK = "LOCKSTEP_TEST_RUN"
# Seconds to wait for an event that usually takes moments. This is no claim about speed: it only ends a test that
# hangs, and allows for a slow and busy machine.
PATIENCE = 240

Process = Fork | subprocess.Popen[str]
STARTED: list[Process] = []  # processes that a test has started and that are not closed yet
# The sessions of the jobs in a folder. Processes that a job starts in new sessions have MARK in their environment.
SESSIONS: dict[Path, set[int]] = {}


def start(folder: Path, *overrides: str, launch: tuple[str, ...] = (sys.executable,), **environment: str) -> Process:
    """Start `train.py` in the background, with its run folder at `folder`.

    If `launch` is `python`, `python -c` or `MODULE:FUNCTION`, the command is a fork of an interpreter that has
    imported torch.
    """
    words = ("train.py", *JOB, f"hydra.run.dir={folder}", f"output_root={folder.parent}", *overrides)
    return background(folder, *launch, *words, **environment)


def forking(*words: str) -> None:
    Elastic.can_fork = Spawn.can_fork
    forks.run(sys.path, *words)


def agent(*words: str) -> None:
    """Run a command in which the ranks that an agent of torch starts are forks, as `forking` does for one machine.

    The agent has threads, so they are forks of a process that was forked before there were any.
    """
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    client, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        os.setpgrp()  # the signals to the command are not for this process
        client.close()
        forks.serve(server)
        os._exit(0)
    server.close()

    def start_rank(args: tuple[str, ...], env: dict[str, str], **_: object) -> Fork:
        assert args[0] == sys.executable
        called = args[2:] if args[1] == "-u" else args[1:]
        pid, status = forks.ask(client, called, str(Path.cwd()), env, 1, 2, new="setpgrp")
        return Fork(called, pid, status, *(os.open(os.devnull, os.O_RDONLY) for _ in range(2)))

    subprocess_handler.Popen = start_rank  # type: ignore[misc]
    forks.run(sys.path, *words)


def background(folder: Path, *words: str, cwd: Path = ROOT, afresh: bool = False, **environment: str) -> Process:
    """Start a command in the background, as `start` does; `processes(folder)` finds it and its children.

    `afresh` starts a fresh interpreter.
    """
    environment[MARK] = str(folder)
    process: Process
    if (words[0] in (sys.executable, "lockstep") or ":" in words[0]) and not afresh:
        process = helpers.forks().start(*(words[1:] if words[0] == sys.executable else words), cwd=cwd, **environment)
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
    """Kill these processes and close their streams, so that a failed test does not make the next one fail."""
    for process in processes:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def wait_for(condition: Callable[[], object], patience: float = PATIENCE) -> None:
    """Poll until `condition` holds, for at most `patience` seconds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + patience, "waited too long"
        time.sleep(0.05)


def running(folder: Path, *overrides: str, steps: int = 3, launch: tuple[str, ...] = (sys.executable,)) -> Process:
    """Start a job and wait until it has finished `steps` steps."""
    process = start(folder, *overrides, launch=launch)
    wait_for(lambda: process.poll() is not None or steps_done(folder) >= steps)
    assert process.poll() is None, process.communicate()
    return process


def ended(process: Process) -> tuple[int, str]:
    """Wait for a job to end; returns its exit code and standard error."""
    _, err = process.communicate(timeout=PATIENCE)
    return process.returncode, err


def stopped(process: Process, number: int = signal.SIGTERM) -> str:
    """Stop a job by a signal, and check its exit code; returns its standard error, which has no traceback."""
    process.send_signal(number)
    code, err = ended(process)
    assert (code, "Traceback" in err) == (75, False), err
    return err


def steps_done(folder: Path) -> int:
    """The last step in a run's log."""
    return records(folder)[-1]["step"] if (folder / "metrics.jsonl").exists() and records(folder) else 0


def processes(folder: Path) -> set[int]:
    """The living processes of the job at `folder`, also its loader workers, by their session or their MARK."""
    sessions = SESSIONS.get(folder, set())
    return {pid for pid, session, words in living() if f"{MARK}={folder}" in words or session in sessions}


def living() -> Iterator[tuple[int, int, list[str]]]:
    """The number, the session and the environment of each living process that this user may look at (Linux)."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            environment = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            state, _, _, session, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
            if state not in "ZX":
                yield int(entry.name), int(session), environment


def left_of(temporary: Path) -> dict[int, str]:
    """The processes that this one has started, by their folder for temporary files, and their command lines.

    Without the interpreter that commands are forked from, and what lives as long as this process: Python's tracker of
    shared memory, the service of W&B.
    """
    expected = {helpers.forks().process.pid} if helpers.forks.cache_info().currsize else set()
    started = [
        pid for pid, _, words in living() if f"TMPDIR={temporary}" in words and pid not in {*expected, os.getpid()}
    ]
    commands = {}
    for pid in started:
        with suppress(OSError):
            commands[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return {pid: words for pid, words in commands.items() if not re.search("resource_tracker|wandb-core", words)}


def children(parent: int) -> list[int]:
    """The process numbers of the children of a process."""
    return [int(child) for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def ranks(folder: Path, process: Process) -> list[int]:
    """The process numbers of the ranks, in order, under `spawn` and `elastic`."""
    helper = "resource_tracker"
    pids = children(process.pid)
    return sorted(pid for pid in pids if helper not in Path(f"/proc/{pid}/cmdline").read_text())


def summary(folder: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((folder / "summary.json").read_text())
    return content


def logged(folder: Path) -> str:
    """The text of the logs of all ranks."""
    return "".join(path.read_text() for path in sorted((folder / "logs").glob("rank*.log")))


def send(number: signal.Signals, *pids: int) -> None:
    for pid in pids:
        os.kill(pid, number)
