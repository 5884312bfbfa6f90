"""`lockstep report`: the page of a run or of a sweep."""

from lockstep.core import log
from lockstep.core.errors import InputError
from lockstep.core.run import State
from lockstep.core.run_dir import RunDir
from lockstep.sweep.ledger import Ledger
from lockstep.sweep.page import write_sweep_report
from lockstep.sweep.runs import existing, read_single
from lockstep.telemetry.progress import progress
from lockstep.telemetry.report import is_current, write_report


def report(path: str) -> None:
    """Write `report.html` into the folder of a run; into that of a sweep, and of each of its jobs that has changed.

    Raises:
        InputError: the path is no run and no sweep, or its ledger is damaged; what can be read has its page.
        StorageError: a page cannot be written.
    """
    folder = existing(path)
    ledger, damaged, unchanged = Ledger(folder), [], 0
    if ledger.exists:
        records = [record for record in ledger.records() if (folder / record.folder).is_dir()]
        damaged = [record.error for record in records if record.state is State.damaged]
        with progress("reporting", len(records)) as advance:
            for record in records:
                run_dir = RunDir(folder / record.folder)
                # That a job which runs was killed is in no file.
                if record.state is not State.running and is_current(run_dir, ledger.path_of(record.number)):
                    unchanged += 1
                else:
                    write_report(read_single(run_dir.path))
                advance(1)
        written = write_sweep_report(ledger)
    elif RunDir(folder).overrides.is_file() or RunDir(folder).summary.is_file():
        written = write_report(read_single(folder))
    else:
        raise InputError(f"{folder} is no run and no sweep; `lockstep runs {folder}` lists those in it")
    others = f"; the pages of {unchanged} of its {len(records)} jobs were up to date" if unchanged else ""
    log.show(f"wrote {written}{others}")
    if damaged:
        raise InputError(*damaged)
