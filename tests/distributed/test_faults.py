"""Hangs, crashes and signals of real processes: what is said, and that nothing is left."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from helpers import records, train
from processes import (
    ELASTIC,
    FORKING,
    FORKS,
    INLINE,
    LONG,
    SPAWN,
    Process,
    ended,
    logged,
    processes,
    ranks,
    running,
    send,
    start,
    steps_done,
    stopped,
    summary,
    wait_for,
)

pytestmark = pytest.mark.slow

HANGS_AFTER = "launcher.timeout=3s"
STREAMING = ("loader=streaming", "loader.workers=1")
# train.py with a data set whose fourth batch rank 0 reads for ever.
ENDLESS = """
import itertools, os, runpy, sys
from lockstep.data.loading import reading
read, calls = reading.read_images, itertools.count(1)
def endless(*wanted):
    late = next(calls) > 3 and os.environ.get("RANK", "0") == "0"
    while late:
        read(*wanted)
    return read(*wanted)
reading.read_images = endless
sys.argv = sys.argv[1:]
runpy.run_path("train.py", run_name="__main__")
"""


def fails_as_hanging(folder: Path, process: Process) -> str:
    """Check how a job ends that hangs from now on; returns what it said."""
    code, err = ended(process)
    assert code == 70, err
    assert "no step was finished for 3 s" in err
    assert "Traceback" not in err
    assert summary(folder)["status"] == "failed"
    assert not processes(folder)
    return err


def test_a_suspended_rank_is_found_and_every_rank_leaves_its_stacks(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = running(folder, *SPAWN, *LONG, HANGS_AFTER)
    send(signal.SIGSTOP, ranks(folder, process)[1])
    err = fails_as_hanging(folder, process)
    assert "rank 0 was in" in err
    assert "rank 1 was stopped by a signal" in err
    for rank in (0, 1):
        assert "most recent call first" in (folder / "logs" / f"rank{rank}.log").read_text()


@pytest.mark.parametrize("launcher", [INLINE, SPAWN], ids=["inline", "spawn"])
def test_an_image_that_never_comes_is_found_and_the_place_is_named(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    folder, launch = tmp_path / "run", (sys.executable, "-c", ENDLESS)
    process = start(folder, *launcher, *STREAMING, HANGS_AFTER, launch=launch)
    wait_for(lambda: process.poll() is not None or steps_done(folder) == 3)
    assert "rank 0 was in wait (threading.py:" in fails_as_hanging(folder, process)
    assert "in endless" in logged(folder)


def test_a_killed_rank_is_named_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = running(folder, *SPAWN, *LONG)
    send(signal.SIGKILL, ranks(folder, process)[1])
    code, err = ended(process)  # by its watchdog it would in ten minutes
    assert (code, summary(folder)["status"]) == (70, "failed")
    assert "rank 1 was ended by SIGKILL, probably because the machine, or its memory cgroup" in err
    assert "ran out of memory; use train.micro_batches=auto, or fewer ranks" in err
    assert not processes(folder)


def test_a_rank_that_was_killed_is_started_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = (*ELASTIC, "launcher.restarts=1", "steps=30", "checkpoint.every=5")
    process = running(folder, *words, steps=12, launch=FORKING)
    send(signal.SIGKILL, ranks(folder, process)[1])
    code, err = ended(process)
    assert code == 0, err
    assert [line["step"] for line in records(folder) if "loss/train" in line] == list(range(1, 31))


def test_a_stop_of_one_rank_stops_the_job_and_is_no_reason_to_restart(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = running(folder, *ELASTIC, *LONG, "launcher.restarts=3", launch=FORKING)
    send(signal.SIGUSR1, ranks(folder, process)[1])
    code, err = ended(process)
    assert code == 75, err
    assert "and saved" in err


def test_ctrl_c_in_a_terminal_is_one_wish_to_stop(tmp_path: Path) -> None:
    """Of forked ranks; test_systems.py has fresh ones."""
    folder = tmp_path / "run"
    process = running(folder, *SPAWN, *LONG)
    os.killpg(process.pid, signal.SIGINT)  # the ranks get it too
    code, err = ended(process)
    assert code == 75, err
    assert "and saved" in err
    assert "Traceback" not in err


def test_a_second_interrupt_ends_a_job_that_cannot_stop(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = running(folder, *ELASTIC, *LONG, launch=FORKING)
    send(signal.SIGSTOP, ranks(folder, process)[1])
    process.send_signal(signal.SIGINT)
    time.sleep(1.2)
    assert process.poll() is None
    while process.poll() is None:  # once more is enough, unless the first was heard late
        process.send_signal(signal.SIGINT)
        time.sleep(1.2)
    code, err = ended(process)
    assert code == 130, err
    assert summary(folder)["status"] == "failed"
    assert not processes(folder)


@pytest.mark.parametrize("launcher", [INLINE, ELASTIC], ids=["inline", "elastic"])
def test_a_stop_before_the_first_step_costs_nothing(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    folder = tmp_path / "run"
    process = start(folder, *launcher, "steps=2")
    # With ranks: while they import torch. Without: as soon as the folder is there.
    wait_for(lambda: ranks(folder, process) if launcher != INLINE else (folder / "config.yaml").exists())
    process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    assert "stopped before" in stopped(process)
    assert not processes(folder)
    if launcher == INLINE:
        again = train(f"hydra.run.dir={folder}", "steps=2", f"output_root={tmp_path}")
        assert again.code == 0, again.err


def listening(pids: set[int]) -> set[str]:
    """The local addresses, in the kernel's notation, that some processes listen on."""
    opened = [path for pid in pids for path in Path(f"/proc/{pid}/fd").iterdir()]
    sockets = {str(path.readlink()) for path in opened if path.is_symlink()}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {line[1].partition(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets}


@pytest.mark.parametrize("launcher", [SPAWN, ELASTIC], ids=["spawn", "elastic"])
def test_a_job_is_out_of_reach_from_outside_and_gone_with_its_killed_launcher(
    tmp_path: Path, launcher: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, temporary = tmp_path / "run", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    process = running(folder, *launcher, *LONG, *STREAMING)
    commands = {Path(f"/proc/{pid}/cmdline").read_text() for pid in [process.pid, *ranks(folder, process)]}
    assert (len(commands) == 1) == (launcher == SPAWN and FORKS), "the ranks of elastic are fresh interpreters"
    pids = set(processes(folder))
    assert listening(pids) == {"0100007F"}  # 127.0.0.1
    process.kill()
    ended(process)
    wait_for(lambda: not processes(folder))
    assert not list(temporary.glob("torchelastic_*"))
    assert not [path for path in Path("/dev/shm").iterdir() if any(f"_{pid}_" in path.name for pid in pids)]
