"""The figures that observers log: each is written once, with the next ones, or before what needs them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.core import observer
from lockstep.core.errors import InputError, LockstepError
from lockstep.core.observer import Observer
from lockstep.core.run_dir import RunDir
from lockstep.core.world import World
from lockstep.training import build_observers
from lockstep.training.build_observers import Observers
from lockstep.training.moments import Callbacks
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


@pytest.mark.parametrize("value", ["nan", None, [1, 2], "text", torch.ones(2), torch.ones(1, device="meta")], ids=str)
def test_a_figure_is_a_number_and_declared(value: Any) -> None:
    observers = Observers(names=("my/scalar",))
    with pytest.raises(InputError, match="the figure 'my/other' is not declared"):
        observers.log("my/other", 1)
    if value == "nan":
        observers.log("my/scalar", value)
    else:
        for group in ((), ("callback",)):
            says = rf"^{(*group, 'logger')[0]}: the figure 'my/scalar' is .*, expected a number$"
            with pytest.raises(InputError, match=says):
                observers.log("my/scalar", value, *group)
            assert observers.logged == {}


def test_a_figure_is_a_number_of_python_and_the_group_of_who_logs_is_named() -> None:
    observers = Observers(names=("my/scalar",))
    observers.log("my/scalar", torch.tensor(0.5))  # type: ignore[arg-type]
    assert [(name, type(value), value) for name, value in observers.logged.items()] == [("my/scalar", float, 0.5)]
    for group in ((), ("callback",)):
        with pytest.raises(InputError, match=f"^{(*group, 'logger')[0]}: the figure 'my/other' is not declared"):
            observers.log("my/other", 1, *group)


class Failing(Writing):
    """Fails where it is told to."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        super().write(step, scalars)
        if self.where == "write":
            raise LockstepError("no room")

    def end(self, outcome: Any) -> None:
        super().end(outcome)
        if self.where == "end":
            raise LockstepError("no room")


@pytest.mark.parametrize("where", ["write", "end"])
def test_an_observer_that_fails_at_the_end_leaves_the_others_their_end(where: str) -> None:
    failing, later = Failing(where), Writing()
    observers = Observers(failing, later, names=("my/scalar",))
    observers.log("my/scalar", 1)
    with pytest.raises(LockstepError, match="no room"):
        observers.end("failed")
    assert (failing.calls[-1], later.calls[-1]) == ("failed", "failed")


