"""Kills jobs again and again at random moments, and shows that the killed run equals a run that was never killed.

    python benchmarks/reliability/soak.py --kills 100 --json soak.json

For each number of ranks a small real job (dropout, averaged weights, bfloat16, loader workers, checkpoints every ten
steps) is trained to its end once. Then the same command is started again and again in one folder, and after a random
time all its processes are killed with SIGKILL, or it gets a signal that asks it to stop, so that kills happen in
imports, start-up, training, saving and evaluation.

A run that reaches its end is compared with the first, to the last bit: the newest checkpoint, all
logged figures (except those of speed), and that each figure of each step is in each file exactly once. Then the next
run begins in a new folder, until all kills are used. Linux. Exits with 1 if there was any difference.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from lockstep.checkpoint import reading
from lockstep.checkpoint.files import find_corruption
from lockstep.checkpoint.reading import latest_valid, undamaged_facts
from lockstep.core.errors import InputError, Stopped
from lockstep.core.run import candidates
from lockstep.core.run_dir import RunDir

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
from measure import Rows, console, living, parser, show, write  # noqa: E402

JOB = (
    *(
        "name=soak",
        "device=cpu",
        "batch=100",
        "model.dropout=0.3",
        "optimizer=sgd",
        "train.ema=0.9",
        "precision=bf16",
    ),
    *("loader=streaming", "loader.workers=2", "checkpoint.every=10", "telemetry.interval=5"),
    *("logger=[jsonl,tensorboard]", "launcher.threads=1"),
)
MARK = "LOCKSTEP_SOAK_RUN"  # in the environment of every process of a job
SOONEST_S = 1.0
ENOUGH = 10  # differences on one number of ranks after which it is given up
# Half of the kills are SIGKILL of every process, and half one of these to the command or to its process group. A job
# must save after these, and end with exit code 75 within STOPPED_S seconds.
STOPS = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGXCPU, signal.SIGALRM)
STOPPED_S = 120.0
GONE_S = 10.0  # seconds within which the last process of a job must have ended
# Figures of speed: the same steps in both runs, but other values.
TIMED = ("perf/", "img_per_s", "data_wait_pct")
# Of the step the run is at when so many seconds have passed: figures of the hardware, pictures of predictions.
SAMPLED = ("cpu/", "gpu/", "system/", "images/", "precision_recall/", "weights/")


@dataclass
class Tally:
    """Counts for the runs on one number of ranks; `resumes` are the starts in a folder where a job was killed."""

    ranks: int
    seconds: float = 0.0
    runs: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    signals: Counter[str] = field(default_factory=Counter)
    resumes: Counter[str] = field(default_factory=Counter)
    hash_equal: int = 0
    losses_equal: int = 0
    files_whole: int = 0
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Record:
    """The files of a finished run.

    Fields:
        fingerprint: a hash of its newest checkpoint.
        weights: a hash of `model.safetensors`.
        status: the status in `summary.json`.
        figures: by file, all figures as (tag, step, value).
    """

    fingerprint: str
    weights: str
    status: str
    figures: dict[str, list[tuple[str, int, object]]]

    @classmethod
    def of(cls, run: RunDir) -> Record:
        return cls(
            fingerprint=fingerprint(run),
            weights=hashlib.sha256(run.weights.read_bytes()).hexdigest(),
            status=run.read_summary()["status"],
            figures={
                "metrics.jsonl": list(from_lines(run.metrics)),
                "metrics.csv": list(from_table(run.table)),
                "TensorBoard": list(from_events(run.path)),
            },
        )

    def losses(self) -> list[tuple[str, int, object]]:
        return [figure for figure in self.figures["metrics.jsonl"] if figure[0].startswith("loss/")]

    def differences(self, reference: Record) -> Iterator[str]:
        """The differences of the files from those of `reference`, one sentence each."""
        if self.status != "completed":
            yield f"summary.json says {self.status}"
        if self.fingerprint != reference.fingerprint:
            yield "the newest checkpoint is another"
        if self.weights != reference.weights:
            yield "model.safetensors differs"
        for name, figures in self.figures.items():
            times = Counter((tag, step) for tag, step, _ in figures)
            expected = Counter((tag, step) for tag, step, _ in reference.figures[name])
            if several := [example for example, count in times.items() if count > 1]:
                yield f"{name} has {len(several)} figures more than once, such as {several[0]}"
            odd = {place for place in times.keys() ^ expected.keys() if not place[0].startswith(SAMPLED)}
            if odd:
                yield f"{name} misses, or has besides, {len(odd)} figures, such as {min(odd)}"
            if changed := set(untimed(figures)) ^ set(untimed(reference.figures[name])):
                yield f"{name} has {len(changed)} other values, such as {min(changed, key=repr)}"


def fingerprint(run: RunDir) -> str:
    """A hash of everything in the newest checkpoint."""
    newest = latest_valid(run.checkpoints, say=lambda sentence: None)
    assert newest is not None, f"{run.path} has no checkpoint"
    loaded, digest = reading.read_checkpoint(newest), hashlib.sha256()
    for part in leaves((loaded.model, loaded.ema, loaded.state, loaded.facts["progress"])):
        digest.update(part)
    return digest.hexdigest()


def leaves(value: Any) -> Iterator[bytes]:
    """The content of a tree of tensors and plain values, as bytes, in a fixed order."""
    if isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield repr(key).encode()
            yield from leaves(value[key])
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from leaves(part)
    else:
        yield repr(value).encode()


def untimed(figures: list[tuple[str, int, object]]) -> Iterator[tuple[str, int, object]]:
    return (figure for figure in figures if not figure[0].startswith((*TIMED, *SAMPLED)))


def from_lines(path: Path) -> Iterator[tuple[str, int, object]]:
    for line in map(json.loads, path.read_text().splitlines()):
        yield from ((tag, line["step"], value) for tag, value in line.items() if tag not in ("step", "time"))


def from_table(path: Path) -> Iterator[tuple[str, int, object]]:
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            yield from ((tag, int(row["step"]), value) for tag, value in row.items())


def from_events(folder: Path) -> Iterator[tuple[str, int, object]]:
    """The figures that TensorBoard shows: training and evaluations have the same tags, in folders of their own."""
    for name in ("", "val", "val_ema"):
        if not (folder / name).is_dir():  # without TensorBoard, as in node_kills.py
            continue
        read = EventAccumulator(str(folder / name), {"scalars": 0}).Reload()
        for tag in read.Tags()["scalars"]:
            yield from ((f"{tag} {name}", event.step, event.value) for event in read.Scalars(tag))


def processes(folder: Path) -> list[int]:
    """The living processes of the job at `folder`, by the mark in their environment."""
    return living(f"{MARK}={folder}\0")


def shared_memory() -> set[str]:
    """The files in shared memory that no process uses. Files in use belong to other jobs on this machine."""
    files = list(Path("/dev/shm").glob("*"))
    held = ""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            held += (entry / "maps").read_text()
            held += "".join(f"{path.readlink()}\n" for path in (entry / "fd").iterdir())
        except OSError:  # the process has just ended, or belongs to another user
            continue
    return {path.name for path in files if str(path) not in held and path.exists()}


def kill(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Send SIGKILL to every process of a job."""
    everyone = processes(folder)
    os.killpg(process.pid, signal.SIGKILL)
    for pid in everyone:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def stop(process: subprocess.Popen[bytes], number: signal.Signals, *, group: bool) -> int | None:
    """Ask a job to stop; returns its exit code, or None if it saved or had nothing to save."""
    if group:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    code = process.wait(STOPPED_S)
    return None if code == Stopped.exit_code else code


