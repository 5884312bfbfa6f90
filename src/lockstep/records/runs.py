"""Finds the runs of a folder and compares them: groups the seeds of a config, and lists how two runs differ."""

import functools
import json
import math
import os
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from lockstep.config.history import present_key
from lockstep.config.options import can_be_group, differences
from lockstep.config.roles import TARGET, is_sample, role_of
from lockstep.config.schema import RECIPES
from lockstep.core import safe_read
from lockstep.core.errors import InputError, did_you_mean
from lockstep.core.fields import Role, leaves
from lockstep.core.figures import CONFIDENCE
from lockstep.core.run import TEST_SCORES, Run, State
from lockstep.core.run_dir import RunDir, pointed
from lockstep.core.table import Setting
from lockstep.core.tags import Direction, Directions, Monitor, direction_in
from lockstep.records.ledger import Ledger, record_of
from lockstep.records.record import SCORE, Record, columns_of, figure_of

Row = Mapping[str, Any]
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


class JobRun(Run):
    """The run of a job of a sweep: its record says how far it is, also before there is a folder."""

    def __init__(self, ledger: Ledger, record: Record, monitor: Monitor) -> None:
        super().__init__(ledger.folder / record.folder)
        self.ledger, self.record, self.unnamed = ledger, record, monitor
        self.started = record.started

    @property
    def path(self) -> Path:
        """A short path of it for a command."""
        return self.folder.parent / str(self.record.number)

    @cached_property
    def overrides(self) -> list[str]:
        return [*self.record.overrides]

    @cached_property
    def state(self) -> str:
        return State.damaged if self.problem else self.record.present_state

    @cached_property
    def score(self) -> float | None:
        return None if self.problem else self.record.score

    @cached_property
    def error(self) -> str:
        return self.problem or self.record.error


def run_folders(root: Path) -> Iterator[Path]:
    """The folders of sweeps and runs in `root`, a sweep before its jobs, then what this user may not read."""
    errors: list[OSError] = []
    for name, subfolders, _ in os.walk(root, onerror=errors.append):
        subfolders.sort()
        if is_run := safe_read.is_plain(RunDir(Path(name)).overrides):
            subfolders.clear()
        if is_run or Ledger(Path(name)).exists:
            yield Path(name)
    yield from (Path(error.filename) for error in errors if isinstance(error, PermissionError))


def existing(path: str) -> Path:
    """The folder that a user named, or the newest run for `latest`."""
    folder = pointed(Path(path), Path("outputs"), path)
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; name a run, a sweep, or a folder of them, such as outputs")
    return folder


def read_runs(root: Path) -> list[Run]:
    runs: dict[Path, Run] = {}
    for folder in run_folders(root):
        ledger = Ledger(folder)
        try:
            if ledger.exists:
                runs |= {run.folder: run for run in read_jobs(ledger)}
            elif folder not in runs:
                runs[folder] = read_single(folder)
        except InputError as error:
            runs[folder] = Run(folder)
            runs[folder].damage.append(str(error))
    if not runs:
        raise InputError(f"{root} has no run in it; name a run, a sweep, or a folder of them")
    return list(runs.values())


def read_jobs(ledger: Ledger) -> list[Run]:
    monitor = ledger.identity().monitor
    return [JobRun(ledger, record, monitor) for record in ledger.records()]


def read_single(folder: Path) -> Run:
    """The run of a folder, which may be the job of a sweep."""
    if (entry := record_of(folder)) is None:
        return Run(folder)
    return JobRun(*entry, entry[0].identity().monitor)


@functools.cache
def settings(run: Run) -> Mapping[str, str]:
    """The config as the user gave it: the option of each group, and the value of each key that changes the run."""
    if run.problem:
        return {}
    values: dict[str, Any] = {**run.typed_values, **dict(leaves(run.composed))}
    values = {present_key(key): value for key, value in values.items()}
    values |= {key.removesuffix(f".{TARGET}"): value for key, value in values.items()} | run.choices
    values = {key: value for key, value in values.items() if key not in names_of_files(run)}
    values |= {"monitor": run.monitor.name} if "monitor" in values else {}  # `auto` and its value are one
    for key, text in run.typed_values.items():  # `init_from=base/${seed}` is one setting of all seeds
        if not is_sample(key) and any(map(is_sample, _REFERENCE.findall(text))):
            values[key] = text
    roles = {key: role_of(key, run.composed) for key in values if not key.endswith(f".{TARGET}")}
    keys = [key for key, role in roles.items() if role.makes_another_run or role is Role.rounding]
    return {key: values[key] if isinstance(values[key], str) else json.dumps(values[key]) for key in keys}


@functools.cache
def names_of_files(run: Run) -> Mapping[str, str]:
    """The names of a run's recipe and of its files of the user's own groups: the run is the values that these set."""
    unset = {key: text for key, text in run.typed_values.items() if text == "null"}  # `debug=null`
    names = {} if run.problem else unset | run.choices
    return {key: name for key, name in names.items() if key == RECIPES or can_be_group(key)}


