"""The ledger of a sweep: which jobs it has, and how far each is. Knows no trainer and no torch.

    SWEEP/sweep.json       what the sweep is: its base config, and the keys that it varies
    SWEEP/jobs/NNN.json    the record of a job
    SWEEP/best             the name of the run folder with the best score, a text file as `outputs/latest` is one

Each record is a separate file, replaced in one step by whoever runs the job. So no kill can tear it, and several
machines can write the ledger of one sweep on a network file system, where SQLite's write-ahead log does not work.
"""

import dataclasses
import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from lockstep.config.commands import key_of
from lockstep.config.history import present_key, present_values, present_words
from lockstep.config.options import default_of_key
from lockstep.config.roles import identity_of, role_of
from lockstep.config.schema import Job
from lockstep.core.errors import InputError, Interrupted, Stopped, StorageError, as_known
from lockstep.core.formats import FileFormat, check_format, stamp
from lockstep.core.run import Run, State, born, read_overrides
from lockstep.core.run_dir import SWEEP, RunDir
from lockstep.core.safe_read import UnreadableFile, is_plain, read_json, read_name
from lockstep.core.safe_write import fail_if_full, make_folder, storing, write_atomic
from lockstep.core.tags import Direction, Monitor
from lockstep.records.record import SCORE, Identify, Record, best_of, job_key, parsed_record
from lockstep.runtime.program import JobError
from lockstep.runtime.signals import StopNow, not_begun