@pytest.mark.parametrize(
    ("rank", "size", "cut"), [(0, 1, [0, 1, 2, 3, 4]), (0, 2, [0, 2, 4]), (1, 2, [1, 3]), (2, 3, [2])]
)
def test_a_resume_cuts_the_samples_of_each_rank_that_is_gone_once(
    tmp_path: Path, rank: int, size: int, cut: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, files, closed = RunDir.at(tmp_path / "run"), list[tuple[Path, float]](), list[Path]()
    for other in range(5):
        run.rank_samples(other).touch()

    def samples(path: Path, step: float) -> Any:
        files.append((path, step))
        return SimpleNamespace(close=lambda: closed.append(path))

    monkeypatch.setattr(build_observers, "Samples", samples)
    job: Any = SimpleNamespace(telemetry=SimpleNamespace(samples=True))
    world = World.solo()
    place: Any = SimpleNamespace(**{**vars(world), "rank": rank, "size": size})
    progress = Progress(step=6, scores=[(6, 1.0)])
    assert build_observers._samples(job, run, place, progress) is not None
    assert sorted(files) == [(run.rank_samples(other), 6) for other in cut]
    assert sorted(closed) == [run.rank_samples(other) for other in cut if other != rank], "its own stays open"
    job.telemetry.samples = False
    assert build_observers._samples(job, run, place, Progress(step=6)) is None


def test_every_run_is_read_by_the_packages_that_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("lockstep.nothing.listener", "lockstep.report.listener", "no_such_package.listener")
    monkeypatch.setattr(observer, "LISTENERS", names)
    assert [listener.__module__ for listener in observer.listeners()] == ["lockstep.report.listener"]


def test_a_run_has_the_name_of_its_folder(tmp_path: Path) -> None:
    facts: Any = {"plan": None, "step": 0, "after": 0.0, "config": {}, "hyperparameters": {}}
    for name in ("run", "lr=0.1,wd=0.05", "v1.2"):
        info = observer.RunInfo(run_dir=RunDir(tmp_path / name), **facts)
        assert (info.folder, info.name) == (tmp_path / name, name)
    (tmp_path / "link").symlink_to(tmp_path)
    for folder in (tmp_path / "link", tmp_path / "link" / "run", Path("runs/one")):
        info = observer.RunInfo(run_dir=RunDir(folder), **facts)
        assert (info.folder, info.name) == (folder, folder.name), "as the user named it"


class Facts(Observer):
    """Knows something at the end of a run, and fails if it is told to."""

    commands = ("look at a",)

    def __init__(self, facts: Mapping[str, Any], error: Exception | None = None) -> None:
        self.facts, self.error = facts, error

    def findings(self, evidence: Any) -> Mapping[str, Any]:
        if self.error is not None:
            raise self.error
        return {**self.facts, "of": evidence}

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        assert isinstance(scalars, dict)
        scalars.clear()


def test_the_findings_and_the_commands_of_all_observers_are_together() -> None:
    one, other = Facts({"a": 1, "b": 1}), Facts({"b": 2, "c": 2})
    other.commands = ("look at b", "look at c")
    observers = Observers(one, other)
    assert observers.findings(7) == {"a": 1, "b": 2, "c": 2, "of": 7}
    assert observers.commands == ["look at a", "look at b", "look at c"]
    assert Observers().findings(7) == {}


def test_what_an_observer_does_to_its_figures_the_next_one_does_not_see() -> None:
    writing = Writing()
    Observers(Facts({}), writing).write(3, {"loss/train": 0.5})
    assert writing.calls == [(3, {"loss/train": 0.5})]


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize(
    "error", [InputError("a sentence"), LockstepError("a sentence"), ZeroDivisionError("odd")], ids=repr
)
def test_an_error_of_a_users_observer_has_its_line_and_one_of_ours_its_traceback(
    ours: bool, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_observers, "is_ours", lambda cls: ours)
    monkeypatch.setattr(build_observers, "option_name", lambda cls: cls.__name__.lower())
    line = Facts.findings.__code__.co_firstlineno + 2
    with pytest.raises(type(error) if ours else LockstepError) as raised:
        Observers(Facts({}, error)).findings(7)
    if ours or isinstance(error, LockstepError):
        assert raised.value is error
    else:
        sentence = f"{__file__}:{line}: logger facts: findings raised ZeroDivisionError: odd"
        assert str(raised.value) == sentence


def test_every_moment_reaches_every_observer_with_its_values() -> None:
    calls = list[Any]()
    moments: dict[str, tuple[Any, ...]] = {
        "first_batch": ("micro", "images"),
        "write_gpu": (3, {"gpu": 1.0}),
        "evaluated": (3, {"top1": 1.0}, True),
        "predicted": ("predictions",),
        "saved": (3, Path("step")),
        "completed": ({"status": "completed"},),
    }

    def observer(number: int) -> Any:
        return SimpleNamespace(
            **{name: lambda *values, name=name: calls.append((number, name, values)) for name in moments}
        )

    observers = Observers(observer(1), observer(2))
    for name, values in moments.items():
        getattr(observers, name)(*values)
    assert calls == [(number, name, values) for name, values in moments.items() for number in (1, 2)]


class Noting:
    """A lock that keeps when it is taken and given back."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def __enter__(self) -> None:
        self.events.append("taken")

    def __exit__(self, *_: object) -> None:
        self.events.append("given back")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("write", (3, {"loss/train": 1.0})),
        ("write_gpu", (3, {"gpu": 1.0})),
        ("evaluated", (3, {"top1": 1.0}, True)),
        ("flush", ()),
        ("end", ("completed",)),
    ],
)
def test_one_thread_at_a_time_is_in_the_observers(name: str, values: tuple[Any, ...]) -> None:
    events = list[str]()
    inner: Any = SimpleNamespace(**{name: lambda *_: events.append("within")})
    observers = Observers(inner)
    observers.lock = Noting(events)  # type: ignore[assignment]
    getattr(observers, name)(*values)
    assert (events[0], events[-1]) == ("taken", "given back")
    depths = [1 if event == "taken" else -1 for event in events[: events.index("within")]]
    assert sum(depths) > 0, "it holds the lock"


def test_a_callback_is_called_at_a_moment_while_no_other_thread_is_in_the_observers() -> None:
    events = list[str]()
    callback: Any = SimpleNamespace(step_end=lambda run: events.append(f"step {run}"))
    callbacks = Callbacks({"told": callback})
    callbacks.lock = Noting(events)  # type: ignore[assignment]
    callbacks.tell("step_end", 3)
    assert events == ["taken", "step 3", "given back"]


def test_a_figure_that_another_thread_logs_waits_for_a_write() -> None:
    events = list[str]()
    observers = Observers(names=("my/a",))
    observers.lock = Noting(events)  # type: ignore[assignment]
    observers.log("my/a", 1)
    assert events == ["taken", "given back"]


@pytest.mark.parametrize(
    ("size", "whole", "one_pass", "graph", "micro_batches", "divided", "reduces"),
    [
        (1, True, True, False, 1, True, False),
        (1, True, True, False, 4, True, False),
        (2, True, True, False, 4, True, True),
        (2, True, False, False, 1, False, True),  # a rank has other micro-batches at the same time
        (1, True, False, False, 1, True, False),
        (1, True, True, True, 1, False, False),  # a replay calls no hook
        (2, False, True, False, 1, True, False),
        (2, False, True, False, 2, False, False),  # hooks of a sharded model are called elsewhere
    ],
)
def test_a_step_is_divided_where_its_parts_can_be_told_apart(
    size: int,
    whole: bool,
    one_pass: bool,
    graph: bool,
    micro_batches: int,
    divided: bool,
    reduces: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build_observers, "TimeSpent", lambda *values, **named: (values, named))
    job: Any = SimpleNamespace(
        strategy=SimpleNamespace(whole_model=whole, one_pass=one_pass), train=SimpleNamespace(cuda_graph=graph)
    )
    world: Any = SimpleNamespace(size=size, device="a device")
    plan: Any = SimpleNamespace(micro_batches=micro_batches, log_every=7)
    state: Any = SimpleNamespace(model="model")
    times: Any = build_observers._times(job, world, plan, state, Progress(step=5))
    assert times == (("model" if divided else None, "a device"), {"reduces": reduces, "period": 7, "first": 5})
