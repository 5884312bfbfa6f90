"""The files of scalars and samples: metrics.jsonl, metrics.csv, TensorBoard's, and the log of samples."""

import base64
import collections
import csv
import dataclasses
import errno
import hashlib
import json
import math
import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins import base_plugin
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import backend_context, plugin_data_pb2
from torch.utils.tensorboard import summary as summaries

from helpers import resolved, train_here
from lockstep.core.errors import InputError, StorageError
from lockstep.core.figures import Predictions, read_figures
from lockstep.core.observer import Outcome, RunInfo
from lockstep.core.plan import Plan
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_read import UnreadableFile
from lockstep.core.tags import VAL_TOP1
from lockstep.core.world import World
from lockstep.tasks import Distill
from lockstep.telemetry import loggers, pictures, trackers
from lockstep.telemetry.sinks import CSV_COLUMNS, CsvTable, JsonLines, Samples, fingerprints
from lockstep.telemetry.tensorboard import EventFile, TensorBoardWriter, chart_layout, curve_of
from lockstep.telemetry.trackers import LONGEST_NAME, MLflowRun, WandBRun, accepted
from lockstep.training.build_observers import hyperparameters
from lockstep.training.objects import ModelObject

PLAN = Plan(examples=95, batch=10, total_steps=40, micro_batches=1, log_every=1, eval_every=1, save_every=1)
FACTS = {"model": "DigitNet()", "lr": 0.1, "batch": 64}


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def table_of(
    path: Path, after: float = 0, latest: dict[str, float] | None = None, tags: Sequence[str] = (VAL_TOP1,)
) -> CsvTable:
    return CsvTable(path, PLAN, after, latest or {}, tags)


def test_a_row_behind_a_resume_has_the_figures_of_training_before_it(tmp_path: Path) -> None:
    lines, path = JsonLines(tmp_path / "metrics.jsonl", 0), tmp_path / "metrics.csv"
    lines.write(5, {"loss/train_epoch": 0.7, "acc/train_epoch_top1": 60.0, "optim/lr": 0.2})
    lines.write(10, {"loss/train_epoch": 0.5, "acc/train_epoch_top1": 75.0, "optim/lr": 0.1})
    lines.end("completed")
    (_, _), (_, latest) = read_figures(tmp_path / "metrics.jsonl", 12)
    assert [step for step, _ in read_figures(tmp_path / "metrics.jsonl", 9)] == [5]
    table = table_of(path, 12, latest)
    table.write(15, {"acc/val_top1": 90.0})
    table.end("completed")
    (row,) = rows(path)
    shown = {key: row[key] for key in ("step", "train_loss", "train_top1", "lr", "val_top1")}
    assert shown == {"step": "15", "train_loss": "0.5", "train_top1": "75", "lr": "0.1", "val_top1": "90"}


def test_a_write_is_a_line_with_its_step_and_time_at_once_and_null_for_what_is_not_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = JsonLines(tmp_path / "metrics.jsonl", 0)
    monkeypatch.setattr(time, "time", lambda: 1234.56789)
    sink.write(3, {"loss/train": 0.5, "a": math.nan, "b": math.inf})
    (line,) = lines(tmp_path / "metrics.jsonl")
    sink.end("completed")
    assert line == {"step": 3, "time": 1234.568, "loss/train": 0.5, "a": None, "b": None}


@pytest.mark.parametrize("tail", ["", '{"step": 4, "loss', "{", "\x00\x00", '{"step": 1e999}\n', '{"step": 1}'])
def test_lines_of_steps_that_are_done_again_go_and_a_half_line_too(tmp_path: Path, tail: str) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path, 0)
    for step in (1, 2, 3, 4, 5):
        sink.write(step, {"loss/train": float(step)})
    sink.end("completed")
    path.write_text(path.read_text() + tail)
    again = JsonLines(path, 3)
    again.write(4, {"loss/train": 40.0})
    again.end("completed")
    assert [(line["step"], line["loss/train"]) for line in lines(path)] == [(1, 1), (2, 2), (3, 3), (4, 40)]


DAMAGED = ["\x00\x00", "[1]", "{}", '{"step": true}', '{"step": 1, "a": "b"}', '{"step": 1, "a": NaN}', "[" * 9999]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_line_is_omitted_and_told(tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{content}\n{{"step": 2}}\n')
    JsonLines(path, 2).end("completed")
    assert [line["step"] for line in lines(path)] == [1, 2]
    assert capsys.readouterr().out == f"warning: {path} is damaged: line 2 cannot be read, and is skipped\n"


def test_a_record_that_was_cut_anywhere_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    first, last = b'{"step": 2}\n', '{"step": 2, "\N{BLACK SQUARE}": 0.5}\n'.encode()
    for cut in range(1, len(last)):
        path.write_bytes(first + last[:cut])
        JsonLines(path, 2).end("completed")
        assert path.read_bytes() == first
        assert "line 2 cannot be read" in capsys.readouterr().out


def test_metrics_that_cannot_be_written_are_a_storage_error(tmp_path: Path, full_disk: Any) -> None:
    sink, table = JsonLines(tmp_path / "metrics.jsonl", 0), table_of(tmp_path / "metrics.csv")
    with full_disk(1):
        for sink_or_table in (sink, table):
            with pytest.raises(StorageError, match=r"metrics\.\w+ cannot be written \(File too large\)"):
                sink_or_table.write(1, {"acc/val_top1": 0.5})
    sink.end("completed")
    table.end("completed")


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_an_evaluation_is_a_row_with_the_last_figures_of_training(tmp_path: Path) -> None:
    table = table_of(tmp_path / "metrics.csv")
    table.write(10, {"loss/train_epoch": 0.123456789, "optim/lr": 0.1, "gpu/util/0": 50.0})
    table.write(15, {"loss/val": 0.5, "acc/val_top1": 90.0, "acc/val_top5": 99.0})
    table.end("completed")
    (row,) = rows(tmp_path / "metrics.csv")
    assert list(row) == ["step", "epoch", *CSV_COLUMNS.values()]
    assert b"\r" not in (tmp_path / "metrics.csv").read_bytes()
    assert (row["step"], row["epoch"], row["train_loss"], row["val_top1"]) == ("15", "1.5", "0.123456789", "90")
    assert row["img_per_s"] == ""
    table = table_of(tmp_path / "own.csv", tags=["loss/val", "metric/map", "distill/kl"])
    table.write(10, {"distill/kl": 0.5})
    table.write(1234, {"loss/val": 0.25, "metric/map": 0.75})
    table.end("completed")
    (row,) = rows(tmp_path / "own.csv")
    assert [row["epoch"], row["val_loss"], row["map"], row["distill/kl"]] == ["123.4", "0.25", "0.75", "0.5"]
    assert not [name for name in row if "top" in name], "the job has no accuracy"


def test_each_class_of_a_metric_has_a_column_also_behind_a_resume(tmp_path: Path) -> None:
    path, tags = tmp_path / "metrics.csv", ["loss/val", "metric/f1", "metric/recall"]
    table = table_of(path, tags=tags)
    table.write(10, {"loss/val": 0.5, "metric/f1": 0.25, "metric/recall/a": 0.5, "metric/recall/b/c": math.nan})
    table.write(20, {"loss/val": 0.5, "metric/f1": 0.5, "metric/recall/a": 0.75, "metric/recall/b/c": 1.0})
    table.end("completed")
    again = table_of(path, 10.5, {"metric/f1": 0.25, "metric/recall/a": 0.5}, tags)
    again.write(20, {"loss/val": 0.5, "metric/f1": 0.125, "metric/recall/a": 1.0, "metric/recall/b/c": 0.0})
    again.end("completed")
    names = ("step", "f1", "recall/a", "recall/b/c", "recall")
    assert [[row.get(name) for name in names] for row in rows(path)] == [
        ["10", "0.25", "0.5", "", None],
        ["20", "0.125", "1", "0", None],
    ]


def test_a_metric_has_its_column_beside_another_whose_name_begins_like_it(tmp_path: Path) -> None:
    path, tags = tmp_path / "metrics.csv", ["metric/recall", "metric/recall_5"]
    table = table_of(path, 10, {"metric/recall_5": 0.75}, tags)
    table.write(20, {"loss/val": 0.5, "metric/recall_5": 0.5, "metric/recall": 0.25})
    table.end("completed")
    header, _, _ = path.read_text().partition("\n")
    assert header.endswith(",recall,recall_5")
    (row,) = rows(path)
    assert (row["recall"], row["recall_5"]) == ("0.25", "0.5")


@pytest.mark.parametrize("tail", ["", "1", "30,3,0.5", "\n", "x,y\n", "15,1.5\r0.5,1\n"])
def test_rows_of_steps_that_are_done_again_go_and_a_half_row_too(tmp_path: Path, tail: str) -> None:
    path = tmp_path / "metrics.csv"
    table = table_of(path)
    for step in (10, 20, 30):
        table.write(step, {"acc/val_top1": float(step)})
    table.end("completed")
    path.write_text(path.read_text() + tail)
    again = table_of(path, 20.5)
    again.write(30, {"acc/val_top1": 99.0})
    again.end("completed")
    assert [(row["step"], row["val_top1"]) for row in rows(path)] == [("10", "10"), ("20", "20"), ("30", "99")]


def test_rows_below_a_header_that_no_table_has_are_kept(tmp_path: Path) -> None:
    (path := tmp_path / "metrics.csv").write_bytes(b"step,epoch,\rval_top1\n10,1,50\n")
    table = table_of(path, 10.5)
    table.write(20, {"acc/val_top1": 99.0})
    table.end("completed")
    assert [row["step"] for row in rows(path)] == ["10", "20"]


def events(folder: Path) -> EventAccumulator:
    """The events that TensorBoard reads from a folder."""
    return EventAccumulator(str(folder)).Reload()


def hparams_page(folder: Path) -> Any:
    """The columns of TensorBoard's HParams page over a folder of runs."""
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(folder)).Reload()
    provider = MultiplexerDataProvider(multiplexer, str(folder))
    context = backend_context.Context(base_plugin.TBContext(data_provider=provider))
    request = RequestContext()
    return context.experiment_from_metadata(request, "", True, context.hparams_metadata(request, ""), [])


