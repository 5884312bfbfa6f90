"""TensorBoard: the figures of training in the run folder's event file, and those of evaluations in `val`.

TensorBoard colours by folder. So in one chart a curve of training has another colour than one of evaluations.
"""

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from torch import Tensor, nn

from lockstep.core import log
from lockstep.core.data_protocols import MicroBatch
from lockstep.core.errors import StorageError, masked
from lockstep.core.observer import Observer, Outcome
from lockstep.core.predictions import BINS, Predictions
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_read import UnreadableFile
from lockstep.core.safe_write import append, make_folder, storing
from lockstep.telemetry import pictures
from lockstep.telemetry.events import EVENTS, SESSION, trim_events
from lockstep.telemetry.sinks import finite

# The charts of each category of the page of custom scalars, with the tags of their curves.
LAYOUT: dict[str, dict[str, list[str]]] = {
    "Learning": {
        "loss": ["loss/train", "loss/train_epoch", "loss/val"],
        "accuracy": ["acc/train_top1", "acc/train_epoch_top1", "acc/val_top1", "acc/val_top5", "acc/val_ema_top1"],
        "metrics": ["metric/.*"],
    },
    "Throughput": {
        "images per second": ["perf/img_per_s"],
        "waiting for data, %": ["perf/data_wait_pct"],
        "step, ms": ["perf/step_ms"],
        "where the time goes, %": ["perf/time/.*"],
        "model FLOPs utilisation, %": ["perf/mfu_pct"],
    },
    "CPU": {
        "cores in use": ["cpu/cores"],
        "memory, GB": ["cpu/mem_gb"],
        "disk, MB/s": ["cpu/read_mb_s", "cpu/write_mb_s"],
    },
    "GPU": {
        "utilisation, %": ["gpu/util/.*"],
        "memory, GB": ["gpu/mem_gb/.*"],
        "power, W": ["gpu/power_w/.*"],
        "temperature, °C": ["gpu/temp_c/.*"],
    },
    "Optimisation": {
        "learning rate": ["optim/lr"],
        "gradient norm": ["optim/grad_norm"],
        "loss scale": ["optim/scale"],
    },
}

FLUSH_S = 10
PICTURES_S = 10  # between two evaluations whose pictures are written: they take 20 ms
TRAINING_IMAGES = 16
BUCKETS = 64  # of a histogram
OF_EVALUATIONS = ("loss/val", "acc/val", "metric/")  # how the tags of evaluations begin


def layout_of(config: Mapping[str, Any]) -> dict[str, dict[str, list[str]]]:
    """The charts for a run with this config: `LAYOUT` without those that would stay empty."""
    on_cpu = config.get("device") == "cpu"
    scaled = str(config.get("precision", {}).get("_target_")).endswith(".FP16") and not on_cpu
    missing = {"metrics"} if not config.get("metric") else set()
    missing |= {"loss scale"} if not scaled else set()
    missing |= {"model FLOPs utilisation, %"} if on_cpu else set()
    charts = {name: {chart: LAYOUT[name][chart] for chart in LAYOUT[name] if chart not in missing} for name in LAYOUT}
    if on_cpu or not config.get("telemetry", {}).get("gpu", True):
        del charts["GPU"]
    return charts


