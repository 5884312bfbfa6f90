"""The first hour: what has to be typed, and how long it takes, from a folder of photos to a model in use.

    python benchmarks/first_hour.py --photos PHOTOS --timm SCRIPTS
    python benchmarks/first_hour.py --photos PHOTOS

PHOTOS has `train/CLASS/*` and `val/CLASS/*`. SCRIPTS is a folder with timm's train.py, validate.py, inference.py and
onnx_export.py. They are not in its package, but in the top folder of its repository,
https://github.com/huggingface/pytorch-image-models. Without SCRIPTS only Lockstep is measured.

Both train the same network of timm from random weights, on the same photos at the same size, with the same
optimizer, schedule (except for Lockstep's warm-up of 5 %), crops, batch, epochs and seeds. Both evaluate it, predict
each photo of `val`, and export it to ONNX. They take turns, once for each seed. Seconds are medians of whole
commands, with their start.

The characters are those of the shortest line that does the job; a path counts as one. Options that only make both
train alike are not counted. timm's scripts have no demo page.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from measure import Rows, parser, show, write

MODEL, SIZE, STORED, BATCH = "resnet18", 32, 36, 64
LOCKSTEP, TIMM = "Lockstep", "timm's scripts"
SAME = (
    "--opt adamw --lr 1e-3 --weight-decay 0.01 --opt-betas 0.9 0.999 --smoothing 0 --warmup-epochs 0 "
    "--sched-on-updates --color-jitter 0 --train-interpolation bilinear"
)


@dataclass(frozen=True)
class Line:
    """A command line: `typed` is counted; `alike` only makes the two ways train alike."""

    typed: str
    alike: str = ""

    @property
    def whole(self) -> str:
        return f"{self.typed} {self.alike}".strip()


Way = Mapping[str, Line]


def lockstep(photos: str, epochs: int, seed: int) -> Way:
    """The commands of the first hour with Lockstep."""
    data = f"dataset=folder dataset.path={photos} dataset.decode_size={STORED} dataset.input_size={SIZE}"
    return {
        "train": Line(
            f"lockstep train {data} model={MODEL} epochs={epochs}",
            f"batch={BATCH} augment=standard device=cpu seed={seed}",
        ),
        "evaluate": Line("lockstep evaluate latest"),
        "predict": Line(f"lockstep predict latest {photos}/val"),
        "export": Line("lockstep export latest"),
        "page": Line("lockstep demo latest", "--port 0"),
    }


def timm(photos: str, scripts: str, epochs: int, seed: int, classes: int) -> Way:
    """The commands of the first hour with timm's scripts. Each needs the description of the network again."""
    network = f"--model {MODEL} --num-classes {classes}"
    size, weights = f"--input-size 3 {SIZE} {SIZE}", "--checkpoint output/train/run/model_best.pth.tar"
    crop = f"--interpolation bilinear --crop-pct {SIZE / STORED:.4f}"
    return {
        "train": Line(
            f"python {scripts}/train.py {photos} {network} {size} --device cpu -b {BATCH} --epochs {epochs} "
            "--experiment run",
            f"{SAME} {crop} --seed {seed}",
        ),
        "evaluate": Line(f"python {scripts}/validate.py {photos} {network} {size} --device cpu {weights}", crop),
        "predict": Line(
            f"python {scripts}/inference.py {photos}/val {network} {size} --device cpu {weights} --results-dir . "
            "--fullname --include-index",
            crop,
        ),
        "export": Line(
            f"python {scripts}/onnx_export.py {network} --img-size {SIZE} {weights} model.onnx", "--dynamic-size"
        ),
    }


def environment() -> dict[str, str]:
    """The variables of the commands, with the programs of this interpreter's environment first on the path."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def run(line: str, folder: Path) -> str:
    """Run a command line in a folder; returns its output. Ends the program if the command fails."""
    done = subprocess.run(
        ["bash", "-c", line], cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{line}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def show_page(line: str, folder: Path) -> str:
    """Start a command that serves a web page, load the page, and end the command with Ctrl-C."""
    with subprocess.Popen(
        shlex.split(line), cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        first = server.stdout.readline()
        try:
            with urllib.request.urlopen(first.split()[0], timeout=60) as answer:
                return answer.read().decode()
        finally:
            server.send_signal(signal.SIGINT)


TOP1: Mapping[str, Callable[[str], float]] = {
    LOCKSTEP: lambda printed: float(re.findall(r"top-1 +([\d.]+) %", printed)[0]),
    TIMM: lambda printed: float(json.loads(printed[printed.index("--result") + len("--result") :])["top1"]),
}


def time_way(name: str, way: Way) -> tuple[dict[str, float], float]:
    """Run the commands of a way once; returns the seconds of each, and the final top-1."""
    seconds, top1 = {}, 0.0
    with tempfile.TemporaryDirectory() as folder:
        for step, line in way.items():
            began = time.perf_counter()
            printed = (show_page if step == "page" else run)(line.whole, Path(folder))
            seconds[step] = time.perf_counter() - began
            if step == "evaluate":
                top1 = TOP1[name](printed)
    return seconds, top1


def main() -> None:
    options = parser(__doc__, repeats=3, of="seeds")
    options.add_argument("--photos", type=Path, required=True)
    options.add_argument("--timm", type=Path, metavar="SCRIPTS")
    options.add_argument("--epochs", type=int, default=5)
    arguments = options.parse_args()
    photos = arguments.photos.resolve()
    classes = sum(entry.is_dir() for entry in (photos / "train").iterdir())

    def ways(photos: str, scripts: str, seed: int) -> dict[str, Way]:
        theirs = {TIMM: timm(photos, scripts, arguments.epochs, seed, classes)} if arguments.timm is not None else {}
        return {LOCKSTEP: lockstep(photos, arguments.epochs, seed), **theirs}

    short = ways("P", "S", 0)
    steps = short[LOCKSTEP]
    seconds: dict[tuple[str, str], list[float]] = {}
    top1: dict[str, list[float]] = {name: [] for name in short}
    scripts = shlex.quote(str(arguments.timm.resolve())) if arguments.timm is not None else ""
    for seed in range(arguments.repeats):
        for name, way in ways(shlex.quote(str(photos)), scripts, seed).items():
            lasted, accuracy = time_way(name, way)
            top1[name].append(accuracy)
            for step, duration in lasted.items():
                seconds.setdefault((step, name), []).append(duration)
    medians = {place: statistics.median(durations) for place, durations in seconds.items()}
    tables: dict[str, Rows] = {
        "characters typed": {
            step: {name: float(len(way[step].typed)) for name, way in short.items() if step in way} for step in steps
        },
        "seconds": {step: {name: medians[step, name] for name in short if (step, name) in medians} for step in steps},
        "top-1 on val, %": {
            f"seed {seed}": {name: top1[name][seed] for name in top1} for seed in range(arguments.repeats)
        },
    }
    for title, rows in tables.items():
        show(title, rows)
    write(arguments.json, tables)


if __name__ == "__main__":
    main()
