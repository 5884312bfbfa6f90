"""With which sentence and exit code the program ends."""

import contextlib
import errno
import io
import math
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

import lockstep
from lockstep.core import terminal
from lockstep.core.errors import InputError, LockstepError, RankFailed, Stopped, StorageError
from lockstep.core.terminal import SafeStream
from lockstep.runtime import program
from lockstep.runtime.program import LONGEST_LINE, JobError, bypass_hydra_errors, command_line
from lockstep.runtime.signals import STOP_SIGNALS, StopNow, StopRequest


class Left(BaseException):
    """The program has ended."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@pytest.fixture(autouse=True)
def _program(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def leave(code: int) -> NoReturn:
        raise Left(code)

    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    monkeypatch.setattr(program, "leave", leave)
    monkeypatch.setattr(program.threading, "_shutdown", lambda: None)
    monkeypatch.setattr(program.atexit, "_run_exitfuncs", lambda: None)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def code_of(error: BaseException) -> int:
    with pytest.raises(Left) as left, command_line():
        raise error
    return left.value.code


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (InputError("no such thing"), 2, "lockstep: no such thing\n"),
        (JobError(InputError("no such thing")), 2, "lockstep: no such thing\n"),
        (JobError(StorageError("full")), StorageError.exit_code, "lockstep: full\n"),
        (JobError(Stopped("saved")), 75, "lockstep: saved\n"),
        (JobError(ValueError("odd")), LockstepError.exit_code, "ValueError: odd\n"),
        (SystemExit(3), 3, ""),
        (SystemExit(0), 0, ""),
    ],
    ids=repr,
)
def test_an_error_ends_the_program_with_its_own_code_and_its_sentence(
    error: BaseException, code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(error) == code
    assert capsys.readouterr().err.endswith(says)


def test_an_error_of_a_job_is_no_error_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(JobError), bypass_hydra_errors():
        raise ValueError("odd")
    with pytest.raises(JobError) as carried, bypass_hydra_errors():
        raise InputError("no such file") from OSError("odd")
    assert str(carried.value.error) == "no such file"
    assert code_of(ValueError("odd")) == 2, "Hydra raises them for values that it does not expect"
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("end", [StopNow(), SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_what_ends_a_program_is_no_error_of_its_job(end: BaseException) -> None:
    with pytest.raises(type(end)) as raised, bypass_hydra_errors():
        raise end
    assert raised.value is end


def test_a_stop_before_a_run_is_a_stop_whatever_a_library_makes_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        with command_line(stopped="stopped early"):
            try:
                signal.raise_signal(signal.SIGTERM)
            except BaseException as stop:
                raise RuntimeError("cannot read") from stop

    with pytest.raises(Left) as left:
        interrupted()
    assert left.value.code == Stopped.exit_code
    assert capsys.readouterr().err == "lockstep: stopped early\n"


def test_output_that_is_lost_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", SafeStream(lambda: full))
        sys.stdout.write("a result")
        with pytest.raises(Left) as left:
            program.finish()
    assert left.value.code == StorageError.exit_code
    assert capsys.readouterr().err == f"lockstep: the output cannot be written ({os.strerror(errno.ENOSPC)})\n"


def test_a_reader_that_has_read_enough_ends_a_program_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", SafeStream(lambda: None))
    vars(sys.stdout)["error"] = BrokenPipeError()
    with pytest.raises(Left) as left:
        program.finish()
    assert left.value.code == 0


def test_a_reader_that_comes_late_gets_what_is_written_then_and_the_program_has_its_patience_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(terminal, "READER_WAIT_S", 0.05)
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", encoding="utf-8") as file, terminal.impatient():
        stream = SafeStream(lambda: file)
        while not stream.is_stuck:
            assert stream.write("x" * select.PIPE_BUF) == select.PIPE_BUF
        began = time.monotonic()
        for _ in range(99):
            stream.write("what is dropped")
        assert time.monotonic() - began < 1, "nobody waits twice"
        os.read(reader, 2**22)
        stream.write("é, late\n")
        assert os.read(reader, 2**22).decode() == "é, late\n"
        assert (stream.is_stuck, stream.error) == (False, None)
        with terminal.impatient():
            pass
        assert math.isfinite(terminal._patience_s)
    os.close(reader)
    assert math.isinf(terminal._patience_s)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "koi8-r", "utf-8", "utf-16"])
def test_a_stream_of_any_encoding_takes_any_text(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "aé€ж漢✓\n"
    with (tmp_path / "out").open("w", encoding=encoding) as file:
        for name, stream in (("stdin", sys.stdin), ("stdout", file), ("stderr", file)):
            monkeypatch.setattr(sys, name, stream)
        terminal.guard_streams()
        assert sys.stdout.write(text) == len(text)
        sys.stdout.flush()
        assert sys.stdout.error is None  # type: ignore[attr-defined]
    assert (tmp_path / "out").read_bytes().decode(encoding).encode("ascii", "backslashreplace") == text.encode(
        "ascii", "backslashreplace"
    )


def test_the_first_error_of_a_stream_is_kept() -> None:
    errors = [BrokenPipeError("first"), OSError("second")]

    def fail(stream: object) -> None:
        raise errors[0]

    with Path("/dev/null").open("w") as file:
        stream = SafeStream(lambda: file)
        stream._try(fail)
        errors.reverse()
        stream._try(fail)
    assert str(stream.error) == "first"


@pytest.mark.parametrize("length", [LONGEST_LINE, LONGEST_LINE + 1])
def test_a_long_sentence_keeps_its_beginning_and_its_remedy(length: int, capsys: pytest.CaptureFixture[str]) -> None:
    sentence = f"wrong{'x' * (length - len('wrongremedy'))}remedy"
    program.explain(InputError(sentence))
    shown = capsys.readouterr().err
    assert shown.startswith("lockstep: wrong")
    assert shown.endswith("remedy\n")
    assert (sentence in shown) == (length == LONGEST_LINE)


@pytest.mark.parametrize(("variable", "is_full"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_a_mistake_has_its_traceback_only_where_the_user_asks_for_it(
    variable: str | None, is_full: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    if variable is not None:
        monkeypatch.setenv("HYDRA_FULL_ERROR", variable)
    code_of(InputError("odd"))
    assert ("Traceback" in capsys.readouterr().err) == is_full


def test_a_thread_cannot_train() -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(lockstep.InputError, match="was called in a thread"):
        pool.submit(lockstep.train).result()


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [({"RANK": "1", "WORLD_SIZE": "2"}, "one of 2 ranks.* each would train alone"), ({"WORLD_SIZE": "2"}, "no RANK")],
    ids=["torchrun", "half of it"],
)
def test_a_rank_that_others_started_cannot_train_as_a_script(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], sentence: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(lockstep.InputError, match=sentence):
        lockstep.train()


def test_what_was_written_before_is_shown_before_what_goes_past_the_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "stdout").open("w") as out, (tmp_path / "stderr").open("w") as err:
        for name, file in (("stdout", out), ("stderr", err)):
            monkeypatch.setattr(sys, name, file)
            file.write("first ")
        with terminal.impatient():
            for name in ("stdout", "stderr"):
                assert terminal.standard(name).write("sécond ") == len("sécond ")
            for name in ("stdout", "stderr"):
                assert (tmp_path / name).read_text() == "first sécond "


def test_a_descriptor_takes_as_many_bytes_as_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    choose = select.select
    monkeypatch.setattr(select, "select", lambda *sets: waited.append(sets[-1]) or choose(*sets[:-1], 0))
    reader, writer = os.pipe()
    assert terminal.write_some(writer, b"x" * 10_000, 7.0) == select.PIPE_BUF
    assert terminal.write_some(writer, b"abc", 0.0) == 3
    monkeypatch.setattr(os, "isatty", lambda number: number == writer)
    assert terminal.write_some(writer, b"x" * 10_000, 0.0) == 128
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * select.PIPE_BUF)
    assert terminal.write_some(writer, b"x", 3.0) == 0
    assert waited == [7.0, 0.0, 0.0, 3.0]
    os.close(reader)
    os.close(writer)


def test_a_stream_has_a_descriptor_if_its_text_goes_to_a_file(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as file, (tmp_path / "raw").open("wb", buffering=0) as raw:
        unbuffered = io.TextIOWrapper(raw, write_through=True)
        streams = [file, unbuffered, io.TextIOWrapper(io.BytesIO()), io.StringIO(), None]
        assert [terminal._has_descriptor(stream) for stream in streams] == [True, True, False, False, False]  # type: ignore[arg-type]
        fake: Any = SimpleNamespace(buffer=file.buffer)
        assert not terminal._has_descriptor(fake), "a notebook's"


def test_a_stream_that_fails_goes_nowhere_from_then_on_and_a_mistake_of_ours_is_no_fault_of_it() -> None:
    before = len([*Path("/dev/fd").iterdir()])
    with Path("/dev/full").open("w") as full:
        stream = SafeStream(lambda: full)
        assert stream.write("é" * 10) == 10
        stream.flush()
        assert isinstance(stream.error, OSError)
        assert Path(f"/proc/self/fd/{full.fileno()}").readlink() == Path(os.devnull)
        assert len([*Path("/dev/fd").iterdir()]) == before + 1
    with pytest.raises(ValueError, match="closed"):
        stream.write("x")
    assert SafeStream(lambda: None).write("é") == 1


CLOSED = """
import os, sys
from lockstep.core import terminal
terminal.guard_streams()
outputs = sys.stdout, sys.stderr
terminal.guard_streams()
assert outputs == (sys.stdout, sys.stderr), "they are guarded once"
assert not isinstance(sys.stdin, terminal.SafeStream)
print("nobody reads this", file=sys.stderr)
print("nor this", flush=True)
with open(sys.argv[1], "w") as file:
    file.write(f"{file.fileno()} {sys.stdin.read()!r} {[os.get_inheritable(number) for number in range(3)]}")
    del sys.stdin, sys.stdout, sys.stderr, outputs
    [os.fstat(number) for number in range(3)]
