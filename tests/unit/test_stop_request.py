"""What a signal does to a run: when a stop interrupts, when it waits for the state, and what is left behind it."""

import gc
import importlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from lockstep.core.errors import Interrupted, Stopped
from lockstep.runtime import signals
from lockstep.runtime.signals import AGAIN_S, RUNG_END, STOP_SIGNALS, StopNow, StopRequest, listen, stop_signals


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def after_a_step() -> StopRequest:
    """The request of a run that has a state to save."""
    request = StopRequest()
    request.step_done()
    return request


def test_one_interrupt_that_arrives_twice_saves_and_a_later_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    request = after_a_step()
    for later, force in ((0.0, False), (0.9 * AGAIN_S, False), (0.2 * AGAIN_S, True)):
        now += later
        request.take(signal.SIGINT)
        assert (request.requested, request.force) == (True, force)
    assert isinstance(request.error(), Interrupted)
    now, exactly = 1.0, after_a_step()
    exactly.take(signal.SIGINT)
    now += AGAIN_S
    exactly.take(signal.SIGINT)
    assert exactly.force, "it counts from `AGAIN_S` on"
    ended = after_a_step()
    ended.ask("enough")
    now += 2 * AGAIN_S
    ended.take(signal.SIGINT)
    assert not ended.force, "a stop of the run's own is no interrupt"
    polite = after_a_step()
    for _ in range(3):
        now += 2 * AGAIN_S
        polite.take(signal.SIGTERM)
    assert not polite.force, "only a second interrupt ends a run without its state"


def test_a_process_leaves_with_its_code_also_where_its_end_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hangs(Exception):
        """What is done at the end of the program does not end."""

    def hang() -> None:
        raise Hangs

    last_resorts = list[SimpleNamespace]()

    def timer(seconds: float, call: object, words: list[int]) -> SimpleNamespace:
        last_resorts.append(SimpleNamespace(call=call, words=words, start=lambda: None))
        return last_resorts[-1]

    monkeypatch.setattr(signals.threading, "Timer", timer)
    monkeypatch.setattr(signals.atexit, "_run_exitfuncs", hang)
    with pytest.raises(Hangs):
        signals.leave(76)
    assert [(resort.call, resort.words) for resort in last_resorts] == [(os._exit, [76])]


def test_a_stop_interrupts_until_there_is_a_state_to_save() -> None:
    early = StopRequest()
    with pytest.raises(StopNow):
        early(signal.SIGTERM, None)
    early(signal.SIGTERM, None)  # a second one would interrupt the clean-up
    late = after_a_step()
    late(signal.SIGTERM, None)
    assert late.requested_after_step()


def test_an_evaluation_can_be_interrupted_and_the_step_after_it_cannot() -> None:
    request = after_a_step()
    with request.interrupting():
        assert request.immediate
        with request.interrupting(allowed=False):
            assert request.immediate, "the outer context allows it"
    with request.interrupting(allowed=False):
        assert not request.immediate
    assert not request.immediate
    request(signal.SIGTERM, None)
    with pytest.raises(StopNow), request.interrupting():
        raise AssertionError("a stop was already requested")