def start(folder: Path, *overrides: str, shell: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """Start the command as a user does; its output is appended to a file beside the folder."""
    words = [sys.executable, "train.py", *overrides, f"hydra.run.dir={folder}", f"output_root={folder.parent}"]
    with folder.with_suffix(".out").open("ab") as out:
        return subprocess.Popen(
            [*shell, *words],
            cwd=ROOT,
            env={**os.environ, "OMP_WAIT_POLICY": "passive", MARK: str(folder)},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def overrides_of(ranks: int, steps: int) -> list[str]:
    return [*JOB, f"steps={steps}", f"launcher.ranks={ranks}", f"strategy={'ddp' if ranks > 1 else 'single'}"]


def moment(run: RunDir, started: float) -> str:
    """What a job, started at the time `started` and killed now, was doing."""
    if not run.metrics.exists() or run.metrics.stat().st_mtime < started:
        return "starting"
    return "saving" if any(run.checkpoints.glob(".*.tmp")) else "training"


def soak(tally: Tally, root: Path, *, kills: int, steps: int, chance: random.Random) -> None:
    """Train on `tally.ranks` ranks once without kills, and then until there were `kills` kills."""
    reference = RunDir(root / f"{tally.ranks}-reference")
    began = time.monotonic()
    if failed := start(reference.path, *overrides_of(tally.ranks, steps)).wait():
        tally.faults.append(f"the run that nobody killed ended with exit code {failed}")
        return
    tally.seconds = time.monotonic() - began
    expected = Record.of(reference)
    litter = shared_memory()
    while tally.kills.total() < kills and len(tally.faults) < ENOUGH:
        tally.runs += 1
        run = RunDir(root / f"{tally.ranks}-{tally.runs}")
        while (code := attempt(tally, run, kills, steps, chance)) is None:
            pass
        if code:
            tally.faults.append(
                f"run {run.path.name}: ended with exit code {code}, see {run.path.with_suffix('.out')}"
            )
            continue
        compare(tally, run, expected)
        console.print(f"{tally.ranks} ranks, run {tally.runs} at its end, killed {tally.kills.total()} times so far")
    until = time.monotonic() + GONE_S
    while (left := shared_memory() - litter) and time.monotonic() < until:
        time.sleep(0.5)  # other jobs that have just ended remove theirs
    if left:
        tally.faults.append(f"/dev/shm has {', '.join(sorted(left))} behind the jobs")


def attempt(tally: Tally, run: RunDir, kills: int, steps: int, chance: random.Random) -> int | None:
    """Start or resume a run; returns its exit code, or None if it was killed."""
    checkpoints = candidates(run.checkpoints)
    if run.path.exists():
        tally.resumes["from a checkpoint" if checkpoints else "from scratch"] += 1
        tally.faults += [f"{path}: {reason}" for path in checkpoints if (reason := find_corruption(path))]
    over = bool(checkpoints) and undamaged_facts(checkpoints[0])["progress"]["step"] == steps
    started = time.time()
    process = start(run.path, *overrides_of(tally.ranks, steps))
    patience = chance.uniform(SOONEST_S, max(SOONEST_S, tally.seconds)) if tally.kills.total() < kills else None
    try:
        code: int | None = process.wait(patience)
    except subprocess.TimeoutExpired:
        number = chance.choice((signal.SIGKILL, chance.choice(STOPS)))
        tally.signals[number.name] += 1
        code = None if number == signal.SIGKILL else stop(process, number, group=chance.random() < 0.5)
    finally:
        if process.returncode is None:
            kill(process, run.path)
    until = time.monotonic() + GONE_S
    while processes(run.path) and time.monotonic() < until:
        time.sleep(0.02)
    if left := processes(run.path):
        tally.faults.append(f"run {run.path.name}: {len(left)} processes outlived it")
    if code is None:
        tally.kills[moment(run, started)] += 1
    # A job that was killed after its last step is refused when it is started again, because nothing is left to do.
    return 0 if over and code == InputError.exit_code else code


def compare(tally: Tally, run: RunDir, expected: Record) -> None:
    """Compare a finished run with the one that nobody killed, and count what is equal."""
    record = Record.of(run)
    same_state = record.fingerprint == expected.fingerprint
    different = list(record.differences(expected))
    tally.hash_equal += same_state
    tally.losses_equal += record.losses() == expected.losses()
    tally.files_whole += len(different) == (not same_state)
    tally.faults += [f"run {run.path.name}: {difference}" for difference in different]


def rows(tallies: list[Tally]) -> Rows:
    """The counts of each number of ranks."""
    return {
        f"{tally.ranks} ranks": {
            "kills": tally.kills.total(),
            "at start": tally.kills["starting"],
            **{name: tally.kills[name] for name in ("training", "saving")},
            "resumed": tally.resumes["from a checkpoint"],
            "from scratch": tally.resumes["from scratch"],
            "runs": tally.runs,
            "hash": tally.hash_equal,
            "losses": tally.losses_equal,
            "files": tally.files_whole,
        }
        for tally in tallies
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--kills", type=int, default=100, help="over all numbers of ranks")
    options.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    options.add_argument("--steps", type=int, default=240, help="of each run")
    options.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    arguments = options.parse_args()
    chance = random.Random(arguments.seed)
    for stop_signal in STOPS:  # some are ignored in the background, and the jobs would ignore them too
        signal.signal(stop_signal, signal.SIG_DFL)
    root = Path(tempfile.mkdtemp(prefix="lockstep-soak-"))
    tallies = [Tally(ranks) for ranks in arguments.ranks]
    parts = len(tallies)
    for number, tally in enumerate(tallies):
        kills = (number + 1) * arguments.kills // parts - number * arguments.kills // parts
        soak(tally, root, kills=kills, steps=arguments.steps, chance=chance)
        for fault in tally.faults:
            console.print(f"{tally.ranks} ranks: {fault}", soft_wrap=True)
    # A killed run that was resumed counts as equal where its newest checkpoint, its losses and its files are those of
    # the run that nobody killed. Processes that outlive a job, and files left in shared memory, are faults.
    show("killed and resumed", rows(tallies), ratios=False)
    signals = sum((tally.signals for tally in tallies), Counter[str]())
    console.print(", ".join(f"{name} {count}" for name, count in signals.most_common()))
    facts = {"seed": arguments.seed, "steps": arguments.steps, "signals": signals}
    write(arguments.json, {"runs": rows(tallies)}, **facts, faults=[fault for t in tallies for fault in t.faults])
    if any(tally.faults for tally in tallies):
        console.print(f"not the same run: the folders are kept in {root}", soft_wrap=True)
        sys.exit(1)
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
