"""TensorBoard: training in the run folder's event files, evaluations in `val`, averaged weights in `val_ema`.

TensorBoard draws all folders that have a tag into one chart, in a colour per folder. So the three share their tags:
`loss/train`, `loss/val` and `loss/val_ema` of `metrics.jsonl` are the curves of one chart, `loss`.
"""

from __future__ import annotations

import functools
import math
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.config.commands import shell_command
from lockstep.config.options import annotations_of
from lockstep.core import log
from lockstep.core.data_protocols import Shard
from lockstep.core.errors import StorageError, escaped
from lockstep.core.figures import BINS, Predictions, finite, is_of_option, number_or_text, place_of
from lockstep.core.model import own_part
from lockstep.core.observer import Observer, Outcome, RunInfo
from lockstep.core.run import Run
from lockstep.core.run_dir import relative
from lockstep.core.safe_read import UnreadableFile, read_text
from lockstep.core.safe_write import append, make_folder
from lockstep.core.tags import CPU, FIGURES, GPU, Monitor
from lockstep.telemetry import pictures

PICTURES_S = 10  # between two evaluations with pictures, which take 20 ms to write
TRAINING_IMAGES = 16
BUCKETS = 64  # of a histogram
VAL_FOLDER, VAL_EMA_FOLDER = "val", "val_ema"  # folders
OPTIONS_PAGE = "Options"  # the category of the charts of figures that options log
TRAINED = re.compile(r"(loss|acc)/(train_epoch|train|val_ema|val)_?(.*)")


@functools.lru_cache(maxsize=1024)  # called for each figure of each log point
def curve_of(tag: str, folder: str) -> tuple[str, str]:
    """The TensorBoard folder and tag of a figure of `metrics.jsonl` that is written with the figures of `folder`.

    HParams sorts its columns by tag and ticks the first five: `system/` keeps the machine's figures out of them.
    """
    if match := TRAINED.fullmatch(tag):
        kind, of, name = match.groups()
        own = "epoch" * (of == "train_epoch")
        return VAL_EMA_FOLDER if of == VAL_EMA_FOLDER else folder, "/".join(filter(None, (kind, own, name)))
    return folder, f"system/{tag}" if tag.startswith((CPU, GPU)) else tag


def chart_layout(tags: Iterable[str]) -> dict[str, dict[str, list[str]]]:
    """The charts of each category of the page of custom scalars, with the tags of their curves as patterns.

    Each figure of `tags` that an option logs has a chart.
    """
    pages: dict[str, dict[str, list[str]]] = {}
    for figure in FIGURES:
        tag = curve_of(figure.tag, "")[1] + ".*" * figure.tag.endswith("/")
        charts = pages.setdefault(figure.page, {}).setdefault(figure.title, [])
        charts += [tag] * (tag not in charts)
    pages[OPTIONS_PAGE] = {tag: [re.escape(tag)] for tag in tags if is_of_option(tag)}
    return {page: charts for page, charts in pages.items() if page and charts}


