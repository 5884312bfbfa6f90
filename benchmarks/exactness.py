"""What exactness costs: each part of the promise against the same work without it, in turns, on this machine.

    python benchmarks/exactness.py --json exactness.json

Masks: dropout by the keys of the examples, compared with torch's dropout. Strict: the real command on one and two
ranks. Figures are medians; CPU, one thread per rank. `benchmarks/checkpoint.py` measures what a save costs.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from lockstep.core.data_protocols import Shard
from lockstep.models import DigitNet
from lockstep.stochastic import KeyedModel, key_draws
from lockstep.stochastic.numbers import forward_keys
from measure import Rows, in_turns, parser, report, scaled, timed

ROOT = Path(__file__).parent.parent


def masks() -> Rows:
    """Microseconds of a forward and backward pass in training: by torch's generator and by keys."""
    keys = forward_keys(0, Shard(1, 0, torch.empty(64), torch.zeros(64), torch.arange(64), 64, 0, 1))

    def one_pass(model: nn.Module, inputs: tuple[Any, ...]) -> None:
        model(*inputs).sum().backward()

    rows = {}
    shapes = {f"Dropout, 64 x {n:,}": (n,) for n in (512, 9216, 65536)}
    layers: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
        name: (nn.Sequential(nn.Identity(), nn.Dropout(0.5)), shape) for name, shape in shapes.items()
    }
    layers["digitnet"] = (DigitNet().build(10, (1, 8, 8)), (1, 8, 8))
    options: dict[str, Any] = {"drop_rate": 0.1, "drop_path_rate": 0.1, "num_classes": 10}
    layers["resnet18 at 32 px, dropout and drop path"] = (timm.create_model("resnet18", **options), (3, 32, 32))
    small: dict[str, Any] = {**options, "img_size": 32, "patch_size": 4, "attn_drop_rate": 0.1, "proj_drop_rate": 0.1}
    vit = timm.create_model("vit_tiny_patch16_224", **small)
    layers["vit_tiny, 64 patches, four kinds of dropout"] = (vit, (3, 32, 32))
    for name, (model, shape) in layers.items():
        model.train()
        plain = copy.deepcopy(model)
        keyed = KeyedModel(model, key_draws(model, torch.zeros(1, *shape), 0))
        images = torch.randn(64, *shape, requires_grad=True)
        cases = {
            "torch": partial(timed, partial(one_pass, plain, (images,))),
            "keyed": partial(timed, partial(one_pass, keyed, (images, keys))),
        }
        rows[name] = scaled(in_turns(cases, 10), 1e6)
    return rows


def step_ms(*job: str) -> float:
    """Milliseconds per step of the real command on the CPU, from its own log, without the first window."""
    quiet = ("logger=jsonl", "train.eval_every=100%", "checkpoint.every=100%", "device=cpu")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "train.py", *job, *quiet, f"hydra.run.dir={folder}/run", f"output_root={folder}"],
            cwd=Path(__file__).parent.parent,
            env={**os.environ, "OMP_WAIT_POLICY": "passive"},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        lines = map(json.loads, Path(folder, "run", "metrics.jsonl").read_text().splitlines())
        return statistics.median([line["perf/step_ms"] for line in lines if "perf/step_ms" in line][1:])


def strict(repeats: int) -> Rows:
    """Milliseconds per step of the real command."""
    small = ("dataset=fake", "dataset.size=32", "dataset.classes=10", "model=resnet18", "batch=32", "steps=8")
    step = partial(step_ms, *small, "launcher.threads=1", "telemetry.interval=2")
    rows = {}
    for ranks in (1, 2):
        on = f"launcher.ranks={ranks}"
        cases = {
            "exact": partial(step, on),
            "exact, as many micro-batches": partial(step, on, f"train.micro_batches={4 // ranks}"),
            "strict": partial(step, on, "repro=strict"),
        }
        rows[f"{ranks} rank{'s' * (ranks > 1)}"] = in_turns(cases, repeats)
    return rows


def main() -> None:
    arguments = parser(__doc__, repeats=3, of="of the runs of the real command").parse_args()
    torch.set_num_threads(1)
    measures: dict[str, Callable[[], Rows]] = {
        "masks of a forward pass, us": masks,
        "strict, ms per step of resnet18 at 32 px, batch 32": partial(strict, arguments.repeats),
    }
    report(arguments.json, measures)


if __name__ == "__main__":
    main()
