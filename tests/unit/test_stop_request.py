"""What a signal does to a run: when a stop interrupts, when it waits for the state, and what is left behind it."""

import os
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace

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
    assert StopRequest().rung_end == rung_end


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
