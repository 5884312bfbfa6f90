"""What a sweep compares its jobs by: the score, and what it cost. Several objectives have trade-offs."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from lockstep.core.errors import InputError
from lockstep.core.run import Run
from lockstep.sweep.ledger import Ledger
from lockstep.sweep.record import Direction, Record

SCORE = "score"


def _seconds(run: Run) -> float | None:
    """The time of all training steps as `metrics.jsonl` has it, without start-up, evaluations and saves."""
    steps = [(0, 0.0), *run.series("perf/step_ms")]
    total = sum(ms / 1000 * (step - before) for (before, _), (step, ms) in pairwise(steps))
    return total or None  # None for a job of an app that writes no such file


# The costs of a run as objectives, of which less is better; None for one that was not measured.
COSTS: Mapping[str, Callable[[Run], float | None]] = {
    "seconds": _seconds,
    "megabytes": lambda run: path.stat().st_size / 1e6 if (path := run.run_dir.weights).exists() else None,
    "kwh": lambda run: run.spent.get("kwh"),
}
OBJECTIVES = (SCORE, *COSTS)


def _value(ledger: Ledger, record: Record, name: str) -> float | None:
    return record.score if name == SCORE else COSTS[name](Run(ledger.folder / record.folder))


def check(names: Sequence[str]) -> None:
    """Raise InputError for names that are no objectives."""
    if not names or len({*names}) < len(names) or not {*names} <= {*OBJECTIVES}:
        raise InputError(
            f"sweep.objectives is [{','.join(map(str, names))}], expected some of {', '.join(OBJECTIVES)}, each "
            f"once: sweep.objectives=[{SCORE}]"
        )


def values(ledger: Ledger, record: Record, names: Sequence[str]) -> list[float]:
    """The objectives of a job that is done; empty if one is unknown."""
    known = [_value(ledger, record, name) for name in names] if record.score is not None else []
    return [] if None in known else [value for value in known if value is not None]


def missing(ledger: Ledger, records: Sequence[Record], names: Sequence[str]) -> list[str]:
    """A sentence for each objective that jobs that are done do not have."""
    done = [record for record in records if record.score is not None]
    without = {name: [str(r.number) for r in done if _value(ledger, r, name) is None] for name in names}
    return [
        f"sweep.objectives: {name} was not measured in job{'s' * (len(jobs) > 1)} {', '.join(jobs)}, which cannot be "
        f"compared by it; leave it out: sweep.objectives=[{','.join(other for other in names if other != name)}]"
        for name, jobs in without.items()
        if jobs
    ]


def directions(names: Sequence[str], score: Direction) -> list[Direction]:
    """Which value of each objective is better; that of the score is the sweep's."""
    return [score if name == SCORE else Direction.minimize for name in names]


def trade_offs(jobs: Mapping[int, Sequence[float]], names: Sequence[str], score: Direction) -> list[int]:
    """The Pareto set, best score first: no other job is better in one objective and worse in none."""
    better = directions(names, score)
    gains = {number: [d.gain(value) for d, value in zip(better, job, strict=True)] for number, job in jobs.items()}

    def is_beaten(number: int) -> bool:
        others = (gain for gain in gains.values() if gain != gains[number])
        return any(all(a >= b for a, b in zip(other, gains[number], strict=True)) for other in others)

    return sorted(
        (number for number in jobs if not is_beaten(number)), key=lambda number: gains[number], reverse=True
    )