def tensorboard(
    folder: Path, after: float = 0, facts: Any = FACTS, *, monitor: str = "top1", text: str = "", model: Any = None
) -> TensorBoardWriter:
    """TensorBoard's files of a run in a folder, which resumes after a step, with the `text` as its config."""
    run_dir = RunDir(folder)
    if text:
        run_dir.config.write_text(text)
    config = {"monitor": monitor, "input": {"mean": [0.5], "std": [0.5]}}
    place: dict[str, Any] = {"run_dir": run_dir, "plan": PLAN, "step": int(after), "after": after}
    info = RunInfo(**place, config=config, hyperparameters=facts, model=model or torch.nn.Linear(1, 1))
    options = {} if model is None else {"histograms": True}
    writer = loggers.TensorBoard(**options).build(info)
    assert isinstance(writer, TensorBoardWriter)
    return writer


def files_of(folder: Path) -> set[Path]:
    """The event files of a folder, without those of evaluations."""
    return {path for path in folder.iterdir() if path.name != "val"}


def test_a_run_is_an_event_file_with_scalars_and_hyperparameters_and_one_of_evaluations(tmp_path: Path) -> None:
    sink = tensorboard(tmp_path)
    for step in (1, 2):
        sink.write(step, {"loss/train": 1 / step})
        sink.write(step, {"loss/val": 0.5, "acc/val_top1": 10.0 * step})
    sink.end("completed")
    (file,), (val,) = files_of(tmp_path), (tmp_path / "val").iterdir()
    assert all(path.name.startswith("events.out.tfevents") for path in (file, val))
    read = events(tmp_path)
    assert [(scalar.step, scalar.value) for scalar in read.Scalars("loss")] == [(1, 1.0), (2, 0.5)]
    assert read.Tags()["scalars"] == ["loss"]
    content = read.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    assert hparams.keys() == FACTS.keys()
    assert (hparams["model"].string_value, hparams["lr"].number_value) == ("DigitNet()", 0.1)
    assert events(tmp_path / "val").Tags()["scalars"] == ["loss", "acc/top1"]


def test_the_curves_of_training_and_of_evaluations_share_a_chart() -> None:
    curves = {"loss/train": ("", "loss"), "loss/val": ("val", "loss"), "loss/val_ema": ("val_ema", "loss")}
    curves |= {"acc/train_top1": ("", "acc/top1"), "acc/val_top5": ("val", "acc/top5")}
    curves |= {"acc/val_ema_top1": ("val_ema", "acc/top1"), "loss/train_epoch": ("val", "loss/epoch")}
    curves |= {"acc/train_epoch_top1": ("val", "acc/epoch/top1"), "gpu/util/0": ("", "system/gpu/util/0")}
    curves |= {"metric/f1": ("val", "metric/f1"), "optim/lr": ("", "optim/lr"), "test/loss": ("val", "test/loss")}
    assert {tag: curve_of(tag, "val" if folder else "") for tag, (folder, _) in curves.items()} == curves


def test_the_first_metric_of_hparams_is_the_best_value_of_the_monitor(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    sink = tensorboard(tmp_path / "run", monitor="-loss")
    for step, (loss, best) in enumerate([(0.5, True), (0.25, True), (0.75, False)], start=1):
        sink.evaluated(step, {"loss/val": loss}, best)
        sink.write(step, {"loss/train": loss, "loss/val": loss, "cpu/cores": 2.0, "perf/img_per_s": 9.0})
    sink.end("completed")
    assert [scalar.value for scalar in events(tmp_path / "run" / "val").Scalars("Best/loss")] == [0.5, 0.25]
    shown = [metric.name.tag for metric in hparams_page(tmp_path).metric_infos]
    assert shown[0] == "Best/loss"
    assert shown.index("system/cpu/cores") > shown.index("loss"), "the page ticks the first five"


def test_captions_are_cut_where_they_would_overlap() -> None:
    wide = "W" * 40
    one, two = (pictures.sheet(np.full((2, 1, 8, 8), 255, np.uint8), texts) for texts in ([wide, ""], [wide, wide]))
    tiles = [np.asarray(Image.open(BytesIO(png)).convert("L")) for png in (one, two)]
    middle = tiles[0].shape[1] // 2
    assert (tiles[0][:, middle:] == 255).all(), "the first caption ends before the second image"
    assert (tiles[1][:, middle:] < 255).any()


@pytest.mark.parametrize("gap", ["\t", "\r", "\x0b", "\x85", "  ", "\n"])
def test_every_gap_in_a_name_or_caption_of_a_picture_is_one_space(gap: str) -> None:
    counts: dict[str, Any] = {"examples": [1, 1], "predicted": [1, 1], "hits": [1, 1], "confusion": [[1, 0], [0, 1]]}
    drawn = []
    for name in (f"cat{gap}dog", "cat dog"):
        matrix = Predictions(step=1, names=[name, "ant"], **counts, curves=[], worst=[])
        line = name.replace("\n", " ")  # the lines of a caption stay lines
        drawn.append((pictures.heat(matrix), pictures.sheet(np.zeros((1, 1, 8, 8), np.uint8), [line])))
    assert drawn[0] == drawn[1]


def test_the_layout_shows_every_category(tmp_path: Path) -> None:
    tensorboard(tmp_path).end("completed")
    stored = events(tmp_path).Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    shown = layout_pb2.Layout.FromString(stored)
    assert [category.title for category in shown.category] == [*chart_layout([])]
    assert [chart.title for chart in shown.category[0].chart] == ["Loss", "Accuracy, %", "Metrics"]
    curves = {chart.title: [*chart.multiline.tag] for category in shown.category for chart in category.chart}
    some = {"Loss": ["loss", "loss/epoch"], "Accuracy, %": ["acc/top1", "acc/epoch/top1", "acc/top5"]}
    some |= {
        "Metrics": ["metric/.*"],
        "CPU power, W": ["system/cpu/power_w"],
        "GPU power, W": ["system/gpu/power_w/.*"],
    }
    assert {title: curves[title] for title in some} == some
    assert {"", "Options"}.isdisjoint(chart_layout(["loss/val"]))
    assert chart_layout(["loss/val", "metric/f1", "my/a.b"])["Options"] == {"my/a.b": [r"my/a\.b"]}


def written(folder: Path) -> dict[tuple[str, int], int]:
    """How often TensorBoard shows each (tag, step) of a folder."""
    read = plugin_event_accumulator.EventAccumulator(str(folder), {"tensors": 0}).Reload()
    return collections.Counter((tag, event.step) for tag in read.Tags()["tensors"] for event in read.Tensors(tag))


def part(folder: Path, after: int, steps: range, value: float = 1.0) -> None:
    """Write the events of one part of a run, which resumes after step `after` and logs `steps`."""
    sink = tensorboard(folder, after)
    for step in steps:
        sink.write(step, {"loss/train": value, "optim/lr": 0.1})
    sink.end("completed")


def test_tensorboard_shows_every_step_of_a_resumed_run_once(tmp_path: Path) -> None:
    part(tmp_path, 0, range(1, 6))
    part(tmp_path, 3, range(4, 9))
    part(tmp_path, 2, range(3, 6), 2.0)
    scalars = events(tmp_path).Scalars("loss")
    assert [(scalar.step, scalar.value) for scalar in scalars] == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2)]
    part(tmp_path, 0, range(1, 3), 3.0)
    assert [(scalar.step, scalar.value) for scalar in events(tmp_path).Scalars("loss")] == [(1, 3), (2, 3)]


def test_a_figure_is_in_tensorboards_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    threads = threading.active_count()
    sink = tensorboard(tmp_path)
    for step in (1, 2):
        sink.write(step, {"loss/train": 0.5})
        assert [scalar.step for scalar in events(tmp_path).Scalars("loss")] == [*range(1, step + 1)]
    assert threading.active_count() == threads
    sink.end("completed")


def test_the_hyperparameters_have_the_task_and_the_monitor() -> None:
    for task, shown in (("multiclass", ("multiclass", "top1")), ("regression", ("regression", "-mae"))):
        values = hyperparameters(resolved("dataset=fake", "device=cpu", f"task={task}"), World.solo())
        assert (values["task"], values["monitor"]) == shown


def test_each_key_of_a_users_option_and_each_swept_key_is_a_hyperparameter() -> None:
    job = resolved("dataset=fake", "device=cpu", "train.min_delta=0.5")
    values = hyperparameters(job, World.solo(), ["train.min_delta", "batch"])
    assert (values["train.min_delta"], values["batch"]) == (0.5, job.batch)
    own = dataclasses.make_dataclass("Senet", [("drop", float, 0.3)], bases=(type(job.model),), frozen=True)
    values = hyperparameters(dataclasses.replace(job, model=own()), World.solo())
    assert (values["model"], values["model.drop"]) == ("Senet", 0.3)


