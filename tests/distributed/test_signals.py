"""Every signal that ends a process by default: what a job does with it, as docs/resuming.md says."""

from __future__ import annotations

import os
import pty
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

import forks
from helpers import ROOT, command, records
from processes import (
    ELASTIC,
    FORKING,
    FRESH,
    INLINE,
    LONG,
    SPAWN,
    TORCHRUN,
    background,
    ended,
    processes,
    ranks,
    running,
    start,
    steps_done,
    stopped,
    summary,
    wait_for,
)

STOPS = (
    *("TERM", "INT", "HUP", "QUIT", "USR1", "ALRM", "VTALRM", "PROF", "POLL", "PWR", "STKFLT", "XCPU"),
    *("RTMIN", "RTMAX"),
)
IGNORED = ["PIPE", "XFSZ"]
STACKS = "USR2"
FAULTS = ["ILL", "TRAP", "ABRT", "BUS", "FPE", "SEGV", "SYS"]
FATAL = ("KILL", *FAULTS)
# Sends every signal to a child of its own, and prints what became of it: the signal that ended it, or `stop`, or `0`.
WALK = """
import os, signal
for number in (signal.SIGHUP, signal.SIGQUIT):  # ignored where the tests run under nohup or in the background
    signal.signal(number, signal.SIG_DFL)
from lockstep.runtime import signals
signals.begin()
for number in sorted(signal.valid_signals()):
    child = os.fork()
    if not child:
        request = signals.StopRequest()
        request.step_done()
        with signals.stop_signals(request):
            os.kill(os.getpid(), number)
        os._exit(75 if request.requested else 0)
    _, status = os.waitpid(child, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    else:
        print(number, os.waitstatus_to_exitcode(status))
"""


def number_of(name: str) -> int:
    return int(getattr(signal, f"SIG{name}"))


def test_each_signal_stops_a_job_or_does_what_the_table_says() -> None:
    done = command(sys.executable, "-c", WALK)  # without torch, a fork takes a millisecond
    assert done.code == 0, done.err
    outcomes = {int(number): int(code) for number, code in map(str.split, done.out.splitlines())}
    expected = {number_of(name): 75 for name in STOPS}
    expected |= dict.fromkeys(range(signal.SIGRTMIN, signal.SIGRTMAX + 1), 75)
    expected |= {number_of(name): 0 for name in (*IGNORED, STACKS)}
    expected |= {number_of(name): -number_of(name) for name in FATAL}
    harmless = {number_of(name) for name in ("CHLD", "CONT", "URG", "WINCH", "TSTP", "TTIN", "TTOU")}
    assert {number: code for number, code in outcomes.items() if number not in harmless} == expected
    table = (ROOT / "docs" / "resuming.md").read_text()
    assert [name for name in (*STOPS, *IGNORED, STACKS, *FATAL) if not re.search(rf"`SIG{name}\b", table)] == []


@pytest.mark.slow
def test_one_run_is_stopped_by_one_after_another_and_goes_on(tmp_path: Path) -> None:
    """All of them reach the same handler, as the test above shows; the other tests send TERM, HUP and USR1."""
    folder = tmp_path / "run"
    for name in ("INT", "RTMAX"):
        before = steps_done(folder)
        process = start(folder, *INLINE, *LONG, "checkpoint.every=1000")
        wait_for(lambda before=before, process=process: process.poll() is not None or steps_done(folder) > before)
        assert "and saved" in stopped(process, number_of(name))
    steps = [line["step"] for line in records(folder) if "loss/train" in line]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.slow
def test_a_hangup_of_the_command_saves(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = running(folder, *ELASTIC, *LONG, launch=FORKING)
    assert "and saved" in stopped(process, signal.SIGHUP)
    assert not processes(folder)


@pytest.mark.slow
def test_a_hangup_of_torchrun_saves(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = running(folder, *FRESH, *LONG, launch=(*TORCHRUN, "--standalone", "--nproc-per-node=2"))
    process.send_signal(signal.SIGHUP)
    ended(process)  # with torchrun's own code
    assert (summary(folder)["status"], summary(folder)["exit_code"]) == ("stopped", 75)
    wait_for(lambda: not processes(folder))


def in_terminal(folder: str, *words: str) -> None:
    """Run a command in a terminal of its own, and close the terminal when the file `close` is there."""
    child, terminal = pty.fork()
    if not child:
        forks.run(sys.path, *words)
        sys.exit(0)
    os.set_blocking(terminal, False)
    while not Path(folder, "close").exists():
        try:
            os.read(terminal, 2**16)
        except OSError:  # nothing is written now, or the command has ended
            signal.sigtimedwait([], 0.05)
    os.close(terminal)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


@pytest.mark.slow
def test_a_terminal_that_is_closed_saves(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = running(folder, *SPAWN, *LONG, launch=("test_signals:in_terminal", str(tmp_path)))
    (tmp_path / "close").touch()
    code, err = ended(process)
    assert code == 75, err
    assert summary(folder)["status"] == "stopped"
    assert not processes(folder)


@pytest.mark.slow
def test_a_run_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    folder, nohup = tmp_path / "run", shutil.which("nohup")
    assert nohup is not None
    process = running(folder, *FRESH, *LONG, "launcher=spawn", launch=(nohup, sys.executable))
    os.killpg(process.pid, signal.SIGHUP)
    step = steps_done(folder)
    wait_for(lambda: process.poll() is not None or steps_done(folder) > step + 3)
    stopped(process)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [INLINE, SPAWN, ELASTIC], ids=["inline", "spawn", "elastic"])
def test_three_hundred_requests_for_stacks_end_no_busy_run(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    """The first ones reach ranks that are starting: of `elastic`, interpreters that have imported nothing yet."""
    folder, busy = tmp_path / "run", ("loader=streaming", "loader.workers=4", "checkpoint.every=1", *LONG)
    process = start(folder, *launcher, *busy)
    wait_for(lambda: process.poll() is not None or ranks(folder, process) or (launcher == INLINE and folder.exists()))
    for last in (0, 3):
        wait_for(lambda last=last: process.poll() is not None or steps_done(folder) >= last)
        for _ in range(150):
            process.send_signal(signal.SIGUSR2)
            signal.sigtimedwait([], 0.01)
    for log in [folder / "logs" / f"rank{rank}.log" for rank in range(1 if launcher == INLINE else 2)]:
        wait_for(lambda log=log: process.poll() is not None or "most recent call first" in log.read_text())
    stopped(process)


def test_a_slurm_task_that_gets_a_hangup_passes_it_on_and_reports_the_code(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    waits = f"trap 'exit 75' TERM; touch {tmp_path}/ready; while :; do sleep 0.05; done"
    words = ("-m", "lockstep.job.slurm_task", str(tmp_path), "sh", "-c", waits)
    process = background(tmp_path, sys.executable, *words, afresh=True, SLURM_JOB_ID="1", SLURM_NODEID="1")
    wait_for(lambda: process.poll() is not None or (tmp_path / "ready").exists())
    stopped(process, signal.SIGHUP)
    assert not processes(tmp_path)