@pytest.mark.parametrize(("share", "rung_end"), [("0.25", 0.25), (None, float("inf"))])
def test_a_job_of_a_halving_stops_at_the_end_of_its_round(
    monkeypatch: pytest.MonkeyPatch, share: str | None, rung_end: float
) -> None:
    if share is not None:
        monkeypatch.setenv(RUNG_END, share)
    assert [StopRequest().rung_end for _ in range(2)] == [rung_end] * 2, "each request of a process knows it"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_before_the_first_step_ends_the_context_as_a_stop(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(Stopped), stop_signals(StopRequest()):
        signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_the_handlers_of_a_rank_outlive_its_run() -> None:
    request = after_a_step()
    with stop_signals(request, restore=False):
        pass
    assert signal.getsignal(signal.SIGTERM) is request
    signal.raise_signal(signal.SIGTERM)  # a late signal has no effect


def stopped_with(request: StopRequest, error: Exception) -> None:
    """Stop a rank with a request, and raise the error that follows from it."""
    with stop_signals(request):
        request.requested = True
        raise error


def test_a_stop_explains_the_errors_that_it_causes_only_while_nothing_must_be_saved() -> None:
    with pytest.raises(Stopped):
        stopped_with(StopRequest(), RuntimeError("connection closed by peer"))
    with pytest.raises(RuntimeError, match="odd"):
        stopped_with(after_a_step(), RuntimeError("odd"))


def test_a_stop_is_known_to_the_handlers_before_and_after() -> None:
    program = after_a_step()
    listen(program)
    with stop_signals(after_a_step()):
        signal.raise_signal(signal.SIGTERM)
    assert program.requested, "the program behind the run must not go on"
    with pytest.raises(Stopped), stop_signals(after_a_step()):
        raise AssertionError("the stop came before the handlers were set")


def test_the_signals_that_ask_for_a_stop_are_those_that_end_a_process_and_that_nobody_handles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("INT", "TERM", "HUP", "QUIT", "USR1", "ALRM", "VTALRM", "PROF", "POLL", "PWR", "STKFLT", "XCPU")
    usual = {*(getattr(signal, f"SIG{name}") for name in names), *range(signal.SIGRTMIN, signal.SIGRTMAX + 1)}
    handlers: dict[int, object] = {}
    monkeypatch.setattr(signals.signal, "getsignal", lambda number: handlers.get(number, signal.SIG_DFL))
    assert {*signals._stop_signals()} == usual
    handlers |= {signal.SIGINT: signal.SIG_IGN, signal.SIGHUP: signal.SIG_IGN, signal.SIGPROF: lambda *_: None}
    assert {*signals._stop_signals()} == usual - {signal.SIGHUP, signal.SIGPROF}, "who sends SIGINT means it"


def test_a_stop_names_the_step_at_which_an_earlier_process_has_saved_the_run() -> None:
    request = StopRequest()
    assert str(request.error()).startswith("stopped before a step was finished; nothing is lost: rerun the command")
    request.saved = "step 5 of 9"
    assert str(request.error()).startswith("stopped at step 5 of 9, which was saved: rerun the command")
    request.force = True
    assert isinstance(request.error(), Interrupted), "the steps since then are lost"


def test_a_reason_of_the_run_itself_is_no_second_interrupt() -> None:
    request = after_a_step()
    request.ask("the budget is spent")
    assert (request.requested, request.reason, request.force) == (True, "the budget is spent", False)
    interrupted = after_a_step()
    interrupted.take(signal.SIGINT)
    interrupted.ask("the budget is spent")
    assert not interrupted.force, "there is a state to save"


def test_an_import_is_not_interrupted_however_deep_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[bool]()

    def look() -> None:
        seen.append(signals.importing(sys._getframe()))
        for force in (False, True):
            request = StopRequest()
            request.force = force
            request(signal.SIGTERM, sys._getframe())
            assert request.requested

    (tmp_path / "looks_while_imported.py").write_text("import builtins\nbuiltins.look()\n")
    monkeypatch.setattr("builtins.look", look, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("looks_while_imported")
    del sys.modules["looks_while_imported"]
    assert seen == [True]
    assert not signals.importing(sys._getframe())
    assert not signals.importing(None)
    forced = after_a_step()
    forced.force = True
    with pytest.raises(StopNow):
        forced(signal.SIGTERM, sys._getframe())


def test_a_signal_that_was_blocked_until_the_context_stops_it() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        request = StopRequest()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stopped), stop_signals(request):
            pytest.fail("the signal has not come")
        assert request.requested
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_behind_a_run_a_late_signal_interrupts_nothing_and_an_earlier_stop_is_known_to_it() -> None:
    request = StopRequest()
    with stop_signals(request, restore=False):
        pass
    signal.raise_signal(signal.SIGTERM)
    assert request.requested
    later = StopRequest()
    with pytest.raises(Stopped), stop_signals(later):
        pytest.fail("the stop came before")
    assert later.requested


@pytest.mark.parametrize(
    ("parent", "variable", "launched", "whom"),
    [
        (None, None, False, []),
        (5, None, False, [5]),
        (None, "7", False, [7]),
        (5, "7", False, [5]),
        (None, None, True, [None]),
        (None, "7", True, [None]),
        (5, "7", True, [5]),
    ],
)
def test_a_process_of_ours_ends_with_the_one_that_it_must_not_outlive(
    parent: int | None, variable: str | None, launched: bool, whom: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    followed, prepared = list[Any](), list[str]()
    monkeypatch.setattr(signals, "die_with_parent", followed.append)
    for name in ("guard_streams", "own_process"):
        monkeypatch.setattr(signals, name, lambda name=name: prepared.append(name))
    monkeypatch.setattr(signals, "is_launched", lambda: launched)
    monkeypatch.delenv(signals.PARENT, raising=False)
    if variable is not None:
        monkeypatch.setenv(signals.PARENT, variable)
    threshold, stacks = gc.get_threshold(), signal.getsignal(signal.SIGUSR2)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR2])
    try:
        signals.begin(parent)
        assert not {signal.SIGTERM, signal.SIGUSR2} & signal.pthread_sigmask(signal.SIG_BLOCK, [])
        assert signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN, "it asks ranks for their stacks"
        assert gc.get_threshold()[0] > threshold[0]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGUSR2, stacks)
        gc.set_threshold(*threshold)
    assert (followed, prepared) == (whom, ["guard_streams", "own_process"])
    assert signals.PARENT not in os.environ, "its own children have other parents"


class Gone(BaseException):
    """The process has ended at once."""


def end_at_once(code: int) -> NoReturn:
    raise Gone(code)


