"""`lockstep ladder`: one job on each rung from one device to many, and how the rungs compare on this machine.

A ladder is a sweep whose jobs are rungs. They run one at a time, in interleaved repeats, and have the folders and
records of a sweep (`lockstep.records.ledger`). An interrupted rung is measured again from its start.
"""

import hashlib
import json
import math
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from lockstep.config import commands, components
from lockstep.config.composition import composed, without_keys
from lockstep.config.options import is_builtin
from lockstep.core import log, run_dir, safe_read
from lockstep.core.errors import BY_EXIT_CODE, InputError, LockstepError, Stopped
from lockstep.core.model import has_batchnorm
from lockstep.core.run import Run, State
from lockstep.core.run_dir import RunDir, relative
from lockstep.core.safe_write import Lock, storing, write_atomic
from lockstep.core.table import show_rows
from lockstep.core.tags import TOP1
from lockstep.diagnostics.ladder_table import WIDEST, row_of, show_ladder, speed_chart
from lockstep.job.prepare import job_of
from lockstep.job.resume import refuse_resume
from lockstep.job.validate_with_data import check_plan
from lockstep.models.nets import sketch
from lockstep.records.ledger import Identity, Ledger
from lockstep.records.record import Record
from lockstep.records.runs import Row
from lockstep.runtime import host
from lockstep.runtime.commands import ending, running
from lockstep.runtime.signals import StopNow
from lockstep.telemetry.pictures import shorten
from lockstep.telemetry.progress import progress
from lockstep.training.resolved_job import ResolvedJob

DEFAULT = ("experiment=mnist_tutorial",)
# Every run writes its figures, and nothing else that takes time.
FIXED = ("logger=jsonl", "telemetry.report=never", "repro=exact")
# What the rungs set themselves.
OF_RUNGS = {"strategy", "strategy.", "logger.", "launcher", "launcher.ranks", "launcher.nodes"}
OF_RUNGS |= {"sweep.", *commands.RUN_FOLDERS, *map(commands.key_of, FIXED)}
# The strategies whose setups have their names from the tutorials.
OF_TUTORIALS = frozenset({"single", "dp", "ddp", "allreduce", "allreduce_hooks"})
LADDER_STOPPED = "the ladder was stopped; rerun the command to resume"
LADDERS, LADDER_PICTURE = "ladders", "ladder.svg"
MOST_REPEATS = 100


@dataclass(frozen=True)
class Rung:
    """A way to train the job: a strategy of Lockstep, or a script of the user's, with its content."""

    name: str
    words: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()
    script: Path | None = None
    code: bytes = b""

    @property
    def change(self) -> str:
        if self.script is not None:
            return commands.shell_command(["python", self.script])
        return commands.shell_command([*self.launcher, *("train.py",) * bool(self.launcher), *self.words])

    @property
    def has_ranks(self) -> bool:
        return bool(self.launcher) or "launcher=spawn" in self.words

    @property
    def lines(self) -> int:
        """The lines of code that a user writes for it."""
        lines = map(bytes.strip, self.code.splitlines())
        return sum(bool(line) and not line.startswith(b"#") for line in lines)

    def command(self, overrides: Sequence[str], job: ResolvedJob, folder: Path) -> list[str]:
        if self.script is not None:
            facts = {"data-root": job.data_root, "epochs": job.epochs, "seed": job.seed}
            return [sys.executable, str(self.script), *(f"--{key}={value}" for key, value in facts.items())]
        where = (commands.override("hydra.run.dir", folder), commands.override("output_root", folder.parent))
        # Without this folder torchrun makes one among the temporary ones, which stays there.
        torchrun = ["-m", "torch.distributed.run", f"--log-dir={os.devnull}"] if self.launcher else []
        program = [sys.executable, *torchrun, *self.launcher[1:], "-m", "lockstep", "train"]
        return [*program, *overrides, *self.words, *FIXED, *where]


