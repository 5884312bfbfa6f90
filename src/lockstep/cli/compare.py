"""`lockstep compare`: runs side by side, and what differs between two."""

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

from rich.table import Column, Table

from lockstep.cli.rows import show_rows
from lockstep.core import log
from lockstep.core.errors import InputError
from lockstep.core.monitor import Direction
from lockstep.core.run import Run, State
from lockstep.sweep.record import score_text
from lockstep.sweep.runs import Row, causes, direction_of, existing, groups, ordered, read_runs

INTERVAL = (
    "±: the standard deviation. [ ]: Welch's 95 % interval of the difference of the means; where it holds 0, the "
    "difference is within the spread: other seeds could turn it round"
)


def compare(paths: Sequence[str], *, by: Sequence[str], sort: str | None, form: str) -> None:
    """Show what differs between runs, and their scores: in every key but the seed, or in those of `by`.

    Raises:
        InputError: a path has no run, a key is unknown, or the files of a run are damaged.
    """
    read = [run for path in paths for run in read_runs(existing(path))]
    runs = list({run.folder.resolve(): run for run in read}.values())
    runs = [run for run in runs if "rung" not in run.typed_values] or runs  # rungs have a table of their own
    left_out = dict.fromkeys(run.error for run in runs if run.state == State.damaged)
    two = len(runs) == len(paths) == 2 and not by and not left_out
    if not two:
        odd = [run for run in runs if run.direction not in (None, direction_of(runs))]
        sentence = "{}: its scores are to {}; name it alone"
        left_out |= dict.fromkeys(sentence.format(run.folder.parent, run.direction) for run in odd)
        runs = [run for run in runs if run not in odd]
    rows = causes(runs) if two else groups(runs, by)
    is_best_first = sort == "score" and direction_of(runs) is Direction.maximize
    rows = rows if sort is None else ordered(rows, sort, descending=is_best_first)
    if form != "table":
        show_rows(rows, form)
    elif two:
        _show_causes(runs, rows)
    else:
        _show_groups(runs, rows)
    if left_out:
        raise InputError(*left_out)


def _show_groups(runs: Sequence[Run], rows: Sequence[Row]) -> None:
    table = Table("what differs", Column("score", no_wrap=True), "done", "not done", "to the best")
    for row in rows:
        settings = " ".join(f"{key}={row[key]}" for key in takewhile(lambda key: key != "score", row) if row[key])
        score = score_text(row["score"]) + (
            "" if row["spread"] is None else f" ± {score_text(row['spread'], row['score'])}"
        )
        table.add_row(settings, score, str(row["done"]), row["not_done"], _difference(row))
    log.show_table(table)
    if any(row["low"] is not None for row in rows):
        log.show(INTERVAL)
    if scored := [run for run in runs if run.score is not None]:
        best = max(scored, key=lambda run: direction_of(runs).gain(run.score or 0))
        log.show(f"best run: {score_text(best.score)}, {best.folder}")
    endings = Counter((run.state, run.error) for run in runs if run.error and run.state != State.damaged)
    for (state, error), number in endings.items():
        log.show(f"{number} {state}: {error}")


def _difference(row: Row) -> str:
    if row["low"] is not None:
        verdict = ", within the spread" * row["within_spread"]
        return f"{row['difference']:+.2f} [{row['low']:+.2f}, {row['high']:+.2f}]{verdict}"
    return f"{row['difference']:+.2f}" if row["difference"] else ""


def _show_causes(runs: Sequence[Run], rows: Sequence[Row]) -> None:
    for name, run in zip("AB", runs, strict=True):
        log.show(f"{name}  {run.state}  {score_text(run.score)}  {run.folder}")
    table = Table("likely cause", "key", "A", "B")
    for row in rows:
        table.add_row(*row.values())
    if rows:
        log.show_table(table)
    else:
        log.show("nothing differs that their folders know of: data, config, code, versions, machine")
