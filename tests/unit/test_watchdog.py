"""When the watchdog ends a rank: of which error, and after how many seconds."""

import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import psutil
import pytest

from lockstep.core.errors import Interrupted, LockstepError, RankFailed, Stopped
from lockstep.runtime import watchdog
from lockstep.runtime.signals import AGAIN_S, GRACE_S, LEAVE_S, StopRequest
from lockstep.runtime.watchdog import PATIENCE_S, TICK_S, Watchdog, dump_stacks_on_crash


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
    for signs in (2, 3, 4):
        quick = Rank(timeout=20)
        assert quick.live(100, lambda now: [quick.heartbeat() for _ in range(signs)])[0] is None  # noqa: B023


@pytest.mark.usefixtures("use_cpu")
@pytest.mark.parametrize("again", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2])
@pytest.mark.parametrize(("begun", "seconds"), [(False, GRACE_S + TICK_S), (True, PATIENCE_S + TICK_S)])
def test_a_stop_ends_a_rank_soon_after_the_first_signal_that_asked_for_it(
    begun: bool, seconds: float, again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback", lambda file: None)
    alone, repeated = Rank(timeout=600, begun=begun), Rank(timeout=600, begun=begun)
    for rank in (alone, repeated):
        rank.get(signal.SIGTERM)
    assert alone.live(60) == (Stopped, seconds)
    assert repeated.live(60, lambda now: repeated.get(again)) == (Stopped, seconds)


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


def test_after_a_stop_a_rank_that_computes_has_until_the_timeout_to_finish_its_step(
    use_cpu: Callable[[bool], None],
) -> None:
    use_cpu(True)
    rank = Rank(timeout=8 * PATIENCE_S)
    rank.get(signal.SIGTERM)
    assert rank.live(20 * PATIENCE_S) == (RankFailed, 8 * PATIENCE_S)


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
    before, earlier = signal.set_wakeup_fd(ends[1]), signal.signal(signal.SIGUSR2, lambda number, frame: None)
    handler = signal.getsignal(signal.SIGUSR2)
    try:
        files = len([*Path("/proc/self/fd").iterdir()])
        with Watchdog(0, timeout=60.0, stop=StopRequest(), file=sys.stderr, record_error=lambda error, places: None):
            pass
        assert (len([*Path("/proc/self/fd").iterdir()]), signal.set_wakeup_fd(ends[1])) == (files, ends[1])
        assert signal.getsignal(signal.SIGUSR2) is handler
    finally:
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGUSR2, earlier)
        for end in ends:
            os.close(end)


def test_a_rank_is_left_when_its_watchdog_has_ended() -> None:
    class Slow(Watchdog):
        def run(self) -> None:
            super().run()
            time.sleep(0.05)
            open_ends.extend(map(os.fstat, (self.pipe, self.signals)))

    open_ends = list[os.stat_result]()
    with Slow(0, timeout=60.0, stop=StopRequest(), file=sys.stderr, record_error=lambda error, places: None):
        pass
    assert len(open_ends) == 2