def test_the_hyperparameters_of_a_job_are_its_options_and_numbers_as_they_are_typed(tmp_path: Path) -> None:
    words = (
        "dataset=folder",
        f"dataset.path={tmp_path / 'photos'}",
        "dataset.decode_size=8",
        "dataset.val_share=0.5",
    )
    words += (
        "model=digitnet",
        "model.width=8",
        "device=cpu",
        "optimizer=sgd",
        "optimizer.lr=0.5",
        "batch=2",
        "seed=4",
    )
    words += ("optimizer.nesterov=true", "optimizer.weight_decay=0.25", "train.swa_from=2", "train.clip_norm=1.5")
    values = hyperparameters(resolved(*words, "epochs=3"), World.solo())
    expected = {"model": "digitnet(width=8)", "augment": values["augment"], "monitor": "top1"}
    expected |= {"strategy": "single", "precision": "fp32", "schedule": values["schedule"], "loss": "cross_entropy"}
    expected |= {"input": "3x8x8", "optimizer": "sgd(nesterov=True)", "task": "multiclass"}
    numbers = {"optimizer.lr": 0.5, "optimizer.weight_decay": 0.25, "batch": 2, "epochs": 3, "seed": 4, "ranks": 1}
    numbers |= {"train.micro_batches": 1, "train.mixup": 0.0, "train.cutmix": 0.0, "train.erase": 0.0}
    numbers |= {"train.repeats": 1, "train.clip_norm": 1.5, "train.ema": 0.0}
    expected["dataset"] = "folder(val_share=0.5, train_folder=., val_folder=val) photos"
    assert values == {**expected, **numbers, "train.swa_from": "2"}
    named = hyperparameters(resolved(*words, "dataset.train_folder=Folder"), World.solo())
    assert named["dataset"] == "folder(val_share=0.5, train_folder=Folder, val_folder=val) photos"
    ranks = dataclasses.replace(World.solo(), size=4)
    swept = hyperparameters(resolved(*words), ranks, ["loss.class_weights", "train.sizes", "logger"])
    assert (swept["ranks"], swept["loss.class_weights"], swept["train.sizes"]) == (4, "null", "null")
    assert not [name for name in swept if name.startswith("logger")]


def test_the_hyperparameters_of_objects_are_their_types_and_lists_are_json() -> None:
    job = resolved("dataset=fake", "dataset.classes=2", "device=cpu", "loss.class_weights=[1,2.5]")
    own = ModelObject(type="Net", module="own", weights="abc")
    values = hyperparameters(dataclasses.replace(job, model=own), World.solo(), ["loss.class_weights"])
    assert (values["model"], values["loss.class_weights"]) == ("Net", "[1.0, 2.5]")
    assert values["loss"] == "cross_entropy(class_weights=[1.0, 2.5])"
    taught = hyperparameters(dataclasses.replace(job, task=Distill(teacher="/home/me/run", share=0.75)), World.solo())
    assert taught["task"] == "distill(share=0.75)", "without the path"
    assert (values["model.type"], values["model.weights"]) == ("Net", "abc")
    assert not [name for name in values if name.endswith("_target_")]


def test_tensorboard_puts_the_hyperparameters_that_differ_first(tmp_path: Path) -> None:
    for name, batch in (("a", 64), ("b", 32)):
        (tmp_path / name).mkdir()
        sink = tensorboard(tmp_path / name, facts={**FACTS, "batch": batch, "zoom": batch})
        sink.write(1, {"acc/val_top1": 50.0})
        sink.end("completed")
    experiment = hparams_page(tmp_path)
    assert [column.name for column in experiment.hparam_infos] == ["batch", "zoom", "lr", "model"]
    assert [metric.name.tag for metric in experiment.metric_infos] == ["acc/top1"]


def test_a_record_that_a_kill_cut_short_hides_nothing_else(tmp_path: Path) -> None:
    part(tmp_path, 0, range(1, 4))
    (path,) = files_of(tmp_path)
    path.write_bytes(path.read_bytes()[:-5])
    part(tmp_path, 3, range(4, 5))
    assert [scalar.step for scalar in events(tmp_path).Scalars("loss")] == [1, 2, 4]


@pytest.mark.parametrize("content", [b"", b"not ours", b"\xff" * 100, bytes(100)])
def test_a_file_of_something_else_does_not_end_tensorboard(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "events.out.tfevents.1.host.1").write_bytes(content)
    part(tmp_path, 3, range(4, 6))
    assert [scalar.step for scalar in events(tmp_path).Scalars("loss")] == [4, 5]
    assert ("custom_scalars__config__", 0) in written(tmp_path), "also of a run that had no TensorBoard before"


def test_flushed_figures_survive_a_kill(tmp_path: Path) -> None:
    table = table_of(tmp_path / "metrics.csv")
    sinks = [JsonLines(tmp_path / "metrics.jsonl", 0), table, tensorboard(tmp_path)]
    for sink in sinks:
        sink.write(1, {"loss/val": 0.5, "acc/val_top1": 50.0})
        sink.flush()
    assert ("acc/top1", 1) in written(tmp_path / "val")
    assert len(lines(tmp_path / "metrics.jsonl")) == len(rows(tmp_path / "metrics.csv")) == 1
    for sink in sinks:
        sink.end("completed")


@pytest.mark.parametrize("writes", [0, 1, 2000])
def test_a_full_disk_is_reported_once_and_ends_nothing(
    tmp_path: Path, full_disk: Any, capsys: pytest.CaptureFixture[str], writes: int
) -> None:
    with full_disk(300):
        sink = tensorboard(tmp_path)
        for step in range(1, writes):
            sink.write(step, {"loss/train": 1.0})
        sink.end("completed")
    out = capsys.readouterr().out
    assert out.count("TensorBoard's file cannot be written") == 1
    assert "the run continues without it" in out


def test_an_event_file_that_cannot_be_closed_leaves_no_other_one_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = tensorboard(tmp_path)
    training, evaluations = sink.files.values()

    def fails() -> None:
        training.file.close()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    training.close = fails  # type: ignore[method-assign]
    sink.end("completed")
    assert evaluations.file.closed
    assert capsys.readouterr().out.count("TensorBoard's file cannot be written") == 1


PNG = pictures.in_base64(np.zeros((1, 4, 4), np.uint8))
COUNTS: dict[str, Any] = {"examples": [2, 1], "predicted": [1, 2], "hits": [1, 1], "confusion": [[1, 1], [0, 1]]}
CURVES = [[[0] * 126 + [2], [1] + [0] * 126], [[0] * 126 + [1], [2] + [0] * 126]]
WORST = [{"sample": "7", "label": 0, "predicted": 1, "probability": None, "loss": None, "png": PNG}]
PREDICTIONS = Predictions(step=2, names=["a/b <c>", "d"], **COUNTS, curves=CURVES, worst=WORST)
PICTURES = {("images/worst", 2), ("images/confusion", 2), ("precision_recall/a/b <c>", 2), ("precision_recall/d", 2)}


def session(folder: Path, after: float = 0, *, texts: str = "batch: 1", **options: Any) -> TensorBoardWriter:
    """One part of a run of two steps, whose evaluation is the best."""
    folder.mkdir(exist_ok=True)
    sink = tensorboard(folder, after, text=texts, **options)
    images = torch.tensor([-1.0, 1.0]).view(2, 1, 1, 1).expand(2, 3, 8, 8)
    for step in range(int(after) + 1, 3):
        if step == 1:
            sink.first_batch(SimpleNamespace(step=1), images)
            sink.first_batch(SimpleNamespace(step=1), -images)
        sink.write(step, {"loss/train": 1.0})
    sink.write(2, {"loss/train_epoch": 1.0, "acc/train_epoch_top1": 50.0, "loss/val": 1.0, "metric/f1": 0.5})
    sink.predicted(PREDICTIONS)
    sink.end("completed")
    return sink


def test_tensorboard_shows_the_images_the_predictions_and_the_texts_of_a_run(tmp_path: Path) -> None:
    session(tmp_path)
    scalars = {(tag, 2) for tag in ("loss/epoch", "acc/epoch/top1", "loss", "metric/f1")}
    assert set(written(tmp_path / "val")) == scalars | PICTURES, "curves of evaluations have a colour of their own"
    read = events(tmp_path)
    (augmented,) = read.Images("input/augmented")
    pixels = np.asarray(Image.open(BytesIO(augmented.encoded_image_string)).convert("L"))
    assert augmented.step == 1
    shown = {tag: events(tmp_path / "val").Images(tag)[0] for tag in ("images/worst", "images/confusion")}
    assert shown["images/worst"].encoded_image_string == pictures.worst(PREDICTIONS)
    assert shown["images/confusion"].encoded_image_string == pictures.heat(PREDICTIONS)
    assert (pixels[10, 10], pixels[10, 130]) == (0, 255), "the images of the first micro-batch, as they were before"
    (text,) = read.Tensors("run/config/text_summary")
    assert text.tensor_proto.string_val == [b"    batch: 1"]
    curve = events(tmp_path / "val").Tensors("precision_recall/d")[0].tensor_proto
    hits, wrong, right, missed, precision, recall = np.array(curve.float_val).reshape(6, -1)
    assert (hits[0], wrong[0], missed[0], wrong[1]) == (1, 2, 0, 0)
    assert (right[:2].tolist(), missed.any()) == ([0, 2], False), (
        "above the first threshold, both others are left out"
    )
    assert (precision[0], recall[0], precision[-1]) == (pytest.approx(1 / 3), 1, 1)


