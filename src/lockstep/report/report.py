"""`lockstep report`: the pages of a run, or of a sweep and its jobs, in their folders."""

from lockstep.core import log
from lockstep.core.errors import InputError
from lockstep.core.run import State
from lockstep.core.run_dir import RunDir
from lockstep.records.ledger import Ledger
from lockstep.records.runs import existing, read_single
from lockstep.report.bundle import write_bundle
from lockstep.report.run_page import write_report
from lockstep.report.sweep_page import write_sweep_report
from lockstep.telemetry.progress import progress


def report(path: str, *, bundle: bool = False) -> None:
    """Write `report.html` into the folders of a run or a sweep and of each of its jobs; or a zip for a bug report."""
    folder = existing(path)
    if bundle:
        write_bundle(folder)
        return
    ledger, damaged = Ledger(folder), []
    if ledger.exists:
        records = [record for record in ledger.records() if (folder / record.folder).is_dir()]
        damaged = [record.error for record in records if record.state is State.damaged]
        with progress("reporting", len(records)) as advance:
            for record in records:
                write_report(read_single(folder / record.folder))
                advance(1)
        written = write_sweep_report(ledger)
    elif RunDir(folder).overrides.is_file() or RunDir(folder).summary.is_file():
        written = write_report(read_single(folder))
    else:
        raise InputError(f"{folder} is neither a run nor a sweep; `lockstep runs {folder}` lists those in it")
    log.show(f"wrote {written}")
    if damaged:
        raise InputError(*damaged)