JOBS, BEST_FILE = "jobs", "best"
DIFFERENCES_SHOWN = 3
SWEEPS = "sweeps"  # the folder of the sweeps, in `output_root`


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What a sweep is. Two lines with one identity are the same sweep, perhaps with more values."""

    base: Mapping[str, Any] = field(default_factory=dict)  # what all jobs share, as composed without the swept keys
    swept: tuple[str, ...] = ()  # the keys that differ from job to job, sorted
    words: tuple[str, ...] = ()  # the command line of the newest call, without the program
    of_hydra: tuple[str, ...] = ()  # the words of that line for Hydra's sweeper
    direction: Direction = Direction.maximize
    figure: str = SCORE  # the figure that the score is; `score` where nothing says it
    latest: str = ""  # the run that `latest` names to its jobs: the newest one when the sweep began
    id: str = field(default_factory=lambda: secrets.token_hex(8))  # no other sweep has it, even in the same folder

    @property
    def monitor(self) -> Monitor:
        return Monitor(self.figure, self.direction)

    @property
    def hash(self) -> str:
        text = json.dumps([self.base, self.swept], sort_keys=True)  # which decide what the score is
        return hashlib.sha256(text.encode()).hexdigest()

    def difference(self, other: Self) -> str:
        """The differences between this sweep and `other`, for a sentence; empty if there are none."""
        if self.swept != other.swept:
            return f"it sweeps {' '.join(self.swept)}, and this line {' '.join(other.swept) or 'nothing'}"
        # A key that a later version has added is not in the earlier config, and has its default in a new one.
        ours, theirs = (
            {key: value for key, value in identity_of(base).items() if value not in (None, [], {})}
            for base in (self.base, other.base)
        )
        added = {key for key in ours.keys() ^ theirs.keys() if default_of_key(key) == {**ours, **theirs}[key]}
        keys = [key for key in sorted({*ours, *theirs} - added) if ours.get(key) != theirs.get(key)]
        shown = [f"{key} is {ours.get(key)} there and {theirs.get(key)} here" for key in keys[:DIFFERENCES_SHOWN]]
        return ", ".join([*shown, *(["and more"] if len(keys) > len(shown) else [])])


class Ledger:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_new = False  # whether this object has created it

    @property
    def exists(self) -> bool:
        return is_plain(self.folder / SWEEP)

    def create(self, identity: Identity) -> None:
        """Write what the sweep is. Raises InputError if the folder cannot be written, StorageError on a full disk."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            make_folder(self.folder / JOBS)
        except OSError as error:
            fail_if_full(self.folder, error)
            raise InputError(
                f"output_root: {self.folder} cannot be written ({error.strerror}); choose a folder that can be, with "
                "output_root=FOLDER"
            ) from error
        facts = {**stamp(FileFormat.sweep), "hash": identity.hash, **dataclasses.asdict(identity)}
        write_atomic(self.folder / SWEEP, json.dumps(facts, indent=2) + "\n")
        self.is_new = True

    def identity(self) -> Identity:
        """What the sweep is. Raises InputError if the file is damaged, or of a later version."""
        path, again = self.folder / SWEEP, "start anew with sweep.resume=new"
        try:
            facts = read_json(path)
            check_format(FileFormat.sweep, facts, path)
            return Identity(
                base=present_values(dict(facts["base"])),
                swept=tuple(sorted(map(present_key, map(str, facts["swept"])))),
                words=tuple(present_words(map(str, facts["words"]), say=False)),
                of_hydra=tuple(map(str, facts.get("of_hydra", ()))),  # an earlier version has none
                direction=Direction(facts["direction"]),
                figure=str(facts.get("figure", SCORE)),  # an earlier version names none
                latest=str(facts.get("latest", "")),
                id=str(facts["id"]),
            )
        except UnreadableFile as error:
            raise InputError(f"{error}; {again}") from error
        except (LookupError, TypeError, ValueError) as error:
            raise InputError(f"{path} is not a file of a sweep's ledger; {again}") from error

    def records(self) -> list[Record]:
        """All records, by number; a damaged one says so."""
        names = (path.stem for path in (self.folder / JOBS).glob("*.json"))
        return [self.record(number) for number in sorted(int(name) for name in names if name.isdecimal())]

    def enter(self, jobs: Iterable[tuple[Sequence[str], str]], identify: Identify = job_key) -> list[Record]:
        """The records of jobs, by what `identify` says they are; each that the ledger does not have gets a number.

        `jobs` are overrides, and a name for the run folder behind the number. A damaged record is put aside, and its
        job resumes in its folder. Raises StorageError if a record cannot be written.
        """
        with storing(folder := self.folder / JOBS):
            make_folder(folder)  # it was lost
        records = self.records()
        following = 1 + max((record.number for record in records), default=-1)
        # A damaged record of a job that had not begun has no overrides.
        known = {identify(r.overrides): r for r in records if r.overrides or r.state is not State.damaged}
        entered = []
        for overrides, name in jobs:
            key = identify(overrides)
            if key not in known:
                known[key] = Record(number=following, overrides=tuple(overrides), folder=f"{following:03}-{name}")
                self.write(known[key])
                following += 1
            elif known[key].state is State.damaged:
                path = self.path_of(known[key].number)
                with storing(path):
                    path.replace(path.with_suffix(".damaged"))
                known[key] = self.write(replace(known[key], state=State.waiting, exit_code=0, error=""))
            entered.append(known[key])
        return entered

    def write(self, record: Record) -> Record:
        """Replace the record of a job. Raises StorageError, and leaves the old record unchanged."""
        write_atomic(self.path_of(record.number), json.dumps(dataclasses.asdict(record), indent=2) + "\n")
        return record

    def start(self, record: Record) -> Record:
        return self.write(
            replace(
                record,
                state=State.running,
                host=socket.gethostname(),
                pid=os.getpid(),
                born=born(os.getpid()),
                started=time.time(),
                ended=0.0,
                exit_code=0,
                error="",
            )
        )

    def end(
        self, record: Record, state: State, *, objective: float | None = None, exit_code: int = 0, error: str = ""
    ) -> Record:
        ended = replace(record, state=state, ended=time.time(), objective=objective, exit_code=exit_code, error=error)
        self.write(ended)
        with suppress(InputError, StorageError):  # `sweep.json` is damaged, or the disk is full
            self.mark_best()
        return ended

    def mark_best(self) -> None:
        """Name the folder of the best job in the file `best`, of the first of equal ones."""
        best = best_of(self.records(), self.identity().direction)
        if best is not None and best.folder != self.best:
            write_atomic(self.folder / BEST_FILE, f"{best.folder}\n")

    @property
    def best(self) -> str:
        """The name of the folder of the best job; empty before there is one."""
        with suppress(UnreadableFile):
            return read_name(self.folder / BEST_FILE)
        return ""

    def read(self, record: Record) -> Record:
        """The present record of a job."""
        return self.record(record.number)

    def record(self, number: int) -> Record:
        """The record with a number; a damaged one has what the job's folder says, and the error."""
        path = self.path_of(number)
        try:
            record = parsed_record(number, read_json(path))
            # It waits again if its folder is gone: nobody can use its score without the weights.
            is_gone = record.state is State.done and not (self.folder / record.folder).exists()
            return replace(record, state=State.waiting, objective=None) if is_gone else record
        except (InputError, LookupError, TypeError, ValueError) as error:
            reason = error if isinstance(error, UnreadableFile) else f"{path} is not the record of a job"
            folder = min((path.name for path in self.folder.glob(f"{path.stem}-*")), default=path.stem)
            overrides: list[str] = []
            with suppress(InputError):  # the job has not begun
                overrides = read_overrides(RunDir(self.folder / folder).overrides)
            return Record(
                number=number,
                overrides=tuple(overrides),
                folder=folder,
                state=State.damaged,
                exit_code=InputError.exit_code,
                error=f"{reason}; rerun the sweep's command to resume the job",
            )

    def path_of(self, number: int) -> Path:
        return self.folder / JOBS / f"{number:03}.json"