@pytest.mark.parametrize("after", [0, 1, 1.5, 2, 2.5])
def test_a_resume_has_figures_and_pictures_once(tmp_path: Path, after: float) -> None:
    verdict = {"sentence": "it waits", "evidence": "43 %", "override": None}
    session(tmp_path).completed({"verdict": verdict, "step": 2})
    before = written(tmp_path)
    assert ("loss", 2) in before, "the verdict hides nothing"
    assert b"it waits" in events(tmp_path).Tensors("run/verdict/text_summary")[0].tensor_proto.string_val[0]
    for texts in ("batch: 2", "batch: 3"):  # twice from the same step
        if after <= 2:
            session(tmp_path, after, texts=texts)
        else:
            tensorboard(tmp_path, after, text=texts).end("completed")
    shown = written(tmp_path), written(tmp_path / "val")
    assert {times for counts in shown for (_, step), times in counts.items() if step} == {1}
    assert shown[1].keys() >= PICTURES
    assert shown[0].keys() >= {key for key in before if key[0] in ("loss", "input/augmented")}
    last = events(tmp_path).Tensors("run/config/text_summary")[-1]
    assert (last.step, last.tensor_proto.string_val) == (int(after) + 1, [b"    batch: 3"])


def test_histograms_are_there_on_request(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3)
    model.register_parameter("none", torch.nn.Parameter(torch.empty(0)))
    session(tmp_path / "without").end("completed")
    session(tmp_path / "run", model=model)
    tags = {name: {tag for tag, _ in written(tmp_path / name / "val")} for name in ("without", "run")}
    assert not [tag for tag in tags["without"] if tag.startswith("weights/")]
    assert {tag for tag in tags["run"] if tag.startswith("weights/")} == {"weights/weight", "weights/bias"}
    for value in (math.nan, math.inf):
        with torch.no_grad():
            model.bias[0] = value
        session(tmp_path / f"{value}", model=model)
        assert "weights/bias" not in {tag for tag, _ in written(tmp_path / f"{value}" / "val")}


def test_a_histogram_has_64_buckets_also_of_short_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any, int]] = []
    histogram = summaries.histogram

    def recorded(name: str, values: Any, bins: int) -> Any:
        calls.append((name, values.dtype, bins))
        return histogram(name, values, bins)

    monkeypatch.setattr(summaries, "histogram", recorded)
    session(tmp_path / "run", model=torch.nn.Linear(2, 3).bfloat16())
    assert calls == [("weights/weight", np.float32, 64), ("weights/bias", np.float32, 64)]


def board(folder: Path, after: float = 0, **config: Any) -> TensorBoardWriter:
    """TensorBoard's files of a run with this config in a folder of its own."""
    place: dict[str, Any] = {"run_dir": RunDir.at(folder), "plan": PLAN, "step": int(after), "after": after}
    return TensorBoardWriter(RunInfo(**place, config=config, hyperparameters=FACTS))


def text_of(folder: Path, name: str) -> tuple[int, bytes]:
    """The step and the text of the one text of a name."""
    (event,) = events(folder).Tensors(f"run/{name}/text_summary")
    (text,) = event.tensor_proto.string_val
    return event.step, text


def test_each_channel_of_a_picture_has_its_own_mean_and_spread(tmp_path: Path) -> None:
    sink = board(tmp_path / "run", input={"mean": [0.0, 0.5, 1.0], "std": [1.0, 0.5, 0.2]})
    image = torch.tensor([0.2, 0.6, -3.0]).view(1, 3, 1, 1).expand(1, 3, 8, 8)
    sink.first_batch(SimpleNamespace(step=1), image)  # type: ignore[arg-type]
    sink.write_gpu(3, {"gpu/util/0": 50.0})
    sink.end("completed")
    (augmented,) = events(tmp_path / "run").Images("input/augmented")
    picture = np.asarray(Image.open(BytesIO(augmented.encoded_image_string)))
    assert picture[10, 10].tolist() == [51, 204, 102], "0.2, 0.8 and 0.4 of 255"
    assert [(of.step, of.value) for of in events(tmp_path / "run").Scalars("system/gpu/util/0")] == [(3, 50.0)]


@pytest.mark.parametrize("device", ["cpu", "cuda", None])
def test_a_run_on_the_cpu_has_no_page_of_gpus(device: str | None, tmp_path: Path) -> None:
    board(tmp_path / "run", device=device).end("completed")
    stored = events(tmp_path / "run").Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    shown = {category.title for category in layout_pb2.Layout.FromString(stored).category}
    assert {"CPU", "GPU"} - shown == ({"GPU"} if device == "cpu" else set())


def test_a_config_without_a_monitor_and_without_pixels_has_the_usual_ones(tmp_path: Path) -> None:
    sink = board(tmp_path / "run")
    sink.first_batch(SimpleNamespace(step=1), torch.empty(0, 3, 8, 8))  # type: ignore[arg-type]
    values = torch.tensor([-0.5, 127.6 / 255, 1.5]).view(3, 1, 1, 1).expand(3, 1, 8, 8)
    sink.first_batch(SimpleNamespace(step=1), torch.cat([values] * 6))  # type: ignore[arg-type]
    for step, (score, best) in enumerate([(0.0, True), (1.0, False), (math.nan, True), (2.0, True)]):
        sink.evaluated(step, {"acc/val_top1": score}, best)
    sink.evaluated(9, {"loss/val": 0.5}, True)
    sink.write(9, {"loss/train": math.nan, "optim/lr": 0.5})
    sink.end("completed")
    best_ones = events(tmp_path / "run" / "val").Scalars("Best/top1")
    assert [(scalar.step, scalar.value) for scalar in best_ones] == [(0, 0.0), (3, 2.0)]
    assert events(tmp_path / "run").Tags()["scalars"] == ["optim/lr"]
    (augmented,) = events(tmp_path / "run").Images("input/augmented")
    picture = np.asarray(Image.open(BytesIO(augmented.encoded_image_string)).convert("L"))
    assert picture.shape == (4 * 124, 4 * 124), "sixteen images"
    assert [int(picture[10, 10 + 124 * place]) for place in range(3)] == [0, 128, 255]


def test_what_people_wrote_about_a_run_is_said_at_each_start_and_without_control_characters(tmp_path: Path) -> None:
    board(tmp_path / "run", 4, tags=["a", "b"], notes="a\x1b[2J\n\nb").end("completed")
    assert text_of(tmp_path / "run", "tags") == (5, b"    a, b")
    assert text_of(tmp_path / "run", "notes") == (5, b"    a\\x1b[2J\n    \n    b")


def test_the_verdict_has_its_evidence_and_its_override_and_the_last_step(tmp_path: Path) -> None:
    for number, override in enumerate((None, "loader.workers=8")):
        sink = board(tmp_path / str(number))
        sink.end("completed")
        sink.completed({"verdict": {"sentence": "it waits", "evidence": "43 %", "override": override}, "step": 7})
        lines = [b"    it waits", b"    43 %", *([override.encode().rjust(20)] if override else [])]
        assert text_of(tmp_path / str(number), "verdict") == (7, b"\n".join(lines))


def test_an_event_file_is_named_after_its_time_machine_and_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.5)
    sink = tensorboard(tmp_path)
    sink.write(1, {"loss/train": 0.5})
    sink.end("completed")
    (file,) = files_of(tmp_path)
    assert file.name == f"events.out.tfevents.1000.500000.{socket.gethostname()}.{os.getpid()}"
    assert [scalar.wall_time for scalar in events(tmp_path).Scalars("loss")] == [1000.5]


def test_pictures_come_ten_seconds_after_the_last_ones_or_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("lockstep.telemetry.tensorboard.time.monotonic", lambda: now)
    sink = tensorboard(tmp_path)
    seen = []
    for number, passed in enumerate((4.0, 6.0, 1.0, 10.0, 10.5, 1.0), start=1):
        now += passed
        sink.predicted(dataclasses.replace(PREDICTIONS, step=number, worst=[] if number < 6 else WORST, confusion=[]))
        seen.append(sorted(step for tag, step in written(tmp_path / "val") if tag == "precision_recall/d"))
    assert seen == [[], [], [3], [3], [3, 5], [3, 5]]
    sink.end("completed")
    of_end = {(tag, step) for tag, step in written(tmp_path / "val") if step == 6}
    assert of_end == {("precision_recall/a/b <c>", 6), ("precision_recall/d", 6), ("images/worst", 6)}
    assert {tag for tag, step in written(tmp_path / "val") if step < 6} == {
        name for name, _ in PICTURES if "prec" in name
    }