@functools.cache
def codes(run: Run) -> Mapping[str, str]:
    """The code of the user that a run was trained with, from its first step on, in a word for each package."""
    texts = dict[str, str]()
    for code in [*run.earlier_code, *({**code, "package": package} for package, code in (run.code or {}).items())]:
        key, digest = f"code of {code.get('package')}", f"#{str(code.get('sha256'))[:7]}"
        texts[key] = f"{texts[key]}, {digest}" if key in texts else digest
    return texts


def differing(runs: Sequence[Run]) -> list[str]:
    """The keys in which runs differ, typed ones first; not those that only follow from a group that differs."""
    typed = dict.fromkeys(key for run in runs for key in run.typed_values if key in settings(run))
    differ = _differing([settings(run) for run in runs])
    differ = [*(key for key in typed if key in differ), *(key for key in differ if key not in typed)]
    follows = {key for key in differ if "." in key and key.partition(".")[0] in differ}
    return [key for key in differ if key in typed or key not in follows]


def _differing(facts: Sequence[Mapping[str, str]]) -> list[str]:
    keys = dict.fromkeys(key for of_run in facts for key in of_run)
    return [key for key in keys if len({of_run[key] for of_run in facts if key in of_run}) > 1]


def in_names(runs: Sequence[Run], keys: Sequence[str]) -> list[str]:
    """The keys to show for `keys`: names of files in place of the values that they set, if they tell these apart."""
    listed = dict.fromkeys(key for run in runs for key in names_of_files(run))
    names = [key for key in listed if len({names_of_files(run).get(key, "null") for run in runs}) > 1]
    of_files = [key for key in keys if not any(key in run.typed_values for run in runs)]
    told_apart = len(by_values(runs, [*names, *of_files])) == len(by_values(runs, names))
    return [*names, *(key for key in keys if key not in of_files)] if of_files and told_apart else [*keys]


def by_values(runs: Sequence[Run], keys: Sequence[str]) -> dict[tuple[str, ...], list[Run]]:
    """The runs with equal values of some keys together, by these values."""
    members: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        members.setdefault(tuple(value_of(run, key) for key in keys), []).append(run)
    return members


def groups(runs: Sequence[Run], by: Sequence[str] = (), names: Sequence[str] = ()) -> list[Row]:
    """A row for the runs of a monitor that differ in the seed alone, or are equal in the keys `by`; the best first.

    Each row also has the figures `names`. Raises InputError if no run has a key of `by`.
    """
    for key in by:
        if not any(value_of(run, key) for run in runs):
            others = ", ".join(differing(runs)) or "none"
            raise InputError(f"--by {key}: no run has this key; they differ in {others}")
    monitors = {monitor: [run for run in runs if run.monitor == monitor] for monitor in (run.monitor for run in runs)}
    return ordered([row for monitor, of in monitors.items() for row in _groups(of, by, monitor, names)], SCORE, {})


def _groups(runs: Sequence[Run], by: Sequence[str], monitor: Monitor, names: Sequence[str]) -> list[Row]:
    keys = [*by] or [key for key in differing(runs) if not is_sample(key)]
    code = [] if by else _differing([codes(run) for run in runs])
    members = by_values(runs, [*code, *keys])
    keys = [*code, *(keys if by else in_names(runs, keys))]
    more_keys = [name for name in names if any(name in {**settings(run), **names_of_files(run)} for run in runs)]
    logged = (name for name in names if any(figure_of(run, name) is not None for run in runs))
    figures = dict.fromkeys([*columns_of(runs)[1:], *logged])
    scores = {values: _samples(group, SCORE) for values, group in members.items()}
    images = {values: _validated_on(group) for values, group in members.items()}
    rows: list[Row] = []
    for values, group in members.items():
        rivals = [scores[other] for other in members if images[other] == images[values]]  # others are of other images
        best = max(rivals, key=lambda rival: monitor.direction.gain(statistics.mean(rival)) if rival else -math.inf)
        row: dict[str, Any] = {key: setting(group[0], key) for key in (*keys, *more_keys)}
        for key in dict.fromkeys((*keys, *more_keys)):
            if len(several := dict.fromkeys(value for run in group if (value := value_of(run, key)))) > 1:
                row[key] = Setting(",".join(several))
        row |= _figures(scores[values], best)
        count = Counter(run.state for run in group)
        states = ", ".join(f"{number} {state}" for state, number in count.items())
        row["state"] = group[0].status if len(group) == 1 else states
        if all(isinstance(run, JobRun) for run in runs) and len({run.folder.parent for run in runs}) == 1:
            row["jobs"] = [run.record.number for run in group if isinstance(run, JobRun)]
        row |= {"monitor": monitor.name, "direction": monitor.direction}
        for name in (name for name in figures if name not in row):
            samples = _samples(group, name)
            row[name] = statistics.mean(samples) if samples else None
            row[spread_of(name)] = statistics.stdev(samples) if len(samples) > 1 else None
        rows.append(row)
    return rows


