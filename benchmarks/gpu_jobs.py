"""Shared by the steps of `gpu_check.py`: how they report results, train a job and read its files."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from lockstep import checkpoint
from lockstep.core.run_dir import RunDir
from lockstep.core.world import World
from lockstep.training import experiment
from lockstep.training.resolved_job import ResolvedJob
from measure import living
from runs import prepared

ROOT = Path(__file__).parent.parent
# A variable in the environment of all processes of a step: torchrun's ranks are in sessions of their own.
MARK = "LOCKSTEP_GPU_CHECK"
# Seconds to wait for an event that usually takes moments, also on a slow machine. The limit of a step is larger.
PATIENCE_S = 60.0
QUIET = ("name=check", "logger=jsonl", "telemetry.interval=1")
# Small images, and an evaluation only at the end. The learning rate is low, so that rounding errors do not grow.
SMALL = (
    *("dataset=fake", "dataset.size=32", "dataset.classes=10", "steps=3"),
    *("optimizer=sgd", "optimizer.lr=0.01", "schedule=constant", "train.eval_every=100%", "checkpoint.every=100%"),
)
NORMED = (*SMALL, "model=test_resnet", "augment=crop_flip")


class Failed(Exception):
    """A step failed: one sentence with the expected and the actual result."""


@dataclass(frozen=True)
class Place:
    """Where a step runs: on `cpu` or `cuda`, and in its own folder."""

    device: str
    folder: Path

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def half(self) -> str:
        """The 16-bit format to check: float16 on a GPU, because it has a loss scaler, else bfloat16."""
        return "fp16" if self.cuda else "bf16"

    @property
    def batch(self) -> tuple[str, str]:
        """Overrides for a batch that is quick on this device, and for a data set of three batches."""
        batch = 128 if self.cuda else 16
        return f"batch={batch}", f"dataset.examples={3 * batch}"


def expect(condition: bool, sentence: str) -> None:
    """Raise Failed with `sentence` unless `condition` holds."""
    if not condition:
        raise Failed(sentence)


def prepared_job(place: Place, name: str, *overrides: str) -> tuple[ResolvedJob, RunDir]:
    """A job on this device, and its run folder `name`."""
    return prepared(place.folder / name, [*QUIET, f"device={place.device}", *overrides])


def trained(place: Place, name: str, *overrides: str, heartbeat: Callable[[], None] = lambda: None) -> RunDir:
    """Train a job in this process, or resume the run `name`; `heartbeat` is called after each step."""
    job, run = prepared_job(place, name, *overrides)
    torch.set_num_threads(int(job.launcher.threads))
    experiment.run(job, run, World.solo("cuda:0" if place.cuda else "cpu"), heartbeat=heartbeat)
    return run


def command(place: Place, name: str, *overrides: str, launch: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Start `train.py` as a user does, with the run folder `name` in the step's folder; its stderr is a pipe."""
    folder = place.folder / name
    words = [*QUIET, f"device={place.device}", f"output_root={place.folder}", f"hydra.run.dir={folder}", *overrides]
    return subprocess.Popen(
        [sys.executable, *launch, "train.py", *words],
        cwd=ROOT,
        env={**os.environ, MARK: str(folder)},
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> None:
    """Wait for a command, and raise Failed if it ends with another code than `code`."""
    _, errors = process.communicate()
    print(errors, file=sys.stderr)
    last = (errors.splitlines() or ["no message"])[-1]
    expect(process.returncode == code, f"train.py ended with {process.returncode}, expected {code}: {last}")


def wait_for(condition: Callable[[], bool], event: str) -> None:
    """Poll until `condition` holds, and raise Failed if it does not for too long."""
    began = time.monotonic()
    while not condition():
        expect(time.monotonic() < began + PATIENCE_S, f"{event}: not so within {PATIENCE_S:.0f} s")
        time.sleep(0.05)


def marked(folder: Path) -> list[int]:
    """The living processes that were started for something in `folder` (Linux; elsewhere none are found)."""
    return living(f"{MARK}={folder}")


def kill(pids: list[int]) -> None:
    """Kill processes; those that have ended already are ignored."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def losses(run: RunDir) -> list[float]:
    """The training loss of each step."""
    lines = map(json.loads, run.metrics.read_text().splitlines())
    return [line["loss/train"] for line in lines if "loss/train" in line]


def state(run: RunDir) -> dict[str, bytes]:
    """Weights, momenta and loss scale of a run's newest checkpoint, as bytes."""
    loaded = newest(run)
    momenta = {
        f"momentum of {name}": entries["momentum_buffer"]
        for name, entries in loaded.state["optimizer"]["state"].items()
    }
    tensors = {name: tensor.contiguous().numpy().tobytes() for name, tensor in {**loaded.model, **momenta}.items()}
    return {**tensors, "scaler": repr(loaded.state["scaler"]).encode()}


def newest(run: RunDir) -> checkpoint.LoadedCheckpoint:
    """The newest checkpoint of a run."""
    path = checkpoint.latest_valid(run.checkpoints)
    expect(path is not None, f"{run.path.name} has no checkpoint")
    assert path is not None
    return checkpoint.load(path)


def expect_same_bits(actual: RunDir, expected: RunDir, title: str) -> None:
    """Raise Failed, with the first difference, unless two runs ended with the same state."""
    ours, theirs = state(actual), state(expected)
    different = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    expect(not different, f"{title}: {len(different)} of {len(theirs)} tensors differ, e.g. {different[:1]}")


def largest_loss_difference(actual: RunDir, expected: RunDir) -> float:
    """The largest difference of the losses at a step, relative to `expected`; infinite if one is not finite."""
    pairs = list(zip(losses(actual), losses(expected), strict=True))
    if not all(math.isfinite(loss) for pair in pairs for loss in pair):
        return math.inf
    return max(abs(loss - reference) / abs(reference) for loss, reference in pairs)


def largest_weight_difference(actual: RunDir, expected: RunDir) -> float:
    """The largest difference in the tensors of the model, relative to the largest number of each tensor."""
    ours, theirs = newest(actual).model, newest(expected).model
    return max(
        float((ours[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-12))
        for name, tensor in floats(theirs)
    )


def floats(tensors: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """The floating-point tensors, without counters."""
    return [(name, tensor) for name, tensor in tensors.items() if tensor.is_floating_point()]
