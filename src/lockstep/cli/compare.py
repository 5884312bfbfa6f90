"""`lockstep compare`: runs side by side, and what differs between two."""

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

from rich.table import Column, Table

from lockstep.cli.rows import show_rows
from lockstep.core import log
from lockstep.core.errors import InputError
from lockstep.core.monitor import Monitor, figure_text
from lockstep.core.run import Run, State
from lockstep.sweep.record import cells, columns_of, head, score_text
from lockstep.sweep.runs import Row, causes, existing, groups, ordered, read_runs, tables

INTERVAL = (
    "±: the standard deviation. [ ]: Welch's 95 % interval of the difference of the means; where it contains 0, "
    "the difference is within the spread: other seeds could reverse it"
)


def compare(paths: Sequence[str], *, by: Sequence[str], sort: str | None, form: str) -> None:
    """Show what differs between runs, and their scores: in every key but the seed, or in those of `by`.

    Raises:
        InputError: a path has no run, a key is unknown, or the files of a run are damaged.
    """
    read = [run for path in paths for run in read_runs(existing(path))]
    runs = list({run.folder.resolve(): run for run in read}.values())
    runs = [run for run in runs if "rung" not in run.typed_values] or runs  # rungs have a table of their own
    damaged = dict.fromkeys(run.error for run in runs if run.state == State.damaged)
    two = len(runs) == len(paths) == 2 and not by and not damaged
    rows = causes(runs) if two else groups(runs, by)
    rows = rows if sort is None else ordered(rows, sort)
    if form != "table":
        show_rows(rows, form)
    elif two:
        _show_causes(runs, rows)
    else:
        for number, (monitor, table) in enumerate(tables(rows).items()):
            if number:
                log.show("")
            _show_groups([run for run in runs if run.monitor == monitor], table, monitor)
    if damaged:
        raise InputError(*damaged)


def _show_groups(runs: Sequence[Run], rows: Sequence[Row], monitor: Monitor) -> None:
    name, columns = monitor.name, columns_of(runs)
    heads = [Column(head(column, name), no_wrap=column == "score") for column in columns]
    unfinished = ["not done"] * any(row["not_done"] for row in rows)
    table = Table("what differs", *heads, "done", *unfinished, "to the best")
    for row in rows:
        settings = " ".join(f"{key}={row[key]}" for key in takewhile(lambda key: key != "score", row) if row[key])
        score, *others = cells(row, columns, name)
        score += "" if row["spread"] is None else f" ± {score_text(row['spread'], name)}"
        states = (str(row["done"]), *[row["not_done"]] * len(unfinished))
        table.add_row(settings, score, *others, *states, _difference(row, name))
    log.show_table(table)
    if any(row["low"] is not None for row in rows):
        log.show(INTERVAL)
    if scored := [run for run in runs if run.score is not None]:
        best = max(scored, key=lambda run: monitor.direction.gain(run.score or 0))
        log.show(f"best run: {figure_text(name, best.score or 0)}, {best.folder}")
    endings = Counter((run.state, run.error) for run in runs if run.error and run.state != State.damaged)
    for (state, error), number in endings.items():
        log.show(f"{number} {state}: {error}")


def _difference(row: Row, figure: str) -> str:
    """The difference to the best, and its interval, with signs."""
    numbers = [row[key] for key in ("difference", "low", "high") if row[key] is not None]
    difference, *ends = ["-+"[number >= 0] + score_text(abs(number), figure) for number in numbers] or [""]
    if ends:
        return f"{difference} [{', '.join(ends)}]{', within the spread' * row['within_spread']}"
    return difference if row["difference"] else ""


def _show_causes(runs: Sequence[Run], rows: Sequence[Row]) -> None:
    for name, run in zip("AB", runs, strict=True):
        score = "" if run.score is None else figure_text(run.monitor.name, run.score)
        log.show(f"{name}  {run.state}  {score}  {run.folder}")
    table = Table("likely cause", "key", "A", "B")
    for row in rows:
        table.add_row(*row.values())
    if rows:
        log.show_table(table)
    else:
        log.show("nothing differs that their folders know of: data, config, code, versions, machine")
