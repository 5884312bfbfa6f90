"""Start-up: seconds from the start of a process to the end of its first step, and what a job of a sweep costs.

    python benchmarks/startup.py --json startup.json

Both train the MNIST tutorial's network on 10,000 random images of 28x28, batch 64, AdamW, for one step.
`plain` is a bare loop over tensors. Lockstep is its whole command, up to the time of the first step in the run's
`metrics.jsonl`. On two ranks `plain` is torchrun and DistributedDataParallel. The cost of a job of a sweep is the
time from its start to that of the next one, where jobs of one step run one after another. `the job` is the time that
such a job reports itself, and `Hydra` a sweep of Hydra's basic launcher with a job that prints the time.
`Hydra --cfg job` is a Hydra program that does nothing, with an empty config; the aim is that `--cfg job` takes at
most 1.15 times as long. Medians, in turns.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BATCH, JOBS = 64, 5
JOB = ("device=cpu", "telemetry.interval=1")
BASICNET = (
    *("model=basicnet", "dataset=fake", "dataset.channels=1", "dataset.size=28", "dataset.classes=10"),
    *("dataset.examples=10000", "augment=none", "steps=1"),
)
TWO = ("strategy=ddp", "launcher.ranks=2", "launcher.threads=1")


# --- the programs that are timed; each prints the time at the end of its first step


def network() -> Any:
    from torch import nn

    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)),
        *(nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)),
    )


def data() -> tuple[Any, Any]:
    import torch

    return torch.rand(10_000, 1, 28, 28), torch.randint(10, (10_000,))


def report_end() -> None:
    """Print the time at the end of the first step, in one write, because two ranks share a pipe."""
    print(f"\n{time.time()}\n", end="", flush=True)


def first_step(model: Any, optimizer: Any, images: Any, labels: Any) -> None:
    from torch.nn import functional as F

    F.cross_entropy(model(images), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
    report_end()


def plain() -> None:
    import torch

    (images, labels), model = data(), network()
    first_step(model, torch.optim.AdamW(model.parameters(), lr=1e-3), images[:BATCH], labels[:BATCH])


def plain_ranks() -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    (images, labels), model = data(), DistributedDataParallel(network())
    mine = slice(dist.get_rank() * BATCH // 2, (dist.get_rank() + 1) * BATCH // 2)
    first_step(model, torch.optim.AdamW(model.parameters(), lr=1e-3), images[mine], labels[mine])
    dist.destroy_process_group()


def hydra_alone() -> None:
    """A sweep whose jobs print the time."""
    import hydra

    from lockstep.config.hydra_policy import own_hydra

    sys.argv = ["train.py", *sys.argv[3:]]
    with own_hydra():
        hydra.main(config_path=str(ROOT / "conf"), config_name="config")(lambda composed: print(f"\n{time.time()}"))()


def hydra_empty() -> None:
    """A Hydra program that does nothing, with an empty config."""
    import hydra

    sys.argv = ["empty.py", *sys.argv[3:]]
    hydra.main(config_path=None)(lambda composed: None)()


Cases = dict[str, Callable[[], float]]
LOOPS = (plain, plain_ranks, hydra_alone, hydra_empty)
TABLES = ("step", "command", "sweep")


# --- the commands that start them


def command(*words: str) -> str:
    """The output of a command in the project's folder."""
    # Waiting threads must not spin, and nothing may use the network. Python may write compiled modules, as after an
    # installation.
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr}")
    return done.stdout


def loop(name: str, *launch: str) -> float:
    """Seconds to the first step of one of the loops above."""
    began = time.time()
    out = command(sys.executable, *launch, __file__, "--loop", name)
    return max(float(line) for line in out.splitlines() if line[:1].isdigit()) - began