def output_of(ledger: Ledger, record: Record) -> Path:
    """The file with everything that a job of the pool prints."""
    return ledger.folder / JOBS / f"{record.number:03}.log"


def record_of(folder: Path) -> tuple[Ledger, Record] | None:
    """The record of the job in a run folder; None if the folder is not of a sweep."""
    ledger, number = Ledger(folder.parent), folder.name.partition("-")[0]
    if not number.isdecimal() or not (ledger.folder / JOBS / f"{number}.json").exists():
        return None
    record = ledger.record(int(number))
    return (ledger, record) if record.folder == folder.name else None


def recorded(ledger: Ledger, record: Record, function: Callable[[], float | None]) -> float | None:
    """Run a job of a sweep in this process and keep its record. Raises what the job raised, or Stopped."""
    record = ledger.start(record)
    try:
        objective = function()
    except BaseException as raised:
        error = raised.error if isinstance(raised, JobError) else raised
        if isinstance(error, StopNow | KeyboardInterrupt):
            error = not_begun(Run(ledger.folder / record.folder).saved)
        translated = None
        if isinstance(error, Exception):
            from lockstep.config.messages import translate  # a job that ends well needs none

            translated = translate(error)
        known = translated or as_known(error)
        # A full disk is not the job's fault: a rerun of the command resumes it.
        state = State.stopped if isinstance(known, Stopped | Interrupted | StorageError) else State.failed
        ledger.end(record, state, exit_code=known.exit_code, error=str(known))
        raise (translated or error) from None
    ledger.end(record, State.done, objective=objective)
    return objective


def words_of_sweep(words: Sequence[str]) -> list[str]:
    """The words of a line behind those of its `sweep.resume`, if none changes a job; Hydra's sweeper is in them."""
    typed = {key_of(word): word.partition("=")[2] for word in words if "=" in word and not word.startswith("-")}
    named, root = typed.get("sweep.resume", "auto"), typed.get("output_root", Job().output_root)
    if named in ("auto", "new") or any(role_of(key).makes_another_run for key in typed):
        return [*words]
    try:
        stored = resumed_sweep(Path(root).expanduser(), named).identity()
    except InputError:  # `choose_folder` says it, with the config
        return [*words]
    before = [word for word in (*stored.of_hydra, *stored.words) if key_of(word) not in typed]
    first = next(place for place, word in enumerate(words) if key_of(word) in typed)
    return [*words[:first], *before, *words[first:]]


def resumed_sweep(root: Path, named: str) -> Ledger:
    """The sweep that `sweep.resume` names. Raises InputError if there is none."""
    if named == "latest":
        newest = max((root / SWEEPS).glob("*/sweep.json"), default=None)
        if newest is None:
            raise InputError(f"sweep.resume=latest: no sweep has been started in {root / SWEEPS} yet")
        return Ledger(newest.parent.absolute())
    ledger = Ledger(Path(named).expanduser().absolute())
    if not ledger.exists:
        raise InputError(
            f"sweep.resume: {named} is not a sweep's folder; name one with sweep.resume=FOLDER, or the newest with "
            "sweep.resume=latest"
        )
    return ledger
