"""When the watchdog ends a rank: of which error, and after how many seconds."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from lockstep.core.errors import Interrupted, LockstepError, RankFailed, Stopped
from lockstep.runtime.signals import AGAIN_S, GRACE_S, StopRequest
from lockstep.runtime.watchdog import PATIENCE_S, TICK_S, Watchdog


class Ended(Exception):
    """What the watchdog ends its process with."""

    def __init__(self, error: LockstepError) -> None:
        super().__init__()
        self.error = error


class Ticks:
    """The seconds of a rank, in no time: `act` is what the rank does in each tick, up to `seconds`."""

    def __init__(self, seconds: float, act: Callable[[float], object]) -> None:
        self.seconds, self.act, self.now = seconds, act, 0.0

    def wait(self, tick: float) -> bool:
        self.now += tick
        self.act(self.now)
        return self.now > self.seconds


class Rank(Watchdog):
    """A rank under a watchdog that raises the error with which it would end the process."""

    def __init__(self, *, timeout: float, begun: bool = True) -> None:
        stop = StopRequest()
        if begun:
            stop.step_done()
        super().__init__(0, timeout=timeout, stop=stop, file=sys.stderr, record_error=lambda error, places: None)
        self.pipe, self.writer = os.pipe()  # as in its context, which would start the thread
        os.set_blocking(self.pipe, False)

    def end(self, error: LockstepError) -> NoReturn:
        raise Ended(error)

    def get(self, number: int) -> None:
        """Get a signal."""
        os.write(self.writer, bytes([number]))

    def live(self, seconds: float, act: Callable[[float], object] = lambda now: None) -> tuple[type | None, float]:
        """The kind of the error that ended the rank within so many seconds, if one did, and when."""
        ticks = Ticks(seconds, act)
        self.finished = ticks
        try:
            self.run()
        except Ended as ended:
            return type(ended.error), ticks.now
        return None, ticks.now


@pytest.fixture
def use_cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Have this process compute all the time, or never."""

    def set_use(computes: bool) -> None:
        used = iter(range(10**9))
        monkeypatch.setattr(time, "process_time", lambda: float(next(used)) if computes else 0.0)

    set_use(False)
    return set_use


def test_a_rank_that_waits_for_its_first_step_ends_at_the_timeout_and_one_that_compiles_does_not(
    use_cpu: Callable[[bool], None],
) -> None:
    assert Rank(timeout=20, begun=False).live(60) == (RankFailed, 20)
    use_cpu(True)
    assert Rank(timeout=20, begun=False).live(60)[0] is None


def test_after_the_first_step_only_a_finished_one_is_a_sign_of_life(use_cpu: Callable[[bool], None]) -> None:
    use_cpu(True)
    assert Rank(timeout=20).live(60) == (RankFailed, 20)
    slow = Rank(timeout=20)
    assert slow.live(100, lambda now: now % 19 == 0 and slow.heartbeat())[0] is None


@pytest.mark.usefixtures("use_cpu")
def test_a_stop_with_nothing_to_save_ends_a_rank_soon() -> None:
    rank = Rank(timeout=600, begun=False)
    rank.get(signal.SIGTERM)
    error, seconds = rank.live(60)
    assert (error, seconds) == (Stopped, GRACE_S + TICK_S)


@pytest.mark.usefixtures("use_cpu")
def test_after_a_stop_a_rank_waits_for_the_others_as_long_as_their_steps_take() -> None:
    short = Rank(timeout=600)
    short.get(signal.SIGTERM)
    assert short.live(100) == (Stopped, PATIENCE_S + TICK_S)
    longer = 2 * PATIENCE_S
    long = Rank(timeout=600)

    def step_then_stop(now: float) -> None:
        if now == longer:
            long.heartbeat()
            long.get(signal.SIGTERM)

    error, seconds = long.live(4 * longer, step_then_stop)
    assert error is Stopped
    assert seconds > longer + 1.9 * longer, "a step of a minute is waited for twice as long"
    impatient = Rank(timeout=5)
    impatient.get(signal.SIGTERM)
    assert impatient.live(100)[1] <= 5 + TICK_S, "never longer than the timeout"


@pytest.mark.usefixtures("use_cpu")
def test_a_rank_that_saves_its_state_is_not_ended_by_the_stop_that_it_obeys() -> None:
    rank = Rank(timeout=600)
    rank.stop.leaving = True
    rank.get(signal.SIGTERM)
    assert rank.live(5 * PATIENCE_S)[0] is None


@pytest.mark.usefixtures("use_cpu")
def test_a_second_interrupt_ends_a_rank_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, clock = Rank(timeout=600), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def interrupt_twice(now: float) -> None:
        clock[0] = now
        if now in (1.0, 2.0 + AGAIN_S):
            rank.get(signal.SIGINT)

    assert rank.live(60, interrupt_twice) == (Interrupted, 2.0 + AGAIN_S)


def test_a_program_has_its_files_its_wakeup_and_its_handler_back_after_a_rank() -> None:
    ends = os.pipe()
    os.set_blocking(ends[1], False)
    before, handler = signal.set_wakeup_fd(ends[1]), signal.getsignal(signal.SIGUSR2)
    try:
        files = len([*Path("/proc/self/fd").iterdir()])
        with Watchdog(0, timeout=60.0, stop=StopRequest(), file=sys.stderr, record_error=lambda error, places: None):
            pass
        assert (len([*Path("/proc/self/fd").iterdir()]), signal.set_wakeup_fd(ends[1])) == (files, ends[1])
        assert signal.getsignal(signal.SIGUSR2) is handler
    finally:
        signal.set_wakeup_fd(before)
        for end in ends:
            os.close(end)
