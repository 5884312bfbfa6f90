"""Kills one of two machines again and again, and shows that the run still equals the run of a single machine.

    python benchmarks/reliability/node_kills.py --kills 20 --json node_kills.json

The machines are network namespaces with a link between them, so this needs Linux, root and `ip` (iproute2). A small
real job (dropout, momentum, averaged weights, a checkpoint every four steps) runs on both with `launcher.restarts`,
and once on one machine with the same number of ranks. Every process of the machine without main is killed with
SIGKILL: while its rank starts, in a step, in an evaluation and while main saves, in turns. The run folder shows
which phase each kill met. Up to 3 s later the same command is started there again, as on a machine that comes back.
A run has up to four kills. It must end with exit code 0 and equal the run on one machine to the last bit: weights,
averaged weights, optimizer state, losses, each step once. Exits with 1 if one does not.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.core.run_dir import RunDir
from soak import ROOT, Record, start

sys.path.append(str(ROOT / "tests"))
from measure import Rows, console, parser, show, write
from namespaces import Machine, Unavailable, two_machines

STEPS, EVAL_EVERY = 40, 6
JOB = (
    *("name=node_kills", "device=cpu", "precision=fp64", "strategy=ddp", "launcher.threads=1", "batch=300"),
    *("model.width=8", "model.dropout=0.3", "optimizer=sgd", "train.ema=0.9", "train.eval_batch=4"),
    *("telemetry.interval=1", "logger=jsonl", f"steps={STEPS}", f"train.eval_every={EVAL_EVERY}"),
    "checkpoint.every=4",
)
PHASES = ("start-up", "step", "evaluation", "checkpoint")
RANK = b"TORCHELASTIC_RUN_ID=lockstep"
PATIENCE_S = 300.0  # the time limit for every event
LONGEST_AWAY_S = 3.0


class Failed(Exception):
    """A run failed; the message says where."""


@dataclass
class Tally:
    """Counts of runs and kills. `met` counts kills by the intended phase and the phase in which they happened."""

    runs: int = 0
    equal: int = 0
    met: Counter[tuple[str, str]] = field(default_factory=Counter)
    survived: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


class TwoMachines:
    """A run on two machines; the second one, without main, is killed."""

    def __init__(self, run: RunDir, main: Machine, second: Machine, restarts: int) -> None:
        self.run, self.second = run, second
        self.overrides = (
            *JOB,
            *("launcher=elastic", "launcher.nodes=2", "launcher.ranks=1", "launcher.timeout=2min"),
            *(f"launcher.rendezvous={main.address}:29500", f"launcher.restarts={restarts}"),
        )
        self.processes = [start(run.path, *self.overrides, shell=main.shell)]
        self.ranks_began = 0.0  # the time at which the rank of this attempt was first seen
        self.start_second()

    def start_second(self) -> None:
        self.processes.append(start(self.run.path, *self.overrides, shell=self.second.shell))

    def wait_for(self, condition: Callable[[], object], event: str) -> None:
        """Wait until `condition` holds. Raises Failed: the job ended, or it took too long."""
        until = time.monotonic() + PATIENCE_S
        while not condition():
            code = self.processes[0].poll()
            if code is not None or time.monotonic() > until:
                raise Failed(f"no {event}; main's machine has exit code {code}")
            time.sleep(0.001)

    def await_rank(self) -> None:
        """Wait until the second machine has a rank."""
        self.wait_for(
            lambda: any(RANK in environment_of(pid) for pid in self.second.pids()), "rank on the second machine"
        )
        self.ranks_began = time.time()

    def await_phase(self, phase: str, chance: random.Random) -> None:
        """Wait for a random moment in this phase."""
        if phase == "start-up":
            time.sleep(chance.uniform(0, 6))
            return
        first = chance.randrange(1, 4)  # steps of this attempt to wait for
        self.wait_for(lambda: len(self.new_lines()) >= first, "step")
        while True:
            self.wait_for(lambda: self.phase() == phase, phase)
            time.sleep(chance.uniform(0, 0.1) if phase == "step" else 0)
            if self.phase() == phase:
                return

    def new_lines(self) -> list[dict[str, Any]]:
        """The lines of the log that this attempt has written."""
        return [line for line in lines(self.run) if line["time"] > self.ranks_began]

    def phase(self) -> str:
        """The phase in which the ranks are now."""
        if any(self.run.checkpoints.glob(".*.tmp")):
            return "checkpoint"
        new = self.new_lines()
        if not new:
            return "start-up"
        return "evaluation" if new[-1]["step"] % EVAL_EVERY == 0 and "loss/val" not in new[-1] else "step"

    def kill_second(self, phase: str, chance: random.Random) -> str:
        """Kill the second machine in a phase and start it again; returns the phase in which the kill happened."""
        self.await_rank()
        pids = self.second.pids()  # before the wait, because listing the processes takes longer than a save
        self.await_phase(phase, chance)
        met = self.phase()
        for pid in (*pids, *self.second.pids()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.processes[-1].wait()
        time.sleep(chance.uniform(0, LONGEST_AWAY_S))
        self.start_second()
        return met

    def await_end(self) -> None:
        """Wait until both commands have ended. Raises Failed: one did not end with exit code 0."""
        for name, process in (("main's machine", self.processes[0]), ("the second machine", self.processes[-1])):
            if code := process.wait(PATIENCE_S):
                raise Failed(f"{name} ended with exit code {code}")

    def close(self) -> None:
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def environment_of(pid: int) -> bytes:
    """The environment of a process; empty if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def lines(run: RunDir) -> list[dict[str, Any]]:
    """The whole lines of a log that is being written."""
    text = run.metrics.read_text() if run.metrics.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def attempt(tally: Tally, run: RunDir, machines: tuple[Machine, Machine], kills: int, chance: random.Random) -> None:
    """One run on two machines with so many kills. Raises Failed: it did not come to its end."""
    phases = chance.sample(PHASES, kills)
    with closing(TwoMachines(run, *machines, restarts=kills)) as job:
        for phase in phases:
            met = job.kill_second(phase, chance)
            tally.met[phase, met] += 1
            job.await_rank()
            tally.survived[phase] += 1
            console.print(f"{run.path.name}: killed, meant for {phase}, met {met}; its ranks are started again")
        job.await_end()


