"""Images per second that a user meets: a network trained on JPEG photos by Lockstep, timm, torchvision and Lightning.

    pip install -r benchmarks/requirements-peers.txt
    python benchmarks/photos.py --photos PHOTOS --timm SCRIPTS --torchvision REFERENCES --json photos.json
    python benchmarks/photos.py

PHOTOS has a folder of JPEG files for each class; without it, the benchmark makes files of 500x375. They are repeated
under other names (hard links) until there are `--files`. SCRIPTS has timm's train.py, which is not in its package but
in the top folder of https://github.com/huggingface/pytorch-image-models. REFERENCES is `references/classification` of
https://github.com/pytorch/vision. A peer that is not there is left out, with a sentence.

Each contender is its own command, in a process of its own, with its usual log and as many workers as the process has
cores (Lockstep chooses its threads). All have the same network, batch, number format, SGD with momentum, and random
resized crops of 224 with mirrors. Otherwise they have the settings that their documents recommend for speed: on a GPU
channels_last (torchvision's script has no such option, and its half precision is float16) and `cudnn.benchmark` where
the program has it, but no compilation; torchvision transforms tensors by its second version.

They take turns. One clock counts the steps in what a command logs, from the third line on, for `--seconds`; then the
command is stopped. A turn never takes more than three minutes. So neither the start, nor an evaluation, nor a
checkpoint is in the rate; the start has its own table. On a CPU, "of a core" counts the processor time of all
processes of a command, which depends less on what else the machine does.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard
from uuid import uuid4

import torch
from PIL import Image

from input import photographs
from measure import SPREAD, Figures, Rows, console, living, machine, parser, show, write

LOCKSTEP, TIMM, TORCHVISION, LIGHTNING = "Lockstep", "timm", "torchvision", "Lightning"
WARM_UP = 2  # lines of the log before the clock
LIMIT = 180.0  # seconds of a turn
MARK = "LOCKSTEP_PHOTOS_TURN"
HERE = Path(__file__).parent
SUMMARIES: Mapping[str, Callable[[list[float]], float]] = {
    "": statistics.median,
    SPREAD: lambda figures: max(figures) / min(figures),
}


@dataclass(frozen=True)
class Setting:
    """What all contenders have alike."""

    photos: Path
    model: str
    precision: str
    device: str
    batch: int
    workers: int
    every: int
    classes: int


@dataclass(frozen=True)
class Contender:
    """A command line of Python, the file in which it logs its steps, and how a step is read from a line there."""

    line: str
    step: str
    log: str = "out.txt"


def lockstep(setting: Setting) -> Contender:
    layout = "model.channels_last=true train.cudnn_benchmark=true" * (setting.device == "cuda")
    return Contender(
        f"-m lockstep train dataset=folder dataset.path={quote(setting.photos)} dataset.crop_from=file "
        f"augment=standard loader=streaming model={setting.model} optimizer=sgd optimizer.lr=0.01 "
        f"batch={setting.batch} precision={setting.precision} device={setting.device} epochs=1 "
        f"telemetry.interval={setting.every} hydra.run.dir=run {layout}",
        r'"step": (\d+)',
        "run/metrics.jsonl",
    )


def timm(setting: Setting, scripts: Path) -> Contender:
    layout = "--channels-last" * (setting.device == "cuda")
    half = "--amp --amp-dtype bfloat16" * (setting.precision == "bf16")
    return Contender(
        f"{quote(scripts)}/train.py --data-dir {quote(setting.photos)} --model {setting.model} --epochs 1 --lr 0.01 "
        f"-b {setting.batch} -j {setting.workers} --device {setting.device} --num-classes {setting.classes} "
        f"--color-jitter 0 --train-interpolation bilinear --log-interval {setting.every} {half} {layout}",
        r"Train: 0 \[ *(\d+)/",
    )


def torchvision(setting: Setting, references: Path) -> Contender:
    half = "--amp" * (setting.precision == "bf16")
    return Contender(
        f"{quote(references)}/train.py --data-path {quote(setting.photos)} --model {setting.model} --epochs 1 "
        f"--lr 0.01 -b {setting.batch} -j {setting.workers} --device {setting.device} --use-v2 --backend tensor "
        f"--print-freq {setting.every} --output-dir . {half}",
        r"Epoch: \[0\] +\[ *(\d+)/",
    )


def lightning(setting: Setting) -> Contender:
    return Contender(
        f"{quote(HERE)}/peers/lightning_photos.py {quote(setting.photos)} {setting.model} --batch {setting.batch} "
        f"--workers {setting.workers} --precision {setting.precision} --device {setting.device} "
        f"--every {setting.every}",
        r"^step (\d+)",
    )


def quote(path: Path) -> str:
    return shlex.quote(str(path))


def _has_train(folder: Path | None) -> TypeGuard[Path]:
    return folder is not None and (folder / "train.py").is_file()


def contenders(setting: Setting, timm_scripts: Path | None, references: Path | None) -> dict[str, Contender]:
    """Those that can do it here; a sentence for each of the others."""
    able, absent = {LOCKSTEP: lockstep(setting)}, {}
    if not _has_train(timm_scripts):
        absent[TIMM] = "its train.py is not in its package; --timm FOLDER names the folder that has it"
    else:
        able[TIMM] = timm(setting, timm_scripts)
    if not _has_train(references):
        absent[TORCHVISION] = "its references are not in its package; --torchvision FOLDER names their folder"
    elif setting.model not in importlib.import_module("torchvision.models").list_models():
        absent[TORCHVISION] = "it has no such network"
    elif (setting.precision, setting.device) == ("bf16", "cpu"):
        absent[TORCHVISION] = "its half precision is for a GPU"
    else:
        able[TORCHVISION] = torchvision(setting, references)
    if importlib.util.find_spec("lightning") is None:
        absent[LIGHTNING] = "it is not installed; pip install -r benchmarks/requirements-peers.txt"
    else:
        able[LIGHTNING] = lightning(setting)
    for name, reason in absent.items():
        console.print(f"{setting.model}, {setting.precision}: without {name}: {reason}")
    return able


def processor_seconds(mark: str) -> float:
    """The processor time that all living processes with `mark` in their environment have taken (Linux)."""
    ticks = 0
    for number in living(mark):
        try:
            fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def turn(contender: Contender, batch: int, seconds: float) -> Figures:
    """Run a command until its steps have been counted for so long; returns its rates and the seconds of its start."""
    mark = f"{MARK}={uuid4().hex}"
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **dict([mark.split("=")])}
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        with Path(folder, "out.txt").open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, *shlex.split(contender.line)],
                cwd=folder,
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            # By step, when its line came; on a CPU, the processor time up to it.
            seen: list[tuple[int, float, float]] = []
            while len(seen) <= WARM_UP or seen[-1][1] - seen[WARM_UP][1] < seconds:
                time.sleep(0.1)
                log, now = Path(folder, contender.log), time.perf_counter()
                steps = re.findall(contender.step, log.read_text(), re.MULTILINE) if log.exists() else []
                if steps and (not seen or int(steps[-1]) > seen[-1][0]):
                    seen.append((int(steps[-1]), now, processor_seconds(mark)))
                elif process.poll() is not None or now - began > LIMIT:
                    break
            if len(seen) <= WARM_UP + 1:
                last = Path(folder, "out.txt").read_text()[-2000:]
                sys.exit(f"{contender.line}\nlogged {len(seen)} steps in {now - began:.0f} s\n{last}")
        finally:
            stop(process)
    (step, start, used), (last_step, end, last_used) = seen[WARM_UP], seen[-1]
    images = (last_step - step) * batch
    of_a_core = {"img/s of a core": images / (last_used - used)} if last_used > used else {}
    return {"img/s": images / (end - start), **of_a_core, "seconds to the first steps": start - began}


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a command with its workers."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=30)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def repeated(photos: Path, folder: Path, files: int) -> int:
    """A folder data set with so many names for the photos, each of which is in `val` once; the number of classes."""
    classes = sorted(entry for entry in photos.iterdir() if entry.is_dir())
    copies: list[Path] = []
    for entry in classes:
        for original in sorted(path for path in entry.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg")):
            copies.append(folder / "val" / entry.name / f"{len(copies):06}.jpg")
            for split in ("train", "val"):
                (folder / split / entry.name).mkdir(parents=True, exist_ok=True)
            copies[-1].write_bytes(original.read_bytes())
    for at, copy in enumerate(itertools.islice(itertools.cycle(copies), files)):
        (folder / "train" / copy.parent.name / f"{at:08}.jpg").hardlink_to(copy)
    describe(copies)
    return len(classes)


def describe(photos: list[Path]) -> None:
    """Print the number of the photos, their bytes, size and quality."""
    headers = [Image.open(path) for path in photos]
    width, height = (statistics.median(header.size[axis] for header in headers) for axis in (0, 1))
    coarseness = statistics.median(sum(header.quantization[0]) for header in headers)  # type: ignore[attr-defined]
    console.print(
        f"{len(photos)} photos of {statistics.mean(path.stat().st_size for path in photos) / 1000:.0f} kB; medians: "
        f"{width:.0f}x{height:.0f}, steps of quantisation that add up to {coarseness} "
        "(libjpeg's: 292 at quality 96, 736 at 90, 1858 at 75)"
    )


def main() -> None:
    cuda = torch.cuda.is_available()
    options = parser(__doc__, repeats=3)
    options.add_argument("--photos", type=Path, help="class folders of JPEG files")
    options.add_argument("--timm", type=Path, metavar="SCRIPTS")
    options.add_argument("--torchvision", type=Path, metavar="REFERENCES")
    options.add_argument("--models", nargs="+", default=["resnet18", "resnet50d"])
    options.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    options.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    options.add_argument("--batch", type=int, default=256 if cuda else 32)
    options.add_argument("--every", type=int, default=20 if cuda else 1, help="steps between two lines of a log")
    options.add_argument("--files", type=int, default=1_000_000 if cuda else 20_000)
    options.add_argument("--seconds", type=float, default=60.0, help="of the clock in a turn [60]")
    options.add_argument("--workers", type=int, default=machine()["cores"])
    arguments = options.parse_args()
    tables: dict[str, Rows] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "photos")
        photos = arguments.photos or photographs(Path(name, "shapes"), 80, 375, 500)
        classes = repeated(photos.resolve(), folder, arguments.files)
        peers = [path and path.resolve() for path in (arguments.timm, arguments.torchvision)]
        for model, precision in itertools.product(arguments.models, arguments.precisions):
            setting = Setting(
                *(folder, model, precision, arguments.device),
                *(arguments.batch, arguments.workers, arguments.every, classes),
            )
            able = contenders(setting, *peers)
            turns: dict[str, list[Figures]] = {contender: [] for contender in able}
            for _ in range(arguments.repeats):
                for contender, command in able.items():
                    turns[contender].append(turn(command, arguments.batch, arguments.seconds))
            for figure in turns[LOCKSTEP][0]:
                title = f"{figure}, batch {arguments.batch}, {arguments.device}"
                values = {contender: [figures[figure] for figures in turns[contender]] for contender in able}
                for suffix, summary in SUMMARIES.items():
                    rows = tables.setdefault(f"{title}{suffix}", {})
                    rows[f"{model}, {precision}"] = {name: summary(some) for name, some in values.items()}
            for title, rows in tables.items():
                show(title, rows, ratios=not title.endswith(SPREAD))
            write(arguments.json, tables)


if __name__ == "__main__":
    main()
