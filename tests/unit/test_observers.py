"""The figures that observers log: each is written once, with the next ones, or before what needs them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.core.errors import InputError
from lockstep.core.observer import Observer
from lockstep.core.run_dir import RunDir
from lockstep.core.world import World
from lockstep.training import build_observers
from lockstep.training.build_observers import Observers
from lockstep.training.train_state import Progress


class Writing(Observer):
    """Keeps what it is called with, and the figures of each write."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self.calls.append((step, dict(scalars)))

    def flush(self) -> None:
        self.calls.append("flush")

    def end(self, outcome: Any) -> None:
        self.calls.append(outcome)


class Logging(Writing):
    """Logs a figure while it gets those of a step."""

    observers: Observers

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        super().write(step, scalars)
        self.observers.log("my/own", 10 * step)


def test_a_figure_is_written_once_by_all_with_the_next_ones() -> None:
    one, other = Writing(), Writing()
    observers = Observers(one, other, names=("my/scalar",))
    observers.log("my/scalar", 1)
    observers.log("my/scalar", 2)
    observers.write(3, {"loss/train": 0.5})
    observers.write(4, {"loss/train": 0.25})
    expected = [(3, {"loss/train": 0.5, "my/scalar": 2.0}), (4, {"loss/train": 0.25})]
    assert one.calls == other.calls == expected


def test_what_an_observer_logs_while_it_writes_goes_to_those_behind_it_in_the_same_step() -> None:
    first, second = Logging(), Writing()
    first.observers = observers = Observers(first, second, names=("my/own",))
    for step in (1, 2):
        observers.write(step, {"loss/train": 0.5})
    assert first.calls == [(1, {"loss/train": 0.5}), (2, {"loss/train": 0.5})]
    assert second.calls == [(step, {"loss/train": 0.5, "my/own": 10.0 * step}) for step in (1, 2)]


@pytest.mark.parametrize("ends", [False, True])
def test_a_figure_that_waits_is_written_at_its_step_before_a_checkpoint_and_before_the_end(ends: bool) -> None:
    writing = Writing()
    observers = Observers(writing, names=("my/scalar",))
    for _ in range(2):
        observers.write(7, {})
        observers.log("my/scalar", 1)
        observers.end("completed") if ends else observers.flush()
    last = "completed" if ends else "flush"
    assert writing.calls == [(7, {}), (7, {"my/scalar": 1.0}), last] * 2
    writing.calls.clear()
    observers.end("completed") if ends else observers.flush()
    assert writing.calls == [last], "no empty line"


@pytest.mark.parametrize("value", ["nan", None, [1, 2]])
def test_a_figure_is_a_number_and_declared(value: Any) -> None:
    observers = Observers(names=("my/scalar",))
    with pytest.raises(InputError, match="the figure 'my/other' is not declared"):
        observers.log("my/other", 1)
    if value == "nan":
        observers.log("my/scalar", value)
    else:
        with pytest.raises(InputError, match=r"the figure 'my/scalar' is .*, expected a number"):
            observers.log("my/scalar", value)


@pytest.mark.parametrize(
    ("rank", "size", "cut"), [(0, 1, [0, 1, 2, 3, 4]), (0, 2, [0, 2, 4]), (1, 2, [1, 3]), (2, 3, [2])]
)
def test_a_resume_cuts_the_samples_of_each_rank_that_is_gone_once(
    tmp_path: Path, rank: int, size: int, cut: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, files = RunDir.at(tmp_path / "run"), list[tuple[Path, int]]()
    for other in range(5):
        run.rank_samples(other).touch()

    def samples(path: Path, step: int) -> Any:
        files.append((path, step))
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(build_observers, "Samples", samples)
    job: Any = SimpleNamespace(telemetry=SimpleNamespace(samples=True))
    world = World.solo()
    place: Any = SimpleNamespace(**{**vars(world), "rank": rank, "size": size})
    assert build_observers._samples(job, run, place, Progress(step=6)) is not None
    assert sorted(files) == [(run.rank_samples(other), 6) for other in cut]
    job.telemetry.samples = False
    assert build_observers._samples(job, run, place, Progress(step=6)) is None
