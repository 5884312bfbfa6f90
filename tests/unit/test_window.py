"""The figures of the steps between two log points."""

from __future__ import annotations

import pytest

from lockstep.telemetry import Window


def test_rate_and_share_are_of_the_seconds_of_training() -> None:
    window = Window(first=1, last=4, loss=0.5, top1=80.0, examples=256, seconds=2.0, waited=0.5)
    assert window.rate == pytest.approx(128)
    assert window.wait_share == pytest.approx(25)
