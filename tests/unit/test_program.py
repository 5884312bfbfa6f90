"""With which sentence and exit code the program ends."""

import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest

import lockstep
from lockstep.core.errors import InputError, LockstepError, Stopped, StorageError
from lockstep.core.terminal import SafeStream
from lockstep.runtime import program
from lockstep.runtime.program import LONGEST_LINE, JobError, bypass_hydra_errors, command_line
from lockstep.runtime.signals import STOP_SIGNALS


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
    assert code_of(ValueError("odd")) == 2, "Hydra raises them for values that it does not expect"
    assert "Traceback" not in capsys.readouterr().err


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


def test_output_that_is_lost_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", SafeStream(lambda: full))
        sys.stdout.write("a result")
        with pytest.raises(Left) as left:
            program.finish()
    assert left.value.code == StorageError.exit_code


def test_a_reader_that_has_read_enough_ends_a_program_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", SafeStream(lambda: None))
    vars(sys.stdout)["error"] = BrokenPipeError()
    with pytest.raises(Left) as left:
        program.finish()
    assert left.value.code == 0


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
