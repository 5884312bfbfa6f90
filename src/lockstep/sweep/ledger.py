"""The ledger of a sweep: which jobs it has, and how far each is. Knows no trainer, no Hydra and no torch.

    SWEEP/sweep.json       what the sweep is: its base config, and the keys that it varies
    SWEEP/jobs/NNN.json    the record of a job
    SWEEP/best             the name of the run folder with the best score, a text file as `outputs/latest` is one

Each record is a file of its own, replaced in one step by whoever runs the job. So no kill can tear it, and several
machines can write the ledger of one sweep on a network file system, where SQLite's write-ahead log does not work.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.core import safe_read
from lockstep.core.errors import InputError, StorageError
from lockstep.core.fields import leaves
from lockstep.core.safe_read import UnreadableFile
from lockstep.core.safe_write import fail_if_full, write_atomic
from lockstep.sweep.record import Direction, Record, State, best_of, born

VERSION = 1
SWEEP, JOBS, BEST = "sweep.json", "jobs", "best"
DIFFERENCES_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What a sweep is. Two lines with one identity are the same sweep, perhaps with more values.

    Fields:
        base: the config that all jobs share, as composed without the swept keys.
        swept: the keys that differ from job to job, sorted.
        words: the command line of the newest call, without the program.
        direction: which score is better.
    """

    base: Mapping[str, Any]
    swept: tuple[str, ...]
    words: tuple[str, ...]
    direction: Direction = Direction.maximize

    @property
    def hash(self) -> str:
        text = json.dumps([self.base, self.swept, self.direction], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def difference(self, other: Identity) -> str:
        """What differs between this sweep and `other`, for a sentence; empty if nothing does."""
        if self.swept != other.swept:
            return f"it sweeps {' '.join(self.swept)}, and this line {' '.join(other.swept) or 'nothing'}"
        if self.direction != other.direction:
            return f"its direction is {self.direction}, and that of this line {other.direction}"
        ours, theirs = dict(leaves(self.base)), dict(leaves(other.base))
        keys = [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]
        shown = [f"{key} is {ours.get(key)} there and {theirs.get(key)} here" for key in keys[:DIFFERENCES_SHOWN]]
        return ", ".join([*shown, *(["and more"] if len(keys) > len(shown) else [])])


class Ledger:
    """The ledger in the folder of a sweep."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def exists(self) -> bool:
        return (self.folder / SWEEP).is_file()

    def create(self, identity: Identity) -> None:
        """Write what the sweep is.

        Raises:
            InputError: the folder cannot be written.
            StorageError: the disk is full.
        """
        try:
            (self.folder / JOBS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            fail_if_full(self.folder, error)
            raise InputError(
                f"output_root: {self.folder} cannot be written ({error.strerror}); choose a folder that can be, with "
                "output_root=FOLDER"
            ) from error
        facts = {"version": VERSION, "hash": identity.hash, **dataclasses.asdict(identity)}
        write_atomic(self.folder / SWEEP, json.dumps(facts, indent=2) + "\n")

    def identity(self) -> Identity:
        """What the sweep is.

        Raises:
            InputError: the file is damaged, or of another version of Lockstep.
        """
        facts = self._read(self.folder / SWEEP)
        if facts.get("version") != VERSION:
            raise InputError(
                f"{self.folder / SWEEP} is of version {facts.get('version')!r} of the ledger, and this Lockstep has "
                f"{VERSION}; go on with the version that wrote it, or start anew with sweep.resume=new"
            )
        try:
            return Identity(
                base=dict(facts["base"]),
                swept=tuple(map(str, facts["swept"])),
                words=tuple(map(str, facts["words"])),
                direction=Direction(facts.get("direction", Direction.maximize)),
            )
        except (LookupError, TypeError, ValueError) as error:
            raise _damaged(self.folder / SWEEP) from error

    def records(self) -> list[Record]:
        """All records, by number.

        Raises:
            InputError: a record is damaged.
        """
        return [self.record(path) for path in sorted((self.folder / JOBS).glob("[0-9]*.json"))]

    def enter(self, jobs: Iterable[tuple[Sequence[str], str]]) -> list[Record]:
        """The records of jobs, by their overrides in any order; each that the ledger does not have gets a number.

        `jobs` are overrides, and a name for the run folder behind the number.
        """
        known = {frozenset(record.overrides): record for record in self.records()}
        following = 1 + max((record.number for record in known.values()), default=-1)
        entered = []
        for overrides, name in jobs:
            key = frozenset(overrides)
            if key not in known:
                known[key] = Record(number=following, overrides=tuple(overrides), folder=f"{following:03}-{name}")
                self.write(known[key])
                following += 1
            entered.append(known[key])
        return entered

    def write(self, record: Record) -> Record:
        """Replace the record of a job.

        Raises:
            StorageError: the file cannot be written; the old record is unchanged.
        """
        text = json.dumps(dataclasses.asdict(record), indent=2)
        write_atomic(self.folder / JOBS / f"{record.number:03}.json", text + "\n")
        return record

    def start(self, record: Record) -> Record:
        """Record that this process runs a job."""
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
        """Record how a job ended."""
        ended = replace(record, state=state, ended=time.time(), objective=objective, exit_code=exit_code, error=error)
        self.write(ended)
        with suppress(InputError, StorageError):  # another record is damaged, or the disk is full
            present = record_of(self.folder / self.best)
            self.mark_best([ended, *(present[1:] if present else ())])
        return ended

    def mark_best(self, records: Iterable[Record]) -> None:
        """Name the folder of the best of these jobs in the file `best`, the first of equal ones."""
        best = best_of(records, self.identity().direction)
        if best is not None and best.folder != self.best:
            write_atomic(self.folder / BEST, f"{best.folder}\n")

    @property
    def best(self) -> str:
        """The name of the folder of the best job; empty before there is one."""
        with suppress(UnreadableFile):
            return safe_read.read_text(self.folder / BEST).strip()
        return ""

    def read(self, record: Record) -> Record:
        """The present record of a job."""
        return self.record(self.folder / JOBS / f"{record.number:03}.json")

    def record(self, path: Path) -> Record:
        """The record in a file."""
        facts = self._read(path)
        try:
            record = Record(
                **{**facts, "overrides": tuple(map(str, facts["overrides"])), "state": State(facts["state"])}
            )
            if path.stem != f"{record.number:03}" or "/" in record.folder or not record.folder.startswith(path.stem):
                raise ValueError(record.folder)
        except (LookupError, TypeError, ValueError) as error:
            raise _damaged(path) from error
        return record

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            facts = safe_read.read_json(path)
        except UnreadableFile as error:
            raise InputError(f"{error}; start anew with sweep.resume=new") from error
        if not isinstance(facts, dict):
            raise _damaged(path)
        return facts


def output_of(ledger: Ledger, record: Record) -> Path:
    """The file with everything that a job of the pool prints."""
    return ledger.folder / JOBS / f"{record.number:03}.log"


def record_of(folder: Path) -> tuple[Ledger, Record] | None:
    """The record of the job in a run folder; None if the folder is not of a sweep."""
    ledger, number = Ledger(folder.parent), folder.name.partition("-")[0]
    path = ledger.folder / JOBS / f"{number}.json"
    if not number.isdigit() or not path.is_file():
        return None
    record = ledger.record(path)
    return (ledger, record) if record.folder == folder.name else None


def _damaged(path: Path) -> InputError:
    return InputError(f"{path} is not a file of a sweep's ledger; start anew with sweep.resume=new")