def lockstep(*words: str) -> float:
    """Seconds to the first step of the command."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        command(sys.executable, "train.py", *JOB, *words, f"hydra.run.dir={folder}", f"output_root={folder}")
        lines = Path(folder, "metrics.jsonl").read_text().splitlines()
        return float(json.loads(lines[0])["time"]) - began


def seconds(*words: str) -> float:
    """Seconds that a whole command takes."""
    began = time.perf_counter()
    command(*words)
    return time.perf_counter() - began


def between(starts: Iterable[float]) -> float:
    """Milliseconds from the start of a job to that of the next one, the median."""
    return 1000 * statistics.median(after - before for before, after in itertools.pairwise(sorted(starts)))


def of_sweep(files: str, figure: str, *words: str) -> list[float]:
    """A figure in these files of a sweep, whose jobs run one after another."""
    with tempfile.TemporaryDirectory() as folder:
        words = ("-m", *JOB, "steps=1", f"output_root={folder}", f"seed=range({JOBS + 1})", *words)
        command(sys.executable, "train.py", *words)
        return [json.loads(path.read_text())[figure] for path in Path(folder).glob(f"sweeps/*/{files}.json")]


def each_job(*words: str) -> float:
    """Milliseconds that one more job of a sweep takes."""
    return between(of_sweep("jobs/*", "started", *words))


def each_job_of_hydra() -> float:
    """The same for a sweep of Hydra's basic launcher whose jobs only print the time."""
    with tempfile.TemporaryDirectory() as folder:
        words = ("-m", "hydra/launcher=basic", f"hydra.sweep.dir={folder}", f"seed=range({JOBS + 1})")
        out = command(sys.executable, __file__, "--loop", "hydra_alone", *words)
    return between(float(line) for line in out.splitlines() if line[:1].isdigit())


def the_job() -> float:
    """Milliseconds that a job of a sweep says it took itself."""
    return 1000 * statistics.median(of_sweep("*/summary", "seconds"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=TABLES, default=TABLES)
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--loop", choices=[loop.__name__ for loop in LOOPS], help=argparse.SUPPRESS)
    arguments, _ = parser.parse_known_args()
    if arguments.loop is not None:
        globals()[arguments.loop]()
        return

    from measure import Rows, in_turns, show, write

    one: Cases = {"plain": functools.partial(loop, "plain"), "Lockstep": lambda: lockstep(*BASICNET)}
    digits: Cases = {"Lockstep": lambda: lockstep("steps=1")}
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    two: Cases = {
        "plain": lambda: loop("plain_ranks", *torchrun),
        "Lockstep": lambda: lockstep(*BASICNET, *TWO),
        "elastic": lambda: lockstep(*BASICNET, *TWO, "launcher=elastic"),
    }
    shown: Cases = {
        "python": lambda: seconds(sys.executable, "-c", "pass"),
        "Hydra --cfg job": lambda: seconds(sys.executable, __file__, "--loop", "hydra_empty", "--cfg", "job"),
        "--cfg job": lambda: seconds(sys.executable, "train.py", "--cfg", "job"),
        "--help": lambda: seconds(sys.executable, "train.py", "--help"),
        "import torch": lambda: seconds(sys.executable, "-c", "import torch"),
    }
    sweep: Cases = {
        "the job": the_job,
        "Lockstep": each_job,
        "elastic": lambda: each_job("launcher=elastic"),
        "Hydra": each_job_of_hydra,
    }
    tables: dict[str, tuple[str, dict[str, Cases]]] = {
        "step": ("seconds to the first step", {"basicnet": one, "the default job": digits, "basicnet, 2 ranks": two}),
        "command": ("seconds of a command", {"": shown}),
        "sweep": ("milliseconds of a job of a sweep", {"1 rank": sweep}),
    }
    results: dict[str, Rows] = {}
    for title, rows in (tables[name] for name in arguments.only):
        results[title] = {name: in_turns(cases, arguments.repeats) for name, cases in rows.items()}
        show(title, results[title])
    if "command" in arguments.only:
        times = results["seconds of a command"][""]
        print(f"--cfg job takes {times['--cfg job'] / times['Hydra --cfg job']:.2f} times as long as Hydra alone")
    write(arguments.json, results)


if __name__ == "__main__":
    main()
