"""`lockstep prove`: the first promise, tried on this machine with the user's own config.

Each run is the real command in processes of its own, in float64, where another order of a sum is worth 1e-16 and a
wrong scale, sample, mask or statistic cannot hide. All else is the user's config, dropout and stochastic depth too.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor

from lockstep.checkpoint import MODEL, latest_valid
from lockstep.config import components, composition
from lockstep.config.schema import Job
from lockstep.core import log
from lockstep.core.errors import InputError, LockstepError
from lockstep.core.protocols import Strategy
from lockstep.core.run_dir import RunDir
from lockstep.models.nets import without_weights
from lockstep.precision import FP64
from lockstep.runtime.signals import PARENT
from lockstep.strategy.sync_batchnorm import has_batchnorm

# So many micro-batches more than the user's config has are tried too: uneven on most batches and ranks.
MORE_MICRO_BATCHES = 2
KEEP_ALL = 1_000_000
# Those whose state is cut over the ranks are killed and resumed too.
KILLED = frozenset({"fsdp", "zero", "pipeline"})
# What a strategy needs for its run to be the same as that of the others.
EQUAL_WITH = {"local_sgd": ("strategy.local_steps=1",)}
# Of every run, behind the user's overrides.
COMMON = (
    "precision=fp64",
    "launcher.threads=1",
    "train.eval_every=100%",
    "checkpoint.every=100%",
    "telemetry.interval=1",
    "logger=jsonl",
    "telemetry.samples=true",
)
LOSS_TOLERANCE, WEIGHT_TOLERANCE = 1e-12, 1e-10
EXPLANATION = (
    f"Losses may differ by {LOSS_TOLERANCE:g}, relatively and at any step, and weights at the end by "
    f"{WEIGHT_TOLERANCE:g} of the largest: in float64 that leaves room for another order of the same sums (1e-16 "
    "at first, growing with the steps) and for nothing else. A killed run and repro=strict have to agree to the last "
    "bit. Samples: every example once per epoch, at the same steps, with the same augmented pixels."
)


@dataclass(frozen=True)
class Case:
    """One run, the one before it that it is compared with, and whether the two must agree to the bit."""

    name: str
    overrides: tuple[str, ...]
    reference: str
    exact: bool = False
    killed: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a run left: training losses by step, final weights, samples as (epoch, step, index, hash of pixels)."""

    losses: list[float]
    weights: dict[str, Tensor]
    samples: list[tuple[int, int, int, int]]


def prove(overrides: list[str], *, steps: int, ranks: str | None) -> None:
    """Run all cases and print how far each is from the run it should be.

    Raises:
        InputError: the config does not fit.
        LockstepError: a run failed, or is not the run it should be.
    """
    if steps < 2:
        raise InputError(f"--steps is {steps}, expected 2 or more: one run is killed on its way")
    job = components.build_job(composition.composed([*overrides, "name=prove"]))
    planned = cases(_sizes(ranks), micro_batches=_several(job), others=_strategies(job))
    common = [*COMMON, f"steps={steps}"]
    folder = Path(tempfile.mkdtemp(prefix="lockstep-prove-"))
    log.console.print(f"{len(planned)} runs of {steps} steps, in {folder}", soft_wrap=True)
    table = Table("run", "against", "loss", "weights", "samples", "")
    outcomes: dict[str, Outcome] = {}
    failed = []
    for case in planned:
        reference = "" if case.reference == case.name else case.reference
        words = [*for_strategy(case, overrides), *common]
        outcome = _run_unless_refused(case, folder, words, steps) if not reference or reference in outcomes else None
        if outcome is None:
            table.add_row(case.name, reference, "", "", "", "refused")
            continue
        outcomes[case.name] = outcome
        row, same = compare(case, outcome, outcomes[case.reference])
        table.add_row(case.name, reference, *row, "pass" if same else "FAIL")
        failed += [] if same else [case.name]
    log.console.print(table)
    log.console.print(EXPLANATION, soft_wrap=True)
    if failed:
        raise LockstepError(f"not the same run: {', '.join(failed)}; the runs are kept in {folder}")
    shutil.rmtree(folder)


