"""Every part of a run is closed, and the first error is the one that is raised."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lockstep.core.closing import closing
from lockstep.core.errors import Interrupted, NumericalError, StorageError


def failing(error: Exception, closed: list[str]) -> Callable[[], None]:
    def close() -> None:
        closed.append("failing")
        raise error

    return close


def test_all_are_closed_in_turn_when_nothing_fails() -> None:
    closed: list[str] = []
    with closing(lambda: closed.append("one"), lambda: closed.append("two")):
        closed.append("work")
    assert closed == ["work", "one", "two"]


@pytest.mark.parametrize("ended_by", [NumericalError("the loss is nan", step=3), Interrupted(), KeyboardInterrupt()])
def test_the_first_error_is_raised_and_later_ones_are_printed(
    ended_by: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    closed: list[str] = []
    with (
        pytest.raises(type(ended_by)) as caught,
        closing(failing(OSError("no space left"), closed), lambda: closed.append("last")),
    ):
        raise ended_by
    assert caught.value is ended_by
    assert closed == ["failing", "last"]
    assert "at its end the run also met this: OSError: no space left" in capsys.readouterr().out


def test_an_error_of_the_end_alone_is_raised_when_all_are_closed(capsys: pytest.CaptureFixture[str]) -> None:
    closed: list[str] = []
    with (
        pytest.raises(StorageError, match="first"),
        closing(failing(StorageError("first"), closed), failing(ValueError("second"), closed)),
    ):
        closed.append("work")
    assert closed == ["work", "failing", "failing"]
    assert "ValueError: second" in capsys.readouterr().out


def test_a_second_interrupt_waits_for_no_other_part() -> None:
    closed: list[str] = []
    with pytest.raises(Interrupted), closing(failing(Interrupted(), closed), lambda: closed.append("never")):
        raise StorageError("no space left")
    assert closed == ["failing"]