@pytest.mark.parametrize("enabled", [True, False])
def test_the_stacks_of_a_crash_are_written_unless_the_program_has_them_written_already(
    enabled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[Any]()
    monkeypatch.setattr(watchdog.faulthandler, "is_enabled", lambda: enabled)
    monkeypatch.setattr(watchdog.faulthandler, "enable", lambda file: calls.append(file.name))
    monkeypatch.setattr(watchdog.faulthandler, "disable", lambda: calls.append("disable"))
    log = tmp_path / "stacks.log"
    with suppress(ZeroDivisionError), dump_stacks_on_crash(log) as file:
        file.write("stacks")
        raise ZeroDivisionError
    assert log.read_text() == "stacks"
    assert len(calls) == (0 if enabled else 2)
    assert enabled or calls[1] == "disable"


@pytest.mark.usefixtures("use_cpu")
def test_the_longest_step_is_kept_and_the_silence_that_continues_is_none() -> None:
    rank = Rank(timeout=600)
    rank.live(60, lambda now: now in (4.0, 24.0, 30.0) and rank.heartbeat())
    assert rank.longest == 20 - TICK_S
    assert rank.quiet == 60 - 30


@pytest.mark.usefixtures("use_cpu")
def test_signals_that_come_together_are_all_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    dumps = list[object]()
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback", dumps.append)
    rank = Rank(timeout=600)
    for number in (signal.SIGUSR2, signal.SIGUSR2, signal.SIGWINCH, signal.SIGTERM):
        rank.get(number)
    rank.live(1)
    assert dumps == [sys.stderr], "once"
    assert (rank.received.requested, rank.stop.requested) == (True, False), "the main thread hears it by itself"
    rank.get(signal.SIGUSR2)
    rank.live(1)
    assert len(dumps) == 2


@pytest.mark.usefixtures("use_cpu")
def test_a_stop_during_an_import_ends_a_rank_that_has_nothing_to_save_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchdog, "importing", lambda frame: True)
    for begun, ends in ((False, (Stopped, TICK_S)), (True, (None, 10 + TICK_S))):
        rank = Rank(timeout=600, begun=begun)
        rank.stop.saved = "step 5 of 9"
        rank.get(signal.SIGTERM)
        assert rank.live(10) == ends
    assert Rank(timeout=600, begun=False).live(10)[0] is None, "nobody asked for a stop"


@pytest.mark.usefixtures("use_cpu")
def test_a_stop_says_how_far_the_run_was_saved_and_how_long_no_step_was_finished() -> None:
    errors = list[str]()
    for begun in (False, True):
        rank = Rank(timeout=600, begun=begun)
        rank.stop.saved = "step 5 of 9"
        rank.get(signal.SIGTERM)
        rank.quiet, rank.idle = 7.0, -20.0  # it has computed since its last step
        rank.finished = Ticks(100, lambda now: None)
        with pytest.raises(Ended) as ended:
            rank.run()
        errors.append(str(ended.value.error))
    assert errors[0].startswith("stopped at step 5 of 9, which was saved: rerun")
    assert errors[1].startswith(
        f"stopped without saving, because no step was finished for {7 + PATIENCE_S + 20.5:g} s; a"
    )


@pytest.mark.usefixtures("use_cpu")
@pytest.mark.parametrize("suspended", [(), (8,), (7, 8)])
def test_a_peer_that_stands_still_is_waited_for_a_little_after_a_stop(
    suspended: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "_is_suspended", suspended.__contains__)
    rank = Rank(timeout=600)
    rank.local_peer_pids = {1: 7, 2: 8}
    rank.get(signal.SIGTERM)
    assert rank.live(100) == (Stopped, (GRACE_S if suspended else PATIENCE_S) + TICK_S)


class Gone(BaseException):
    """The process has ended."""