@pytest.mark.parametrize(
    "error", [OSError("no"), StorageError("no"), UnreadableFile(Path("a"), "is a pipe")], ids=repr
)
def test_after_a_file_that_cannot_be_written_no_other_one_is_tried(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = tensorboard(tmp_path)
    tries: list[int] = []

    def refuse(self: EventFile, summary: Any, step: int) -> None:
        tries.append(step)
        raise error

    monkeypatch.setattr(EventFile, "add", refuse)
    for step in (1, 2):
        sink.write(step, {"loss/train": 1.0})
        sink.evaluated(step, {"acc/val_top1": 1.0}, True)
        sink.first_batch(SimpleNamespace(step=1), torch.ones(1, 1, 8, 8))  # type: ignore[arg-type]
        sink.predicted(PREDICTIONS)
    sink.end("completed")
    sink.completed({"verdict": {"sentence": "it waits"}, "step": 2})
    assert tries == [1]
    assert capsys.readouterr().out.count("TensorBoard's file cannot be written") == 1


def test_the_command_of_tensorboard_shows_the_folder_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sink = board(tmp_path / "a run")
    sink.end("completed")
    assert sink.commands == ["tensorboard --logdir 'a run'"]


@pytest.mark.parametrize("logger", [loggers.JSONL(), loggers.TensorBoard()], ids=repr)
def test_a_logger_keeps_the_evaluation_that_a_resume_has_behind_it(logger: Any, tmp_path: Path) -> None:
    for step, after in ((0, 0.0), (2, 2.5), (2, 2.0)):
        place: dict[str, Any] = {"run_dir": RunDir.at(tmp_path / "run"), "plan": PLAN, "step": step, "after": after}
        sink = logger.build(RunInfo(**place, config={}, hyperparameters={}))
        if step == 0:
            sink.write(2, {"loss/val": 0.5})
        sink.end("completed")
        if isinstance(logger, loggers.JSONL):
            left = len(lines(tmp_path / "run" / "metrics.jsonl"))
        else:
            left = len([key for key in written(tmp_path / "run" / "val") if key == ("loss", 2)])
        assert left == (after != 2.0 or step == 0), after


def test_a_run_without_a_verdict_gets_no_text_about_it(tmp_path: Path) -> None:
    session(tmp_path).completed({"step": 2})
    assert "run/verdict/text_summary" not in events(tmp_path).Tags()["tensors"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_hash_is_of_the_pixels_and_their_places_and_not_of_batch_or_memory_order(dtype: torch.dtype) -> None:
    images = torch.rand(6, 3, 5, 4, dtype=dtype, generator=torch.Generator().manual_seed(0))
    whole = fingerprints(images)
    assert whole.dtype == torch.int64
    words = images.flatten(1).numpy().view(np.int32 if dtype == torch.float32 else np.int64).astype(np.int64)
    assert whole.tolist() == (words * np.arange(1, 2 * words.shape[1], 2)).sum(1).tolist()
    assert torch.equal(torch.cat([fingerprints(images[at : at + 1]) for at in range(6)]), whole)
    assert torch.equal(fingerprints(images.contiguous(memory_format=torch.channels_last)), whole)
    changed = images.clone()
    changed[:, 2, 4, 3] = torch.nextafter(changed[:, 2, 4, 3], torch.tensor(2.0, dtype=dtype))
    signs = [images.clone() for _ in range(60)]
    for place, altered in enumerate(signs):  # the highest bit of each pixel
        altered.view(6, -1)[:, place] *= -1
    for altered in (images.flip(-1), images.roll(1, 2), changed, *signs):
        assert not (fingerprints(altered) == whole).any()


def test_a_run_leaves_broken_images_out_and_says_how_many(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos = tmp_path / "photos"
    for number in range(24):
        path = photos / ("train", "val")[number % 2] / ("a", "b")[number // 2 % 2] / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), 10 * number, dtype=np.uint8)).save(path)
    (photos / "train" / "a" / "04.png").write_bytes(b"")
    (photos / "val" / "b" / "07.png").write_bytes(b"")
    data = ("dataset=folder", f"dataset.path={photos}", "dataset.decode_size=8", "dataset.skip=5")
    run = train_here(tmp_path / "run", *data, "train.mixup=0.2", "loss.label_smoothing=0.1", "batch=5", "epochs=2")
    assert run.read_summary()["skipped"] == 2
    assert capsys.readouterr().out.count("of at most 5") == 2


def test_a_metric_that_a_resume_adds_or_removes_has_a_column_and_loses_no_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, rows = tmp_path / "metrics.csv", list[dict[str, str]]()
    for step, tags in enumerate(([], ["metric/f1"], ["metric/auroc", "metric/f1"], ["metric/auroc"]), start=1):
        table = table_of(path, step - 0.5, tags=["acc/val_top1", *tags])
        table.write(step, {"loss/val": step + 0.5, **dict.fromkeys(tags, step + 0.25)})
        table.end("completed")
        rows.append({"step": str(step), "val_loss": f"{step}.5", **{tag[7:]: f"{step}.25" for tag in tags}})
    with path.open() as file:
        read = [{key: value for key, value in row.items() if value} for row in csv.DictReader(file)]
    assert [{key: value for key, value in row.items() if key not in ("epoch",)} for row in read] == rows
    assert capsys.readouterr().out == ""


def test_each_repetition_of_an_example_is_a_sample_of_the_example(tmp_path: Path) -> None:
    micro: Any = SimpleNamespace(step=4, epoch=1, indices=torch.tensor([3, 13, 29]))
    samples, images = Samples(tmp_path / "samples.jsonl", 0), torch.arange(12.0).view(3, 1, 2, 2)
    samples.record(micro, images, examples=10)
    samples.close()
    read = [(line["step"], line["epoch"], line["index"], line["hash"]) for line in lines(tmp_path / "samples.jsonl")]
    assert read == [(4, 1, index, int(own)) for index, own in zip((3, 3, 9), fingerprints(images), strict=True)]


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (2, "L"), (3, "RGB"), (5, "RGB")])
def test_three_channels_are_colours_and_fewer_are_grey(channels: int, mode: str) -> None:
    image = np.arange(channels * 6, dtype=np.uint8).reshape(channels, 2, 3)
    picture = pictures.as_image(image)
    assert (picture.mode, picture.size) == (mode, (3, 2))
    shown = image[:3].transpose(1, 2, 0) if mode == "RGB" else image[0]
    assert np.array_equal(np.asarray(picture), shown)


def test_a_cell_of_the_confusion_matrix_is_as_dark_as_its_share_of_the_true_class() -> None:
    """The first class has two images, one of which is taken for the second; all of the second are right."""
    counts: dict[str, Any] = {"examples": [2, 8], "predicted": [1, 9], "hits": [1, 8], "confusion": [[1, 1], [0, 8]]}
    large = Predictions(step=1, names=["1", "2"], **counts, curves=[], worst=[])
    page = np.asarray(Image.open(BytesIO(pictures.heat(large))).convert("L")).astype(int)
    margin, cell = page.shape[0] - 2 * pictures.CELL, pictures.CELL
    corner = [[page[margin + cell * row + 1, margin + cell * column + 1] for column in (0, 1)] for row in (0, 1)]
    assert corner[0][0] == corner[0][1], "a half each"
    assert corner[1][0] == 255 > corner[0][0] > corner[1][1]
    colours = np.asarray(Image.open(BytesIO(pictures.heat(large))).convert("RGB"))
    assert colours[margin + 1, margin + 1].tolist() == [80, 108, 150], "the root of a half of the way to blue"
    assert colours[margin + cell + 1, margin + cell + 1].tolist() == [8, 48, 107]


def test_the_count_of_a_cell_is_in_the_row_of_its_true_class(monkeypatch: pytest.MonkeyPatch) -> None:
    places: dict[str, tuple[float, float]] = {}

    def drawn(self: Any, place: tuple[float, float], text: str, **options: Any) -> None:
        if "anchor" in options:
            places[text] = place

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", drawn)
    confusion = [[11, 12, 13], [21, 22, 23], [31, 32, 33]]
    counts: dict[str, Any] = {"examples": [1] * 3, "predicted": [1] * 3, "hits": [1] * 3, "confusion": confusion}
    pictures.heat(Predictions(step=1, names=["1", "2", "3"], **counts, curves=[], worst=[]))
    ordered = sorted(places, key=lambda text: places[text][::-1])  # down the rows
    assert ordered == [str(count) for row in confusion for count in row]


@pytest.mark.parametrize(("after", "points"), [(2.0, [2]), (4.0, [2, 4]), (4.5, [2, 4, 4]), (9.0, [2, 4, 4, 6])])
def test_wandb_gets_offline_all_that_a_resume_keeps(
    after: float, points: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[tuple[int, dict[str, float]]] = []
    own = SimpleNamespace(log=lambda scalars, step: copied.append((step, scalars)))
    wandb = SimpleNamespace(init=lambda **options: own, Settings=dict, Error=ValueError)
    monkeypatch.setitem(sys.modules, "wandb", wandb)  # type: ignore[arg-type]
    monkeypatch.delenv("WANDB_MODE", raising=False)
    run_dir = RunDir.at(tmp_path / "run")
    figures = [(2, {"loss/train": 0.5}), (4, {"loss/train": 0.4}), (4, {"loss/val": 0.3}), (6, {"loss/train": 0.2})]
    run_dir.metrics.write_text("".join(json.dumps({"step": step, **scalars}) + "\n" for step, scalars in figures))
    place: dict[str, Any] = {"run_dir": run_dir, "plan": PLAN, "step": int(after), "after": after}
    info = RunInfo(**place, config={"output_root": str(tmp_path)}, hyperparameters={}, id="one")
    WandBRun(info, project=None, entity=None, mode=None)
    assert copied == figures[: len(points)]
    assert [step for step, _ in copied] == points


@pytest.mark.parametrize(
    ("typed", "environment", "expected"), [("a", "b", "a"), (None, "b", "b"), (None, "", "usual")]
)
def test_what_a_tracker_is_told_comes_before_the_environment(
    typed: str | None, environment: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = {"project": "lockstep", "mode": "offline", "experiment": "lockstep"}

    class Seen(Exception):
        pass

    def seen(experiment: str = "", **settings: Any) -> None:
        raise Seen({**settings, "experiment": experiment})

    client = SimpleNamespace(get_experiment_by_name=seen)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=seen, Error=KeyError, Settings=dict))
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=lambda **_: client))
    for name in ("WANDB_PROJECT", "WANDB_MODE", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.setenv(name, environment)
    run: Any = SimpleNamespace(
        config={"output_root": str(tmp_path)}, id="1", name="run", hyperparameters={}, folder="run"
    )
    for start in (
        lambda: WandBRun(run, project=typed, entity=None, mode=typed),
        lambda: MLflowRun(run, experiment=typed, folder=str(tmp_path / "store")),
    ):
        with pytest.raises(Seen) as error:
            start()
        settings = {key: value for key, value in error.value.args[0].items() if key in usual and value}
        assert settings
        assert settings == {key: usual[key] if expected == "usual" else expected for key in settings}


class FakeWandB:
    """W&B, which keeps in memory what it gets; its run is itself."""

    Error, Settings = KeyError, dict

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.options = error, dict[str, Any]()
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.summary: dict[str, float] = {}
        self.exit_codes: list[int] = []

    def init(self, **options: Any) -> "FakeWandB":
        if self.error is not None:
            raise self.error
        self.options, self.offline = options, options["mode"] == "offline"
        self.dir = f"{options['dir']}/wandb/offline-run-1/files"
        return self

    def log(self, scalars: dict[str, float], step: int) -> None:
        self.logged.append((step, scalars))

    def finish(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)


def info_of(folder: Path, *, run: str = "one", **config: Any) -> RunInfo:
    """A run with these keys of its config, whose `output_root` is the folder."""
    place: dict[str, Any] = {"run_dir": RunDir.at(folder / "run"), "plan": PLAN, "step": 0, "after": 0}
    return RunInfo(**place, config={"output_root": str(folder), **config}, hyperparameters={"lr": 0.1}, id=run)


ANNOTATED = {"tags": ["a", "b"], "run_group": "paper", "notes": "why this run"}


def test_wandb_begins_with_what_a_run_is_and_what_its_variables_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_DIR", "WANDB_NAME", "WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    info = info_of(tmp_path, **ANNOTATED)
    run = loggers.WandB(project="photos", entity="me", mode="online").build(info)
    assert fake.options == {
        "project": "photos",
        "entity": "me",
        "mode": "online",
        "id": "one",
        "name": "run",
        "tags": ["a", "b"],
        "notes": "why this run",
        "group": "paper",
        "resume": "allow",
        "dir": str(tmp_path),
        "config": {**info.config, "hyperparameters": {"lr": 0.1}},
        "settings": {"silent": True, "console": "off", "disable_git": True, "save_code": False},
    }
    assert (tmp_path / "wandb").is_dir()
    assert run.commands == [], "it is there already"
    loggers.WandB().build(info_of(tmp_path, tags=[]))
    assert [fake.options[key] for key in ("project", "entity", "mode")] == ["lockstep", None, "offline"]
    assert [fake.options[key] for key in ("tags", "notes", "group")] == [None] * 3, "its own variables decide"
    monkeypatch.setenv("WANDB_DIR", "elsewhere")
    monkeypatch.setenv("WANDB_NAME", "mine")
    (tmp_path / "wandb").rmdir()
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "of the variable")
    run = loggers.WandB().build(info_of(tmp_path))
    assert (fake.options["dir"], fake.options["name"]) == ("elsewhere", "mine")
    assert fake.options["project"] == "of the variable"
    assert not (tmp_path / "wandb").exists()
    assert run.commands == ["wandb sync elsewhere/wandb/offline-run-1"]


