"""A run, a sweep, a packed data set and an export as a version of Lockstep wrote them, and the numbers they gave.

    python tests/kept_formats.py tests/data/1.1

makes the folder of the present version. tests/cli/test_kept_formats.py uses the folders of all versions.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

RUN = (
    "train dataset=folder dataset.path=photos dataset.channels=1 dataset.decode_size=8 dataset.input_size=8 "
    "model=digitnet model.width=8 optimizer.lr=0.01 batch=8 steps=12 train.eval_every=100% checkpoint.keep=1 seed=3 "
    "hydra.run.dir=run"
)
SWEEP = (
    "train -m optimizer.lr=0.01,0.001 dataset=packed dataset.path=packed model=linear train.ema=0.9 batch=8 steps=6 "
    "checkpoint.every=2 hydra.sweep.dir=sweep"
)
SAME = " device=cpu name=kept launcher=inline launcher.threads=1 logger=jsonl telemetry.report=never"
PHOTOS = ("photos/val/bright/0.png", "photos/val/dark/1.png")
PREPROCESS = "preprocess.txt"  # preprocess.py of the version, so that no tool takes it for code of this one
PLACE, HOST = "/laboratory", "laboratory"  # in the place of the folder and the machine that made them
Lockstep = Callable[[str], str]  # runs a command in the folder of the files, and returns what it shows


def photos(folder: Path) -> None:
    """Grey photos of two brightnesses, under noise."""
    random = np.random.default_rng(0)
    for split, number in (("train", 8), ("val", 4)):
        for label, brightness in (("dark", 100), ("bright", 150)):
            (folder / split / label).mkdir(parents=True)
            for index in range(number):
                pixels = np.clip(random.normal(brightness, 60, (8, 8)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / split / label / f"{index}.png")


def numbers(lockstep: Lockstep, folder: Path) -> dict[str, Any]:
    """What the files give, by command; changes the files."""
    figures: dict[str, Any] = {}
    for name, command in {
        "evaluate": "evaluate run dataset.path=photos --json --out .",
        "evaluate the weights": "evaluate run/model.safetensors dataset=folder dataset.path=photos "
        "dataset.channels=1 dataset.decode_size=8 dataset.input_size=8 --json --out .",
        "predict": f"predict run {' '.join(PHOTOS)} --json",
        "predict the best of the sweep": f"predict sweep/best {PHOTOS[0]} --json",
        "runs": "runs . --json",
        "compare": "compare sweep --json",
    }.items():
        figures[name] = plain(json.loads(lockstep(command)))
    figures["predictions.csv"] = (folder / "predictions.csv").read_text().splitlines()[0]
    figures["pack"] = lockstep("pack --check packed").strip()
    figures["export"] = logits(folder / "exported.onnx")
    figures["clean"] = [row["checkpoints"] for row in json.loads(lockstep("clean sweep --json"))]
    lockstep("train resume=run steps=16")  # the files of the run change from here on
    figures["resume"] = scores(folder / "run")
    lockstep(f"train dataset=packed dataset.path=packed model=linear batch=8 steps=6 hydra.run.dir=of_pack{SAME}")
    figures["train the pack"] = scores(folder / "of_pack")
    return figures


def plain(value: Any) -> Any:
    """A result without what differs from call to call: times, the machine, the version."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    varying = ("lockstep", "path", "when", "started", "seconds", "hours", "img_per_s", "cpu_mem_gb", "kwh")
    varying += ("size",)  # of the logs, too, which are left out
    return {key: plain(item) for key, item in value.items() if key not in varying}


def scores(run: Path) -> Any:
    summary = json.loads((run / "summary.json").read_text())
    return {key: summary[key] for key in ("status", "step", "scores", "best", "best_step")}


def logits(file: Path) -> list[float]:
    """What an exported model computes for the photos."""
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    card = json.loads(session.get_modelmeta().custom_metadata_map["lockstep"])
    names: dict[str, Any] = {}
    exec((file.parent / PREPROCESS).read_text(), names)
    images = np.concatenate([names["preprocess"](str(file.parent / photo), card) for photo in PHOTOS])
    return [float(value) for value in session.run(["logits"], {"images": images})[0].ravel()]


def make(target: Path) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "files")

        def lockstep(command: str) -> str:
            words = [sys.executable, "-m", "lockstep", *shlex.split(command)]
            return subprocess.run(words, cwd=folder, check=True, text=True, stdout=subprocess.PIPE).stdout

        photos(folder / "photos")
        for command in ("pack photos packed --size 8 dataset.channels=1", RUN + SAME, SWEEP + SAME):
            lockstep(command)
        lockstep("export sweep/best --out exported.onnx")
        (folder / "preprocess.py").rename(folder / PREPROCESS)
        for path in folder.rglob("*"):
            if path.suffix in (".yaml", ".json", ".txt", ".log") and "checkpoints" not in path.parts:
                path.write_text(anonymous(path.read_text(), folder))
        shutil.copytree(folder, target, ignore=shutil.ignore_patterns(".lock", "*.log", "multirun.yaml"))
        recorded = {"sweep": SWEEP + SAME, **numbers(lockstep, folder)}
        (target / "numbers.json").write_text(json.dumps(recorded, indent=1) + "\n")


def anonymous(text: str, folder: Path) -> str:
    """A text of the files without the machine that made them."""
    for path in (folder, Path(__file__).parents[1]):
        text = text.replace(str(path), PLACE)
    text = text.replace(socket.gethostname(), HOST)
    text = re.sub(r'"platform": "[^"]*"', '"platform": "Linux"', text)
    return re.sub(r'"git": "[^"]*"', '"git": null', text)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
