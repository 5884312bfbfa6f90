"""Asks jobs to stop at random moments of every phase, and measures the time until all their processes have ended.

    python benchmarks/reliability/stop.py --tries 20 --json stop.json

Each job is the real command. It gets one SIGTERM a random time after the beginning of a phase: while it starts,
trains, goes through the micro-batches of a slow step, evaluates, compiles, decodes a data set into memory or tries
what fits into memory. It must end with exit code 75 and one sentence, and leave no process. Linux. Exits with 1 if
one does not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

from soak import MARK, ROOT, processes

PATIENCE_S = 120.0
STOPPED = 75
RANKS = ("launcher.ranks=2", "strategy=ddp", "launcher.threads=1")
SMALL = ("logger=jsonl", "telemetry.interval=1", "device=cpu")
# Images of 96 pixels, whose steps and evaluations take seconds on a CPU.
SLOW = ("dataset=fake", "dataset.size=96", "dataset.classes=10", "model=resnet18", "launcher.threads=1")
CUT = ("dataset.examples=256", "batch=128", "train.micro_batches=32", "steps=1000", "train.eval_every=100%")
LONG = ("dataset.examples=4000", "batch=4", "train.eval_every=1", "train.eval_batch=8", "steps=1000")
PHOTOS = 3000

console = Console(highlight=False, width=110)


def started(folder: Path, out: Path) -> bool:
    """The phase begins at once."""
    return True


def trained(folder: Path, out: Path) -> bool:
    """The phase begins after the first step."""
    return (folder / "metrics.jsonl").exists() and "loss/train" in (folder / "metrics.jsonl").read_text()


def launched(folder: Path, out: Path) -> bool:
    """The phase begins when the run folder exists."""
    return (folder / "config.yaml").exists()


def compiling(folder: Path, out: Path) -> bool:
    """The phase begins with the first compilation."""
    return "compiling the model" in out.read_text()


@dataclass
class Phase:
    """A job and the phase in which it is stopped.

    Fields:
        name: the name of the phase.
        overrides: the overrides of the job.
        begins: whether the phase has begun, from the run folder and the output so far.
        within: the job is stopped at a random time within so many seconds of the phase's beginning.
        seconds: the measured seconds from each signal to the end of the last process.
        faults: a sentence for each stop that went wrong.
    """

    name: str
    overrides: tuple[str, ...]
    begins: Callable[[Path, Path], bool]
    within: float
    seconds: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def phases(photos: Path) -> list[Phase]:
    folder = ("dataset=folder", f"dataset.path={photos}", "dataset.decode_size=32", "model=linear")
    return [
        Phase("start-up, one process", ("launcher.threads=1",), started, 4.0),
        Phase("start-up, two ranks, forked", RANKS, started, 5.0),
        Phase("start-up, two ranks, elastic", (*RANKS, "launcher=elastic"), started, 9.0),
        Phase("training, one process", ("epochs=1000", "launcher.threads=1"), trained, 3.0),
        Phase("training, two ranks", ("epochs=1000", *RANKS), trained, 3.0),
        Phase("micro-batches, one process", (*SLOW, *CUT), trained, 10.0),
        Phase("micro-batches, two ranks", (*SLOW, *CUT, *RANKS), trained, 10.0),
        Phase("evaluation, one process", (*SLOW, *LONG), trained, 10.0),
        Phase("evaluation, two ranks", (*SLOW, *LONG, *RANKS), trained, 10.0),
        Phase("compiling", ("model.compile=true", "launcher.threads=1", "epochs=1000"), compiling, 40.0),
        Phase("decoding a resident set", (*folder, "loader=resident", "launcher.threads=1"), launched, 6.0),
        Phase("decoding a resident set, two ranks", (*folder, "loader=resident", *RANKS), launched, 8.0),
        Phase("trying micro-batches", (*SLOW, "batch=512", "train.micro_batches=auto"), launched, 8.0),
    ]


def make_photos(root: Path) -> None:
    """A folder of images whose decoding takes seconds."""
    pixels = np.random.default_rng(0).integers(0, 256, (400, 400, 3), dtype=np.uint8)
    for split, count in (("train", PHOTOS), ("val", 8)):
        (root / split / "a").mkdir(parents=True)
        (root / split / "b").mkdir()
        Image.fromarray(pixels).save(root / split / "a" / "0.png")
        for number in range(1, count):
            os.link(root / split / "a" / "0.png", root / split / "ab"[number % 2] / f"{number}.png")


def attempt(phase: Phase, folder: Path, chance: random.Random) -> None:
    """Start the job of a phase, stop it at a random moment, and check how it ends."""
    out = folder.with_suffix(".out")
    with out.open("w") as file:
        process = subprocess.Popen(
            [
                sys.executable,
                "train.py",
                *SMALL,
                *phase.overrides,
                f"hydra.run.dir={folder}",
                f"output_root={folder.parent}",
            ],
            cwd=ROOT,
            # Each job has its own cache, so that each compiles for as long as the first.
            env={**os.environ, MARK: str(folder), "TORCHINDUCTOR_CACHE_DIR": str(folder.with_suffix(".cache"))},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    until = time.monotonic() + PATIENCE_S
    while not phase.begins(folder, out) and process.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    delay = chance.uniform(0.05, phase.within)
    time.sleep(delay)
    if process.poll() is not None:
        phase.faults.append(f"{folder.name}: ended with {process.returncode} before it was asked to, see {out}")
        return
    process.terminate()
    stop_time = time.monotonic()
    while (left := processes(folder)) and time.monotonic() < stop_time + PATIENCE_S:
        time.sleep(0.02)
    phase.seconds.append(time.monotonic() - stop_time)
    for pid in left:
        os.kill(pid, 9)
    code, printed = process.wait(), out.read_text()
    if left or code != STOPPED or "Traceback" in printed or "stopped" not in printed:
        # Python had not installed its signal handlers yet: the signal killed it.
        if code == -15 and phase.begins is started and delay < 1:
            return
        phase.faults.append(
            f"{folder.name}: asked after {delay:.2f} s, ended with {code}, {len(left)} left, see {out}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=20, help="of each phase")
    parser.add_argument("--only", default="", help="phases whose names contain this")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--json", type=Path, help="where the figures go")
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    root = Path(tempfile.mkdtemp(prefix="lockstep-stop-"))
    make_photos(root / "photos")
    table = Table("phase", "stops", "median s", "longest s", "faults")
    chosen = [phase for phase in phases(root / "photos") if arguments.only in phase.name]
    for number, phase in enumerate(chosen):
        for count in range(arguments.tries):
            attempt(phase, root / f"{number}-{count}", chance)
        middle, longest = (f"{function(phase.seconds or [0.0]):.1f}" for function in (statistics.median, max))
        console.print(
            f"{phase.name}: {len(phase.seconds)} stops, median {middle} s, longest {longest} s", soft_wrap=True
        )
        for fault in phase.faults:
            console.print(f"  {fault}", soft_wrap=True)
        table.add_row(phase.name, str(len(phase.seconds)), middle, longest, str(len(phase.faults)))
    console.print(table)
    if arguments.json:
        figures = {phase.name: {"seconds": phase.seconds, "faults": phase.faults} for phase in chosen}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    if any(phase.faults for phase in chosen):
        console.print(f"the folders are kept in {root}")
        sys.exit(1)
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
