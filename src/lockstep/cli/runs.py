"""`lockstep runs`: the runs and sweeps of a folder as a table."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lockstep.cli.compare import show_rows
from lockstep.core import log
from lockstep.core.errors import InputError
from lockstep.core.run import Run, State
from lockstep.runtime.host import GB, amount
from lockstep.sweep.compare import Row, ordered
from lockstep.sweep.ledger import Ledger
from lockstep.sweep.record import Direction, best_of, score_text
from lockstep.sweep.runs import differing, existing, read_jobs, run_folders
from lockstep.telemetry.columns import moment

COLUMNS = ("when", "name", "what", "score", "state", "size")


def runs(folder: str, *, sort: str, filters: Sequence[str], form: str) -> None:
    """Show the runs and sweeps of a folder; those of a sweep for its folder.

    A `sort` by score puts the best first; by another column, the largest last. `filters` are KEY=VALUE, KEY<NUMBER
    and KEY>NUMBER, on columns and on keys of the config.

    Raises:
        InputError: the folder does not exist or has no run, a condition is wrong, or files are damaged.
    """
    root = existing(folder)
    rows, damaged = _rows(root)
    known = {name for row in rows for name in row}
    rows = [row for row in rows if all(_fits(row, condition, known) for condition in filters)]
    smaller = Ledger(root).exists and Ledger(root).identity().direction is Direction.minimize
    rows = ordered(rows, sort, descending=sort == "score" and not smaller)
    if form == "json":
        show_rows(rows, form)
    elif rows:
        _show(rows)
    elif not damaged:
        log.show(f"no run fits {' and '.join(filters)}")
    if damaged:
        raise InputError(*damaged)


def _show(rows: Sequence[Row]) -> None:
    """Print two lines for each row: its figures, with the name at the end, where it can be copied; what differs."""
    shown = [
        (row["when"], score_text(row["score"]), amount(row["size"] / GB), row["state"], row["name"]) for row in rows
    ]
    shown = [("when", "score", "size", "state", "name"), *shown]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for cells, what in zip(shown, ["", *(row["what"] for row in rows)], strict=True):
        line = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        log.console.print(line.rstrip(), soft_wrap=True)
        if what:
            log.show(f"    {what}")


def _rows(root: Path) -> tuple[list[Row], list[str]]:
    """A row for each run and each sweep, and sentences about what is damaged."""
    single: list[Run] = []
    rows: list[Row] = []
    damaged: list[str] = []
    for path in run_folders(root):
        ledger = Ledger(path)
        try:
            if path == root and ledger.exists:
                single = read_jobs(ledger)
            elif ledger.exists:
                rows.append(_sweep(ledger, root))
                damaged += [record.error for record in ledger.records() if record.state is State.damaged]
            elif not Ledger(path.parent).exists:
                single.append(Run(path))
        except InputError as error:
            damaged.append(str(error))
    damaged += [run.error for run in single if run.state == State.damaged]
    if not (single or rows or damaged):
        raise InputError(f"{root} has no run in it; name a folder of runs: lockstep runs outputs")
    keys = differing(single)
    for run in single:
        what = " ".join(f"{key}={run.settings[key]}" for key in keys if key in run.settings)
        what += f"  rung {run.rung}" if run.rung and run.state != State.done else ""
        rows.append({**_columns(run.folder, root, run.started, what, run.score, run.state), **run.settings})
    return rows, damaged


def _sweep(ledger: Ledger, root: Path) -> Row:
    identity, records = ledger.identity(), ledger.records()
    typed = {word.partition("=")[0]: word for word in identity.words}
    what = " ".join(word for key, word in typed.items() if key in identity.swept)
    started = min((record.started for record in records if record.started), default=0.0)
    best = best_of(records, identity.direction)
    count = Counter(record.present_state for record in records)
    state = ", ".join(f"{number} {state}" for state, number in count.items())
    return _columns(ledger.folder, root, started, what, best.score if best else None, state)


def _columns(path: Path, root: Path, started: float, what: str, score: float | None, state: str) -> Row:
    size = 0
    for folder, _, files in os.walk(path):
        for file in files:
            with suppress(OSError):  # a job that runs has just removed it
                size += os.lstat(Path(folder, file)).st_size
    name = str(path.relative_to(root)) if path != root else path.name
    return dict(zip(COLUMNS, (moment(started), name, what, score, state, size), strict=True))


def _fits(row: Row, condition: str, known: set[str]) -> bool:
    """Whether a row fulfils a condition. A row without the key does not."""
    match = re.fullmatch(r"([^=<>]+)(=.*|[<>]-?\d+(?:\.\d*)?(?:e-?\d+)?)", condition)
    if match is None or match[1] not in known:
        wrong = f"no run has {match[1]}" if match else "it is no condition"
        raise InputError(
            f"--filter {condition}: {wrong}; expected KEY=VALUE, KEY<NUMBER or KEY>NUMBER: --filter state=done"
        )
    value, sign, limit = row.get(match[1]), match[2][0], match[2][1:]
    if sign == "=":
        return str(value) == limit
    try:
        return float(value or "none") < float(limit) if sign == "<" else float(value or "none") > float(limit)
    except ValueError:
        return False
