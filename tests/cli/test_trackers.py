"""MLflow and W&B with real stores: any name of a class, the identity of a run, changed values, their variables."""

from __future__ import annotations

import json
import string
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from lockstep.core.errors import InputError
from lockstep.core.observer import RunInfo
from lockstep.core.run_dir import RunDir, relative
from lockstep.telemetry.loggers import MLflow, WandB
from processes import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of the libraries that the trackers use
CHARACTERS = [*string.printable.strip(), " ", *"äß漢字🎉é", unicodedata.normalize("NFD", "é"), "\t", "\x7f", "\u202e"]
WORDS = [
    "cat (tabby)",
    "50%",
    "../up",
    "a//b",
    "/root",
    "trailing/",
    ".",
    "..",
    "-",
    "x" * 300,
    "x" * 299 + "y",
]
NAMES = [f"metric/recall/{name}" for name in (*WORDS, *(f"a{character}b" for character in CHARACTERS))]


ANNOTATED = {"tags": ["a", "b"], "run_group": "paper", "notes": "why this run"}


def run_info(folder: Path, *, run: str = "one", step: int = 0, **hyperparameters: str | float) -> RunInfo:
    run_dir = RunDir.at(folder / "run")
    config = {"output_root": str(folder), **ANNOTATED, "tags": ["a", "b"] if step == 0 else ["c"]}
    steps: dict[str, Any] = {"plan": None, "step": step, "after": step}  # they need no plan
    return RunInfo(run_dir=run_dir, config=config, hyperparameters=hyperparameters, id=run, **steps)


def stored(folder: Path) -> list[Any]:
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("lockstep")
    return list(client.search_runs([experiment.experiment_id], order_by=["attributes.start_time"]))


def test_mlflow_takes_every_name_and_keeps_them_apart(tmp_path: Path) -> None:
    run = MLflow().build(run_info(tmp_path, lr=0.1))
    run.write(1, {name: float(number) for number, name in enumerate(NAMES)})
    run.end("completed")
    assert run.commands == [f"mlflow ui --backend-store-uri sqlite:///{tmp_path}/mlflow/mlflow.db"]
    (at_mlflow,) = stored(tmp_path)
    assert sorted(at_mlflow.data.metrics.values()) == [float(number) for number in range(len(NAMES))]
    assert at_mlflow.data.metrics["metric/recall/a-b"] == NAMES.index("metric/recall/a-b"), "a good name is kept"


def test_wandb_takes_every_name_and_keeps_them_apart(tmp_path: Path) -> None:
    protocol = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    from test_loggers import stored_records

    run = WandB().build(run_info(tmp_path))
    run.write(1, {name: float(number) for number, name in enumerate(NAMES)})
    (command,) = run.commands
    run.end("completed")
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert command == f"wandb sync {relative(file.parent)}"

    def figures() -> list[float]:
        messages = [protocol.Record.FromString(data) for data in stored_records(file)]
        items = [item for message in messages for item in message.history.item]
        named = [item for item in items if (item.key or item.nested_key[0]).startswith("metric/")]
        return [json.loads(item.value_json) for item in named]

    wait_for(figures)  # a process of W&B writes them, which lags on a busy machine
    assert sorted(figures()) == [float(number) for number in range(len(NAMES))]


def test_a_run_in_a_folder_that_was_removed_is_a_new_one_and_a_resumed_one_is_not(tmp_path: Path) -> None:
    for run, step in (("one", 0), ("one", 3), ("two", 0)):
        MLflow().build(run_info(tmp_path, run=run, step=step, lr=0.1)).end("completed")
    assert len(stored(tmp_path)) == 2


def test_a_run_keeps_the_values_of_its_first_start(tmp_path: Path) -> None:
    for step, lr in ((0, 0.1), (3, 0.2)):
        MLflow().build(run_info(tmp_path, step=step, lr=lr)).end("completed")
    (at_mlflow,) = stored(tmp_path)
    assert at_mlflow.data.params["lr"] == "0.1"


def test_mlflow_has_the_tags_the_notes_and_the_group_of_the_last_start(tmp_path: Path) -> None:
    for step, tags in ((0, "a, b"), (3, "c")):
        MLflow().build(run_info(tmp_path, step=step)).end("completed")
        (at_mlflow,) = stored(tmp_path)
        expected = {"tags": tags, "run_group": "paper", "mlflow.note.content": "why this run"}
        assert expected.items() <= at_mlflow.data.tags.items()


def test_wandb_has_the_tags_the_notes_and_the_group(tmp_path: Path) -> None:
    run = WandB().build(run_info(tmp_path))
    at_wandb = vars(run)["run"]
    assert ([*at_wandb.tags], at_wandb.notes, at_wandb.group) == (["a", "b"], "why this run", "paper")
    run.end("completed")


def test_the_variables_of_the_trackers_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store := f"sqlite:///{tmp_path}/mine.db")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "photos")
    MLflow().build(run_info(tmp_path)).end("completed")
    client = mlflow.MlflowClient(tracking_uri=store)
    assert len(client.search_runs([client.get_experiment_by_name("photos").experiment_id])) == 1
    assert not (tmp_path / "mlflow").exists()
    monkeypatch.setenv("WANDB_PROJECT", "photos")
    monkeypatch.setenv("WANDB_MODE", "offline")
    WandB().build(run_info(tmp_path)).end("completed")
    assert len([*tmp_path.glob("wandb/offline-run-*")]) == 1


def test_a_mode_that_wandb_does_not_have_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "nowhere")
    with pytest.raises(InputError, match="W&B cannot begin the run"):
        WandB().build(run_info(tmp_path))


def test_a_key_wins_over_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "theirs")
    MLflow(experiment="lockstep").build(run_info(tmp_path)).end("completed")
    assert len(stored(tmp_path)) == 1
