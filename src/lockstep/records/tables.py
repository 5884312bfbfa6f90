"""Tables of runs side by side: a column for each key that differs, and for figures."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

from lockstep.core import log
from lockstep.core.run import TEST_SCORES, Run
from lockstep.core.run_dir import relative
from lockstep.core.table import Column, column_of_settings, show_table
from lockstep.core.tags import Directions, Monitor, figure_text
from lockstep.records.record import SCORE, Record, columns_of, directions_of, head, score_text
from lockstep.records.runs import JobRun, Row, column_direction, spread_of, tables

INTERVAL = (
    "±: the standard deviation. [ ]: Welch's 95 % interval of the difference of the means; where it contains 0, "
    "the difference is within the spread: other seeds could reverse it"
)


def columns_of_keys(rows: Sequence[Row], keys: Iterable[str], names: Sequence[str] = ()) -> list[Column]:
    """A column for each key; those among the chosen columns `names` alone, if there are any."""
    keys = [*keys]
    chosen = [key for key in keys if key in names] or keys
    return [column_of_settings(key, [row.get(key, "") for row in rows]) for key in chosen]


def column_of_figure(rows: Sequence[Row], name: str, monitor: Monitor, directions: Directions) -> Column:
    """The column of a figure: the mean and the spread of each row; the best as shown are bold, unless all are."""
    figure = monitor.name if name in (SCORE, TEST_SCORES) else name
    texts = [[score_text(row.get(key), figure) for key in (name, spread_of(name))] for row in rows]
    direction = column_direction(name, monitor.direction, directions)
    gains = {number: direction.gain(row[name]) for number, row in enumerate(rows) if row.get(name) is not None}
    shown_best = texts[max(gains, key=gains.__getitem__)][0] if gains else ""
    best = [number for number in gains if texts[number][0] == shown_best]
    cells = [" ± ".join(filter(None, text)) for text in texts]
    best = best if len(best) < len(gains) else []
    return Column(head(name, monitor.name, directions), cells, may_move=name != SCORE, best=best)


def show_groups(
    runs: Sequence[Run],
    rows: Sequence[Row],
    names: Sequence[str] = (),
    *,
    form: str = "table",
    differences: bool = True,
) -> None:
    """Show the rows of `groups` with the figures `names`, a table for each monitor, and its best run."""
    for number, (monitor, of) in enumerate(tables(rows).items()):
        if number:
            log.show("")
        members = [run for run in runs if run.monitor == monitor]
        shown, directions = names or columns_of(members), directions_of(members)
        show_table([*_columns(of, monitor, shown, names, directions, differences=differences)], form)
        if form != "table":
            continue
        if differences and any(row["low"] is not None for row in of):
            log.show(INTERVAL)
        if scored := [run for run in members if run.score is not None]:
            best = max(scored, key=lambda run: monitor.direction.gain(run.score or 0))
            job = f"job {best.record.number} with " if isinstance(best, JobRun) and "jobs" in of[0] else ""
            log.show(f"best: {job}{figure_text(monitor.name, best.score or 0)}, {relative(best.folder)}")


def _columns(
    rows: Sequence[Row],
    monitor: Monitor,
    names: Sequence[str],
    chosen: Sequence[str],
    directions: Directions,
    *,
    differences: bool,
) -> Iterator[Column]:
    keys = dict.fromkeys(key for row in rows for key in takewhile(lambda key: key != SCORE, row))
    if "jobs" in rows[0]:
        yield Column("job", [job_numbers(row["jobs"]) for row in rows])
    yield from columns_of_keys(rows, keys, chosen)
    yield from (column_of_figure(rows, name, monitor, directions) for name in names if name not in keys)
    yield Column("state", [row["state"] for row in rows])
    if differences and any(row["difference"] for row in rows):
        yield Column("to the best", [_difference(row, monitor.name) for row in rows], may_move=True)


def job_numbers(jobs: Sequence[int]) -> str:
    """Numbers of jobs: `3`, `0-2` or `0, 2`."""
    is_range = len(jobs) > 2 and [*jobs] == [*range(jobs[0], jobs[-1] + 1)]
    return f"{jobs[0]}-{jobs[-1]}" if is_range else ", ".join(map(str, jobs))


def errors_of(records: Iterable[Record]) -> Iterator[tuple[Record, list[str]]]:
    """Each error of jobs once: the first job that has it, and its lines, which begin with the numbers of the jobs."""
    alike: dict[str, list[Record]] = {}
    for record in records:
        alike.setdefault(record.error, []).append(record)
    alike.pop("", None)
    for error, jobs in alike.items():
        names = f"job{'s' * (len(jobs) > 1)} {job_numbers([record.number for record in jobs])}"
        yield jobs[0], [f"{names}: {line}" for line in error.split("\n")]


def _difference(row: Row, figure: str) -> str:
    """The difference to the best, and its interval, with signs."""
    numbers = [row[key] for key in ("difference", "low", "high") if row[key] is not None]
    difference, *ends = ["-+"[number >= 0] + score_text(abs(number), figure) for number in numbers] or [""]
    return f"{difference} [{', '.join(ends)}]" if ends else difference if row["difference"] else ""
