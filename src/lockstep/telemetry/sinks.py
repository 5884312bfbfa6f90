"""Where scalars go: `metrics.jsonl` (the truth, append only), `metrics.csv`, and TensorBoard."""

from __future__ import annotations

import csv
import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from lockstep import log
from lockstep.errors import StorageError
from lockstep.plan import Plan
from lockstep.rundir import write_atomic

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
FLUSH_S = 10


class JsonLines:
    """One JSON object per write: `step`, `time` (Unix seconds) and the scalars; null for what is not finite.

    Lines behind `after`, the step that a run goes on from, are of steps that will be done again: they go.
    """

    def __init__(self, path: Path, after: int) -> None:
        if path.exists():
            kept = [line for line in path.read_text().splitlines() if _step(line) <= after]
            write_atomic(path, "".join(f"{line}\n" for line in kept))
        self.path = path
        self.file = path.open("a", buffering=1)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        finite = {key: value if math.isfinite(value) else None for key, value in scalars.items()}
        with _storing(self.path):
            self.file.write(json.dumps({"step": step, "time": round(time.time(), 3), **finite}) + "\n")

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


def _step(line: str) -> float:
    """The step of a line; a line cut short by a kill belongs to no step that counts."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


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


class Table:
    """`metrics.csv`: a row per evaluation, with the last figures of training beside it."""

    def __init__(self, path: Path, plan: Plan, after: int) -> None:
        self.path, self.plan = path, plan
        self.latest: dict[str, float] = {}
        self.header = ["step", "epoch", *COLUMNS.values()]
        rows: list[list[str]] = []
        if path.exists():
            lines = path.read_text().splitlines(keepends=True)[1:]
            # A line cut short by a kill has no end, and may still look like a smaller step.
            whole = [line for line in lines if line.endswith("\n")]
            rows = [row for row in csv.reader(whole) if int(row[0]) <= after]
        self.file = path.open("w", newline="", buffering=1)
        self.writer = csv.writer(self.file)
        self.writer.writerows([self.header, *rows])

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self.latest.update(scalars)
        if "acc/val_top1" in scalars:
            epoch = step / self.plan.steps_per_epoch
            values = (self.latest.get(key) for key in COLUMNS)
            figures = ["" if value is None else f"{value:.6g}" for value in values]
            with _storing(self.path):
                self.writer.writerow([step, f"{epoch:.4g}", *figures])

    def close(self) -> None:
        with _storing(self.path):
            self.file.close()


class TensorBoard:
    """One event file of main's. A full disk is said once and does not end the run.

    Args:
        folder: of the run.
        after: the step that the run goes on from; what older event files have behind it is purged.
        facts: the hyper-parameters, with the same keys in every run, or TensorBoard drops columns.
    """

    def __init__(self, folder: Path, after: int, facts: Mapping[str, Any]) -> None:
        self.failed = False
        with self._forgiving():
            self.writer = SummaryWriter(str(folder), purge_step=after + 1 if after else None, flush_secs=FLUSH_S)
            if after:
                return
            self.writer.add_custom_scalars(LAYOUT)
            # Written to the run's own file: `add_hparams` would make a second run of its own.
            for summary in hparams(dict(facts), {"acc/val_top1": 0.0, "loss/val": 0.0}):
                self.writer._get_file_writer().add_summary(summary)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        if not self.failed:
            with self._forgiving():
                for tag, value in scalars.items():
                    self.writer.add_scalar(tag, value, step)

    def close(self) -> None:
        if not self.failed:
            with self._forgiving():
                self.writer.close()

    @contextmanager
    def _forgiving(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failed = True
            log.warn(f"TensorBoard's file cannot be written ({error}); the run goes on without it")