def _validated_on(runs: Sequence[Run]) -> frozenset[tuple[str, str]]:
    """What decides which images runs are evaluated on: the data set, and its keys that do not only change pixels."""
    pairs = {pair for run in runs for pair in settings(run).items()}
    return frozenset((k, v) for k, v in pairs if is_below(k, ("dataset",)) and role_of(k) is not Role.pixels)


def _samples(runs: Sequence[Run], name: str) -> list[float]:
    """A figure of the runs that are done, once for equal runs; none for a setting with a pruned job."""
    items = {run: [*codes(run).items(), *settings(run).items()] for run in runs}
    shared = {run: frozenset(item for item in items[run] if not is_sample(item[0])) for run in runs}
    pruned = {shared[run] for run in runs if run.state == State.pruned}
    pairs = ((run, figure_of(run, name)) for run in runs if run.score is not None and shared[run] not in pruned)
    return [*{frozenset(items[run]): value for run, value in pairs if value is not None}.values()]


def spread_of(name: str) -> str:
    """The column with the standard deviation of a figure."""
    return "spread" if name == SCORE else f"{name}_spread"


def value_of(run: Run, key: str) -> str:
    """The value of a key of a run, also of a key that does not change the run if it was typed; empty without one."""
    return {**run.typed_values, **names_of_files(run), **codes(run), **settings(run)}.get(key, "")


def setting(run: Run, key: str) -> Setting:
    """The value of a key of a run; empty if it does not have the key."""
    value = Setting(value_of(run, key))
    value.is_default = bool(run.composed) and key not in _changed(run)
    return value


@functools.cache
def _changed(run: Run) -> set[str]:
    return {key for key, _, _ in differences(run.composed, run.choices)}


def _figures(scores: Sequence[float], best: Sequence[float]) -> Row:
    """Statistics of a group's scores, compared with the best group's."""
    low, high = welch(scores, best) if min(len(scores), len(best)) > 1 and scores is not best else (None, None)
    return {
        "score": statistics.mean(scores) if scores else None,
        "spread": statistics.stdev(scores) if len(scores) > 1 else None,
        "done": len(scores),
        "difference": statistics.mean(scores) - statistics.mean(best) if scores else None,
        "low": low,
        "high": high,
        "within_spread": None if low is None or high is None else low <= 0 <= high,
    }


def welch(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """The confidence interval of the difference of two means whose variances may differ.

    Welch's t interval (B. L. Welch, "The generalization of 'Student's' problem when several different population
    variances are involved", Biometrika 34, 1947), with Satterthwaite's degrees of freedom.
    """
    from scipy.special import stdtrit

    difference = statistics.mean(first) - statistics.mean(second)
    parts = [(statistics.variance(scores) / len(scores), len(scores) - 1) for scores in (first, second)]
    variance = sum(part for part, _ in parts)
    if variance == 0:
        return difference, difference
    freedom = variance**2 / sum(part**2 / less for part, less in parts)
    margin = float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * math.sqrt(variance)
    return difference - margin, difference + margin


def tables(rows: Sequence[Row]) -> dict[Monitor, list[Row]]:
    """The rows of each monitor, in the order of the first ones: scores of several figures cannot be compared."""
    members: dict[Monitor, list[Row]] = {}
    for row in rows:
        monitor = Monitor(row.get("monitor", SCORE), row.get("direction", Direction.maximize))
        members.setdefault(monitor, []).append(row)
    return members


def ordered(rows: Sequence[Row], key: str, directions: Directions) -> list[Row]:
    """Each table by a column: numbers by size, figures of an evaluation best first; then texts, then others."""
    check_columns("--sort", [key], rows)

    def place(row: Row) -> tuple[int, float, str]:
        try:
            return 0, -column_direction(key, row["direction"], directions).gain(float(row[key])), ""
        except (KeyError, TypeError, ValueError):
            return (1, 0.0, str(row[key])) if row.get(key) else (2, 0.0, "")

    return [row for table in tables(sorted(rows, key=place)).values() for row in table]


def check_columns(flag: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
    names = dict.fromkeys(name for row in rows for name in row)
    for key in columns:
        if rows and key not in names:
            others = f" There are {', '.join(names)}, and the tags of logged figures."
            hint = did_you_mean(key, names, prefix=f"{flag} ") or others
            raise InputError(f"{flag} {key}: there is no such column.{hint}")


def column_direction(name: str, score: Direction, directions: Directions) -> Direction:
    """Which values of a column come first: better figures, smaller values of anything else."""
    return score if name in (SCORE, TEST_SCORES) else direction_in(directions, name) or Direction.minimize


def is_below(key: str, heads: Sequence[str]) -> bool:
    return any(key == head or key.startswith(f"{head}.") for head in heads)
