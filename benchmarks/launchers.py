"""24 small jobs of a sweep on two cores, by Hydra's launchers and by ours: seconds from the command to its end.

    pip install --pre hydra-joblib-launcher hydra-submitit-launcher 'lockstep[ray]'
    python benchmarks/launchers.py --json launchers.json

All run the same line of `train.py`, on two cores, with one thread for each job. `basic` runs the jobs one after
another in one process, `joblib` two at once in two processes, `submitit_local` all at once (it has no limit), `pool`
and `ray` two at once. Counted are the jobs whose folders have a completed run. The load of the machine from others is
shown: the processes that want a core, at the start of each line. `--only` leaves out what is not installed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CORES, JOBS = 2, 24
LAUNCHERS = {
    "pool": (),
    "basic": (),
    "joblib": (f"hydra.launcher.n_jobs={CORES}",),
    "submitit_local": (f"hydra.launcher.cpus_per_task={CORES}",),
    "ray": (),
}
JOB = ("device=cpu", "model=linear", "steps=60", "logger=jsonl", "launcher.threads=1")


def measure(launcher: str, root: Path) -> dict[str, Any]:
    """Run the line with a launcher; returns its seconds, the jobs that it completed, and the load before it."""
    load, began = os.getloadavg()[0], time.perf_counter()
    words = [f"seed=range(1,{JOBS + 1})", f"hydra/launcher={launcher}", *LAUNCHERS[launcher], *JOB]
    done = subprocess.run(
        [sys.executable, ROOT / "train.py", "-m", *words, f"output_root={root}"], capture_output=True, text=True
    )
    seconds = time.perf_counter() - began
    completed = sum(json.loads(path.read_text()).get("status") == "completed" for path in root.rglob("summary.json"))
    if completed < JOBS:
        print(done.stderr[-2000:], file=sys.stderr)
    return {"seconds": round(seconds, 1), "completed": completed, "code": done.returncode, "load": round(load, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=LAUNCHERS, default=[*LAUNCHERS])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    results = {}
    for launcher in options.only:
        with tempfile.TemporaryDirectory(prefix=f"{launcher}-") as folder:
            results[launcher] = measure(launcher, Path(folder))
        print(launcher, results[launcher], flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