def rungs(job: ResolvedJob, ranks: int, scripts: Iterable[Path], own: str = "") -> Iterator[Rung]:
    """The rungs of a job: one device, the user's `own` strategy, the tutorials in their order, and the others."""
    many = ("launcher=spawn", f"launcher.ranks={ranks}")
    others = {
        name: Rung(
            type(strategy).__name__ if is_builtin("strategy", name) else name,
            (f"strategy={name}", *(many if strategy.ranks(2) > 1 else ["launcher.ranks=1"])),
        )
        for name, strategy in components.all_options("strategy").items()
        if not (strategy.adapts or strategy.fixed_order or name in OF_TUTORIALS)
    }
    yield Rung("one device", ("strategy=single", "launcher.ranks=1"))
    if own in others:
        yield others.pop(own)
    yield Rung("DataParallel", ("strategy=dp", "launcher.ranks=1"))
    yield Rung("DDP", ("strategy=ddp", *many))
    yield Rung("DDP, torchrun", ("strategy=ddp",), ("torchrun", "--standalone", f"--nproc-per-node={ranks}"))
    yield Rung("averaged by hand", ("strategy=allreduce", *many))
    yield Rung("averaged by hooks", ("strategy=allreduce_hooks", *many))
    if has_batchnorm(sketch(job.model, job.dataset.classes, job.dataset.input_shape)):
        yield Rung("DDP, own batch norm", ("strategy=ddp", "strategy.sync_batchnorm=false", *many))
    if job.precision.dtype is torch.float32 and (job.device == "cuda" or host.has_bfloat16()):
        yield Rung("DDP, mixed precision", ("strategy=ddp", "precision=bf16", *many))
    yield from others.values()
    for script in scripts:
        code = safe_read.read_bytes(script, links=True)
        yield Rung(script_name(script, code), script=script, code=code)


def script_name(script: Path, code: bytes) -> str:
    """The name in a comment `# lockstep ladder calls it HF Trainer` of a script, or else the name of its file."""
    named = re.search(rb"^# lockstep ladder calls it (\S.*)$", code, re.MULTILINE)
    return named[1].decode(errors="replace").strip() if named else script.stem


def ladder(
    overrides: Sequence[str], *, ranks: int | None, repeats: int, only: str | None, scripts: Sequence[str], form: str
) -> None:
    """Train the job on each rung that is not done, and show the table of all.

    Raises:
        InputError: the job or an option is wrong, or the first rung does not run.
        Stopped: the ladder was stopped.
    """
    refuse_resume(overrides, "ladder trains from the initial weights")
    words = (*without_keys(overrides, OF_RUNGS, "each setup sets strategy, launcher, loggers and folder"),) or DEFAULT
    words = (*commands.with_starts(words, commands.latest_starts(composed([*words, "name=ladder"]))),)
    files = [Path(script).absolute() for script in scripts]
    job = job_of([*words, "strategy=single", "launcher.ranks=1"])
    gpus = torch.cuda.device_count() if job.device == "cuda" else 0
    least, most = (1, gpus) if gpus else (2, max(2, host.cores()))
    ranks = ranks if ranks is not None else gpus or 2
    if not least <= ranks <= most:
        raise InputError(f"--ranks is {ranks}, expected from {least} to {most} on this machine: --ranks={most}")
    if not 1 <= repeats <= MOST_REPEATS:
        raise InputError(f"--repeat is {repeats}, expected from 1 to {MOST_REPEATS}: --repeat=3")
    climbed = chosen(all_rungs := [*rungs(job, ranks, files, commands.typed_strategy(overrides))], only)
    if twice := [name for name, count in Counter(shell_name(rung.name) for rung in all_rungs).items() if count > 1]:
        raise InputError(f"--script: two setups are called {twice[0]}; give the file another name")
    options = [f"--ranks={ranks}", f"--repeat={repeats}", *(f"--script={file}" for file in files)]
    line = ("ladder", *words, *options, *[f"--only={only}"] * bool(only))
    identity = Identity(base={"job": words, "ranks": ranks}, swept=("rung", "repeat"), words=line, figure=TOP1)
    ledger = Ledger(Path(job.output_root) / LADDERS / f"{job.name}-{identity.hash[:8]}")
    if not ledger.folder.exists():  # a ladder that cannot begin leaves no folder
        check_plan(job)
    if form == "table":
        often = "once" if repeats == 1 else f"{repeats} times"
        log.show(f"{len(climbed)} setup{'s' * (len(climbed) > 1)}, {often} each: {relative(ledger.folder)}")
        for rung in climbed:
            log.show(f"  {shorten(rung.name, WIDEST):<{WIDEST + 2}}{rung.change}")
    with closing(Lock()) as lock:
        if not ledger.exists:
            ledger.create(identity)
        lock.take(ledger.folder / "lock", user="ladder", remedy="output_root=FOLDER")
        ledger.create(identity)  # with the words of this line, which may be others
        climb(ledger, climbed, repeats, words, job)
    rows = _rows(ledger, climbed, repeats, ranks if gpus else None)
    if form == "table":
        show_ladder(rows)
    else:
        show_rows([{key: value for key, value in row.items() if key != "losses"} for row in rows], form)
    write_atomic(ledger.folder / LADDER_PICTURE, speed_chart(rows))
    if form == "table":
        log.say_command("picture", str(relative(ledger.folder / LADDER_PICTURE)))


