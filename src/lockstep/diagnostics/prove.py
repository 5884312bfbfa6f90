"""`lockstep prove`: a test of the first promise on this machine, with the user's config.

Each run is the real command in new processes, in float64. There, another order of a sum changes a result by 1e-16
only, so a wrong scale, sample, mask or statistic is visible. The rest of the config is the user's, including dropout
and stochastic depth.
"""

import json
import math
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from lockstep.checkpoint.files import MODEL
from lockstep.checkpoint.reading import latest_valid
from lockstep.config import components, composition
from lockstep.config.commands import OF_RUN, key_of, latest_starts, typed_strategy, with_starts
from lockstep.config.options import option_name
from lockstep.config.schema import Job
from lockstep.core import console, log
from lockstep.core.errors import BY_EXIT_CODE, InputError, LockstepError, NumericalError
from lockstep.core.model import UpdateScope, has_batchnorm
from lockstep.core.protocols import Strategy
from lockstep.core.run_dir import RunDir
from lockstep.core.table import show_json
from lockstep.core.tags import TRAIN_LOSS
from lockstep.job.resolve import with_targets
from lockstep.job.resume import refuse_resume
from lockstep.models.nets import sketch
from lockstep.optim.schedule import Chain, Plateau
from lockstep.runtime.commands import ending, running
from lockstep.telemetry.progress import format_duration, progress

PREFIX = "lockstep-prove-"  # of the folders for the runs, in the folder of temporary files
# Some runs have this many more micro-batches than the user's config: they are uneven for most batches and ranks.
MORE_MICRO_BATCHES = 2
KEEP_ALL = MOST_PROOF_STEPS = 1_000_000
EVALUATIONS = 5  # of a run whose scores decide its rates or its end; any other run is evaluated at its end
# The overrides of every run, after the user's.
PROOF_OVERRIDES = (
    *("precision=fp64", "launcher.threads=1", "checkpoint.every=100%"),
    *("telemetry.interval=1", "logger=jsonl", "telemetry.samples=true"),
)
OF_RUNS = {"steps", "epochs", "output_root", "train.eval_every", *map(key_of, PROOF_OVERRIDES), *OF_RUN}
LOSS_TOLERANCE, WEIGHT_TOLERANCE = 1e-12, 1e-10
VERDICT_REFUSED, VERDICT_FAIL = "refused", "FAIL"  # verdicts of a run without figures
OF_FAILURES = (LockstepError.exit_code, NumericalError.exit_code)  # of a run that its strategy may have ended


@dataclass(frozen=True)
class Case:
    """One run, and the earlier one with which it is compared."""

    name: str
    overrides: tuple[str, ...]
    reference: str
    exact: bool = False  # must the two agree to the bit?
    killed: bool = False


@dataclass(frozen=True)
class RunResult:
    losses: list[float]
    weights: dict[str, Tensor]
    samples: list[tuple[int, int, int, int]]  # epoch, step, index, hash of pixels


def prove(
    overrides: list[str], *, steps: int, ranks: str | None, everything: bool = False, form: str = "table"
) -> None:
    """Run the cases, or all of them with `everything`, and print how much each differs from its reference."""
    if not 2 <= steps <= MOST_PROOF_STEPS:
        raise InputError(f"--steps is {steps}, expected from 2 to {MOST_PROOF_STEPS:,}: --steps=20")
    refuse_resume(overrides, "prove trains from the initial weights")
    overrides = with_starts(overrides, latest_starts(composition.composed([*overrides, "name=prove"])))
    overrides = composition.without_keys(overrides, OF_RUNS, f"prove trains --steps={steps} steps in float64")
    job = components.build_job(composition.composed([*overrides, "name=prove"]))
    job = replace(job, dataset=with_targets(job.dataset, job.task.targets))
    own = {typed_strategy(overrides) or option_name(type(job.strategy)): job.strategy}
    planned = cases(_sizes(ranks), micro_batches=_other_micro_batches(job), own=own, everything=everything)
    scored = job.train.patience is not None or isinstance(job.schedule, Plateau | Chain)
    overrides += [f"train.eval_every={max(1, steps // EVALUATIONS) if scored else '100%'}"]
    with _folder_of_runs() as folder:
        _compare_all(planned, folder, overrides, steps, form)


@contextmanager
def _folder_of_runs() -> Iterator[Path]:
    """A new folder for the runs, which is kept if a run failed or differs."""
    is_kept = False
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        yield folder
    except LockstepError as error:
        if is_kept := error.exit_code in OF_FAILURES:
            raise type(error)(f"{error}; the runs are kept in {folder}") from error
        raise
    finally:
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)