class TensorBoard(Observer):
    """Writes event files, new ones after each resume. An error, such as a full disk, is one warning.

    Args:
        folder: the run folder.
        after: where the run resumes from, `RunInfo.after`.
        facts: the hyper-parameters. On a resume they replace the earlier ones, as do the texts.
        layout: the charts, as in `LAYOUT`.
        texts: texts about the run, by title.
        pixels: from the images (b, C, H, W) that the model gets to values from 0 to 1; None shows none.
        model: the model whose weights are shown as histograms; None shows none.
    """

    def __init__(
        self,
        folder: Path,
        after: float,
        facts: Mapping[str, Any],
        layout: Mapping[str, Mapping[str, list[str]]] = LAYOUT,
        *,
        texts: Mapping[str, str] | None = None,
        pixels: Callable[[Tensor], Tensor] | None = None,
        model: nn.Module | None = None,
    ) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard.summary import custom_scalars, hparams

        self.summary = Summary
        self.files: list[BinaryIO] = []  # of training, and of evaluations
        self.failed = False
        self.flushed = self.pictured = time.monotonic()
        self.pending: Predictions | None = None
        self.pixels, self.model = pixels, model
        with self._tolerating_errors():
            # The first of torch's three summaries describes the columns. Without it, TensorBoard sorts the columns:
            # those in which runs differ come first. It shows five until the user asks for more.
            # Written to the run's own file: `add_hparams` would create a second run.
            charts = {
                page: {chart: ["Multiline", tags] for chart, tags in of_page.items()}
                for page, of_page in layout.items()
            }
            session = [custom_scalars(charts), *hparams(dict(facts), {})[1:]]
            session += [text_of(title, text) for title, text in (texts or {}).items()]
            self._open(folder, after, session)
            self._open(folder / "val", after, [])

    def _open(self, folder: Path, after: float, session: Sequence[Any]) -> None:
        """Trim the event files of a folder, and begin a new one, with what describes the run."""
        make_folder(folder)
        trim_events(sorted(folder.glob(EVENTS)), after)
        name = f"{EVENTS.rstrip('*')}{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        file = (folder / name).open("xb")
        self.files.append(file)
        write_event(file, file_version="brain.Event:2")
        for summary in session:
            write_event(file, summary=summary)
        file.flush()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        if self.failed:
            return
        values: tuple[list[Any], list[Any]] = [], []
        for tag, value in finite(scalars).items():
            values[tag.startswith(OF_EVALUATIONS)].append(self.summary.Value(tag=tag, simple_value=value))
        with self._tolerating_errors():
            for file, of_file in zip(self.files, values, strict=True):
                if of_file:
                    write_event(file, step=step, summary=self.summary(value=of_file))
            if time.monotonic() - self.flushed > FLUSH_S:
                self.flush()

    write_gpu = write

    def first_batch(self, micro: MicroBatch, images: Tensor) -> None:
        pixels, self.pixels = self.pixels, None  # of several micro-batches the first one is shown
        if pixels is not None and len(images) and not self.failed:
            shown = (pixels(images[:TRAINING_IMAGES].float().cpu()) * 255).round().clamp(0, 255).byte().numpy()
            with self._tolerating_errors():
                value = self._picture("images/augmented", pictures.sheet(shown))
                write_event(self.files[0], step=0, summary=self.summary(value=[value]))

    def predicted(self, predictions: Predictions) -> None:
        self.pending = predictions
        if time.monotonic() - self.pictured > PICTURES_S:
            self._write_predictions()

    def _write_predictions(self) -> None:
        """Write the pictures of the best evaluation that are not written yet, and histograms of the weights."""
        predictions, self.pending = self.pending, None
        if predictions is None or self.failed:
            return
        from torch.utils.tensorboard.summary import histogram

        values = [self._picture("images/worst", pictures.worst(predictions))] if predictions.worst else []
        if predictions.confusion:
            values.append(self._picture("images/confusion", pictures.heat(predictions)))
        for name, counts in zip(predictions.names, predictions.curves, strict=False):
            values += _pr_curve(f"precision_recall/{name}", np.array(counts)).value
        for name, weight in self.model.named_parameters() if self.model is not None else ():
            local = getattr(weight, "_local_tensor", weight).detach().float().cpu().numpy()
            if local.size and np.isfinite(local).all():
                values += histogram(f"weights/{name}", local, BUCKETS).value
        with self._tolerating_errors():
            write_event(self.files[1], step=predictions.step, summary=self.summary(value=values))
        self.pictured = time.monotonic()

    def _picture(self, tag: str, png: bytes) -> Any:
        image = self.summary.Image(encoded_image_string=png, colorspace=3)
        return self.summary.Value(tag=tag, image=image)

    def flush(self) -> None:
        if not self.failed:
            self.flushed = time.monotonic()
            with self._tolerating_errors():
                for file in self.files:
                    file.flush()

    def end(self, outcome: Outcome) -> None:
        self._write_predictions()
        for file in self.files:
            with self._tolerating_errors():
                file.close()

    @contextmanager
    def _tolerating_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, StorageError, UnreadableFile) as error:
            if not self.failed:
                log.warn(f"TensorBoard's file cannot be written ({error}); the run goes on without it")
            self.failed = True


def write_event(file: BinaryIO, **facts: Any) -> None:
    # The writers of torch and TensorBoard use a thread, and the training loop waits for that thread and for Python's
    # lock up to 2 ms at each log point. This one takes 0.1 ms. Its checksum is computed in Python, and is the largest
    # cost: so all figures of a step are one record.
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    RecordWriter(file).write(Event(wall_time=time.time(), **facts).SerializeToString())


def append_verdict(run_dir: RunDir, step: int) -> None:
    """Add the verdict about a run that has ended to its event file, if it has both."""
    verdict, paths = run_dir.read_summary().get("verdict"), sorted(run_dir.path.glob(EVENTS))
    if verdict and paths:
        text = "\n".join(str(verdict[key]) for key in ("sentence", "evidence", "override") if verdict.get(key))
        with storing(paths[-1]), append(paths[-1], "ab") as file:
            write_event(file, step=step, summary=text_of("verdict", text))


def text_of(title: str, text: str) -> Any:
    """A text about the run as a summary: in Markdown a block of code, whatever it has in it."""
    from torch.utils.tensorboard import summary

    return summary.text(f"{SESSION}{title}", "\n".join(f"    {line}" for line in masked(text).splitlines()))


def _pr_curve(tag: str, counts: np.ndarray) -> Any:
    """The curve of precision over recall of a class as a summary, from its `Predictions.curves`."""
    from torch.utils.tensorboard.summary import pr_curve_raw

    hits, false = counts[:, ::-1].cumsum(1)[:, ::-1].astype(float)
    precision, recall = hits / np.maximum(hits + false, 1), hits / max(hits[0], 1)
    return pr_curve_raw(tag, hits, false, false[0] - false, hits[0] - hits, precision, recall, BINS)
