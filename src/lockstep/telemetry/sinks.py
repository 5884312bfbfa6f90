"""Where scalars go: `metrics.jsonl` (the truth, append only), `metrics.csv`, and TensorBoard.

Each keeps every step once, however often a run is killed: what a file has behind the step that a run goes on from is
of steps that will be done again, and is taken out before the first of them is written.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from lockstep import log
from lockstep.errors import StorageError
from lockstep.files import write_atomic
from lockstep.plan import Plan

LAYOUT: dict[str, dict[str, list[Any]]] = {
    "Learning": {
        "loss": ["Multiline", ["loss/train", "loss/val"]],
        "accuracy": ["Multiline", ["acc/train_top1", "acc/val_top1", "acc/val_top5", "acc/val_ema_top1"]],
    },
    "Throughput": {
        "images per second": ["Multiline", ["perf/img_per_s"]],
        "waiting for data, %": ["Multiline", ["perf/data_wait_pct"]],
        "step, ms": ["Multiline", ["perf/step_ms"]],
        "model FLOPs utilisation, %": ["Multiline", ["perf/mfu_pct"]],
    },
    "GPU": {
        "utilisation, %": ["Multiline", ["gpu/util/.*"]],
        "memory, GB": ["Multiline", ["gpu/mem_gb/.*"]],
        "power, W": ["Multiline", ["gpu/power_w/.*"]],
        "temperature, °C": ["Multiline", ["gpu/temp_c/.*"]],
    },
    "Optimisation": {
        "learning rate": ["Multiline", ["optim/lr"]],
        "gradient norm": ["Multiline", ["optim/grad_norm"]],
        "loss scale": ["Multiline", ["optim/scale"]],
    },
}
LAYOUT_TAG = "custom_scalars__config__"
EVENTS = "events.out.tfevents.*"
FLUSH_S = 10


class JsonLines:
    """One JSON object per write: `step`, `time` (Unix seconds) and the scalars; null for what is not finite.

    Args:
        path: of the file.
        after: the step that the run goes on from.
    """

    def __init__(self, path: Path, after: int) -> None:
        self.path = path
        self.file = reopened(path, after, lambda line: json.loads(line)["step"])

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        finite = {key: value if math.isfinite(value) else None for key, value in scalars.items()}
        with _storing(self.path):
            self.file.write(json.dumps({"step": step, "time": round(time.time(), 3), **finite}) + "\n")

    def flush(self) -> None:
        with _storing(self.path):
            self.file.flush()

    def close(self) -> None:
        with _storing(self.path):
            self.file.close()


@contextmanager
def _storing(path: Path) -> Iterator[None]:
    """Turn a failed write of `path`, without which there is no record of the run, into StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path} cannot be written ({error.strerror})") from error


def reopened(path: Path, after: int, step: Callable[[str], Any], header: str = "") -> TextIO:
    """The file at `path`, to be added to, with the `header` and its whole lines of steps up to `after`.

    A line cut short by a kill has no end, and may still look like a smaller step.
    """

    def counts(line: str) -> bool:
        try:
            return line.endswith("\n") and int(step(line)) <= after
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
            return False

    lines = path.read_text(errors="replace").splitlines(keepends=True) if path.exists() else []
    write_atomic(path, header + "".join(filter(counts, lines)))
    return path.open("a", newline="", buffering=1)


COLUMNS = {
    "loss/train": "train_loss",
    "acc/train_top1": "train_top1",
    "loss/val": "val_loss",
    "acc/val_top1": "val_top1",
    "acc/val_top5": "val_top5",
    "acc/val_ema_top1": "val_ema_top1",
    "optim/lr": "lr",
    "perf/img_per_s": "img_per_s",
    "perf/data_wait_pct": "data_wait_pct",
}


def last_figures(path: Path) -> dict[str, float]:
    """The last value of each tag in a `metrics.jsonl`."""
    figures: dict[str, float] = {}
    for line in path.read_text().splitlines():
        figures.update(json.loads(line))
    return {tag: value for tag, value in figures.items() if value is not None}