def _compare_all(planned: Sequence[Case], folder: Path, overrides: Sequence[str], steps: int, form: str) -> None:
    if form == "table":
        log.show(f"{len(planned)} runs of {steps} steps, in {folder}")
        print_row("run", "against", "loss", "weights", "samples", "")
    results: dict[str, RunResult] = {}
    rows: list[dict[str, Any]] = []
    began = time.monotonic()
    with progress("proving", len(planned)) as advance:
        for case in planned:
            reference = "" if case.reference == case.name else case.reference
            words = [*for_strategy(case, overrides), *PROOF_OVERRIDES, f"steps={steps}"]
            # What is compared with a refused run was refused with it.
            comparable = not reference or reference in results
            result = _run(case, folder, words, steps, form) if comparable else VERDICT_REFUSED
            advance(1)
            facts: dict[str, Any] = {}
            if isinstance(result, str):
                verdict = result
            else:
                results[case.name] = result
                facts = compare_results(case, result, results[case.reference])
                verdict = "pass" if facts["passes"] else VERDICT_FAIL
            rows.append({"run": case.name, "against": reference or None, **facts, "verdict": verdict})
            if form == "table":
                print_row(case.name, reference, *(texts(facts) if facts else ["", "", ""]), verdict)
                if len(rows) == 1 < len(planned):
                    first = time.monotonic() - began
                    all_runs = format_duration(first * len(planned))
                    log.show(f"  (it took {format_duration(first)}, so all take {all_runs} or more)")
    if form == "json":
        show_json(rows)
    if failed := [row["run"] for row in rows if row["verdict"] == VERDICT_FAIL]:
        raise LockstepError(f"not the same run: {', '.join(failed)}")
    if form == "table":
        refused = f", {len(planned) - len(results)} refused" * (len(results) < len(planned))
        log.show(f"all {len(results)} pass{refused}")


def print_row(*cells: str) -> None:
    """Print a row, as soon as the figures of its run are known."""
    name, reference, loss, weights, samples, verdict = cells
    line = f"  {name:<21}{reference:<18}{loss:>8}{weights:>11}{samples:>12}  {verdict}"
    console.terminal.print(line.rstrip(), soft_wrap=True)


def cases(
    sizes: list[int], *, micro_batches: int | None, own: Mapping[str, Strategy] = {}, everything: bool = False
) -> list[Case]:
    """The runs on one rank and on `sizes` ranks (all above one), each after its reference.

    Each strategy runs on the first of `sizes`, where each that keeps its state in another way is also killed; `ddp`
    and the config's `own`, which comes first, run on all. With `everything`, all strategies do. `micro_batches` is a
    number that differs from the user's config; None if it would change the run.
    """
    known = {**own, **components.all_options("strategy"), **own}
    strategies = {name: known[name] for name in known if not (known[name].adapts or known[name].fixed_order)}
    several = [name for name, strategy in strategies.items() if strategy.ranks(2) > 1]
    killed = ["ddp", *own, *(name for name in several if strategies[name].widest is not UpdateScope.model)]

    def with_micro_batches(case: Case) -> list[Case]:
        if micro_batches is None:
            return [case]
        overrides = (*case.overrides, f"train.micro_batches={micro_batches}")
        return [case, replace(case, name=f"{case.name} x {micro_batches}", overrides=overrides)]

    complete = sizes if everything else sizes[:1]
    planned = []
    for name in sorted(strategies, key=lambda name: (name != "single", name not in own, name != "ddp")):
        often = name in ("single", "ddp", *own)
        for ranks in sizes if name in several else [1]:
            is_whole = ranks in (1, *complete)
            words: tuple[str, ...] = (f"strategy={name}", f"launcher.ranks={ranks}")
            case = Case(name if ranks == 1 else f"{name} {ranks}", words, "single")
            if is_whole or often:
                planned += with_micro_batches(case) if is_whole and often else [case]
            if ranks in complete and name in killed:
                words += ("checkpoint.every=1", f"checkpoint.keep={KEEP_ALL}")
                planned.append(Case(f"{case.name} killed", words, case.name, exact=True, killed=True))
    planned = [replace(case, overrides=(*case.overrides, "repro=exact")) for case in planned]
    for ranks in (1, *(size for size in complete if size != 3)):
        words = ("strategy=auto", "repro=strict", f"launcher.ranks={ranks}")
        planned.append(Case(f"strict {ranks}", words, "strict 1", exact=True))
    return planned


def for_strategy(case: Case, overrides: Sequence[str]) -> list[str]:
    """The user's overrides for a case, without the keys of the user's strategy if the case has another strategy."""
    if (name := typed_strategy(overrides)) in ("", "auto") or f"strategy={name}" in case.overrides:
        return list(overrides)
    return [override for override in overrides if not override.lstrip("+").startswith("strategy.")]


def compare_results(case: Case, result: RunResult, reference: RunResult) -> dict[str, Any]:
    """The largest relative differences of a run from its reference, None for one without a value; if it `passes`."""
    # Take the maxima of tensors: they keep a NaN, which then fails every comparison.
    losses, expected = (torch.tensor(run.losses, dtype=torch.float64) for run in (result, reference))
    facts: dict[str, Any] = {"steps": len(losses), "passes": False}
    if len(losses) != len(expected):
        return facts | {"expected": len(expected)}  # the scores have ended one of them earlier
    loss = float(((losses - expected) / expected).abs().max())
    expected_weights, weights = (
        torch.cat([run.weights[name].flatten() for name in reference.weights]) for run in (reference, result)
    )
    weight = float((weights - expected_weights).abs().max() / expected_weights.abs().max())
    identical = torch.equal(weights, expected_weights)
    times = Counter((epoch, index) for epoch, _, index, _ in result.samples)
    once = max(times.values()) == 1
    same = sorted(result.samples) == sorted(reference.samples)
    close = identical if case.exact else loss <= LOSS_TOLERANCE and weight <= WEIGHT_TOLERANCE
    facts |= {name: None if math.isnan(value) else value for name, value in (("loss", loss), ("weights", weight))}
    facts |= {"images": len(times), "samples": "not once each" if not once else "same" if same else "others"}
    return facts | {"identical": identical, "passes": close and once and same}