@pytest.mark.parametrize(
    ("error", "waits"),
    [(RankFailed("no step was finished"), [2 * TICK_S]), (Stopped("stopped"), [])],
    ids=["hang", "stop"],
)
def test_the_end_of_a_rank_says_where_all_of_its_machine_were_and_wakes_them(
    error: LockstepError, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    events, seconds, records, timers = list[Any](), list[float](), list[Any](), list[Any]()

    def leave(code: int) -> NoReturn:
        events.append(("exit", code))
        raise Gone

    def kill(pid: int, number: int) -> None:
        events.append((pid, number))
        if pid == 8:
            raise ProcessLookupError

    def timer(seconds: float, *call: Any) -> Any:
        records.append(call)
        timers.append(SimpleNamespace(seconds=seconds, start=lambda: events.append("timer")))
        return timers[-1]

    monkeypatch.setattr(watchdog.os, "_exit", leave)
    monkeypatch.setattr(watchdog.os, "kill", kill)
    monkeypatch.setattr(watchdog.threading, "Timer", timer)
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback", lambda file: events.append("stacks"))
    monkeypatch.setattr(watchdog.time, "sleep", seconds.append)
    monkeypatch.setattr(watchdog, "_is_suspended", lambda pid: pid == 9)
    rank = Watchdog(
        0, timeout=1.0, stop=StopRequest(), file=sys.stderr, record_error=lambda *facts: records.append(facts)
    )
    rank.local_peer_pids = {1: 7, 2: 8, 3: 9}
    with ThreadPoolExecutor(1) as thread, pytest.raises(Gone):
        thread.submit(rank.end, error).result()
    last_resort, (recorded, places) = records
    assert last_resort == (leave, [error.exit_code])
    assert [(timer.seconds, timer.daemon) for timer in timers] == [(LEAVE_S, True)]
    assert rank.daemon, "a process that ends without it waits for no other signal"
    assert (recorded, places[3], {*places}) == (error, "was stopped by a signal", {0, 3})
    assert places[0].startswith("was in ")
    assert ".py:" in places[0]
    assert "(watchdog.py:" not in places[0], "the line of the main thread, not of its own"
    wakes = [(pid, number) for pid in (7, 8, 9) for number in (signal.SIGUSR2, signal.SIGCONT)]
    wakes.remove((8, signal.SIGCONT))
    assert events == ["timer", "stacks", *wakes, ("exit", error.exit_code)]
    assert seconds == waits


def test_a_peer_that_has_ended_is_not_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    def process(pid: int) -> Any:
        if pid == 1:
            raise psutil.NoSuchProcess(pid)
        if pid == 2:
            raise psutil.AccessDenied(pid)
        return SimpleNamespace(status=lambda: {3: psutil.STATUS_STOPPED, 4: psutil.STATUS_SLEEPING}[pid])

    monkeypatch.setattr(psutil, "Process", process)
    assert [watchdog._is_suspended(pid) for pid in (1, 2, 3, 4)] == [False, False, True, False]


def test_a_signal_is_passed_on_without_a_wait_and_interrupts_no_native_code(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, wakeup = list[Any](), signal.set_wakeup_fd
    monkeypatch.setattr(watchdog.signal, "siginterrupt", lambda *call: calls.append(call))

    def set_wakeup(number: int, **options: bool) -> int:
        calls.append(options)
        return wakeup(number, **options)

    monkeypatch.setattr(watchdog.signal, "set_wakeup_fd", set_wakeup)
    with Watchdog(
        0, timeout=60.0, stop=StopRequest(), file=sys.stderr, record_error=lambda error, places: None
    ) as own:
        assert [os.get_blocking(end) for end in (own.pipe, own.signals)] == [False, False]
    assert calls == [{"warn_on_full_buffer": False}, (signal.SIGUSR2, False), {}]


@pytest.mark.parametrize(("share", "ends"), [(0.5, True), (1.0, True), (1.5, False)])
def test_a_process_that_uses_more_than_a_hundredth_of_a_core_computes(
    share: float, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = (number * share * watchdog.BUSY_SHARE * TICK_S for number in range(10**6))
    monkeypatch.setattr(watchdog, "BUSY_SHARE", 2**-7)  # without a rounding
    monkeypatch.setattr(time, "process_time", lambda: next(used))
    assert (Rank(timeout=20, begun=False).live(60)[0] is RankFailed) == ends


def test_the_place_of_a_rank_is_the_line_that_it_has_come_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> NoReturn:
        raise Gone

    records = list[Any]()
    code = SimpleNamespace(co_name="fit", co_filename="/of/the/user/loop.py", co_firstlineno=3)
    monkeypatch.setattr(watchdog, "_main_frame", lambda: SimpleNamespace(f_code=code, f_lineno=12))
    monkeypatch.setattr(watchdog.os, "_exit", leave)
    monkeypatch.setattr(watchdog.threading, "Timer", lambda *_: SimpleNamespace(start=lambda: None))
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback", lambda file: None)
    rank = Watchdog(
        5, timeout=1.0, stop=StopRequest(), file=sys.stderr, record_error=lambda _, places: records.append(places)
    )
    with pytest.raises(Gone):
        rank.end(Stopped("stopped"))
    assert records == [{5: "was in fit (loop.py:12)"}]


def test_a_handler_of_stacks_that_is_no_function_of_python_is_left_alone() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    try:
        with Watchdog(
            0, timeout=60.0, stop=StopRequest(), file=sys.stderr, record_error=lambda error, places: None
        ) as own:
            own.stacks_before = None  # as Python tells of one that C code has set
            within = signal.getsignal(signal.SIGUSR2)
        assert signal.getsignal(signal.SIGUSR2) is within
    finally:
        signal.signal(signal.SIGUSR2, before)