class Table:
    """`metrics.csv`: a row per evaluation, with the last figures of training beside it.

    Args:
        path: of the file.
        plan: of the run.
        after: the step that the run goes on from.
        latest: the last figures before it, by tag (`last_figures`).
    """

    def __init__(self, path: Path, plan: Plan, after: int, latest: Mapping[str, float] | None = None) -> None:
        self.path, self.plan = path, plan
        self.latest = dict(latest or {})
        header = ",".join(["step", "epoch", *COLUMNS.values()]) + "\n"
        self.file = reopened(path, after, lambda line: line.partition(",")[0], header)
        self.writer = csv.writer(self.file, lineterminator="\n")

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self.latest.update(scalars)
        if "acc/val_top1" in scalars:
            epoch = step / self.plan.steps_per_epoch
            values = (self.latest.get(key) for key in COLUMNS)
            figures = ["" if value is None else f"{value:.6g}" for value in values]
            with _storing(self.path):
                self.writer.writerow([step, f"{epoch:.4g}", *figures])

    def flush(self) -> None:
        with _storing(self.path):
            self.file.flush()

    def close(self) -> None:
        with _storing(self.path):
            self.file.close()


class TensorBoard:
    """One event file of main's for each part of a run. A full disk is said once and does not end the run.

    Args:
        folder: of the run.
        after: the step that the run goes on from.
        facts: the hyper-parameters, with the same keys in every run, or TensorBoard drops columns.
    """

    def __init__(self, folder: Path, after: int, facts: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard.summary import custom_scalars, hparams

        self.event, self.summary = Event, Summary
        self.file: BinaryIO | None = None
        self.lock = threading.Lock()  # the GPU monitor writes from a thread of its own
        self.failed = False
        self.flushed = time.monotonic()
        with self._forgiving():
            described = LAYOUT_TAG in _trimmed(sorted(folder.glob(EVENTS)), after)
            # Not torch's or TensorBoard's writer: theirs has a thread, and what this one writes in 0.1 ms makes the
            # training loop wait for it, and for Python's lock, up to 2 ms at each log point.
            name = f"{EVENTS.rstrip('*')}{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
            self.file = (folder / name).open("xb")
            self.records = RecordWriter(self.file)
            self._add(file_version="brain.Event:2")
            if described:
                return
            # Written to the run's own file: `add_hparams` would make a second run of its own.
            for summary in (custom_scalars(LAYOUT), *hparams(dict(facts), {"acc/val_top1": 0.0, "loss/val": 0.0})):
                self._add(summary=summary)
            self.file.flush()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        if not self.failed:
            # One record for all: the checksum is Python, and costs more than anything else here.
            values = [self.summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
            with self._forgiving():
                self._add(step=step, summary=self.summary(value=values))
                if time.monotonic() - self.flushed > FLUSH_S:
                    self.flush()

    def _add(self, **facts: Any) -> None:
        with self.lock:
            self.records.write(self.event(wall_time=time.time(), **facts).SerializeToString())

    def flush(self) -> None:
        if not self.failed:
            assert self.file is not None
            self.flushed = time.monotonic()
            with self._forgiving():
                self.file.flush()

    def close(self) -> None:
        if self.file is not None:
            with self._forgiving():
                self.file.close()

    @contextmanager
    def _forgiving(self) -> Iterator[None]:
        from google.protobuf.message import DecodeError

        try:
            yield
        except (OSError, DecodeError) as error:
            if not self.failed:
                log.warn(f"TensorBoard's file cannot be written ({error}); the run goes on without it")
            self.failed = True


def _trimmed(paths: list[Path], after: int) -> set[str]:
    """Take all events of steps behind `after` out of event files, oldest first; returns the tags that are left.

    TensorBoard hides such steps if it is told to, but whoever reads the files finds both. A record cut short by a
    kill ends its file.
    """
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    seen: set[tuple[str, int]] = set()
    for path in paths:
        kept = io.BytesIO()
        before = len(seen)
        for record in RawEventFileLoader(str(path)).Load():
            event = Event.FromString(record)
            found = {(value.tag, event.step) for value in event.summary.value}
            if event.step <= after and not found & seen:
                seen |= found
                RecordWriter(kept).write(record)
        if len(seen) == before:
            path.unlink()
        elif kept.getvalue() != path.read_bytes():  # a viewer may have the file open: leave it if it is right
            temporary = path.with_name(".events.tmp")  # a name that no viewer takes for one of events
            temporary.write_bytes(kept.getvalue())
            temporary.replace(path)
    return {tag for tag, _ in seen}
