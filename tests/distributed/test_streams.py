"""Standard streams that are closed, full or without a reader: the exit code of every command is its own."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import forks
from helpers import NARROW, command, forked, train_here
from lockstep.core import errors
from processes import LONG, SPAWN, ended, ranks, start, steps_done, summary, wait_for

STREAMS = ("stdin", "stdout", "stderr")
STATES = ("closed", "full", "broken")
UNREAD = ("stuck", "held")
NOT_PERMITTED = 99
QUICK = ("steps=2", "batch=300", NARROW, "logger=[]", "device=cpu", "launcher.threads=1")
ERRORS = {cls.exit_code: cls.__name__ for cls in (errors.LockstepError, *errors.BY_EXIT_CODE.values())}
# A training command whose job ends with an error, by its exit code (0 is no error).
ENDS = """
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from lockstep.cli import main, run, train
from lockstep.config.schema import GROUPS
from lockstep.core import errors, log
from lockstep.job import worker
def job(*_):
    log.say("a word " * 2_000)
    if sys.argv[1:] != ["seed=0"]:
        raise ERROR
    return 1.0
launcher = SimpleNamespace(node_range=(1, 1), launch=job)
parts = {**dict.fromkeys(GROUPS), "launcher": launcher}
worker.objects_of = lambda *_: ()  # of no job
run.create_run = lambda *_: (nullcontext(), SimpleNamespace(**parts))
sys.argv = ["lockstep", "train", "seed=0" if ERROR is None else "seed=1"]
main.main()
"""


def spoil(stream: str, state: str) -> None:
    """Bring a standard stream of this process into a state, as a shell does before it starts an interpreter."""
    number = STREAMS.index(stream)
    if state == "closed":
        os.close(number)
        setattr(sys, stream, None)
    elif state == "full":
        os.dup2(os.open("/dev/full", os.O_RDWR), number)
    elif state == "held":  # a terminal after Ctrl-S
        keyboard, terminal = os.openpty()
        os.write(keyboard, b"\x13")
        os.dup2(terminal, number)
    else:
        reader, writer = os.pipe()
        os.dup2(writer if number else reader, number)
        if state == "broken":
            os.close(reader)
        else:  # stuck: the pipe is full, and its reader sleeps
            os.set_blocking(writer, False)
            with suppress(BlockingIOError):
                while os.write(writer, bytes(65_536)):
                    pass
            os.set_blocking(writer, True)
        os.close(writer)


def with_stream(stream: str, state: str, *words: str) -> None:
    """Run a command with a stream in a state."""
    spoil(stream, state)
    forks.run(sys.path, *words)


def in_no_folder(folder: str, *words: str) -> None:
    """Run a command in a folder that has been removed."""
    Path(folder).mkdir()
    os.chdir(folder)
    Path(folder).rmdir()
    forks.run(sys.path, *words)


def with_streams_of(state: str, *words: str) -> None:
    """Run a command with both outputs in a state."""
    for stream in STREAMS[1:]:
        spoil(stream, state)
    forks.run(sys.path, *words)


def with_streams(code: str) -> None:
    """Run a program with streams in their states, and name those with which it ends with another code than `code`.

    Success and one of the errors meet each stream in each state; the other errors, which come to their codes in the
    same way, meet each stream once.
    """
    wrong, first = [], [0, *ERRORS].index(int(code))
    states = {stream: STATES if first < 2 else STATES[(first + at) % 3 :][:1] for at, stream in enumerate(STREAMS)}
    program = ENDS.replace("ERROR", f"errors.{ERRORS[int(code)]}('the job')" if int(code) else "None")
    for stream, state in [(stream, state) for stream, chosen in states.items() for state in chosen]:
        if not (child := os.fork()):
            with_stream(stream, state, "-c", program)
        actual = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        wrong += [f"{stream} {state}: {actual}"] if actual != int(code) else []
    sys.stdout.write(f"wrong: {wrong}")


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, *ERRORS])
def test_no_stream_changes_an_exit_code(code: int) -> None:
    done = forked("test_streams:with_streams", str(code))
    assert (done.code, done.out.splitlines()[-1]) == (0, "wrong: []")
    assert "Traceback" not in done.err


# A run reads no input and writes no error; `test_no_stream_changes_an_exit_code` has every state of each stream.
@pytest.mark.parametrize(
    ("stream", "state"), [("stdin", "closed"), ("stderr", "closed"), *(("stdout", state) for state in STATES)]
)
def test_a_run_ends_well(tmp_path: Path, stream: str, state: str) -> None:
    spoiled = ("test_streams:with_stream", stream, state, "train.py", f"output_root={tmp_path}")
    launcher = SPAWN if state == "closed" else ()
    done = forked(*spoiled, *QUICK, *launcher)
    assert (done.code, done.err) == (0, "")
    (summary_file,) = tmp_path.glob("*/summary.json")
    assert '"completed"' in summary_file.read_text()


@pytest.mark.parametrize("state", STATES)
def test_a_result_that_cannot_be_written_is_an_error_unless_its_reader_has_read_enough(
    tmp_path: Path, state: str
) -> None:
    run = train_here(tmp_path / "run", "steps=1", NARROW)
    for words in (
        ("lockstep", "--help"),
        ("lockstep", "predict", "--help"),
        ("train.py", "--help"),
        ("train.py", "--cfg", "job"),
        ("lockstep", "evaluate", str(run.path)),
        ("lockstep", "clean", str(tmp_path)),
    ):
        done = forked("test_streams:with_stream", "stdout", state, *words)
        lines = 0 if state == "broken" else 1
        errors = [line for line in done.err.splitlines() if line.startswith("lockstep: ")]
        assert (done.code, len(errors)) == (74 * lines, lines), (words, done.err)
        assert done.err.count("lockstep: the output cannot be written (") == lines


@pytest.mark.slow
@pytest.mark.parametrize("stream", STREAMS[1:])
def test_a_stop_is_saved_without_a_stream(tmp_path: Path, stream: str) -> None:
    folder = tmp_path / "run"
    process = start(folder, *SPAWN, *LONG, launch=("test_streams:with_stream", stream, "broken"))
    wait_for(lambda: process.poll() is not None or steps_done(folder) >= 3)
    process.send_signal(signal.SIGTERM)
    code, err = ended(process)
    assert code == 75, err
    assert summary(folder)["status"] == "stopped"


@pytest.mark.parametrize(
    "words",
    [("train", "steps=2"), ("runs",)],
)
def test_a_current_folder_that_is_gone_is_one_sentence(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = forked("test_streams:in_no_folder", str(tmp_path / "gone"), "lockstep", *words)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("lockstep: the current folder does not exist any more")
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize(("stream", "state"), [("stdout", "stuck"), ("stdout", "held"), ("stderr", "held")])
def test_a_run_does_not_wait_for_a_reader(tmp_path: Path, stream: str, state: str) -> None:
    spoiled = ("test_streams:with_stream", stream, state, "train.py", f"output_root={tmp_path}")
    done = forked(*spoiled, *QUICK)
    assert (done.code, done.err) == (0, "")
    (log_file,) = tmp_path.glob("*/train.log")
    assert "val top-1" in log_file.read_text(), "the log has what nobody has read"


@pytest.mark.slow
@pytest.mark.parametrize("state", UNREAD)
def test_a_stop_and_a_hang_are_seen_though_nobody_reads(tmp_path: Path, state: str) -> None:
    stopped, hangs = tmp_path / "stopped", tmp_path / "hangs"
    launch = ("test_streams:with_streams_of", state)
    processes = [
        start(stopped, *SPAWN, *LONG, launch=launch),
        start(hangs, *SPAWN, *LONG, "launcher.timeout=3s", launch=launch),
    ]
    for process, folder in zip(processes, (stopped, hangs), strict=True):
        wait_for(lambda process=process, folder=folder: process.poll() is not None or steps_done(folder) >= 3)
    processes[0].send_signal(signal.SIGTERM)
    os.kill(ranks(hangs, processes[1])[1], signal.SIGSTOP)
    codes = [ended(process)[0] for process in processes]
    assert codes == [75, 70]
    assert (summary(stopped)["status"], summary(hangs)["status"]) == ("stopped", "failed")


@pytest.mark.slow
@pytest.mark.parametrize("gigabytes", [1, 3.9])
def test_too_small_an_address_space_is_one_sentence(tmp_path: Path, gigabytes: float) -> None:
    for words in (("train.py", *QUICK, f"output_root={tmp_path}"), ("-m", "lockstep", "predict", "x", "y")):
        done = command("bash", "-c", f'ulimit -v {int(gigabytes * 1e6)}; exec "$@"', "bash", sys.executable, *words)
        assert done.code == 2, done.err
        assert len(done.err.splitlines()) == 1
        assert "ulimit -v unlimited" in done.err
    assert not list(tmp_path.iterdir())