class TensorBoardWriter(Observer):
    """Writes event files, new ones after each resume. An error, such as a full disk, is one warning.

    TensorBoard hides the steps of earlier files that the resumed run does again (`purge_step`).

    HParams has the hyper-parameters of the first start, or those that a sweep varies, and first the best value of the
    monitor. Each start of the run adds texts about it. With `histograms`, evaluations show the weights.
    """

    def __init__(self, run: RunInfo, *, histograms: bool = False) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard.summary import custom_scalars, hparams

        self.summary = Summary
        self.folder, self.after = run.folder, run.after
        self.monitor = Monitor.parse(run.config.get("monitor", str(Monitor())))
        self.files: dict[str, EventFile] = {}  # by folder
        self.failed = False
        self.pictured = time.monotonic()
        self.pending: Predictions | None = None
        self.model, self.is_pictured = run.model if histograms else None, False
        values = run.config.get("input", {})
        self.mean, self.std = (
            torch.tensor(values.get(key) or [x]).view(1, -1, 1, 1) for key, x in (("mean", 0.0), ("std", 1.0))
        )
        # In a sweep only what it varies: TensorBoard ticks five keys, and shows ticked ones in parallel coordinates.
        facts = {key: number_or_text(value) for key, value in Run(run.folder).swept.items()} or run.hyperparameters
        annotations = annotations_of(run.config)
        facts = {**facts, **{key: text for key, text in annotations.items() if key != "notes"}}
        texts = {"config": run.run_dir.config, "command": run.run_dir.command, "environment": run.run_dir.environment}
        on_gpu = run.config.get("device") != "cpu"
        with self._tolerating_errors():
            training = self._file()
            self._file(VAL_FOLDER)
            multiline = {
                page: {chart: ["Multiline", tags] for chart, tags in charts.items()}
                for page, charts in chart_layout(run.tags).items()
                if on_gpu or page != "GPU"
            }
            training.add(custom_scalars(multiline), 0)
            # The first of torch's three summaries describes the columns. Without it, TensorBoard sorts the columns:
            # columns in which runs differ come first. It shows five until the user requests more.
            # Written to the run's own file: `add_hparams` would create a second run.
            for summary in hparams(dict(facts), {})[1:]:
                training.add(summary, 0)
            for title, path in texts.items():
                if path.exists():
                    training.add_text(title, read_text(path), int(run.after) + 1)
            for key, text in annotations.items():
                training.add_text(key, text, int(run.after) + 1)

    @property
    def commands(self) -> Sequence[str]:
        return [shell_command(["tensorboard", "--logdir", relative(self.folder)])]

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        if self.failed:
            return
        # One event for all the figures of a folder: each event costs time.
        values: dict[str, list[Any]] = {}
        usual = VAL_FOLDER if place_of(step, scalars) > step else ""
        for name, value in finite(scalars).items():
            folder, tag = curve_of(name, usual)
            values.setdefault(folder, []).append(self.summary.Value(tag=tag, simple_value=value))
        with self._tolerating_errors():
            for folder, of_folder in values.items():
                self._file(folder).add(self.summary(value=of_folder), step)

    write_gpu = write

    def evaluated(self, step: int, scores: Mapping[str, float], best: bool) -> None:
        value = self.monitor.value_in(scores)
        if best and value is not None and math.isfinite(value) and not self.failed:
            # HParams shows the last value of a curve, and sorts capitals first.
            with self._tolerating_errors():
                best_one = self.summary.Value(tag=f"Best/{self.monitor.name}", simple_value=value)
                self._file(VAL_FOLDER).add(self.summary(value=[best_one]), step)

    def _file(self, folder: str = "") -> EventFile:
        if folder not in self.files:
            # Of the step that the run resumes from, only an evaluation may be left to do.
            purge_step = int(self.after + 0.5) if folder else int(self.after) + 1
            self.files[folder] = EventFile(self.folder / folder, purge_step)
        return self.files[folder]

    def first_batch(self, micro: Shard, images: Tensor) -> None:
        if len(images) and not (self.is_pictured or self.failed):
            self.is_pictured = True  # of several micro-batches the first one is shown
            pixels = images[:TRAINING_IMAGES].float().cpu() * self.std + self.mean
            shown = (pixels * 255).round().clamp(0, 255).byte().numpy()
            with self._tolerating_errors():
                # Of a sweep's jobs it is often the same picture: it comes after `images/`.
                self._file().add_picture("input/augmented", pictures.sheet(shown), micro.step)

    def predicted(self, predictions: Predictions) -> None:
        self.pending = predictions
        if time.monotonic() - self.pictured > PICTURES_S:
            self._write_predictions()

    def _write_predictions(self) -> None:
        """Write the pictures of the best evaluation that are not written yet, and histograms of the weights."""
        predictions, self.pending = self.pending, None
        if predictions is None or self.failed:
            return
        step = predictions.step
        with self._tolerating_errors():
            file = self._file(VAL_FOLDER)
            if predictions.worst:
                file.add_picture("images/worst", pictures.worst(predictions), step)
            if predictions.confusion:
                file.add_picture("images/confusion", pictures.heat(predictions), step)
            for name, counts in zip(predictions.names, predictions.curves, strict=False):
                file.add_pr_curve(f"precision_recall/{name}", counts, step)
            for name, weight in self.model.named_parameters() if self.model is not None else ():
                local = own_part(weight).detach().float().cpu().numpy()
                if local.size and np.isfinite(local).all():
                    file.add(file.summaries.histogram(f"weights/{name}", local, BUCKETS), step)
        self.pictured = time.monotonic()

    def end(self, outcome: Outcome) -> None:
        self._write_predictions()
        for file in self.files.values():
            with self._tolerating_errors():
                file.close()

    def completed(self, summary: Mapping[str, Any]) -> None:
        verdict = summary.get("verdict")
        if verdict and not self.failed:
            text = "\n".join(str(verdict[key]) for key in ("sentence", "evidence", "override") if verdict.get(key))
            with self._tolerating_errors(), closing(EventFile(self.folder)) as file:
                file.add_text("verdict", text, summary.get("step", 0))

    @contextmanager
    def _tolerating_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, StorageError, UnreadableFile) as error:
            if not self.failed:
                log.warn(f"TensorBoard's file cannot be written ({error}); the run continues without it")
            self.failed = True


class EventFile:
    """A new event file in a folder, from which TensorBoard hides the events of others from `purge_step` on.

    Each event is on the disk at once. The thread of `SummaryWriter` takes longer to get an event than to write it.
    """

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard import summary

        self.summaries = summary
        make_folder(folder)
        # TensorBoard reads the files of a folder in the order of their names.
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self.event, self.file = Event, append(folder / name, "ab", buffering=0)
        self.records = RecordWriter(self.file)
        self._write(file_version="brain.Event:2")
        if purge_step is not None:
            self._write(step=purge_step, session_log=SessionLog(status=SessionLog.START))

    def _write(self, **fields: Any) -> None:
        self.records.write(self.event(wall_time=time.time(), **fields).SerializeToString())

    def add(self, summary: Any, step: int) -> None:
        """Write a `Summary`, such as a function of `torch.utils.tensorboard.summary` makes."""
        self._write(step=step, summary=summary)

    def add_text(self, title: str, text: str, step: int) -> None:
        """Write a text about the run: in Markdown a block of code, whatever it has in it."""
        lines = "\n".join(f"    {line}" for line in escaped(text).splitlines())
        self.add(self.summaries.text(f"run/{title}", lines), step)

    def add_picture(self, tag: str, png: bytes, step: int) -> None:
        summary = self.summaries.Summary
        image = summary.Image(encoded_image_string=png, colorspace=3)
        self.add(summary(value=[summary.Value(tag=tag, image=image)]), step)

    def add_pr_curve(self, tag: str, counts: Sequence[Sequence[int]], step: int) -> None:
        """Write the curve of precision over recall of a class, from its `Predictions.curves`."""
        hits, false, precision, recall = pictures.precision_recall(counts)
        negatives = false[0] - false, hits[0] - hits
        self.add(self.summaries.pr_curve_raw(tag, hits, false, *negatives, precision, recall, BINS), step)

    def close(self) -> None:
        self.file.close()