def chosen(climbed: list[Rung], only: str | None) -> list[Rung]:
    """The first rung, and those that `--only` names."""
    if only is None:
        return climbed
    names = {shell_name(rung.name): rung for rung in climbed}
    wanted_names = [shell_name(name) for name in only.split(",")]
    if unknown := [name for name in wanted_names if name not in names]:
        raise InputError(f"--only: there is no setup {unknown[0]!r} here; they are {', '.join(names)}")
    return [rung for name, rung in names.items() if rung is climbed[0] or name in wanted_names]


def shell_name(name: str) -> str:
    """A name that a shell takes without quotes."""
    return re.sub(r"[^a-z0-9]+", "-", name.strip().lower())


def climb(ledger: Ledger, climbed: Sequence[Rung], repeats: int, words: Sequence[str], job: ResolvedJob) -> None:
    """Run the rungs that are not done, one at a time and in turns.

    Raises:
        LockstepError: the first rung does not run.
        Stopped: a rung was stopped.
    """
    turns = [(turn, rung) for turn in range(repeats) for rung in climbed]
    records = ledger.enter((rung_key(rung, turn), run_dir.slug(shell_name(rung.name))) for turn, rung in turns)
    with progress("climbing", len(records)) as advance:
        for (_, rung), record in zip(turns, records, strict=True):
            if record.state is not State.done or not RunDir(ledger.folder / record.folder).summary.is_file():
                record = run_rung(ledger, rung, record, rung.command(words, job, ledger.folder / record.folder))
            if record.state is State.failed and rung is climbed[0]:
                raise BY_EXIT_CODE.get(record.exit_code, LockstepError)(record.error)
            advance(1)


def rung_key(rung: Rung, turn: int) -> tuple[str, ...]:
    """What tells a run of a ladder from the others. A script that was changed is another rung."""
    code = (f"code={hashlib.sha256(rung.code).hexdigest()[:8]}",) if rung.script else ()
    return f"rung={shell_name(rung.name)}", f"repeat={turn}", f"change={rung.change}", *code


def run_rung(ledger: Ledger, rung: Rung, record: Record, command: list[str]) -> Record:
    """Run a rung from its start, and record how it ended.

    Raises:
        Stopped: the rung or the ladder was stopped.
        StorageError: the folder of an earlier run cannot be removed, or the record cannot be written.
    """
    folder = ledger.folder / record.folder
    with storing(folder):
        if folder.exists():
            shutil.rmtree(folder)
    record = ledger.start(record)
    try:
        with running(command, capture=rung.script is not None) as process:
            out, err = process.communicate()
    except StopNow:
        ledger.end(record, State.stopped, exit_code=Stopped.exit_code, error=LADDER_STOPPED)
        raise Stopped(LADDER_STOPPED) from None
    code = process.returncode or 0
    said = ending(code, err)
    if rung.script is None and code == Stopped.exit_code:
        ledger.end(record, State.stopped, exit_code=code, error=said)
        raise Stopped(LADDER_STOPPED)
    if code:
        ledger.end(record, State.failed, exit_code=code, error=said)
    elif rung.script is not None and (figures := _figures_said(out)) is None:
        last = (out.strip().splitlines() or [""])[-1][:80]
        said = f"its last line is {last!r}, expected one such as " + '{"img_per_s": 900.0, "top1": 98.4}'
        said += f"; its errors end with {ending(code, err)}" * bool(err.strip())
        ledger.end(record, State.failed, error=said)
    else:
        if rung.script is not None:
            write_atomic(RunDir.at(folder).summary, json.dumps({"status": "completed", **(figures or {})}))
        shutil.rmtree(RunDir(folder).checkpoints, ignore_errors=True)  # of many rungs they would fill a disk
        ledger.end(record, State.done, objective=Run(folder).summary.get("objective"))
    return ledger.read(record)


def _figures_said(out: str) -> dict[str, float] | None:
    """The figures in the last line that a script has printed; None if it has none, or they cannot be true."""
    try:
        facts = json.loads(out.strip().splitlines()[-1])
        rate, top1 = float(facts["img_per_s"]), float(facts["top1"])
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return None
    return {"img_per_s": rate, "objective": top1} if 0 < rate < math.inf and 0 <= top1 <= 100 else None


def _rows(ledger: Ledger, climbed: Sequence[Rung], repeats: int, gpus: int | None) -> list[Row]:
    by_key = {frozenset(record.overrides): record for record in ledger.records()}
    rows: list[Row] = []
    for rung in climbed:
        records = [by_key[frozenset(rung_key(rung, turn))] for turn in range(repeats)]
        runs = [Run(ledger.folder / record.folder) for record in records if record.state is State.done]
        first, devices = rows[0] if rows else None, gpus if rung.has_ranks else None
        facts = {"lines": rung.lines, "change": rung.change, "reason": "" if runs else records[0].error}
        rows.append(row_of(rung.name, runs, first, devices=devices, **facts))
    return rows