@pytest.mark.parametrize("error", [KeyError("of W&B"), ValueError("no such mode")], ids=repr)
def test_a_run_that_wandb_refuses_is_a_sentence(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandB(error))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"W&B cannot begin the run .*; use logger\.wandb\.mode=offline"):
        loggers.WandB().build(info_of(tmp_path))


OUTCOMES = {"completed": (0, "FINISHED"), "stopped": (75, "KILLED"), "failed": (70, "FAILED")}


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_wandb_gets_what_has_a_value_and_the_best_scores_and_how_a_run_ended(
    outcome: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    run = loggers.WandB(mode="online").build(info_of(tmp_path))
    run.write(3, {"loss/train": 0.5, "a": math.nan, "b": math.inf, "c": 0.0})
    run.write_gpu(4, {"gpu/util/0": 50.0})
    run.evaluated(5, {"loss/val": 1.0, "metric/f1": math.nan}, True)
    run.evaluated(6, {"loss/val": 2.0}, False)
    run.end(outcome)
    assert fake.logged == [(3, {"loss/train": 0.5, "c": 0.0}), (4, {"gpu/util/0": 50.0})]
    assert fake.summary == {"best/step": 5, "best/loss/val": 1.0}
    assert fake.exit_codes == [OUTCOMES[outcome][0]]


class FakeMLflow:
    """MLflow and its client, with a store in memory."""

    def __init__(self) -> None:
        self.uris: list[str] = []
        self.experiments: dict[str, Any] = {}
        self.runs: list[Any] = []

    def MlflowClient(self, *, tracking_uri: str) -> "FakeMLflow":  # noqa: N802
        self.uris.append(tracking_uri)
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        if name == "deleted":
            raise LookupError("the experiment is deleted")
        return self.experiments.get(name)

    def create_experiment(self, name: str, artifacts: str | None, *, tags: dict[str, str]) -> str:
        number = str(len(self.experiments))
        self.experiments[name] = SimpleNamespace(experiment_id=number, artifacts=artifacts, tags=tags)
        return number

    def create_run(self, experiment: str, *, run_name: str, tags: dict[str, str]) -> Any:
        info = SimpleNamespace(run_id=f"r{len(self.runs)}", name=run_name, status="RUNNING", experiment=experiment)
        run = SimpleNamespace(info=info, tags=dict(tags), params=[], points=[], states=[])
        run.data = SimpleNamespace(metrics={})
        self.runs.append(run)
        return run

    def get_run(self, number: str) -> Any:
        (run,) = (run for run in self.runs if run.info.run_id == number)
        return run

    def search_runs(self, experiments: list[str], condition: str) -> list[Any]:
        return [
            run
            for run in self.runs
            if run.info.experiment in experiments
            and condition == f"tags.`lockstep.run` = '{run.tags['lockstep.run']}'"
        ]

    def log_param(self, number: str, key: str, value: str) -> None:
        self.get_run(number).params.append((key, value))

    def set_tag(self, number: str, key: str, value: object) -> None:
        self.get_run(number).tags[key] = value

    def set_terminated(self, number: str, status: str) -> None:
        self.get_run(number).states.append(status)

    def log_batch(self, number: str, *, metrics: list[Any]) -> None:
        assert metrics, "an empty batch is a request for nothing"
        run = self.get_run(number)
        run.points += metrics
        run.data.metrics |= {point.key: point.value for point in metrics}

    def get_metric_history(self, number: str, tag: str) -> list[Any]:
        points = [point for point in self.get_run(number).points if point.key == tag]
        return points[1:] + points[:1]  # in any order


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> FakeMLflow:
    fake = FakeMLflow()
    point = collections.namedtuple("Metric", "key value timestamp step")
    monkeypatch.setitem(sys.modules, "mlflow", fake)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "mlflow.entities", SimpleNamespace(Metric=point))  # type: ignore[arg-type]
    exceptions = SimpleNamespace(MlflowException=LookupError)
    monkeypatch.setitem(sys.modules, "mlflow.exceptions", exceptions)  # type: ignore[arg-type]
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    return fake


def test_a_run_is_in_mlflows_database_in_the_output_folder(
    tmp_path: Path, mlflow: FakeMLflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks: list[tuple[Path, bool]] = []
    locked = trackers.locked
    monkeypatch.setattr(
        trackers, "locked", lambda path, *, waits=False: locks.append((path, waits)) or locked(path, waits=waits)
    )
    monkeypatch.setattr(trackers.logging.getLogger("mlflow"), "level", 0)
    (tmp_path / "out").mkdir()
    run = loggers.MLflow().build(info_of(tmp_path / "out", **ANNOTATED))
    folder = tmp_path / "out" / "mlflow"
    assert mlflow.uris == [f"sqlite:///{folder}/mlflow.db"]
    assert (folder / "mlflow.db").is_file()
    assert locks == [(folder / ".mlflow.lock", True)]
    assert trackers.logging.getLogger("mlflow").level == trackers.logging.WARNING
    kind = {"mlflow.experimentKind": "custom_model_development"}
    expected = {"experiment_id": "0", "artifacts": (folder / "artifacts").as_uri(), "tags": kind}
    assert {name: vars(experiment) for name, experiment in mlflow.experiments.items()} == {"lockstep": expected}
    (stored,) = mlflow.runs
    assert (stored.info.name, stored.params) == ("run", [("folder", str(tmp_path / "out" / "run")), ("lr", "0.1")])
    words = {"lockstep.run": "one", "tags": "a, b", "run_group": "paper", "mlflow.note.content": "why this run"}
    assert stored.tags == words
    assert run.commands == [f"mlflow ui --backend-store-uri sqlite:///{folder}/mlflow.db"]


@pytest.mark.parametrize("place", ["http://host:5000", "https://host", "sqlite:///mine.db"])
def test_the_store_of_a_variable_is_used_unless_a_folder_is_typed(
    place: str, tmp_path: Path, mlflow: FakeMLflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", place)
    run = loggers.MLflow(experiment="photos").build(info_of(tmp_path))
    assert mlflow.uris == [place]
    assert not (tmp_path / "mlflow").exists()
    assert (mlflow.experiments["photos"].artifacts, [*mlflow.experiments]) == (None, ["photos"])
    assert run.commands == ([] if "http" in place else [f"mlflow ui --backend-store-uri {place}"])
    monkeypatch.setenv("HOME", str(tmp_path))
    loggers.MLflow(folder="~/a/store", experiment="photos").build(info_of(tmp_path))
    assert mlflow.uris[1:] == [f"sqlite:///{tmp_path}/a/store/mlflow.db"]
    monkeypatch.chdir(tmp_path)
    loggers.MLflow(folder="b/store", experiment="photos").build(info_of(tmp_path))
    assert mlflow.uris[2:] == [f"sqlite:///{tmp_path}/b/store/mlflow.db"], "of whatever folder it is shown"
    assert len(mlflow.experiments) == 1


def test_a_database_that_is_a_link_is_refused_and_so_is_what_mlflow_refuses(
    tmp_path: Path, mlflow: FakeMLflow
) -> None:
    with pytest.raises(InputError, match=r"MLflow cannot begin the run \(.*is deleted.*\); check logger\.mlflow\.\*"):
        loggers.MLflow(experiment="deleted").build(info_of(tmp_path))
    (tmp_path / "mlflow" / "mlflow.db").unlink()
    (tmp_path / "mlflow" / "mlflow.db").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"mlflow\.db is a symbolic link, which leads elsewhere"):
        loggers.MLflow().build(info_of(tmp_path))
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_mlflow_gets_each_figure_once_however_often_a_run_resumes(
    outcome: Any, tmp_path: Path, mlflow: FakeMLflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers.time, "time", lambda: 1234.5678)
    run = loggers.MLflow().build(info_of(tmp_path))
    run.write(0, {"loss/train": 4.0, "a": math.nan})
    run.write(2, {"loss/train": 2.0, "recall/a(b": 0.5})
    run.write_gpu(2, {"a": math.inf})
    run.evaluated(2, {"loss/val": 1.0}, True)
    run.evaluated(3, {"loss/val": 2.0}, False)
    run.end("stopped")
    again = loggers.MLflow().build(info_of(tmp_path))
    for step in (1, 2, 3):
        again.write(step, {"loss/train": -1.0, "optim/lr": 0.5})
    again.end(outcome)
    (stored,) = mlflow.runs
    name = accepted("recall/a(b")
    points = [("loss/train", 4.0, 0), ("loss/train", 2.0, 2), (name, 0.5, 2), ("optim/lr", 0.5, 1)]
    points += [("optim/lr", 0.5, 2), ("loss/train", -1.0, 3), ("optim/lr", 0.5, 3)]
    assert [(point.key, point.value, point.step) for point in stored.points] == points
    assert {point.timestamp for point in stored.points} == {1_234_568}, "milliseconds"
    assert stored.states == ["KILLED", "RUNNING", OUTCOMES[outcome][1]]
    assert stored.tags["best.step"] == 2
    assert len(stored.params) == 2, "those of its first start"
    third = loggers.MLflow().build(info_of(tmp_path))
    third.write(3, {"optim/lr": 9.0})
    assert len(stored.points) == len(points)
    loggers.MLflow().build(info_of(tmp_path, run="two"))
    assert len(mlflow.runs) == 2


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("metric/recall/a b-c:d.e_f", None),
        ("x" * LONGEST_NAME, None),
        ("x" * (LONGEST_NAME + 1), "x" * LONGEST_NAME),
        ("cat (tabby)", "cat _tabby_"),
        ("50%", "50_"),
        ("a//b", "a_/b"),
        ("/root", "_root"),
        ("trailing/", "trailing_"),
        ("../up/./x/..", "_/up/_/x/_"),
        ("../" + "x" * LONGEST_NAME, "_/" + "x" * (LONGEST_NAME - 2)),
        ("a..b", None),
        ("\udcff", "_"),
    ],
)
def test_a_name_that_mlflow_refuses_has_a_hash_at_its_end(name: str, clean: str | None) -> None:
    digest = hashlib.sha256(name.encode(errors="replace")).hexdigest()[:8]
    assert accepted(name) == (name if clean is None else f"{clean}-{digest}")