"""


def test_closed_streams_have_their_numbers_again_also_in_children_and_stay_open(tmp_path: Path) -> None:
    (program := tmp_path / "program.py").write_text(CLOSED)
    words = [sys.executable, str(program), str(tmp_path / "facts")]
    done = subprocess.run(["sh", "-c", f"exec {shlex.join(words)} <&- >&- 2>&-"], check=False)
    assert done.returncode == 0
    assert (tmp_path / "facts").read_text() == "3 '' [True, True, True]"


def test_output_that_is_in_a_file_too_may_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", SafeStream(lambda: None))
    vars(sys.stdout)["error"] = OSError("full")
    terminal.forgive_output()
    assert sys.stdout.error is None  # type: ignore[attr-defined]
    monkeypatch.setattr(sys, "stdout", object())
    terminal.forgive_output()  # a program's own


@pytest.mark.parametrize(("rank", "reports"), [(None, True), ("0", True), ("1", False)])
def test_of_several_ranks_main_alone_reports_a_stop_and_each_one_its_mistake(
    rank: str | None, reports: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "0")  # of each machine
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    program.explain(Stopped("saved"))
    assert capsys.readouterr().err == "lockstep: saved\n" * reports
    program.explain(InputError("no such thing"))
    assert capsys.readouterr().err == "lockstep: no such thing\n"


def test_an_error_has_a_line_for_each_of_its_own_behind_the_traceback_of_its_rank(
    capsys: pytest.CaptureFixture[str],
) -> None:
    program.explain(RankFailed("rank 1 failed", "Traceback:\n  \x1b[31modd\n\n"), label="job 3: ")
    assert capsys.readouterr().err == "Traceback:\n  \\x1b[31modd\nlockstep: job 3: rank 1 failed\n"
    program.explain(InputError("one mistake", "", "another one"))
    assert capsys.readouterr().err == "lockstep: one mistake\nlockstep: another one\n"


class Gone(BaseException):
    """The process has ended at once."""


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The codes with which this process would have ended at once."""
    codes = list[int]()

    def end(code: int) -> NoReturn:
        codes.append(code)
        raise Gone

    monkeypatch.setattr(program.os, "_exit", end)
    monkeypatch.setattr(program, "GRACE_S", 0.0)
    return codes


