"""`report.html` of a sweep: its table, what the varied keys did to the score, and links to its jobs."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lockstep.config.commands import shell_command
from lockstep.config.roles import is_sample
from lockstep.core.figures import number_or_text
from lockstep.core.run import SEED, Run
from lockstep.core.run_dir import RunDir, relative
from lockstep.core.safe_write import write_atomic
from lockstep.core.tags import Monitor, figure_text
from lockstep.records.ledger import Ledger
from lockstep.records.record import SCORE, Record, best_of, cells, columns_of, directions_of, head, swept_keys, varied
from lockstep.records.runs import JobRun, groups
from lockstep.records.tables import errors_of
from lockstep.report.charts import MOST_CURVES, Curve, line_chart
from lockstep.report.run_page import number, rendered
from lockstep.telemetry import pictures

SPENDING = {"seconds": "seconds", "kWh": "kwh", "USD": "usd"}  # their keys in `summary.json`


def write_sweep_report(ledger: Ledger) -> Path:
    """Write `report.html` into a sweep's folder. Raises InputError for a damaged ledger, StorageError."""
    path = RunDir(ledger.folder).report
    write_atomic(path, sweep_page(ledger))
    return path


def sweep_page(ledger: Ledger, *, refresh: int | None = None) -> str:
    """The page of a sweep, as `run_page`. Raises InputError for a damaged ledger."""
    return rendered("sweep.html", refresh=refresh, **_facts(ledger))


def _facts(ledger: Ledger) -> dict[str, Any]:
    records, identity = ledger.records(), ledger.identity()
    monitor, figure = identity.monitor, identity.figure
    swept = swept_keys(record.overrides for record in records) or identity.swept
    jobs = {record.number: JobRun(ledger, record, monitor) for record in records}
    costs = {number: costs_of(job) for number, job in jobs.items()}
    notes = [sentence for job in jobs.values() for sentence in job.damage]
    shown = [name for name in SPENDING if any(name in cost for cost in costs.values())]
    columns, directions = columns_of(jobs.values()), directions_of(jobs.values())
    count, best_text = Counter(record.present_state for record in records), ""
    if best := best_of(records, monitor.direction):
        words = " ".join(varied(best.overrides, swept))
        best_text = f"job {best.number} with {figure_text(figure, best.score or 0.0)}: {words}"
    summary = {
        "jobs": ", ".join(f"{number} {state}" for state, number in count.items()),
        "best": best_text,
        **{f"{name} of all": f"{sum(cost.get(name, 0) for cost in costs.values()):.3g}" for name in shown},
    }
    ranked = sorted(records, key=lambda job: (job.score is None, -monitor.direction.gain(job.score or 0.0)))
    command = [*identity.of_hydra, *identity.words]
    if command[:1] != ["ladder"]:
        command = ["train", "-m", *command, f"hydra.sweep.dir={relative(ledger.folder)}"]
    return {
        "title": f"Sweep {ledger.folder.name}",
        "folder": str(ledger.folder.absolute()),
        "headline": _headline([*jobs.values()], swept),
        "notes": [*notes, *("\n".join(lines) for _, lines in errors_of(records))],
        "summary": [row for row in summary.items() if row[1]],
        "charts": [
            *_charts(scored := [record for record in ranked if record.score is not None], swept, costs, monitor),
            *_curves(scored, jobs, monitor),
        ],
        "importance": [*_importance(scored, swept)],
        "columns": ["job", "state", *swept, *(head(name, figure, directions) for name in columns), *shown],
        "numbers": 2 + len(swept),  # the first column of figures
        "jobs": [
            (
                # Its page, or its folder if it has none.
                quote(f"{record.folder}/{'report.html' * jobs[record.number].run_dir.report.exists()}"),
                [
                    str(record.number),
                    jobs[record.number].status,
                    *(record.values.get(key, "") for key in swept),
                    *cells({**jobs[record.number].columns, SCORE: record.score}, columns, figure),
                    *(number(costs[record.number].get(name), ".3g") for name in shown),
                ],
            )
            for record in ranked
        ],
        "command": shell_command(["lockstep", *command]),
    }


def _headline(jobs: Sequence[JobRun], swept: Sequence[str]) -> str:
    """The best setting over its seeds or folds: `82.80 ± 2.01 % top-1, 3 seeds, lr=0.1`; empty without several."""
    if not jobs or (best := groups(jobs)[0])["spread"] is None:
        return ""
    samples = [key for key in swept if is_sample(key)] or [SEED]
    record = next(job.record for job in jobs if job.record.number in best["jobs"])
    words = " ".join(varied(record.overrides, [key for key in swept if not is_sample(key)]))
    count = f"{best['done']} {' and '.join(key.rpartition('.')[2] + 's' for key in samples)}"
    return ", ".join(filter(None, [figure_text(best["monitor"], best["score"], best["spread"]), count, words]))


def costs_of(job: Run) -> dict[str, float]:
    figures = {"seconds": job.summary.get("seconds"), **job.spent}
    return {name: figures[key] for name, key in SPENDING.items() if figures.get(key) is not None}


def _charts(
    records: Sequence[Record], swept: Sequence[str], costs: Mapping[int, Mapping[str, float]], monitor: Monitor
) -> Iterator[tuple[str, str]]:
    scores, name = [record.score or 0.0 for record in records], head(SCORE, monitor.name, {})
    if swept and len(records) > 1:
        rows = [
            [*(number_or_text(record.values.get(key, "")) for key in swept), value]
            for record, value in zip(records, scores, strict=True)
        ]
        yield (
            "What was varied, and the score: the darker the better, orange is the best",
            pictures.parallel([*swept, name], rows, [*map(monitor.direction.gain, scores)]),
        )
    for cost in SPENDING:
        points = [
            (costs[record.number][cost], value, str(record.number))
            for record, value in zip(records, scores, strict=True)
            if cost in costs[record.number]
        ]
        if points:
            x, y, labels = zip(*points, strict=True)
            yield f"Score against {cost}, by job", pictures.scatter(x, y, labels, cost, name)


def _curves(
    records: Sequence[Record], jobs: Mapping[int, Run], monitor: Monitor
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The score of each job at its evaluations; the best job, which is the first, has a wider line."""
    colours = itertools.cycle(colour for colour in pictures.COLOURS if colour != pictures.BEST_COLOUR)
    lines: list[Curve] = []
    for place, record in enumerate(records[:MOST_CURVES]):
        if points := jobs[record.number].series(*jobs[record.number].monitor.tags):
            steps, values = zip(*points, strict=True)
            label, colour = (f"job {record.number}", next(colours)) if place else ("best", pictures.BEST_COLOUR)
            lines.append((label, colour, steps, values))
    if chart := line_chart(lines):
        few = f" (the best {MOST_CURVES})" * (len(records) > MOST_CURVES)
        yield f"{head(SCORE, monitor.name, {})} of each job{few}", chart


def _importance(records: Sequence[Record], swept: Sequence[str]) -> Iterator[tuple[str, float]]:
    """The share of the variance of the scores that lies between the values of each key alone, from 0 to 1."""
    scores = [record.score or 0.0 for record in records]
    mean = math.fsum(scores) / (len(scores) or 1)
    total = math.fsum((score - mean) ** 2 for score in scores)
    for key in swept:
        groups: dict[str, list[float]] = {}
        for record in records:
            groups.setdefault(record.values.get(key, ""), []).append(record.score or 0.0)
        if 1 < len(groups) < len(records) and total > 0:
            between = math.fsum(len(of) * (math.fsum(of) / len(of) - mean) ** 2 for of in groups.values())
            yield key, between / total