def texts(facts: Mapping[str, Any]) -> list[str]:
    if "expected" in facts:
        return [f"{facts['steps']} steps", f"of {facts['expected']}", ""]
    loss, weights = ("nan" if facts[name] is None else f"{facts[name]:.1e}" for name in ("loss", "weights"))
    return [
        "same" if facts["loss"] == 0 else loss,
        "same bits" if facts["identical"] else weights,
        f"{facts['images']} {facts['samples']}",
    ]


def _other_micro_batches(job: Job) -> int | None:
    """Another number of micro-batches for a job; None if every other number would change the run."""
    if not isinstance(job.batch, int):
        raise InputError(f"batch is {job.batch}, expected the global batch as a number, such as batch=64")
    uses_batchnorm = has_batchnorm(sketch(job.model, job.dataset.classes, job.dataset.input_shape))
    used = job.train.micro_batches if isinstance(job.train.micro_batches, int) else 1
    number = used + MORE_MICRO_BATCHES
    # Batch norm computes its statistics over a micro-batch, which has other examples on other ranks.
    if uses_batchnorm and used > 1:
        raise InputError(
            f"train.micro_batches is {used}, and this model has batch norm, whose statistics are per micro-batch: it "
            "is another run on each number of ranks; use train.micro_batches=1"
        )
    return None if uses_batchnorm or number > job.batch else number


def _sizes(ranks: str | None) -> list[int]:
    """The numbers of ranks above one that the user chose, or all for which this machine has devices."""
    most = torch.cuda.device_count() if torch.cuda.is_available() else 4
    if ranks is None:
        return [size for size in (2, 3, 4) if size <= most]
    sizes = [int(number) if number.strip().isdecimal() else 0 for number in ranks.split(",")]
    if any(size not in (1, 2, 3, 4) for size in sizes):
        raise InputError(f"--ranks is {ranks!r}, expected some of 1, 2, 3 and 4, such as --ranks 2,4")
    return sorted(set(sizes) - {1})


def _run(case: Case, folder: Path, overrides: list[str], steps: int, form: str) -> RunResult | str:
    """Run a case; the verdict of one without a result: its strategy refuses the config, is not installed, or fails.

    `single` and `ddp` work with every valid config, and all others are compared with `single`. A run that was killed
    was accepted at its first start. Their errors are raised.
    """
    try:
        return run_case(case, folder / case.name.replace(" ", "-"), overrides, steps)
    except InputError as error:
        if case.killed or not {"strategy=single", "strategy=ddp"}.isdisjoint(case.overrides):
            raise
        verdict, sentence = VERDICT_REFUSED, f"{case.name} was not tried: {error}"
    except LockstepError as error:
        if error.exit_code not in OF_FAILURES or "strategy=single" in case.overrides:
            raise
        verdict, sentence = VERDICT_FAIL, str(error)
    if form == "table":
        log.show(f"  {sentence}")
    return verdict


def run_case(case: Case, folder: Path, overrides: list[str], steps: int) -> RunResult:
    """Run a case to its end, with a kill and a resume if the case has them, and read its results."""
    words = [*overrides, *case.overrides, f"hydra.run.dir={folder}", f"output_root={folder.parent}"]
    command = [sys.executable, "-m", "lockstep", "train", *words]
    run_dir = RunDir(folder)
    if case.killed:
        _kill_halfway(command, run_dir, steps)
    with running(command) as process:
        error = process.communicate()[1]
    if code := process.returncode:
        which = f"{case.name}: " * (code != InputError.exit_code)
        raise BY_EXIT_CODE.get(code, LockstepError)(which + ending(code, error))
    lines = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]
    newest = latest_valid(run_dir.checkpoints)
    assert newest is not None
    samples = [
        (record["epoch"], record["step"], record["index"], record["hash"])
        for path in run_dir.logs.glob("rank*.samples.jsonl")
        for record in map(json.loads, path.read_text().splitlines())
    ]
    return RunResult([line[TRAIN_LOSS] for line in lines if TRAIN_LOSS in line], load_file(newest / MODEL), samples)


def _kill_halfway(command: list[str], run_dir: RunDir, steps: int) -> None:
    """Start a run and kill all its processes once half of the steps are saved."""
    half = run_dir.checkpoints / f"step-{max(1, steps // 2):08d}"
    with running(command) as process:
        while process.poll() is None and not half.exists():
            time.sleep(0.01)
        if process.poll() is not None:
            raise LockstepError(f"the run in {run_dir.path} ended before it could be killed; use more --steps")
