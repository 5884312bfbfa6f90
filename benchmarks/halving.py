"""Successive halving against the full grid: the same winner, to the bit, and the share of the steps.

    python benchmarks/halving.py --json halving.json

Learning rates of SGD for the linear network on the digits, as a grid and with `sweep.halving=3`: 27 from 0.0001 to 1,
or `--rates`. Exits with 1 if the weights of the halving's winner are not those that it has in the grid. Which place
it has in the grid depends on how close the jobs are to each other. The steps are counted in `metrics.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from lockstep.core import safe_read
from lockstep.sweep.ledger import Ledger
from lockstep.sweep.record import Record
from sweep_kills import digest

ROOT = Path(__file__).parent.parent
LINE = ("device=cpu", "model=linear", "optimizer=sgd", "epochs=27", "train.eval_every=1ep", "telemetry.interval=1ep")


def sweep(root: Path, rates: int, *words: str) -> tuple[Ledger, Record, int]:
    """Run a sweep; returns its ledger, its winner, and the steps that all its jobs have trained."""
    values = ",".join(f"{10 ** (-4 + 4 * number / (rates - 1)):.2g}" for number in range(rates))
    line = ["-m", f"optimizer.lr={values}", *LINE, "logger=jsonl", "launcher.threads=1", *words]
    subprocess.run([sys.executable, ROOT / "train.py", *line, f"output_root={root}"], check=True, capture_output=True)
    (folder,) = (root / "sweeps").iterdir()
    ledger = Ledger(folder)
    (winner,) = [record for record in ledger.records() if record.folder == ledger.best]
    logs = [safe_read.read_text(folder / record.folder / "metrics.jsonl") for record in ledger.records()]
    return ledger, winner, sum(max(json.loads(line)["step"] for line in log.splitlines()) for log in logs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=int, default=27)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="halving-") as folder:
        grid, best, steps = sweep(Path(folder, "grid"), options.rates)
        halved, winner, fewer = sweep(Path(folder, "halved"), options.rates, "sweep.halving=3")
        place = sorted((r.objective or 0.0 for r in grid.records()), reverse=True).index(winner.objective or 0.0) + 1
        same_bits = digest(grid.folder / winner.folder) == digest(halved.folder / winner.folder)
        facts = {
            "grid": [best.folder, best.objective, steps],
            "halving": [winner.folder, winner.objective, fewer],
            "share": round(fewer / steps, 4),
            "place_in_grid": place,
            "same_bits": same_bits,
        }
    print(json.dumps(facts, indent=2))
    if options.json:
        options.json.write_text(json.dumps(facts, indent=2) + "\n")
    sys.exit(not same_bits)


if __name__ == "__main__":
    main()
