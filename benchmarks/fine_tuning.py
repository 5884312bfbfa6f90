"""Compare `experiment=photos` with the defaults of fastai and ultralytics: top-1 and CPU time on the same photos.

    python benchmarks/fine_tuning.py lockstep FOLDER --epochs 3 --size 32 --seed 0
    export OMP_NUM_THREADS=1
    OTHER/bin/python benchmarks/fine_tuning.py fastai FOLDER --epochs 3 --size 32 --seed 0
    OTHER/bin/python benchmarks/fine_tuning.py ultralytics FOLDER --epochs 3 --size 32 --seed 0

FOLDER has `train/CLASS` and `val/CLASS`; OTHER is an environment with `pip install fastai ultralytics`. All train a
ResNet-18 from random weights, for the same epochs, on one thread of the CPU, with their own batch, augmentation,
optimizer and schedule. The score is that of the best epoch. The time is that of all processes, from the imports to
the end, because a busy machine changes it less than the clock.
"""

import argparse
import csv
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# ultralytics' yolo11-cls-resnet18.yaml without weights: torchvision's network up to its last stage, and its own head.
RESNET18 = {
    "nc": 1000,
    "backbone": [[-1, 1, "TorchVision", [512, "resnet18", None, True, 2]]],
    "head": [[-1, 1, "Classify", ["nc"]]],
}


def lockstep(folder: str, epochs: int, size: int, seed: int, out: str) -> float:
    words = [f"dataset.path={folder}", f"dataset.decode_size={size}", f"epochs={epochs}", f"seed={seed}"]
    line = [sys.executable, "train.py", "experiment=photos", *words, "model=resnet18", "model.pretrained=false"]
    subprocess.run(
        [*line, "launcher.threads=1", "device=cpu", f"hydra.run.dir={out}/run"],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return float(json.loads(Path(out, "run", "summary.json").read_text())["best"])


def fastai(folder: str, epochs: int, size: int, seed: int, out: str) -> float:
    vision = import_module("fastai.vision.all")
    vision.set_seed(seed)
    data = vision.ImageDataLoaders.from_folder(
        folder, valid="val", item_tfms=vision.Resize(size), batch_tfms=vision.aug_transforms(), num_workers=2
    )
    learner = vision.vision_learner(data, vision.resnet18, pretrained=False, metrics=vision.accuracy, path=out)
    with learner.no_bar(), learner.no_logging():
        learner.fit_one_cycle(epochs)
    return 100 * max(float(row[-1]) for row in learner.recorder.values)


def ultralytics(folder: str, epochs: int, size: int, seed: int, out: str) -> float:
    network = Path(out, "resnet18-cls.yaml")  # its own file of this network downloads weights
    network.write_text(json.dumps(RESNET18))
    chosen: dict[str, Any] = {"model": str(network), "pretrained": False, "data": folder, "epochs": epochs}
    chosen |= {"imgsz": size, "seed": seed, "device": "cpu", "workers": 2, "plots": False, "project": out}
    trainer = import_module("ultralytics.models.yolo.classify").ClassificationTrainer(overrides=chosen)
    trainer.train()
    with Path(trainer.save_dir, "results.csv").open() as file:
        return 100 * max(float(row["metrics/accuracy_top1"]) for row in csv.DictReader(file))


TOOLS: dict[str, Callable[..., float]] = {
    "lockstep": lockstep,
    "fastai": fastai,
    "ultralytics": ultralytics,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("folder", type=lambda text: str(Path(text).absolute()))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as out:
        score = TOOLS[words.tool](words.folder, words.epochs, words.size, words.seed, out)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(usage.ru_utime + usage.ru_stime for usage in used)
    sys.stdout.write(f"{words.tool} seed {words.seed}: {score:.2f} % top-1 in {seconds:.0f} s\n")


if __name__ == "__main__":
    main()
