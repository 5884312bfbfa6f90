"""The record of a job of a sweep, and what jobs are compared by: the score, and what it cost."""

import os
import re
import socket
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from lockstep.config.commands import key_of
from lockstep.config.history import present_words
from lockstep.config.roles import is_sample
from lockstep.core.errors import InputError
from lockstep.core.run import TEST_SCORES, Run, State, born
from lockstep.core.safe_read import UnreadableFile, is_number, open_plain
from lockstep.core.tags import (
    METRIC,
    STEP_MS,
    TAGS,
    Direction,
    Directions,
    Monitor,
    direction_in,
    figure_name,
    figure_parts,
    name_of_tag,
)

SCORE = "score"
Job = TypeVar("Job")  # the number of a job, or a name for the jobs of a setting


@dataclass(frozen=True, kw_only=True)
class Record:
    number: int  # in its sweep, from 0
    overrides: tuple[str, ...]
    folder: str
    state: State = State.waiting
    host: str = ""  # the process that runs the job, or ran it last
    pid: int = 0
    born: str = ""  # its start time, from the kernel
    started: float = 0.0  # seconds since 1970
    ended: float = 0.0
    objective: float | None = None  # the score of a finished job
    exit_code: int = 0
    error: str = ""
    submitted: str = ""  # the number of the job of a cluster that runs it
    rung: str = ""  # the round of a successive halving that it is in, or was left behind after: `1 of 3`

    @property
    def values(self) -> dict[str, str]:
        return dict(word.partition("=")[::2] for word in self.overrides)

    @property
    def score(self) -> float | None:
        """The objective of a job that has trained to its end."""
        return None if self.state is State.pruned else self.objective

    @property
    def has_ended(self) -> bool:
        """Whether it trains no further, unless `sweep.retry` runs it again."""
        return self.state in (State.done, State.failed, State.pruned)

    @property
    def runs_elsewhere(self) -> bool:
        """Whether a cluster has the job, in its queue or on a machine, according to its record."""
        return bool(self.submitted) and self.state in (State.waiting, State.running)

    @property
    def runs_here(self) -> bool:
        """Whether a living process of this machine runs the job. A killed one leaves `running` behind."""
        return self.state is State.running and self.host == socket.gethostname() and self.born == born(self.pid) != ""

    @property
    def present_state(self) -> State:
        """The state, as far as this machine can see: the record of a killed job still says `running`."""
        was_here = self.state is State.running and self.host == socket.gethostname()
        return State.killed if was_here and not self.runs_here else self.state


Identify = Callable[[Sequence[str]], Hashable]  # what a job is, by its overrides


def job_key(overrides: Sequence[str], *, samples: bool = True) -> frozenset[str]:
    """What a job is by its overrides in any order, wherever its sweep is; without `samples`, its setting."""
    words = ((key_of(word), word) for word in overrides)
    return frozenset(word for key, word in words if key != "output_root" and (samples or not is_sample(key)))


def checked_direction(name: Any) -> Direction:
    try:
        return Direction(name)
    except ValueError:
        raise InputError(
            f"the direction of the scores is {name!r}, expected {' or '.join(Direction)}: "
            "hydra.launcher.direction=minimize, or hydra.sweeper.direction=minimize in a search"
        ) from None


def best_of(records: Iterable[Record], direction: Direction) -> Record | None:
    """The job with the best score, the first of equal ones; None without any."""
    gains = {r: (direction.gain(r.score), -r.number) for r in records if r.score is not None}
    return max(gains, key=gains.__getitem__, default=None)


def score_text(score: float | None, figure: str) -> str:
    """A figure without its unit; an unknown `score` has two digits behind the point, and four below 1."""
    if score is None:
        return ""
    if figure == SCORE:
        return f"{score:.2f}" if score == 0 or abs(score) >= 1 else f"{score:.4g}"
    return f"{score:.3g}" if figure in COSTS else figure_parts(name_of_tag(figure), score)[0]


def head(name: str, score: str, directions: Directions) -> str:
    """The head of a column, `val top-1`, `val f1`, `test` or `seconds`, where the score is the figure `score`."""
    if name == SCORE:
        return SCORE if score == SCORE else figure_name(score)
    figure = name_of_tag(name)
    is_scored = figure in TAGS or direction_in(directions, METRIC + figure) is not None
    return figure_name(figure) if is_scored else name


def columns_of(runs: Iterable[Run]) -> list[str]:
    """The columns of these runs: the score, the metrics that some have, and at last the test split."""
    return [SCORE, *sorted(dict.fromkeys(name for run in runs for name in run.columns), key=TEST_SCORES.__eq__)]


def cells(figures: Mapping[str, Any], names: Iterable[str], score: str) -> list[str]:
    """These columns of a row as texts, where the score is the figure `score`."""
    return [score_text(figures.get(name), score if name in (SCORE, TEST_SCORES) else name) for name in names]