def test_a_stop_during_an_import_ends_the_program_at_once_with_its_sentence(
    gone: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "importing", lambda frame: True)
    monkeypatch.setattr("lockstep.runtime.signals.importing", lambda frame: True)
    stop = program._StopEarly("stopped early")
    with pytest.raises(Gone):
        stop(signal.SIGTERM, None)
    assert (gone, capsys.readouterr().err) == ([75], "lockstep: stopped early\n")
    stop.requested = True
    stop(signal.SIGTERM, None)
    assert gone == [75], "the first one is being obeyed"


def test_a_program_that_does_not_end_after_a_stop_is_ended_once(
    gone: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = list[tuple[Any, ...]]()
    monkeypatch.setattr(program._thread, "start_new_thread", lambda *call: threads.append(call))
    stop = program._StopEarly("stopped early")
    with pytest.raises(StopNow):
        stop(signal.SIGTERM, None)
    stop(signal.SIGTERM, None)
    assert threads == [(stop._exit_after_grace, ())]
    with pytest.raises(Gone):
        stop._exit_after_grace()
    assert (gone, capsys.readouterr().err) == ([75], "lockstep: stopped early\n")
    stop.ignore_signals()
    stop._exit_after_grace()
    assert gone == [75], "it is ending by itself"
    assert {signal.getsignal(number) for number in STOP_SIGNALS} == {signal.SIG_IGN}


@pytest.mark.parametrize(
    "error", [None, InputError("odd"), SystemExit(0), SystemExit(3), ValueError("odd")], ids=repr
)
def test_no_signal_changes_the_exit_code_of_a_program_that_is_ending(
    error: BaseException | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = list[set[object]]()

    def leave(code: int) -> NoReturn:
        handlers.append({signal.getsignal(number) for number in STOP_SIGNALS})
        raise Left(code)

    monkeypatch.setattr(program, "leave", leave)
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    if error is None:
        with command_line():
            assert not {signal.SIG_IGN, signal.SIG_DFL} & {signal.getsignal(number) for number in STOP_SIGNALS}
            assert (os.environ["PYTHONSAFEPATH"], os.environ["HYDRA_FULL_ERROR"]) == ("1", "1")
        handlers.append({signal.getsignal(number) for number in STOP_SIGNALS})
    else:
        code_of(error)
    assert handlers == [{signal.SIG_IGN}]


def test_a_text_with_which_a_library_exits_is_for_python_to_show() -> None:
    with pytest.raises(SystemExit, match="wrong usage"), command_line():
        raise SystemExit("wrong usage")
    assert code_of(SystemExit(None)) == 0


def test_a_word_that_no_command_takes_is_refused_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2):
        monkeypatch.setattr(sys, "argv", ["train.py", *["steps=3"] * (number - 1), "hydra.job.chdir=true"])
        with pytest.raises(Left) as left, command_line():
            pytest.fail("the command begins")
        assert left.value.code == 2


@pytest.mark.parametrize("failure", [FileNotFoundError(2, "gone"), PermissionError(13, "no right")], ids=repr)
def test_a_folder_that_cannot_be_used_is_left_by_its_user(
    failure: OSError, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> NoReturn:
        raise failure

    monkeypatch.setattr(program.Path, "cwd", fail)
    with pytest.raises(Left) as left, command_line():
        pytest.fail("the command begins")
    assert left.value.code == 2
    sentence = f"the current folder does not exist any more, or cannot be used ({failure.strerror}); change to"
    assert sentence in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("an effect of the stop"), 75),
        (ValueError("an effect of the stop"), 75),
        (JobError(InputError("of the job")), 2),
        (JobError(StorageError("of the job")), StorageError.exit_code),
        (JobError(OSError(errno.ENOSPC, "of the job")), StorageError.exit_code),
        (JobError(ZeroDivisionError("an effect of the stop")), 75),
    ],
    ids=repr,
)
def test_a_stop_is_the_reason_of_all_errors_but_those_that_a_job_explains(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, heard = list[StopRequest](), list[LockstepError]()
    listen = program.listen

    def heed(handler: StopRequest) -> None:
        if handler is not signal.SIG_IGN:
            requests.append(handler)
        listen(handler)

    def stopped() -> None:
        with command_line(says=heard.append):
            requests[0].requested = True
            raise error

    monkeypatch.setattr(program, "listen", heed)
    with pytest.raises(Left) as left:
        stopped()
    assert left.value.code == code == heard[0].exit_code
    assert len(heard) == 1


def test_an_end_does_all_that_an_exit_does_and_waits_for_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    done = list[str]()
    monkeypatch.setattr(program.threading, "_shutdown", lambda: done.append("threads"))
    monkeypatch.setattr(program.atexit, "_run_exitfuncs", lambda: done.append("handlers"))
    stream: Any = SimpleNamespace(flush=lambda: done.append("output"))
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.raises(Left) as left:
        program.finish()
    assert (left.value.code, done) == (0, ["threads", "handlers", "output"])


def test_the_traceback_of_a_defect_has_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(JobError(ZeroDivisionError("\x1b[2Jodd"))) == LockstepError.exit_code
    assert capsys.readouterr().err.endswith("ZeroDivisionError: \\x1b[2Jodd\n")


def test_a_stream_of_a_run_writes_what_its_encoding_lacks_as_its_owner_has_said(tmp_path: Path) -> None:
    for errors, written in (("backslashreplace", b"\\xe9\\u6f22 a\n"), ("replace", b"?? a\n")):
        with (tmp_path / "out").open("w", encoding="ascii", errors=errors) as file, terminal.impatient():
            stream = SafeStream(lambda file=file: file)  # type: ignore[misc]
            assert stream.write("é漢 a\n") == 5
            assert (tmp_path / "out").read_bytes() == written


def test_a_stream_of_a_run_that_goes_to_no_descriptor_gets_its_text_whole() -> None:
    notebook = io.StringIO()
    with terminal.impatient():
        stream = SafeStream(lambda: notebook)
        assert stream.write("é" * 9000) == 9000
    assert notebook.getvalue() == "é" * 9000


def test_a_run_that_fails_gives_its_program_its_patience_back() -> None:
    with pytest.raises(InputError), terminal.impatient():
        raise InputError("odd")
    assert math.isinf(terminal._patience_s)


def test_nobody_who_does_not_read_an_error_holds_its_program_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Errors(io.StringIO):
        def write(self, text: str) -> int:
            waits_s.append(terminal._patience_s)
            return super().write(text)

    waits_s: list[float] = []
    monkeypatch.setattr(sys, "stderr", Errors())
    program.explain(InputError("odd"))
    assert sys.stderr.getvalue() == "lockstep: odd\n"  # type: ignore[attr-defined]
    assert {*waits_s} == {terminal.READER_WAIT_S}


def test_a_reader_is_waited_for_at_each_piece_but_at_the_first_after_one_that_it_did_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(number: int, data: bytes, wait_s: float) -> int:
        pieces.append((number == file.fileno(), data, wait_s))
        return next(sizes)

    pieces: list[tuple[bool, bytes, float]] = []
    sizes = iter((2, 4, 0, 1, 2, 0))
    monkeypatch.setattr(terminal, "write_some", write)
    monkeypatch.setattr(terminal, "READER_WAIT_S", 7.0)
    stream, stuck = SafeStream(lambda: file), list[bool]()
    with (tmp_path / "out").open("w", encoding="utf-8") as file, terminal.impatient():
        for text in ("abécdef", "xyz", "", "last"):
            assert stream.write(text) == len(text)
            stuck.append(stream.is_stuck)
    assert stuck == [True, False, False, True]
    words = [("abécdef", 7.0), ("écdef", 7.0), ("ef", 7.0), ("xyz", 0.0), ("yz", 7.0), ("last", 7.0)]
    assert pieces == [(True, text.encode(), wait_s) for text, wait_s in words]


@pytest.mark.parametrize("length", [LONGEST_LINE + 1, 5 * LONGEST_LINE])
def test_of_a_long_sentence_four_hundred_characters_of_both_ends_are_shown(
    length: int, capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = "".join(chr(ord("a") + number % 26) for number in range(length))
    program.explain(InputError(sentence, "short"))
    assert capsys.readouterr().err == f"lockstep: {sentence[:400]} ... {sentence[-400:]}\nlockstep: short\n"