def cases(
    sizes: list[int], *, micro_batches: int | None, others: Sequence[str] = ("allreduce", "allreduce_hooks")
) -> list[Case]:
    """What is run on how many ranks (`sizes`, all above one), each behind the run it is compared with.

    `micro_batches` is another number of them than the user's config has; None where it makes another run. `others`
    are the strategies besides `ddp` that take the job.
    """

    def cut_too(case: Case) -> list[Case]:
        """The case, and the same with the other number of micro-batches."""
        if micro_batches is None:
            return [case]
        cut = (*case.overrides, f"train.micro_batches={micro_batches}")
        return [case, replace(case, name=f"{case.name} x {micro_batches}", overrides=cut)]

    planned = cut_too(Case("single", ("strategy=single", "launcher.ranks=1"), "single"))
    planned.append(Case("dp", ("strategy=dp", "launcher.ranks=1"), "single"))
    for ranks in sizes:
        on = f"launcher.ranks={ranks}"
        planned += cut_too(Case(f"ddp {ranks}", ("strategy=ddp", on), "single"))
        for strategy in others:
            words = (f"strategy={strategy}", *EQUAL_WITH.get(strategy, ()), on)
            planned.append(Case(f"{strategy} {ranks}", words, "single"))
        for strategy in ("ddp", *(name for name in others if name in KILLED)):
            killed = (f"strategy={strategy}", on, "checkpoint.every=1", f"checkpoint.keep={KEEP_ALL}")
            planned.append(Case(f"{strategy} {ranks} killed", killed, f"{strategy} {ranks}", exact=True, killed=True))
    planned.append(Case("strict 1", ("strategy=auto", "repro=strict", "launcher.ranks=1"), "strict 1"))
    for ranks in (size for size in sizes if size != 3):
        words = ("strategy=auto", "repro=strict", f"launcher.ranks={ranks}")
        planned.append(Case(f"strict {ranks}", words, "strict 1", exact=True))
    return planned


def for_strategy(case: Case, overrides: Sequence[str]) -> list[str]:
    """The user's overrides for a case: without the keys of the strategy they name, if the case has another one."""
    names = [override.partition("=")[2] for override in overrides if override.startswith("strategy=")]
    if not names or names[-1] == "auto" or f"strategy={names[-1]}" in case.overrides:
        return list(overrides)
    return [override for override in overrides if not override.lstrip("+").startswith("strategy.")]


def compare(case: Case, outcome: Outcome, reference: Outcome) -> tuple[list[str], bool]:
    """The row of a case in the table, and whether it passes."""
    # Maxima of tensors: a NaN comes out of them, and is not close to anything.
    losses, expected = (torch.tensor(run.losses, dtype=torch.float64) for run in (outcome, reference))
    loss = float(((losses - expected) / expected).abs().max())
    expected_weights, weights = _flat(reference, reference.weights), _flat(outcome, reference.weights)
    weight = float((weights - expected_weights).abs().max() / expected_weights.abs().max())
    identical = torch.equal(weights, expected_weights)
    times = Counter((epoch, index) for epoch, _, index, _ in outcome.samples)
    once = max(times.values()) == 1
    same = sorted(outcome.samples) == sorted(reference.samples)
    row = [
        f"{loss:.1e}" if loss else "same",
        "same bits" if identical else f"{weight:.1e}",
        f"{len(times)} {'not once each' if not once else 'same' if same else 'others'}",
    ]
    close = identical if case.exact else loss <= LOSS_TOLERANCE and weight <= WEIGHT_TOLERANCE
    return row, close and once and same


def _flat(outcome: Outcome, names: Iterable[str]) -> Tensor:
    """The weights of these names in one row."""
    return torch.cat([outcome.weights[name].flatten() for name in names])


def _strategies(job: Job) -> list[str]:
    """The strategies besides `ddp` whose runs are equal, and that are installed and take the job's optimizer."""
    fitting = []
    for name in ("allreduce", "allreduce_hooks", "fsdp", "zero", "accelerate", "pipeline", "local_sgd"):
        strategy: Strategy = components.build_option("strategy", name)
        try:
            strategy.check(2, "cpu")
            strategy.check_parts(job.optimizer, FP64(), job.train.micro_batches)
        except InputError as error:
            log.console.print(f"  without {name}: {error}", soft_wrap=True)
        else:
            fitting.append(name)
    return fitting