def swept_keys(jobs: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """The keys in which the overrides of jobs differ, in the order of the first job's."""
    words = [dict(word.partition("=")[::2] for word in job) for job in jobs]
    keys = dict.fromkeys(key for overrides in words for key in overrides)
    return tuple(key for key in keys if len({overrides.get(key) for overrides in words}) > 1)


def varied(overrides: Iterable[str], keys: Sequence[str]) -> list[str]:
    """The overrides that set these keys."""
    return [word for word in overrides if word.partition("=")[0] in keys]


def parsed_record(number: int, facts: Any) -> Record:
    """The record of a job from the content of its file. Raises LookupError, TypeError, ValueError if it is none."""
    known = {key: facts[key] for key in Record.__dataclass_fields__ if key in facts}  # a later version may have more
    record = Record(**{**known, "overrides": tuple(facts["overrides"]), "state": State(facts["state"])})
    for key, sample in vars(Record(number=0, overrides=(), folder="", objective=0.0)).items():
        value, types = getattr(record, key), int | float if isinstance(sample, float) else type(sample)
        if not isinstance(value, types) and (key, value) != ("objective", None):
            raise TypeError(key)
    if not isinstance(facts["overrides"], list) or not all(isinstance(word, str) for word in record.overrides):
        raise TypeError("overrides")
    begins_with_number = record.folder.partition("-")[0] == f"{number:03}"
    if record.number != number or not begins_with_number or re.search(r"[/\0]", record.folder):
        raise ValueError(record.folder)
    return replace(record, overrides=tuple(present_words(record.overrides, say=False)))


def _seconds(run: Run) -> float | None:
    """The time of all training steps as `metrics.jsonl` has it, without start-up, evaluations and saves."""
    steps = [(0, 0.0), *run.series(STEP_MS)]
    total = sum(ms / 1000 * (step - before) for (before, _), (step, ms) in pairwise(steps))
    return total or None  # None for a job of an app that writes no such file


def _megabytes(run: Run) -> float | None:
    """The tensors of the weights file, without the text before them, which has classes and scores, too."""
    with suppress(UnreadableFile), open_plain(run.run_dir.weights) as file:
        return (os.fstat(file.fileno()).st_size - 8 - int.from_bytes(file.read(8), "little")) / 1e6
    return None


# The costs of a run as objectives, of which less is better; None for one that was not measured.
COSTS: Mapping[str, Callable[[Run], float | None]] = {
    "seconds": _seconds,
    "megabytes": _megabytes,
    "kwh": lambda run: run.spent.get("kwh"),
}
OBJECTIVES = (SCORE, *COSTS)


def figure_of(run: Run, name: str) -> float | None:
    """A figure of a run: score, cost, number of its summary, or a tag as logged at the best evaluation."""
    if name in (SCORE, *COSTS):
        return run.score if name == SCORE else COSTS[name](run)
    facts: Mapping[str, Any] = {**run.summary, **run.spent, **(run.summary.get("scores") or {}), **run.columns}
    value = facts.get(name_of_tag(name))
    if value is not None and is_number(value):
        return float(value)
    values = dict(run.series(name))
    return values.get(run.summary.get("best_step") or 0, next(reversed(values.values()), None))


def directions_of(runs: Iterable[Run]) -> Directions:
    """The directions of the figures of these runs."""
    return {tag: direction for run in runs for tag, direction in run.directions.items()}


def check_objectives(logged: Sequence[str], monitor: str, objectives: Sequence[str]) -> None:
    """Refuse a monitor and objectives of which a job does not log the figure; without `logged`, nothing is known."""
    for key, others, names in (("monitor", (), [monitor]), ("sweep.objectives", OBJECTIVES, objectives)):
        figures = [Monitor.parse(name).name for name in names if name not in others]
        if wrong := [name for name in figures if logged and name.partition("/")[0] not in logged]:
            raise InputError(
                f"{key} has {wrong[0]}, which an evaluation of this job does not log, expected "
                f"{', '.join([*others, *logged])}; add a metric with metric=[NAME]"
            )


def objectives_of(folder: Path, record: Record, names: Sequence[str]) -> list[float]:
    """The objectives of a job in the `folder` of its sweep, if it is done; empty if one is unknown."""
    run = Run(folder / record.folder)
    figures = [record.score if name == SCORE else figure_of(run, name) for name in names]
    known = [value for value in figures if value is not None]
    return known if record.score is not None and len(known) == len(names) else []


def unmeasured(folder: Path, records: Sequence[Record], names: Sequence[str]) -> list[str]:
    """A sentence for each objective that jobs that are done do not have."""
    done = [record for record in records if record.score is not None]
    without = {name: [str(r.number) for r in done if not objectives_of(folder, r, [name])] for name in names}
    return [
        f"sweep.objectives: {name} was not measured in job{'s' * (len(jobs) > 1)} {', '.join(jobs)}, which cannot be "
        f"compared by it; remove it: sweep.objectives=[{','.join(other for other in names if other != name)}]"
        for name, jobs in without.items()
        if jobs
    ]


def directions(names: Sequence[str], score: Direction) -> list[Direction]:
    """Which value of each objective is better: of the score, as the sweep says; of a figure, as its minus says."""
    return [
        score if name == SCORE else Direction.minimize if name in COSTS else Monitor.parse(name).direction
        for name in names
    ]


def trade_offs(jobs: Mapping[Job, Sequence[float]], names: Sequence[str], score: Direction) -> list[Job]:
    """The Pareto set, best score first: no other job is better in one objective and worse in none."""
    better = directions(names, score)
    gains = {job: [d.gain(value) for d, value in zip(better, values, strict=True)] for job, values in jobs.items()}

    def is_beaten(job: Job) -> bool:
        others = (gain for gain in gains.values() if gain != gains[job])
        return any(all(a >= b for a, b in zip(other, gains[job], strict=True)) for other in others)

    return sorted((job for job in jobs if not is_beaten(job)), key=gains.__getitem__, reverse=True)
