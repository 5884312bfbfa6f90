"""Provokes each verdict, follows it, and compares the gain that it predicts with the gain that it brings.

Each case is a job that is slow for one reason. It is run, its verdict is read from `summary.json`, and it is run
again with the override that the verdict names. Both are run in turns. The gain is that in images per second from the
end of the first window to the end of the run, evaluations and checkpoints included.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from measure import Rows, parser, show, write

QUICK = ("device=cpu", "telemetry.interval=5", "logger=jsonl", "checkpoint.every=100%", "train.eval_every=100%")
FAKE = ("dataset=fake", "dataset.examples=512", "dataset.classes=10", "augment=none")


@dataclass(frozen=True)
class Case:
    """A job that is slow for a reason, and what makes it faster where no override does."""

    words: tuple[str, ...]
    remedy: tuple[str, ...] = ()


def photos(folder: Path) -> Path:
    """A folder of photos that take long to decode, in two classes."""
    from torchvision.io import encode_jpeg, write_file

    generator = np.random.default_rng(0)
    for split, number in (("train", 96), ("val", 8)):
        for n in range(number):
            place = folder / split / f"class{n % 2}"
            place.mkdir(parents=True, exist_ok=True)
            coarse = torch.from_numpy(generator.integers(0, 256, (3, 60, 80), dtype=np.uint8))
            large = nn.functional.interpolate(coarse[None].float(), size=(1500, 2000), mode="bilinear")[0].byte()
            write_file(str(place / f"{n}.jpg"), encode_jpeg(large, quality=90))
    return folder


def cases(folder: Path) -> dict[str, Case]:
    """The cases that this machine can have, by name."""
    tiny = ("model=digitnet", *FAKE, "dataset.channels=1", "dataset.size=8")
    images = ("model=basicnet", *FAKE, "dataset.channels=3", "dataset.size=32")
    return {
        "slow images": Case(
            (
                "model=digitnet",
                "dataset=folder",
                f"dataset.path={photos(folder / 'photos')}",
                "dataset.input_size=32",
                "loader=streaming",
                "loader.workers=1",
                "augment=none",
                "batch=16",
                "epochs=12",
                "telemetry.interval=6",
            )
        ),
        "tiny batch": Case((*tiny, "batch=4", "epochs=30")),
        "bf16": Case((*images, "precision=bf16", "batch=32", "epochs=6")),
        "too many threads": Case((*tiny, "batch=64", "launcher.threads=16", "epochs=20")),
        "bound by the optimizer": Case(
            ("model=linear", *FAKE, "dataset.channels=3", "dataset.size=256", "batch=4", "epochs=6")
        ),
        "too many evaluations": Case((*tiny, "batch=64", "epochs=40", "train.eval_every=2")),
        "too many checkpoints": Case((*tiny, "batch=64", "epochs=40", "checkpoint.every=1")),
        "slow rank": Case(
            (*tiny, "batch=64", "epochs=40", "strategy=ddp", "launcher.ranks=2", "loss=halting", "loss.seconds=0.01"),
            remedy=("loss.seconds=0",),
        ),
        "nothing": Case((*images, "model.channels_last=true", "batch=128", "epochs=12")),
    }


def trained(words: tuple[str, ...], folder: Path) -> tuple[float, Mapping[str, Any]]:
    """Images per second of a run, and its summary."""
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with tempfile.TemporaryDirectory(dir=folder) as output:
        command = [sys.executable, __file__, "--job", *QUICK, *words, f"output_root={output}"]
        done = subprocess.run(command, capture_output=True, text=True, env=here)
        if done.returncode:
            raise SystemExit(f"{' '.join(words)}\n{done.stderr}")
        (run,) = (path.parent for path in Path(output).glob("*/summary.json"))
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        config = lockstep_config(run)
        summary = json.loads((run / "summary.json").read_text())
    first, last = lines[0], lines[-1]
    rate = (last["step"] - first["step"]) * config["batch"] / (last["time"] - first["time"])
    return rate, summary


def lockstep_config(run: Path) -> dict[str, Any]:
    from lockstep.config import yaml_io

    return yaml_io.load(run / "config.yaml")


def case_row(case: Case, repeats: int, folder: Path) -> dict[str, Any]:
    """What a case's first verdict says, and what following it brought."""
    _, summary = trained(case.words, folder)
    verdict = summary["verdict"]
    change = tuple(filter(None, (verdict["override"],))) or case.remedy
    row: dict[str, Any] = {"verdict": verdict["sentence"], "predicted": verdict["gain"] or 1.0, "brought": 1.0}
    if change and verdict["gain"]:
        pairs = [(trained(case.words, folder)[0], trained((*case.words, *change), folder)[0]) for _ in range(repeats)]
        row["brought"] = statistics.median(after / before for before, after in pairs)
    return row


def main() -> None:
    options = parser(__doc__, repeats=3)
    options.add_argument("--only", help="the cases to run, with commas")
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        known = cases(Path(name))
        rows: Rows = {}
        for case in known if arguments.only is None else arguments.only.split(","):
            row = case_row(known[case], arguments.repeats, Path(name))
            print(
                f"{case}: {row['verdict']} [predicted {row['predicted']:.2f}, brought {row['brought']:.2f}]",
                flush=True,
            )
            rows[case] = {"predicted": row["predicted"], "brought": row["brought"]}
            rows[case]["off by"] = max(row["predicted"] / row["brought"], row["brought"] / row["predicted"])
    show("gains", rows, ratios=False)
    write(arguments.json, {"gains": rows})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        import lockstep

        sys.argv[1:2] = []
        lockstep.main(extensions=["provoked"])
        sys.exit()
    main()
