"""What checkpoints cost: a save, a load, and a resume, for resnet50d with AdamW (307 MB) and its real command.

    python benchmarks/checkpoint.py --json checkpoint.json

Save: how long training stands still, and how long until everything is on the disk (for Lockstep also hashed).
Compared with torch.save and safetensors with fsync, and with torch.distributed.checkpoint's async_save, which does
not fsync. Load: from a file to model and optimizer, compared with torch.load and load_state_dict; Lockstep also
checks the sha256 of every file. Resume: from the start of the command to its first new step, and from nothing.
Figures are medians; CPU, one thread; files are read from the page cache.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import timm
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lockstep.checkpoint import reading
from lockstep.checkpoint.reading import load_newest
from lockstep.checkpoint.writing import Checkpointer
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_write import sync
from measure import Figures, Rows, in_turns, parser, scaled, show, timed, write

ROOT = Path(__file__).parent.parent
JOB = ("dataset=fake", "dataset.size=64", "dataset.examples=64", "dataset.classes=1000", "model=resnet50d", "batch=8")
QUIET = ("telemetry.interval=1", "logger=jsonl", "train.eval_every=100%", "device=cpu")
Parts = tuple[nn.Module, torch.optim.Optimizer]


def parts() -> Parts:
    """A model and an optimizer that has done a step."""
    model = timm.create_model("resnet50d")
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def flat(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and optimizer state as one flat dict, which safetensors needs."""
    moments = {
        f"{number}.{name}": tensor
        for number, state in optimizer.state_dict()["state"].items()
        for name, tensor in state.items()
    }
    return {**model.state_dict(), **moments}


def saving(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, repeats: int) -> dict[str, Figures]:
    """Milliseconds that training stands still, and until a save is on the disk."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    # Each checkpoint replaces the one before it, as in a run that improves at every evaluation.
    keeper = Checkpointer(run_dir=RunDir.at(folder / "run"), fingerprint={}, keep=1, keep_best=0, writes=True)
    durable: dict[str, list[float]] = {}
    steps = iter(range(1, 1000))

    def in_line(name: str, save: Callable[[Path], object]) -> float:
        def whole() -> None:
            save(folder / name)
            sync(folder / name)

        durable.setdefault(name, []).append(timed(whole))
        return durable[name][-1]

    def stands_still(name: str, begin: Callable[[], Callable[[], object]]) -> float:
        began = time.perf_counter()
        wait = begin()
        stopped = time.perf_counter() - began
        wait()
        durable.setdefault(name, []).append(time.perf_counter() - began)
        return stopped

    def asynchronous() -> Callable[[], object]:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        future = dcp.async_save(state, checkpoint_id=folder / f"dcp{next(steps)}")
        return lambda: future.result()  # type: ignore[union-attr]

    def ours() -> Callable[[], object]:
        step = next(steps)
        progress = {"step": step, "score": None, "best": None, "best_step": 0, "window": None}
        keeper.save(model=model, ema=None, optimizer=optimizer, scaler=scaler, progress=progress)
        return keeper.wait

    def plain(path: Path) -> None:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)

    cases = {
        "dcp.async_save": partial(stands_still, "dcp.async_save", asynchronous),
        "torch.save, fsync": partial(in_line, "torch.save, fsync", plain),
        "safetensors, fsync": partial(
            in_line, "safetensors, fsync", lambda path: save_file(flat(model, optimizer), path)
        ),
        "lockstep": partial(stands_still, "lockstep", ours),
    }
    stopped = in_turns(cases, repeats)
    keeper.close()
    on_disk = {name: sorted(seconds)[len(seconds) // 2] for name, seconds in durable.items()}
    return {"stands still": scaled(stopped, 1000), "until it is on the disk": scaled(on_disk, 1000)}


def loading(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, repeats: int) -> Figures:
    """Milliseconds from files to a model and an optimizer."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def plain(mmap: bool) -> None:
        saved = torch.load(folder / "torch.save, fsync", mmap=mmap)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    def ours() -> None:
        loaded = load_newest(RunDir(folder / "run"))
        assert loaded is not None
        reading.restore_from(loaded, model=model, ema=None, optimizer=optimizer, scaler=scaler)

    cases = {
        "torch.load": partial(timed, partial(plain, mmap=False)),
        "torch.load, mmap": partial(timed, partial(plain, mmap=True)),
        "safetensors, tensors only": partial(timed, partial(load_file, folder / "safetensors, fsync")),
        "lockstep, hashes checked": partial(timed, ours),
    }
    return scaled(in_turns(cases, repeats), 1000)


def first_step(folder: Path, steps: int) -> float:
    """Seconds from the start of the command to the log line of its first new step."""
    run, began = folder / "run", time.time()
    words = [*JOB, *QUIET, f"steps={steps}", f"hydra.run.dir={run}", f"output_root={folder}"]
    subprocess.run([sys.executable, "train.py", *words], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    times = (json.loads(line)["time"] for line in (run / "metrics.jsonl").read_text().splitlines())
    return next(float(written) - began for written in times if written > began)


def resuming(repeats: int) -> Figures:
    """Seconds to the first new step: of a command, and of the same one with two more steps."""
    turns: list[Figures] = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            turns.append({"from nothing": first_step(Path(folder), 2), "resumed": first_step(Path(folder), 4)})
    return {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}


def main() -> None:
    arguments = parser(__doc__, repeats=9, of="saves and loads, and three times the resumes").parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch.distributed")
    tables: dict[str, Rows] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)  # for dcp
        model, optimizer = parts()
        tables["a save, ms"] = saving(folder, model, optimizer, arguments.repeats)
        tables["a load, ms"] = {"resnet50d, AdamW": loading(folder, model, optimizer, arguments.repeats)}
        dist.destroy_process_group()
    tables["to the first new step, s"] = {"resnet50d": resuming(max(1, arguments.repeats // 3))}
    for title, rows in tables.items():
        show(title, rows)
    write(arguments.json, tables)


if __name__ == "__main__":
    main()
