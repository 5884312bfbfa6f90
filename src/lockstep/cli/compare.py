"""`lockstep compare`: runs side by side, and the likely causes of a difference between two."""

from collections import Counter
from collections.abc import Sequence

from lockstep.core import log
from lockstep.core.errors import InputError
from lockstep.core.monitor import figure_text
from lockstep.core.run import Run, State
from lockstep.core.table import Column, show_rows, show_table
from lockstep.sweep.runs import Row, causes, check_columns, existing, groups, ordered, read_runs
from lockstep.sweep.tables import show_groups


def compare(
    paths: Sequence[str], *, by: Sequence[str], sort: str | None, form: str, columns: Sequence[str] = ()
) -> None:
    """Show the scores of runs by the keys in `by`, or else by the keys that differ, except the seed.

    `columns` are the figures to show in the place of the score and the metrics, or some of the keys.
    """
    read = [run for path in paths for run in read_runs(existing(path))]
    runs = list({run.folder.resolve(): run for run in read}.values())
    runs = [run for run in runs if "rung" not in run.typed_values] or runs  # rungs have their own table
    damaged = dict.fromkeys(run.error for run in runs if run.state == State.damaged)
    two = len(runs) == len(paths) == 2 and not (by or columns or damaged)
    rows = causes(runs) if two else groups(runs, by, [*columns, *([sort] if sort else [])])
    check_columns("--columns", columns, rows)
    rows = rows if sort is None else ordered(rows, sort)
    if form in ("csv", "json"):
        show_rows(rows, form)
    elif two:
        _show_causes(runs, rows, form)
    else:
        show_groups(runs, rows, columns, form=form, differences=not columns)
        endings = Counter((run.state, run.error) for run in runs if run.error and run.state != State.damaged)
        for (state, error), count in endings.items() if form == "table" else ():
            log.show(f"{count} {state}: {error}")
    if damaged:
        raise InputError(*damaged)


def _show_causes(runs: Sequence[Run], rows: Sequence[Row], form: str) -> None:
    for name, run in zip("AB", runs, strict=True):
        score = "" if run.score is None else figure_text(run.monitor.name, run.score)
        log.show(f"{name}  {run.status}  {score}  {run.folder}")
    if rows:
        heads = {"cause": "likely cause", "key": "key", "A": "A", "B": "B"}
        show_table([Column(head, [row[key] for row in rows]) for key, head in heads.items()], form)
    else:
        log.show("nothing differs that their folders know of: data, config, code, versions, machine")
