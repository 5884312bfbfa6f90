"""Kills a whole sweep at random moments, types its line again, and shows that nothing is lost or done twice.

    python benchmarks/sweep_kills.py --kills 20 --json sweep_kills.json

A sweep of 24 small jobs, two of which fail by design (a rate at which the loss overflows), is run to its end once,
and each of its jobs once alone. Then, for each kill, a new sweep is started, its process is killed with SIGKILL at a
random moment of the time that a whole sweep takes, and the same line is typed again. It must end with the same 22
results: the same score and the same bits in every weight as the job alone, each job in one folder, each step once in
`metrics.jsonl`, the files of jobs that were done before untouched. Linux. Exits with 1 if there was any difference.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path

from safetensors.torch import load_file

from lockstep.core.run import State
from lockstep.records.ledger import Ledger
from lockstep.records.record import Record
from measure import parser, timed

ROOT = Path(__file__).parent.parent
RATES = (*(f"{number / 1000:g}" for number in range(1, 12)), "1e6")  # the loss overflows at the last
SEEDS = ("1", "2")
JOB = ("device=cpu", "model=linear", "optimizer=sgd", "steps=60", "logger=jsonl", "launcher.threads=1")
OFTEN = ("checkpoint.every=10", "telemetry.interval=5")
FAILURES = len(SEEDS)

# The score of each finished job, and the hash of its weights, by what it varies.
Results = dict[tuple[str, ...], tuple[float | None, str]]


def command(folder: Path, *words: str) -> list[str]:
    return [sys.executable, str(ROOT / "train.py"), *JOB, *OFTEN, f"output_root={folder}", *words]


def line(folder: Path) -> list[str]:
    """The line of the sweep: 24 jobs."""
    return command(folder, "-m", f"optimizer.lr={','.join(RATES)}", f"seed={','.join(SEEDS)}")


def run(words: list[str]) -> float:
    """Run a command to its end; returns the seconds that it took."""
    return timed(lambda: subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False))


def ledger_in(folder: Path) -> Ledger:
    (sweep,) = (folder / "sweeps").iterdir()
    return Ledger(sweep)


def varied(record: Record) -> tuple[str, ...]:
    return tuple(word for word in record.overrides if word.startswith(("optimizer.lr=", "seed=")))


def digest(folder: Path) -> str:
    """The hash of the weights at the last step of a run."""
    newest = folder / "checkpoints" / (folder / "checkpoints" / "last").read_text()
    tensors = load_file(newest / "model.safetensors")
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(tensors[name].numpy().tobytes())
    return total.hexdigest()


def results(ledger: Ledger) -> Results:
    """The score and the hash of the weights of each finished job."""
    done = [record for record in ledger.records() if record.state is State.done]
    return {varied(record): (record.objective, digest(ledger.folder / record.folder)) for record in done}


def faults_of(ledger: Ledger, expected: Results, before: dict[Path, int]) -> list[str]:
    """What is wrong with a sweep that was killed and went on. `before`: files of jobs that were done at the kill."""
    faults = [] if results(ledger) == expected else ["other results"]
    records = ledger.records()
    if len(records) != len(RATES) * len(SEEDS) or len({varied(record) for record in records}) != len(records):
        faults.append(f"{len(records)} jobs")
    if sum(record.state is State.failed for record in records) != FAILURES:
        faults.append("other failures")
    if any(path.stat().st_mtime_ns != changed for path, changed in before.items()):
        faults.append("files of a finished job were changed")
    for record in records:
        lines = (ledger.folder / record.folder / "metrics.jsonl").read_text().splitlines()
        steps = Counter((facts["step"], "loss/val" in facts) for facts in map(json.loads, lines))
        if record.state is State.done and set(steps.values()) != {1}:
            faults.append(f"steps twice in {record.folder}")
    return faults


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--kills", type=int, default=20)
    arguments.add_argument("--seed", type=int, default=0, help="of the moments")
    options = arguments.parse_args()
    root, random_moments = Path(tempfile.mkdtemp(prefix="sweep-kills-")), random.Random(options.seed)
    whole = run(line(root / "whole"))
    expected = results(ledger_in(root / "whole"))
    alone = {}
    for number, words in enumerate(expected):
        run(command(root / "alone", *words, f"hydra.run.dir={root / 'alone' / str(number)}"))
        alone[words] = digest(root / "alone" / str(number))
    equal = sum(alone[words] == weights for words, (_, weights) in expected.items())
    print(
        f"uninterrupted: {whole:.1f} s, {len(expected)} results, {equal} with the bits of the job alone", flush=True
    )
    faults = (
        [] if equal == len(expected) == len(RATES) * len(SEEDS) - FAILURES else ["the sweep is not its jobs alone"]
    )
    extra = []
    for number in range(options.kills):
        folder = root / str(number)
        moment = random_moments.uniform(0, whole)
        with suppress(subprocess.TimeoutExpired):  # then it is killed
            subprocess.run(
                line(folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=moment, check=False
            )
        swept = ledger_in(folder) if list((folder / "sweeps").glob("*/sweep.json")) else None
        done = [record for record in swept.records() if record.state is State.done] if swept else []
        before = {
            path: path.stat().st_mtime_ns
            for record in done
            if swept is not None
            for path in (swept.folder / record.folder).rglob("*")
            if path.is_file()
        }
        seconds = moment + run(line(folder))
        extra.append(seconds - whole)
        wrong = faults_of(ledger_in(folder), expected, before)
        faults += [f"kill {number}: {fault}" for fault in wrong]
        print(
            f"kill {number} after {moment:.1f} s, {len(done)} done: {seconds:.1f} s in all, {wrong or 'the same'}",
            flush=True,
        )
        shutil.rmtree(folder)
    median = statistics.median(extra)
    print(f"{options.kills} kills, {len(faults)} faults; a kill and its resume cost {median:.1f} s (median)")
    if options.json:
        facts = {"kills": options.kills, "whole_s": whole, "extra_s": extra, "equal": equal, "faults": faults}
        options.json.write_text(json.dumps(facts, indent=2) + "\n")
    shutil.rmtree(root)
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