def _several(job: Job) -> int | None:
    """Another number of micro-batches for a job; None where there is none that keeps the run the same."""
    if not isinstance(job.batch, int):
        raise InputError(f"batch is {job.batch}, expected the global batch as a number, such as batch=64")
    with torch.random.fork_rng(devices=[]):
        normed = has_batchnorm(without_weights(job.model).build(job.dataset.classes, job.dataset.input_shape))
    used = job.train.micro_batches if isinstance(job.train.micro_batches, int) else 1
    several = used + MORE_MICRO_BATCHES
    # Batch norm counts over a micro-batch.
    return None if normed or several > job.batch else several


def _sizes(ranks: str | None) -> list[int]:
    """The numbers of ranks above one that are asked for, or all that this machine has devices for."""
    most = torch.cuda.device_count() if torch.cuda.is_available() else 4
    if ranks is None:
        return [size for size in (2, 3, 4) if size <= most]
    sizes = [int(number) if number.strip().isdigit() else 0 for number in ranks.split(",")]
    if any(size not in (1, 2, 3, 4) for size in sizes):
        raise InputError(f"--ranks is {ranks!r}, expected some of 1, 2, 3 and 4, such as --ranks 2,4")
    return sorted(set(sizes) - {1})


def _run_unless_refused(case: Case, folder: Path, overrides: list[str], steps: int) -> Outcome | None:
    """Run a case; None where its strategy does not take the config, such as a model that cannot be cut so often.

    `single` and `ddp` take every config that is right, and a run that was killed has begun once.
    """
    log.console.print(f"  {case.name}", soft_wrap=True)
    try:
        return _run(case, folder / case.name.replace(" ", "-"), overrides, steps)
    except InputError as error:
        if case.killed or not {"strategy=single", "strategy=ddp"}.isdisjoint(case.overrides):
            raise
        log.console.print(f"  without {case.name}: {error}", soft_wrap=True)
        return None


def _run(case: Case, folder: Path, overrides: list[str], steps: int) -> Outcome:
    """Run a case to its end, through a kill where it asks for one, and read what it left."""
    words = ["train", *overrides, *case.overrides, f"hydra.run.dir={folder}"]
    command = [sys.executable, "-m", "lockstep", *words]
    run_dir = RunDir(folder)
    if case.killed:
        _kill_halfway([*command, f"output_root={folder.parent}"], run_dir, steps)
    with _started([*command, f"output_root={folder.parent}"]) as process:
        error = process.communicate()[1].strip()
    if process.returncode == InputError.exit_code:
        raise InputError(error.removeprefix("lockstep: "))
    if process.returncode:
        raise LockstepError(f"{case.name} ended with exit code {process.returncode}: {error}")
    lines = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]
    newest = latest_valid(run_dir.checkpoints)
    assert newest is not None
    samples = [
        (record["epoch"], record["step"], record["index"], record["hash"])
        for path in run_dir.logs.glob("rank*.samples.jsonl")
        for record in map(json.loads, path.read_text().splitlines())
    ]
    return Outcome([line["loss/train"] for line in lines if "loss/train" in line], load_file(newest / MODEL), samples)


def _kill_halfway(command: list[str], run_dir: RunDir, steps: int) -> None:
    """Start a run and kill all its processes once half of the steps are saved."""
    half = run_dir.checkpoints / f"step-{max(1, steps // 2):08d}"
    with _started(command) as process:
        while process.poll() is None and not half.exists():
            time.sleep(0.01)
        if process.poll() is not None:
            raise LockstepError(f"the run in {run_dir.path} ended before it could be killed; use more --steps")


@contextmanager
def _started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A run. All its processes are killed with the context, or with this process."""
    with subprocess.Popen(
        command,
        # This process runs with full errors for itself (`command_line`); the run is to fail with its sentence alone.
        env={**os.environ, PARENT: str(os.getpid()), "HYDRA_FULL_ERROR": "0"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
