"""The loggers, by their real files, opened with what reads them."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers import forked, records, resolved, train, train_here
from lockstep.core.errors import InputError, LockstepError
from lockstep.core.observer import Observer, Outcome, RunInfo
from lockstep.core.run import Run
from lockstep.job.validate import check_job
from lockstep.telemetry import loggers
from lockstep.training.build_observers import Observers
from processes import processes

SMALL = ("model=linear", "batch=300", "steps=12", "telemetry.interval=2", "train.eval_every=4", "device=cpu")


class Told(Observer):
    """Keeps all that it is told, and fails at a step."""

    def __init__(self, run: RunInfo, fails_at: int = 0) -> None:
        self.log: list[tuple[Any, ...]] = [("begins", run.step, run.plan.total_steps, run.folder)]
        self.fails_at = fails_at

    def write(self, step: int, scalars: Any) -> None:
        self.log.append(("written", step, *scalars))

    def evaluated(self, step: int, scores: Any, best: bool) -> None:
        self.log.append(("evaluated", step, best))
        if step == self.fails_at:
            raise ZeroDivisionError("a logger's own error")

    def saved(self, step: int, checkpoint: Path) -> None:
        assert (checkpoint / "manifest.json").is_file()
        self.log.append(("saved", step))

    def end(self, outcome: Outcome) -> None:
        self.log.append((outcome,))


@pytest.fixture
def observers(monkeypatch: pytest.MonkeyPatch) -> list[Told]:
    """The observers that `logger=jsonl` makes, each `Told`; further ones do not fail."""
    observers: list[Told] = []

    def build(self: loggers.JSONL, run: RunInfo) -> Observer:
        observers.append(Told(run, fails_at=8 if not observers else 0))
        run.run_dir.metrics.touch()  # a run whose file is removed ends
        return observers[-1]

    monkeypatch.setattr(loggers.JSONL, "build", build)
    return observers


def events(observer: Told) -> list[tuple[Any, ...]]:
    return [event for event in observer.log if event[0] != "written"]


def test_an_observer_is_told_of_a_run_and_its_error_leaves_a_run_to_go_on_with(
    tmp_path: Path, observers: list[Told]
) -> None:
    words = (*SMALL, "logger=jsonl", "checkpoint.every=4")
    with pytest.raises(LockstepError, match="logger Told: evaluated raised ZeroDivisionError: a logger's own error"):
        train_here(tmp_path / "run", *words)
    train_here(tmp_path / "run", *words)
    for observer, begun, evaluated, saved, outcome in (
        (observers[0], 0, [4, 8], [4], "failed"),
        (observers[1], 4, [8, 12], [8, 12], "completed"),
    ):
        first, *between, last = events(observer)
        assert first == ("begins", begun, 12, tmp_path / "run")
        assert [event[1] for event in between if event[0] == "evaluated"] == evaluated
        assert [event[1] for event in between if event[0] == "saved"] == saved  # as soon as it is on the disk
        assert last == (outcome,)


def test_a_stopped_run_is_said_to_be_one(tmp_path: Path, observers: list[Told]) -> None:
    train_here(tmp_path / "run", *SMALL, "logger=jsonl", stop_at=3)
    assert events(observers[0])[-2:] == [("saved", 3), ("stopped",)]


def test_each_observer_ends_even_if_one_of_them_fails() -> None:
    ended: list[str] = []

    class Ends(Observer):
        def __init__(self, error: Exception | None) -> None:
            self.error = error

        def end(self, outcome: Outcome) -> None:
            ended.append(outcome)
            if self.error:
                raise self.error

    with pytest.raises(LockstepError, match=r"test_loggers.py:\d+: logger Ends: end raised ZeroDivisionError"):
        Observers(Ends(None), Ends(ZeroDivisionError()), Ends(None)).end("completed")
    assert ended == ["completed"] * 3


@pytest.mark.parametrize("name", sorted(name for name in vars(Observer) if not name.startswith("_")))
def test_a_users_observer_that_raises_is_named_with_its_method_and_line_and_ours_keeps_its_error(
    name: str,
) -> None:
    def fail(*values: object) -> None:
        raise ZeroDivisionError("nothing to divide")

    method: Any = property(fail) if name == "commands" else fail
    known: dict[str, list[Any]] = {"commands": [], "write": [1, {}]}
    values = known[name] if name in known else [None] * (vars(Observer)[name].__code__.co_argcount - 1)
    for module, error, says in (
        ("mine", LockstepError, rf"test_loggers.py:\d+: logger Own: {name} raised ZeroDivisionError: nothing to"),
        ("lockstep.ours", ZeroDivisionError, "^nothing to divide"),
    ):
        observers = Observers(type("Own", (Observer,), {name: method, "__module__": module})())
        with pytest.raises(error, match=says):
            getattr(observers, name)(*values)


def test_several_observers_are_told_all_that_one_is_told() -> None:
    methods = {name for name in vars(Observer) if not name.startswith("_")}
    assert methods <= vars(Observers).keys()
    calls: list[tuple[Any, ...]] = []
    for name in methods - {"commands", "findings", "write", "flush", "end"}:  # which have tests of their own
        observer, values = Observer(), [object()] * (vars(Observer)[name].__code__.co_argcount - 1)
        setattr(observer, name, lambda *arguments: calls.append(arguments))
        getattr(Observers(observer, observer), name)(*values)
        assert calls == [tuple(values)] * 2, name
        calls.clear()


@pytest.mark.parametrize("chosen", ["[]", "jsonl", "tensorboard", "[jsonl,tensorboard]"])
def test_a_run_has_the_files_of_its_loggers(tmp_path: Path, chosen: str) -> None:
    run = train_here(tmp_path / "run", *SMALL, f"logger={chosen}").path
    assert (run / "metrics.jsonl").exists() == ("jsonl" in chosen)
    assert bool([*run.glob("events.out.tfevents.*")]) == ("tensorboard" in chosen)
    assert len((run / "metrics.csv").read_text().splitlines()) == 4


def test_a_logger_whose_package_is_missing_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loggers.WandB, "package", "no_such_package")
    with pytest.raises(InputError, match=r"logger=wandb needs the package no_such_package, .* pip install"):
        check_job(resolved("logger=[jsonl,wandb]"))


def stored_records(file: Path) -> Iterator[bytes]:
    """The records of a `.wandb` file: LevelDB's log, in blocks of 32 KiB, behind a header of seven bytes.

    A record is cut into fragments, each with its checksum, length, and type: whole, first, middle or last.
    """
    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if 2**15 - at % 2**15 < 7 or kind == 0:  # the rest of a block
            at += 2**15 - at % 2**15
            continue
        parts = (b"" if kind in (1, 2) else parts) + data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield parts


@pytest.mark.slow
def test_a_killed_run_is_one_run_at_wandb_with_every_figure(tmp_path: Path) -> None:
    protocol = pytest.importorskip("wandb.proto.wandb_internal_pb2")

    run = tmp_path / "run"
    job = (
        *SMALL,
        "logger=[jsonl,wandb]",
        f"output_root={tmp_path / 'out'}",
        f"hydra.run.dir={run}",
        "checkpoint.every=4",
    )
    killed = (
        "import os, sys; from lockstep.training.trainer import Trainer; log = Trainer.log\n"
        "def kill(self, step, scalars): log(self, step, scalars); step == 6 and os._exit(9)\n"
        "Trainer.log = kill\n"
        "import lockstep; sys.argv[0] = 'train.py'; lockstep.main()"
    )
    assert forked("-c", killed, *job).code != 0
    done = train(*job)
    assert done.code == 0, done.err
    assert not processes(run)

    parts = (tmp_path / "out").glob("wandb/offline-run-*/*.wandb")
    killed_part, whole = sorted(parts, key=lambda path: path.parent.name)
    assert killed_part.name == whole.name  # the identifier
    stored = [protocol.Record.FromString(data) for data in stored_records(whole)]
    (begun,) = [record.run for record in stored if record.HasField("run")][:1]
    assert (begun.project, begun.display_name) == ("lockstep", "run")
    assert [record.exit.exit_code for record in stored if record.HasField("exit")] == [0]
    steps: dict[int, dict[str, float]] = {}
    for record in stored:
        row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        steps.setdefault(row.get("_step", 0), {}).update(row)
    for line in records(run):
        for tag, value in line.items():
            if tag not in ("step", "time") and not tag.startswith("perf/"):
                assert steps[line["step"]][tag] == value


@pytest.mark.filterwarnings("ignore")  # MLflow's, of the libraries that it uses
@pytest.mark.slow
def test_mlflow_has_every_figure_of_a_stopped_run_once(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    run = tmp_path / "out" / "run"
    job = (*SMALL, "logger=[jsonl,mlflow]", f"output_root={tmp_path / 'out'}", "checkpoint.every=4")
    train_here(run, *job, stop_at=7)
    train_here(run, *job)
    database = f"sqlite:///{tmp_path / 'out' / 'mlflow' / 'mlflow.db'}"
    client = mlflow.MlflowClient(tracking_uri=database)
    experiment = client.get_experiment_by_name("lockstep")
    (stored,) = client.search_runs([experiment.experiment_id])
    assert (stored.info.run_name, stored.info.status) == ("run", "FINISHED")
    assert stored.data.tags["lockstep.run"] == Run(run).id
    assert stored.data.params["model"] == "linear"
    for tag in ("loss/train", "acc/val_top1"):
        points = [(point.step, point.value) for point in client.get_metric_history(stored.info.run_id, tag)]
        assert sorted(points) == [(line["step"], line[tag]) for line in records(run) if tag in line]
    # The latest figures are what MLflow's page lists.
    assert stored.data.metrics["acc/val_top1"] == records(run)[-1]["acc/val_top1"]