@pytest.mark.parametrize(
    ("side", "options", "cell"),
    [
        ((8, 8), {}, 120),
        ((7, 8), {}, 120),
        ((8, 7), {}, 120),
        ((50, 50), {}, 150),
        ((8, 8), {"columns": 1}, 480),
        ((7, 7), {"least": 96}, 98),
        ((500, 500), {}, 500),
    ],
    ids=str,
)
def test_small_images_fill_their_page(side: tuple[int, int], options: dict[str, int], cell: int) -> None:
    image = np.zeros((1, *side), np.uint8)
    picture = np.asarray(Image.open(BytesIO(pictures.sheet([None, image, image], **options))).convert("L"))
    columns = options.get("columns", 4)
    height, width = (cell * pixels // max(side) for pixels in side)
    assert picture.shape == ((height + 4) * -(-3 // columns), (width + 4) * min(columns, 3))
    places = [(number // columns * (height + 4), number % columns * (width + 4)) for number in range(3)]
    assert [int(picture[top, left]) for top, left in places] == [255, 0, 0], "the first field is empty"


def test_a_sheet_has_a_line_for_its_heads_and_as_many_as_its_longest_caption(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[tuple[tuple[int, int], str]] = []
    monkeypatch.setattr(ImageDraw.ImageDraw, "text", lambda self, place, text, **_: texts.append((place, text)))
    image = np.zeros((3, 8, 8), np.uint8)
    picture = Image.open(BytesIO(pictures.sheet([image] * 3, ["a", "b\nc", ""], columns=2, heads=["one", "two"])))
    step = 240 + 4 + 2 * 13
    assert picture.size == (2 * 244, 17 + 2 * step)
    heads = [((0, 0), "one"), ((244, 0), "two")]
    captions = [((0, 17 + 240), "a"), ((244, 17 + 240), "b"), ((244, 17 + 253), "c"), ((0, 17 + step + 240), "")]
    assert texts == heads + captions


def test_the_worst_examples_say_what_they_are_and_what_the_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    sheets: list[tuple[list[str], dict[str, int]]] = []
    monkeypatch.setattr(pictures, "sheet", lambda images, captions, **options: sheets.append((captions, options)))
    odds = (0.0, 0.934, None)
    examples = [{**WORST[0], "label": 0, "predicted": 1, "probability": probability} for probability in odds]
    names = ["cat", "\u65e5"]
    pictures.worst(Predictions(step=1, names=names, **COUNTS, curves=[], worst=examples))
    shares = (" (0 %)", " (93 %)", "")
    assert sheets == [([f"is cat\nsaid class 1{share}" for share in shares], {"columns": 3})]


@pytest.mark.parametrize("classes", [20, 21, 150])
def test_twenty_classes_have_names_and_counts_and_more_have_colours(
    classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[tuple[str, str]] = []
    monkeypatch.setattr(ImageDraw.ImageDraw, "text", lambda self, at, text, fill, **_: texts.append((text, fill)))
    confusion = np.eye(classes, dtype=int) * 3
    confusion[0, 1], confusion[-1, -1] = 1, 0
    counts: dict[str, Any] = {name: [1] * classes for name in ("examples", "predicted", "hits")}
    names = ["name", *["b"] * (classes - 1)]
    page = pictures.heat(
        Predictions(step=1, names=names, **counts, confusion=confusion.tolist(), curves=[], worst=[])
    )
    fills = dict(texts)
    assert {"predicted", "true"} <= fills.keys()
    assert ("name" in fills, "3" in fills) == (classes == 20, classes == 20)
    side = Image.open(BytesIO(page)).size[0]
    if classes == 20:
        assert (fills["3"], fills["1"]) == ("white", "black"), "a quarter of the class"
        assert side > 20 * 24 + 13 + 8
    else:
        assert side == 13 + 8 + classes * max(3, 300 // classes)


@pytest.mark.parametrize(
    ("channels", "words"),
    [
        (1, ""),
        (2, " (the first of 2 channels)"),
        (3, ""),
        (4, " (the first three of 4 channels)"),
        (13, " (the first three of 13 channels)"),
    ],
)
def test_pictures_say_which_channels_they_show(channels: int, words: str) -> None:
    assert pictures.channels_shown(channels) == words


@pytest.mark.parametrize(
    ("name", "text"),
    [("caf\u00e9", "caf\u00e9"), ("\u017f", "\u017f"), ("\u0180", "class 0"), ("a\u0180b", "class 0"), ("", "")],
)
def test_a_name_that_the_font_of_pictures_does_not_have_is_a_number(name: str, text: str) -> None:
    assert pictures._name([name], 0) == text


def test_a_part_of_a_pixel_of_a_text_has_a_pixel(monkeypatch: pytest.MonkeyPatch) -> None:
    for length, width in ((0.0, 0), (2.0, 2), (2.25, 3)):
        monkeypatch.setattr(pictures, "_MEASURE", SimpleNamespace(textlength=lambda text, length=length: length))
        assert pictures._width("il") == width


def test_a_text_is_cut_to_what_fits_exactly() -> None:
    width = pictures._width("abcdefgh")
    assert [pictures._fitting("abc\tdefgh"[:4] + "defgh", room) for room in (width + 9, 0)] == ["abc defgh", ""]
    assert pictures._fitting("abcdefgh", width) == "abcdefgh"
    assert pictures._fitting("abcdefgh", width - 1).endswith("…")
    assert pictures._width("iii") >= pictures._MEASURE.textlength("iii")


def test_the_names_of_the_axes_and_classes_of_a_confusion_matrix_are_at_their_rows_and_columns() -> None:
    names = ["ab", "wxyz", "c"]
    counts: dict[str, Any] = {name: [1] * 3 for name in ("examples", "predicted", "hits")}
    matrix = Predictions(step=1, names=names, **counts, confusion=[[1, 0, 0]] * 3, curves=[], worst=[])
    page = np.asarray(Image.open(BytesIO(pictures.heat(matrix))))
    margin = len(page) - 3 * pictures.CELL

    def is_at(text: str, left: int, top: int, *, turned: bool = False) -> bool:
        letters = pictures._text(text)
        pixels = np.asarray(letters.rotate(90, expand=True) if turned else letters)
        return bool((page[top : top + len(pixels), left : left + pixels.shape[1]] == pixels).all())

    assert is_at("predicted", margin, 2)
    assert is_at("true", 2, margin, turned=True)
    assert margin == 13 + 8 + pictures._width("wxyz")
    for label, name in enumerate(names):
        middle, end = margin + 24 * label + 12 - 6, margin - 4 - pictures._width(name)
        assert is_at(name, end, middle), "a row is what is true"
        assert is_at(name, middle, end, turned=True)


def test_the_worst_images_are_shown_as_they_are_and_with_the_words_of_their_targets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sheets: list[tuple[list[np.ndarray], list[str]]] = []
    monkeypatch.setattr(pictures, "sheet", lambda images, captions, **_: sheets.append((images, captions)))
    image = np.arange(3 * 2 * 5, dtype=np.uint8).reshape(3, 2, 5)
    for targets, label, predicted, caption in (
        ("labels", [0, 1], [], "is cat, class 1\nsaid none (50 %)"),
        ("values", [1.5, None], [0.25, 3.0], "is 1.5, not a number\nsaid 0.25, 3 (50 %)"),
    ):
        example = {**WORST[0], "label": label, "predicted": predicted, "probability": 0.5}
        example["png"] = pictures.in_base64(image)
        predictions = Predictions(
            step=1, names=["cat", "\u65e5"], **COUNTS, curves=[], worst=[example], targets=targets
        )
        pictures.worst(predictions)
        images, captions = sheets.pop()
        assert captions == [caption]
        assert [shown.tolist() for shown in images] == [image.tolist()]


def test_a_picture_is_as_wide_and_as_high_as_it_is_asked_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    before = warnings.filters[:], dict(matplotlib.rcParams)
    picture = pictures.svg(lambda axes: axes.plot([1, 2]), 4.0, 3.0).decode()
    assert 'width="288pt" height="216pt"' in picture
    assert (warnings.filters[:], dict(matplotlib.rcParams)) == before, "other charts are as they were"
    sizes: list[tuple[float, ...]] = []
    monkeypatch.setattr(pictures, "drawn", lambda draw, *size: sizes.append(size))
    for columns in (2, 3, 4, 6):
        pictures.parallel([*"abcdef"][:columns], [[1.0] * columns], [1.0])
    assert sizes == [(4.4, 3.2), (4.4, 3.2), (pytest.approx(5.6), 3.2), (pytest.approx(8.4), 3.2)]


def test_the_first_image_may_be_missing_and_a_sheet_has_columns_for_no_more_than_it_shows() -> None:
    image = np.zeros((3, 10, 20), np.uint8)
    page = np.asarray(Image.open(BytesIO(pictures.sheet([None, image], columns=3))).convert("L"))
    assert page.shape == (80 + 4, 2 * (160 + 4)), "a third of the page is 160 pixels"
    assert (page[:, :164] == 255).all()
    assert (page[:80, 164:324] == 0).all()


@pytest.mark.parametrize(("gap", "share"), [(0.0, 1.0), (math.nan, 0.0)])
def test_a_row_has_the_digits_of_its_numbers_and_nothing_for_what_is_no_number(
    gap: float, share: float, tmp_path: Path
) -> None:
    table = table_of(tmp_path / "metrics.csv", tags=["loss/val", "my/gap"])
    table.write(95, {"loss/val": 1 / 3, "my/gap": gap, "perf/data_wait_pct": share})
    table.end("completed")
    (row,) = rows(tmp_path / "metrics.csv")
    shown = (
        row["step"],
        row["epoch"],
        row["val_loss"],
        row["gap" if "gap" in row else "my/gap"],
        row["data_wait_pct"],
    )
    assert shown == ("95", "9.5", "0.3333333333333333", "" if math.isnan(gap) else "0", str(int(share)))


def test_only_an_evaluation_is_a_row_and_a_late_figure_of_training_is_in_the_next_one(tmp_path: Path) -> None:
    table = table_of(tmp_path / "metrics.csv")
    table.write(1, {"optim/lr": 0.5})
    table.write(2, {"acc/val_top1": 50.0})
    table.write(3, {"optim/lr": 0.25, "test/loss": 1.0})
    table.write(4, {"loss/val": 0.5})
    table.end("completed")
    read = [(row["step"], row["lr"], row["val_top1"], row["val_loss"]) for row in rows(tmp_path / "metrics.csv")]
    assert read == [("2", "0.5", "50", ""), ("4", "0.25", "50", "0.5")]


@pytest.mark.parametrize("name", [".mlflow.lock", "mlflow.db"])
def test_no_link_is_followed_in_the_folder_of_mlflow(name: str, tmp_path: Path, mlflow: FakeMLflow) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=rf"{name} is a symbolic link"):
        loggers.MLflow(folder=str(tmp_path / "store")).build(info_of(tmp_path))
    assert not (tmp_path / "elsewhere").exists()


def test_the_verdict_of_a_run_without_steps_is_at_the_first_one_and_a_file_that_failed_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = board(tmp_path / "run")
    sink.end("completed")
    sink.completed({"verdict": {"sentence": "it waits"}})
    assert text_of(tmp_path / "run", "verdict") == (0, b"    it waits")
    before = [*(tmp_path / "run").iterdir()]
    sink.failed = True
    sink.completed({"verdict": {"sentence": "it waits"}})
    assert [*(tmp_path / "run").iterdir()] == before


@pytest.mark.parametrize("outcome", ["completed", "stopped", "failed"])
def test_the_event_files_of_a_run_are_closed_at_its_end(outcome: Outcome, tmp_path: Path) -> None:
    sink = tensorboard(tmp_path)
    sink.write(1, {"loss/train": 1.0, "loss/val_ema": 0.5})
    assert sink.files.keys() == {"", "val", "val_ema"}
    sink.end(outcome)
    assert [file.file.closed for file in sink.files.values()] == [True] * 3
    assert ("loss", 1) in written(tmp_path / "val_ema")


@pytest.mark.parametrize(
    ("typed", "variable", "copies"), [("online", "offline", 0), (None, "online", 0), ("offline", "online", 1)]
)
def test_wandb_gets_the_figures_before_a_resume_where_it_keeps_files_alone(
    typed: str | None, variable: str, copies: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    monkeypatch.setenv("WANDB_MODE", variable)
    info = dataclasses.replace(info_of(tmp_path), step=3, after=3.0)
    info.run_dir.metrics.write_text('{"step": 2, "loss/train": 0.5, "a": null}\n')
    run = (loggers.WandB() if typed is None else loggers.WandB(mode=typed)).build(info)
    assert fake.logged == [(2, {"loss/train": 0.5})] * copies
    assert len(run.commands) == copies


def test_each_event_file_is_closed_though_the_one_before_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: EventFile) -> None:
        self.file.close()
        raise OSError("the disk is odd")

    sink = tensorboard(tmp_path)
    sink.write(1, {"loss/train": 1.0, "loss/val_ema": 0.5})
    monkeypatch.setattr(EventFile, "close", refuse)
    sink.end("completed")
    assert [file.file.closed for file in sink.files.values()] == [True] * 3
    assert capsys.readouterr().out.count("TensorBoard's file cannot be written") == 1


def test_why_tensorboard_or_a_tracker_is_left_out_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("the disk is odd")

    sink = tensorboard(tmp_path)
    monkeypatch.setattr(EventFile, "add", refuse)
    sink.write(1, {"loss/train": 1.0})
    says = "warning: TensorBoard's file cannot be written (the disk is odd); the run continues without it\n"
    assert capsys.readouterr().out == says
    sink.end("completed")
    monkeypatch.setitem(sys.modules, "wandb", FakeWandB(ValueError("no such mode")))  # type: ignore[arg-type]
    with pytest.raises(InputError) as raised:
        loggers.WandB().build(info_of(tmp_path))
    assert str(raised.value) == (
        "logger.wandb: W&B cannot begin the run (no such mode); use logger.wandb.mode=offline"
    )


@pytest.mark.parametrize("outcome", ["completed", "stopped", "failed"])
def test_a_file_of_figures_is_closed_at_the_end(outcome: Outcome, tmp_path: Path) -> None:
    for sink in (JsonLines(tmp_path / "metrics.jsonl", 0), table_of(tmp_path / "metrics.csv")):
        sink.write(1, {"acc/val_top1": 1.0})
        assert not sink.file.closed
        sink.end(outcome)
        assert sink.file.closed


def test_a_chart_has_its_usual_size_and_is_the_address_of_a_picture() -> None:
    begins, _, picture = pictures.drawn(lambda axes: axes.plot([1, 2])).partition(",")
    assert begins == "data:image/svg+xml;base64"
    assert {"+", "/"} & {*picture}, "the letters that browsers take"
    assert b'width="316.8pt" height="187.2pt"' in base64.b64decode(picture, validate=True)
    noise = np.random.default_rng(0).integers(0, 256, (3, 16, 24), np.uint8)
    encoded = base64.b64decode(pictures.in_base64(noise), validate=True)
    assert np.array_equal(np.asarray(Image.open(BytesIO(encoded))), noise.transpose(1, 2, 0))


def test_pictures_that_are_written_are_not_written_again_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("lockstep.telemetry.tensorboard.time.monotonic", lambda: now)
    sink = tensorboard(tmp_path)
    now = 111.0
    sink.predicted(PREDICTIONS)
    assert {count for key, count in written(tmp_path / "val").items() if key in PICTURES} == {1}
    sink.end("completed")
    assert {key: count for key, count in written(tmp_path / "val").items() if key in PICTURES} == dict.fromkeys(
        PICTURES, 1
    )


def test_a_file_that_a_full_disk_does_not_let_end_is_named(tmp_path: Path) -> None:
    def close() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name, sink in (
        ("metrics.jsonl", JsonLines(tmp_path / "metrics.jsonl", 0)),
        ("a.csv", table_of(tmp_path / "a.csv")),
    ):
        sink.file.close()
        sink.file = SimpleNamespace(close=close)  # type: ignore[assignment]
        with pytest.raises(StorageError, match=rf"{name} cannot be written \(No space left on device\)"):
            sink.end("completed")