@pytest.mark.parametrize(
    ("says", "rank", "line"), [("saved", "0", "lockstep: saved\n"), ("saved", "1", ""), ("", "0", "")]
)
@pytest.mark.parametrize("is_read", [True, False])
def test_a_stop_before_the_handlers_of_a_run_ends_the_process_with_its_sentence(
    says: str, rank: str, line: str, is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = list[bytes]()

    def write(number: int, data: bytes, wait_s: float) -> int:
        assert (number, wait_s) == (2, 0)
        if not is_read:
            raise BrokenPipeError
        written.append(data)
        return len(data)

    for name in ("die_with_parent", "guard_streams", "own_process"):
        monkeypatch.setattr(signals, name, lambda *_: None)
    monkeypatch.setattr(signals.gc, "set_threshold", lambda *_: None)
    monkeypatch.setattr(signals, "write_some", write)
    monkeypatch.setattr(signals.os, "_exit", end_at_once)
    monkeypatch.setenv("RANK", rank)
    stacks = signal.getsignal(signal.SIGUSR2)
    signals.begin(says=says)
    signal.signal(signal.SIGUSR2, stacks)
    with pytest.raises(Gone) as gone:
        signal.raise_signal(signal.SIGHUP)
    assert gone.value.args == (75,)
    assert b"".join(written).decode() == line * is_read


def test_a_process_leaves_after_its_exit_handlers_with_all_that_it_has_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = list[str]()
    monkeypatch.setattr(signals.os, "_exit", end_at_once)
    monkeypatch.setattr(signals.atexit, "_run_exitfuncs", lambda: done.append("handlers"))
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, SimpleNamespace(flush=lambda name=name: done.append(name)))
    timers = list[Any]()

    def timer(seconds: float, *call: Any) -> Any:
        timers.append(SimpleNamespace(seconds=seconds, call=call, start=lambda: done.append("timer")))
        return timers[-1]

    monkeypatch.setattr(signals.threading, "Timer", timer)
    with pytest.raises(Gone) as gone:
        signals.leave(70)
    assert gone.value.args == (70,)
    assert done == ["timer", "handlers", "stdout", "stderr"]
    assert (timers[0].daemon, timers[0].seconds) == (True, signals.LEAVE_S)


@pytest.mark.parametrize("has_prctl", [True, False])
@pytest.mark.parametrize("parent", [None, 40, 41])
def test_an_orphan_ends_by_the_kernel_or_by_a_thread_or_at_once(
    has_prctl: bool, parent: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[Any]()
    libc = SimpleNamespace(**{"prctl": lambda *numbers: calls.append(numbers)} if has_prctl else {})
    monkeypatch.setattr(signals.ctypes, "CDLL", lambda name: libc)
    monkeypatch.setattr(signals.os, "getppid", lambda: 40)
    monkeypatch.setattr(signals.os, "_exit", end_at_once)

    def thread(target: object, args: list[int], daemon: bool) -> Any:
        return SimpleNamespace(start=lambda: calls.append((target, args, daemon)))

    monkeypatch.setattr(signals.threading, "Thread", thread)
    if parent == 41:
        with pytest.raises(Gone):
            signals.die_with_parent(parent)
    else:
        signals.die_with_parent(parent)
    assert calls == [(1, signal.SIGKILL) if has_prctl else (signals._follow, [40], True)]


def test_a_process_that_follows_its_parent_ends_when_it_has_another(monkeypatch: pytest.MonkeyPatch) -> None:
    parents, killed = iter([40, 40, 1]), list[tuple[int, int]]()
    monkeypatch.setattr(signals.os, "getppid", lambda: next(parents))
    monkeypatch.setattr(signals.os, "kill", lambda *call: killed.append(call))
    monkeypatch.setattr(signals.time, "sleep", lambda seconds: None)
    signals._follow(40)
    assert killed == [(os.getpid(), signal.SIGKILL)]
    assert next(parents, None) is None


def test_behind_an_error_a_stop_waits_again_for_the_state() -> None:
    request = after_a_step()
    with pytest.raises(KeyError), request.interrupting():
        raise KeyError
    assert not request.immediate
    early = StopRequest()
    with pytest.raises(KeyError), early.interrupting(allowed=False):
        raise KeyError
    assert early.immediate, "nothing is there to be saved yet"


@pytest.mark.parametrize("early", [True, False])
def test_the_handlers_of_before_know_of_a_stop_also_behind_an_error(early: bool) -> None:
    before = StopRequest()
    before.step_done()
    listen(before)

    def stopped(request: StopRequest) -> None:
        with stop_signals(request):
            signal.raise_signal(signal.SIGTERM)
            raise KeyError

    with pytest.raises(Stopped if early else KeyError):
        stopped(StopRequest() if early else after_a_step())
    assert before.requested
    assert signal.getsignal(signal.SIGTERM) is before
    quiet = after_a_step()
    listen(quiet)
    with pytest.raises(KeyError), stop_signals(after_a_step()):
        raise KeyError
    assert not quiet.requested, "nobody asked for a stop"