def compare(tally: Tally, run: RunDir, expected: Record) -> None:
    """Compare a run with the one on one machine, and count it if it is equal."""
    differences = list(Record.of(run).differences(expected))
    tally.equal += not differences
    tally.faults += [f"{run.path.name}: {difference}" for difference in differences]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--kills", type=int, default=20, help="in runs of up to four [20]")
    options.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    arguments = options.parse_args()
    chance, tally = random.Random(arguments.seed), Tally()
    root = Path(tempfile.mkdtemp(prefix="lockstep-node-kills-"))
    alone = RunDir(root / "alone")
    if code := start(alone.path, *JOB, "launcher=spawn", "launcher.ranks=2").wait():
        sys.exit(f"the run on one machine ended with exit code {code}, see {alone.path.with_suffix('.out')}")
    try:
        with two_machines() as machines:
            while tally.met.total() < arguments.kills and not tally.faults:
                tally.runs += 1
                run = RunDir(root / f"run-{tally.runs}")
                try:
                    attempt(tally, run, machines, min(len(PHASES), arguments.kills - tally.met.total()), chance)
                    compare(tally, run, Record.of(alone))
                except Failed as error:
                    tally.faults.append(f"{run.path.name}: {error}, see {run.path.with_suffix('.out')}")
    except Unavailable as error:
        sys.exit(f"node_kills.py {error}")
    rows: Rows = {
        f"meant for {phase}": {
            **{f"met {met}": tally.met[phase, met] for met in PHASES},
            "survived": tally.survived[phase],
        }
        for phase in PHASES
    }
    rows["runs"] = {"all": tally.runs, "with the same bits": tally.equal}
    show("kills of the second machine", rows, ratios=False)
    write(arguments.json, {"kills": rows}, seed=arguments.seed)
    if tally.faults:
        sys.exit("\n".join([*tally.faults, f"the folders are kept in {root}"]))
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
