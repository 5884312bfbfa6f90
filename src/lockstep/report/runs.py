"""`lockstep runs`: what a folder of runs holds, as a table."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config.commands import shell_command
from lockstep.config.roles import is_sample
from lockstep.config.schema import ANNOTATIONS
from lockstep.core import console, log
from lockstep.core.errors import InputError
from lockstep.core.run import Run, State
from lockstep.core.run_dir import RunDir, relative
from lockstep.core.table import Column, Setting, show_rows, show_table
from lockstep.core.tags import Directions, Monitor
from lockstep.records.ledger import Ledger
from lockstep.records.record import SCORE, Record, best_of, columns_of, directions_of, figure_of
from lockstep.records.runs import (
    JobRun,
    Row,
    check_columns,
    differing,
    existing,
    groups,
    in_names,
    names_of_files,
    ordered,
    read_jobs,
    read_single,
    run_folders,
    setting,
    settings,
    spread_of,
    tables,
)
from lockstep.records.tables import column_of_figure, columns_of_keys
from lockstep.report.compare import show_run
from lockstep.runtime.host import format_bytes
from lockstep.telemetry.progress import format_timestamp


@dataclass(frozen=True)
class Shown:
    """What a listing shows: the runs of a folder or the jobs of a sweep, with columns of these keys and figures."""

    is_sweep: bool
    keys: Sequence[str]
    figures: Sequence[str]
    directions: Directions


def runs(folder: str, *, sort: str, filters: Sequence[str], form: str, columns: Sequence[str] = ()) -> None:
    """Show the runs and sweeps of a folder; the jobs of a sweep for its folder; the details of a run for a run's.

    A `sort` by a figure of an evaluation puts the best first; by another column, the largest last. `filters` are
    KEY=VALUE, KEY<NUMBER and KEY>NUMBER, on columns and on keys of the config; a list fits by one of its items.
    `columns` are figures to show in the place of the score, or some of the keys.
    """
    root = existing(folder)
    if form == "table" and RunDir(root).overrides.is_file() and not filters:
        show_run(read_single(root))
        return
    rows, shown, damaged = list_runs(root, sort=sort, filters=filters, columns=columns)
    if form in ("csv", "json"):
        show_rows([without_status(row) for row in rows], form)
    else:
        for number, (monitor, table) in enumerate(tables(rows).items()):
            if number:
                log.show("")
            _show(table, monitor, shown, columns, form)
        if rows and shown.is_sweep and form == "table":
            first = shell_command(["lockstep", "runs", relative(root / _number(rows[0]))])
            log.show(f"one job: {first}")
    if not (rows or damaged or form == "json"):
        log.show(f"no run fits {' and '.join(filters)}")
    if damaged:
        raise InputError(*damaged)


def list_runs(
    root: Path, *, sort: str = "when", filters: Sequence[str] = (), columns: Sequence[str] = ()
) -> tuple[list[Row], Shown, list[str]]:
    """The rows of `runs`, what it shows of them, and what is damaged."""
    rows, shown, damaged = _rows(root, [*columns, sort])
    check_columns("--columns", columns, rows)
    known = {name for row in rows for name in row}
    rows = [row for row in rows if all(_fits(row, condition, known) for condition in filters)]
    return ordered(rows, sort, shown.directions), shown, damaged


def without_status(row: Row) -> Row:
    """A row for programs: its state is a column of its own."""
    return {key: row[key] for key in row if key != "status"}


def _show(rows: Sequence[Row], monitor: Monitor, shown: Shown, chosen: Sequence[str], form: str) -> None:
    """Show the rows, with the name at the end, where it can be copied; for another program it comes first."""
    names = chosen or [name for name in shown.figures if name == SCORE or any(name in row for row in rows)]
    folders = [] if shown.is_sweep else [Column("name", [row["name"] for row in rows])]
    is_read = form == "table" and console.terminal.is_terminal
    show_table(
        [
            *([Column("job", [_number(row) for row in rows])] if shown.is_sweep else []),
            *([] if is_read else folders),
            Column("when", [row["when"][5:] for row in rows]),  # without the year
            *columns_of_keys(rows, shown.keys, chosen),
            *(
                column_of_figure(rows, name, monitor, shown.directions)
                for name in names
                if name not in (*shown.keys, *ANNOTATIONS)
            ),
            *(_column_of_annotation(rows, name) for name in ANNOTATIONS if any(row[name] for row in rows)),
            Column("size", [format_bytes(row["size"]) for row in rows]),
            Column("state", [row["status"] for row in rows]),
            *(folders if is_read else []),
        ],
        form,
    )


def _annotations(run: Run) -> Row:
    """What people find a run by; of a job that has not begun, what its sweep says of all jobs."""
    config = run.composed or (run.ledger.identity().base if isinstance(run, JobRun) else {})
    return {key: config.get(key) for key in ANNOTATIONS}


def _column_of_annotation(rows: Sequence[Row], key: str) -> Column:
    values = (row[key] or "" for row in rows)
    texts = [", ".join(map(str, value)) if isinstance(value, list) else str(value) for value in values]
    return Column(key, texts, may_move=True)


def _number(job: Row) -> str:
    return str(int(job["name"].partition("-")[0]))


def _rows(root: Path, names: Sequence[str]) -> tuple[list[Row], Shown, list[str]]:
    """A row for each run and each sweep, also with these figures; their keys and figures; what is damaged."""
    single: list[Run] = []
    rows: list[tuple[Run, Row]] = []
    swept: dict[str, None] = {}
    damaged: list[str] = []
    for path in run_folders(root):
        ledger = Ledger(path)
        try:
            if path == root and ledger.exists:
                single = read_jobs(ledger)
            elif ledger.exists:
                rows.append(_sweep(ledger, root))
                swept |= dict.fromkeys(ledger.identity().swept)
                damaged += [record.error for record in ledger.records() if record.state is State.damaged]
            elif not Ledger(path.parent).exists:
                single.append(Run(path))
        except InputError as error:
            damaged.append(str(error))
    damaged += [run.error for run in single if run.state == State.damaged]
    if not (single or rows or damaged):
        raise InputError(f"{root} has no run in it; name a folder of runs: lockstep runs outputs")
    keys = dict.fromkeys([*in_names(single, differing(single)), *swept])
    for run in single:
        facts = _facts(run.folder, root, run.started, run.overrides, run.score, run.state, run.status)
        own = {key: Setting(value) for key, value in {**names_of_files(run), **settings(run)}.items()}
        rows.append((run, {**facts, **_annotations(run), **own, **{key: setting(run, key) for key in keys}}))
    described: list[Row] = []
    for run, row in rows:
        values = {name: figure_of(run, name) for name in names if name not in row}
        figures = {name: value for name, value in values.items() if value is not None}
        monitor = {"monitor": run.monitor.name, "direction": run.monitor.direction}
        described.append({**run.columns, **figures, **row, **monitor})
    all_runs = [run for run, _ in rows]
    return described, Shown(Ledger(root).exists, [*keys], columns_of(all_runs), directions_of(all_runs)), damaged


def _sweep(ledger: Ledger, root: Path) -> tuple[Run, Row]:
    """The best job of a sweep, if there is one, and the row of the sweep, of its best setting if it has samples."""
    identity, records = ledger.identity(), ledger.records()
    started = min((record.started for record in records if record.started), default=0.0)
    best = best_of(records, identity.direction)
    count = Counter(record.present_state for record in records)
    state = ", ".join(f"{number} {state}" for state, number in count.items())
    score = best.score if best else None
    facts = _facts(ledger.folder, root, started, identity.words, score, state, state)
    values = {key: Setting(value) for key, _, value in (word.partition("=") for word in identity.words)}
    run = JobRun(ledger, best or Record(number=0, overrides=(), folder=""), identity.monitor)
    annotations = _annotations(JobRun(ledger, best or records[0], identity.monitor) if records else run)
    row = {**facts, **annotations, **{key: values[key] for key in identity.swept if key in values}}
    if any(map(is_sample, identity.swept)) and (jobs := read_jobs(ledger)):
        (setting_row, *_), names = groups(jobs), columns_of(jobs)
        row |= {key: setting_row[key] for name in names for key in (name, spread_of(name))}
    return run, row


def _facts(
    path: Path, root: Path, started: float, overrides: Sequence[str], score: float | None, *states: str
) -> Row:
    size = 0
    for folder, _, files in os.walk(path):
        for file in files:
            with suppress(OSError):  # a job that runs has just removed it
                size += os.lstat(Path(folder, file)).st_size
    return {
        "when": format_timestamp(started),
        "name": str(path.relative_to(root)) if path != root else path.name,
        "overrides": [*overrides],
        "score": score,
        "state": states[0],
        "status": states[1],
        "size": size,
    }


def _fits(row: Row, condition: str, known: set[str]) -> bool:
    """Whether a row fulfils a condition. A row without the key does not."""
    match = re.fullmatch(r"([^=<>]+)(=.*|[<>][+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)", condition)
    if match is None or match[1] not in known:
        wrong = f"no run has {match[1]}" if match else "it is not a condition"
        raise InputError(
            f"--filter {condition}: {wrong}; expected KEY=VALUE, KEY<NUMBER or KEY>NUMBER: --filter state=done"
        )
    value: Any = row.get(match[1])
    sign, limit = match[2][0], match[2][1:]
    if sign == "=":
        return limit in map(str, value if isinstance(value, list) else [value])
    try:
        return float(value) < float(limit) if sign == "<" else float(value) > float(limit)
    except (TypeError, ValueError):
        return False
