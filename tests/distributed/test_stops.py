"""Stops and ends of real processes outside of training: nothing is swallowed, nothing hangs, nothing is left."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from helpers import command, records, train
from processes import (
    ELASTIC,
    FORKS,
    FRESH,
    INLINE,
    LONG,
    SPAWN,
    TORCHRUN,
    Process,
    background,
    children,
    ended,
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

# train.py in which a function is another one: `-c REPLACED MODULE[:CLASS] FUNCTION CODE train.py ...`.
REPLACED = """
import pkgutil, runpy, sys
owner, name, code = sys.argv[1:4]
setattr(pkgutil.resolve_name(owner), name, eval(code))
sys.argv = sys.argv[4:]
runpy.run_path("train.py", run_name="__main__")
"""
RAISES = "lambda *_, **__: 1 / 0"
# A stop that comes where it is easily lost: in a callback from C, whose exceptions go nowhere, or within an import.
SWALLOWED = """
import os, signal, sys, time
from lockstep.runtime import program, signals
class Lost:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
with program.command_line(stopped=getattr(signals, sys.argv[2])):
    if sys.argv[1] == "del":
        Lost()
    else:
        sys.path.insert(0, sys.argv[1])
        import stops
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("where", "command_is", "words"),
    [
        ("del", "STOPPED_EARLY", "before a run began; the same command starts it"),
        ("import", "STOPPED", "before it was done; the same command does it again"),
    ],
)
def test_a_stop_that_is_swallowed_ends_the_program_all_the_same(
    tmp_path: Path, where: str, command_is: str, words: str
) -> None:
    (tmp_path / "stops.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(60)"
    )
    place = str(tmp_path) if where == "import" else where
    done = command(sys.executable, "-W", "ignore", "-c", SWALLOWED, place, command_is)
    assert done.code == 75, done.err
    assert done.err.endswith(f"lockstep: stopped {words}\n")


@pytest.mark.skipif(not FORKS, reason="a rank that is no copy has the function as it is")
def test_a_stop_of_a_process_that_cannot_be_interrupted_before_the_first_step_is_heard(tmp_path: Path) -> None:
    """One rank waits in native code for the other one, which waits for an image that does not come."""
    folder, waits = tmp_path / "run", tmp_path / "waits"
    late = (
        f"lambda self: (open({str(waits)!r}, 'w').close(), __import__('time').sleep(3600)) if self.is_main "
        "else __import__('torch').distributed.barrier()"
    )
    launch = (sys.executable, "-c", REPLACED, "lockstep.core.world:World", "barrier", late)
    process = start(folder, *SPAWN, *LONG, launch=launch)
    wait_for(lambda: waits.exists() or process.poll() is not None)
    assert "stopped before a step was finished" in stopped(process)
    assert not processes(folder)


def without_data(tmp_path: Path, *overrides: str) -> Process:
    """Start a run whose data set does not come, and wait until it waits."""
    waits = tmp_path / "waits"
    waits.unlink(missing_ok=True)
    late = f"lambda *_: (open({str(waits)!r}, 'w').close(), __import__('threading').Event().wait())"
    launch = (sys.executable, "-c", REPLACED, "lockstep.training.build_data", "_splits", late)
    process = start(tmp_path / "run", *INLINE, *overrides, launch=launch)
    wait_for(lambda: waits.exists() or process.poll() is not None)
    return process


def test_a_data_set_that_does_not_come_is_waited_for_no_longer_than_the_timeout(tmp_path: Path) -> None:
    code, err = ended(without_data(tmp_path, "launcher.timeout=2s"))
    assert (code, "no step was finished for 2 s" in err, "Traceback" in err) == (70, True, False), err
    assert summary(tmp_path / "run")["exit_code"] == code


def test_a_run_that_was_stopped_before_its_next_step_is_the_newest_and_says_where_it_stands(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for steps, says in ((2, "stopped before a step was finished"), (4, "stopped at step 2 of 2, which was saved")):
        process = without_data(tmp_path, f"steps={steps}")
        err = stopped(process)
        assert says in err
        assert summary(folder)["error"] in err
        again = train("resume=latest", f"output_root={tmp_path}")
        assert again.code == 0, again.err
        assert (summary(folder)["status"], summary(folder)["step"]) == ("completed", steps)
        (tmp_path / "latest").unlink()


def test_a_stop_that_waits_for_a_suspended_rank_goes_back_to_the_last_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = running(folder, *SPAWN, *LONG, "checkpoint.every=1")
    send(signal.SIGSTOP, ranks(folder, process)[1])
    assert "stopped without saving" in stopped(process)
    assert not processes(folder)


def suspended(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_job_that_was_suspended_for_longer_than_its_timeout_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = running(folder, *SPAWN, *LONG, "launcher.timeout=3s")
    os.killpg(process.pid, signal.SIGTSTP)  # as Ctrl-Z does
    wait_for(lambda: all(suspended(pid) for pid in [process.pid, *ranks(folder, process)]))
    time.sleep(4)
    before = steps_done(folder)
    os.killpg(process.pid, signal.SIGCONT)
    wait_for(lambda: process.poll() is not None or steps_done(folder) > before + 3)
    stopped(process)


def test_an_error_behind_the_start_of_the_ranks_ends_them(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    launch = (sys.executable, "-c", REPLACED, "lockstep.launcher.spawn:Children", "join", RAISES)
    process = start(folder, *ELASTIC, *LONG, launch=launch)
    code, err = ended(process)
    assert (code, "ZeroDivisionError" in err) == (70, True), err
    wait_for(lambda: not processes(folder))


def test_ranks_that_lose_their_torchrun_while_they_import_are_gone(tmp_path: Path) -> None:
    torchrun = (*TORCHRUN, "--standalone", "--nproc-per-node=2")
    soon = ("--no-python", sys.executable, "-c", REPLACED, "lockstep.launcher.attach", "REACHED_S", "0.5")
    process = start(tmp_path / "run", *FRESH, *LONG, launch=(*torchrun, *soon))
    wait_for(lambda: children(process.pid))
    process.kill()
    process.communicate()
    wait_for(lambda: not processes(tmp_path / "run"))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_killed_prove_leaves_no_process(tmp_path: Path) -> None:
    process = background(tmp_path, "lockstep", "prove", "--ranks", "2", "--steps", "1000", TMPDIR=str(tmp_path))
    wait_for(lambda: children(process.pid))
    process.kill()
    assert ended(process)[0] == -signal.SIGKILL
    wait_for(lambda: not processes(tmp_path))


def test_an_evaluation_is_left_between_two_of_its_blocks(tmp_path: Path) -> None:
    """It would take minutes, and one rank alone is asked to stop."""
    folder = tmp_path / "run"
    long = ("dataset=fake", "dataset.examples=80000", "dataset.size=8", "train.eval_batch=1", "train.eval_every=1")
    process = running(folder, *SPAWN, *long, steps=1)
    send(signal.SIGUSR1, ranks(folder, process)[1])
    code, err = ended(process)
    assert code == 75, err
    assert "stopped at step 1 of" in err
    assert "Traceback" not in err
    assert [record for record in records(folder) if "acc/val_top1" in record] == []
    assert not processes(folder)
