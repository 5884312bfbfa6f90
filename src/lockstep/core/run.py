"""A run, from what its folder says. All that shows, compares or resumes runs reads their folders here.

Each file may be missing, damaged, of another version, or somebody else's. A missing file is empty. So is a damaged
one, and `damage` has a sentence about it: who needs the file raises it, who can do without shows it.
"""

import re
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import StrEnum
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import psutil

from lockstep.core.errors import InputError
from lockstep.core.figures import Figures, Predictions, read_figures, read_samples
from lockstep.core.run_dir import SWEEP, RunDir
from lockstep.core.safe_read import MB, UnreadableFile, read_json, read_text, read_yaml
from lockstep.core.tags import VAL_LOSS, Direction, Directions, Monitor, figure_parts, tagged

Content = TypeVar("Content")
Code = Mapping[str, Any]  # facts about the code of an extension

TEST_SCORES = "test"
SEED, FOLD = "seed", "dataset.fold"


class State(StrEnum):
    """How far a run or a job of a sweep is.

    `stopped`: it saved its state, and can resume from there; `pruned`: stopped because others are better; `killed`:
    its summary or record says that it runs, but its process is gone; `damaged`: its files cannot be read.
    """

    waiting = "waiting"
    running = "running"
    done = "done"
    failed = "failed"
    stopped = "stopped"
    pruned = "pruned"
    killed = "killed"
    damaged = "damaged"


class Run:
    """A run. Each file is read once, when it is first used; `damage` has a sentence for each damaged one."""

    unnamed = Monitor()  # of a run that names none, as one that has not begun

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_dir = folder, RunDir(folder)
        self.damage: list[str] = []

    def read(self, path: Path, reader: Callable[[Path], Any], empty: Content) -> Content:
        """What `reader` makes of a file, of the type of `empty`; `empty` without a whole file."""
        try:
            if not (path.is_symlink() or path.exists()):
                return empty
            content = reader(path)
            if isinstance(content, type(empty)):
                return content
            self.damage.append(f"{path} is not a file of a run: expected keys")
        except InputError as error:
            self.damage.append(str(error))
        except PermissionError as error:
            self.damage.append(f"{self.folder} cannot be read ({error.strerror})")
        return empty

    @cached_property
    def summary(self) -> dict[str, Any]:
        """`summary.json`; its values have the types of `core.run_dir`."""
        return self.read(self.run_dir.summary, lambda _: self.run_dir.read_summary(), {})

    @property
    def path(self) -> Path:
        """Its path in a command."""
        return self.folder

    @property
    def id(self) -> str | None:
        """What no other run has; None if no summary has it."""
        return self.summary.get("run")

    @property
    def spent(self) -> dict[str, Any]:
        """What the parts of this run so far have spent, as the summary says it; empty if it does not."""
        return {**(self.summary.get("spent") or {})}

    @property
    def saved(self) -> str:
        """How far this run is saved, for a sentence: `step 312 of 345`; empty before its first checkpoint."""
        with suppress(UnreadableFile, ValueError):
            step = int(read_text(self.run_dir.last).strip().removeprefix("step-"))
            return f"step {step} of {self.summary.get('steps', 'an unknown number')}"
        return ""

    @cached_property
    def problem(self) -> str:
        """What is damaged of the files that say what the run is and how it ended; empty if nothing is."""
        _ = self.summary, self.composed, self.choices, self.overrides
        return next(iter(self.damage), "")

    @cached_property
    def state(self) -> str:
        """A `State`, or what another version of Lockstep has written in its place."""
        status: str = self.summary.get("status", State.waiting)
        if self.problem:
            return State.damaged
        if status == State.running and not _is_held(self.run_dir.lock):
            return State.killed
        return State.done if status == "completed" else status

    @property
    def status(self) -> str:
        """The state for people; of a pruned run, with how far it came."""
        evaluations = self.series(*self.monitor.tags) if self.state == State.pruned else []
        if not evaluations:
            return str(self.state)
        best = max((value for _, value in evaluations), key=self.monitor.direction.gain)
        return f"pruned at step {evaluations[-1][0]} with {figure_parts(self.monitor.name, best)[0]}"

    @cached_property
    def started(self) -> float:
        """Seconds since 1970; 0 if it has not started."""
        return self.summary.get("started") or 0.0

    @property
    def monitor(self) -> Monitor:
        return Monitor.parse(named) if (named := self.summary.get("monitor")) else self.unnamed

    @property
    def directions(self) -> Directions:
        """The directions of the figures that it logs; an earlier version has written its scores alone."""
        scores = dict.fromkeys(tagged(self.summary.get("scores") or {}), Direction.maximize)
        usual = {**scores, VAL_LOSS: Direction.minimize, self.monitor.tags[-1]: self.monitor.direction}
        named = self.summary.get("directions") or usual
        return {tag: Direction(text) for tag, text in named.items()}

    @property
    def columns(self) -> dict[str, float]:
        """What tables show next to the score: the best evaluation's chosen metrics, and `test`, of the monitor."""
        scores, tests = ({**(self.summary.get(key) or {})} for key in ("scores", TEST_SCORES))
        chosen = metrics if isinstance(metrics := self.composed.get("metric"), dict) else ()
        figures = {name: scores.get(name) for name in chosen if name != self.monitor.name}
        figures[TEST_SCORES] = tests.get(self.monitor.name)
        return {name: value for name, value in figures.items() if value is not None and self.score is not None}

    @cached_property
    def score(self) -> float | None:
        """The objective of a run that is done."""
        return None if self.problem else self.summary.get("objective")

    @cached_property
    def error(self) -> str:
        """Why it has no score."""
        return self.problem or self.summary.get("error", "")

    @cached_property
    def environment(self) -> dict[str, Any]:
        return self.read(self.run_dir.environment, read_json, {})

    @cached_property
    def code(self) -> dict[str, Code] | None:
        """The code of the extensions that it uses, by package, from `env.json`; None if an earlier version ran."""
        recorded = self.environment.get("code")
        if not isinstance(recorded, dict):
            return None
        facts = {package: code for package, code in recorded.items() if isinstance(code, dict)}
        return {package: code for package, code in facts.items() if isinstance(code.get("files"), dict)}

    @property
    def earlier_code(self) -> list[Code]:
        """What its code was, if it was resumed with other code: by package, until a step."""
        recorded = self.environment.get("earlier_code")
        return [code for code in recorded if isinstance(code, dict)] if isinstance(recorded, list) else []

    @cached_property
    def composed(self) -> dict[str, Any]:
        """The config as Hydra composed it; another app's config may have interpolations."""
        return self.read(self.run_dir.composed, read_yaml, {})

    @cached_property
    def choices(self) -> dict[str, str]:
        """The option of each group that the config was composed of."""
        match self.read(self.run_dir.hydra / "hydra.yaml", read_yaml, {}):
            case {"hydra": {"runtime": {"choices": {**choices}}}}:
                return {group: str(option) for group, option in choices.items() if option and "/" not in group}
        return {}

    @cached_property
    def overrides(self) -> list[str]:
        return self.read(self.run_dir.overrides, read_overrides, [])

    @cached_property
    def typed_values(self) -> dict[str, str]:
        return dict(word.lstrip("+").partition("=")[::2] for word in self.overrides)

    @property
    def swept(self) -> dict[str, str]:
        """The values of this run for the keys that its sweep varies; empty for a run alone."""
        values = dict(word.partition("=")[::2] for word in self.overrides)
        with suppress(UnreadableFile, LookupError, TypeError):
            keys = read_json(self.folder.parent / SWEEP)["swept"]
            return {key: values[key] for key in keys if key in values}
        return {}

    @cached_property
    def figures(self) -> Figures:
        """The steps of `metrics.jsonl`; NaN is a figure that was not finite."""
        return self.read(self.run_dir.metrics, lambda path: [*read_figures(path, nulls=True)], [])

    @cached_property
    def gpu(self) -> Figures:
        return self.read(self.run_dir.gpu, lambda path: [*read_samples(path)], [])

    def series(self, *tags: str) -> list[tuple[int, float]]:
        """The steps that have one of these figures, with the first of them that is finite."""
        values = ((step, [figures[tag] for tag in tags if tag in figures]) for step, figures in self.figures)
        finite = ((step, [value for value in row if value == value]) for step, row in values)
        return [(step, row[0]) for step, row in finite if row]

    @cached_property
    def predictions(self) -> Predictions | None:
        return next(iter(self.read(self.run_dir.validation, lambda path: [Predictions.read(path)], [])), None)

    @property
    def classes(self) -> int | None:
        """The number of classes, labels or values; None if no predictions say it."""
        return len(self.predictions.names) if self.predictions else None

    @property
    def checkpoints(self) -> list[Path]:
        """Its checkpoints, whole or not, the newest first."""
        return candidates(self.run_dir.checkpoints)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What the newest checkpoint says that its run is."""
        facts = (path / "facts.json" for path in self.checkpoints)
        newest = next(filter(Path.exists, facts), self.run_dir.checkpoints / "facts.json")
        checkpoint: dict[str, Any] = self.read(newest, partial(read_json, limit=64 * MB), {})
        identity = checkpoint.get("identity")
        return identity if isinstance(identity, dict) else {}


def read_overrides(path: Path) -> list[str]:
    """The overrides in `.hydra/overrides.yaml`. Raises InputError if it is missing or not a list of texts."""
    loaded = read_yaml(path)
    if not isinstance(loaded, list) or not all(isinstance(item, str) for item in loaded):
        raise InputError(f"{path} is not a list of overrides: expected KEY=VALUE in each line")
    return loaded


def candidates(folder: Path) -> list[Path]:
    """The checkpoints in a `checkpoints` folder, newest step first."""
    named = (path for path in folder.glob("step-*") if re.fullmatch(r"step-[0-9]{8,18}", path.name) and path.is_dir())
    return sorted(named, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    return int(path.name[5:])


def _is_held(lock: Path) -> bool:
    """Whether the process that holds the lock of a run is alive. On another machine it counts as alive."""
    with suppress(UnreadableFile, LookupError, TypeError):
        holder = read_json(lock)
        return bool(holder["host"] != socket.gethostname() or born(holder["pid"]))
    return False


def born(pid: object) -> str:
    """The start time of a process, which tells it from a later one with its number; empty if it is gone."""
    if not isinstance(pid, int):
        return ""
    with suppress(OSError):  # it has ended, or this is not Linux
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else fields[18]  # a dead process that nobody has waited for is gone too
    # Not on Linux: there psutil adds the time of the boot, which changes with the clock.
    with suppress(psutil.Error, ValueError):
        process = psutil.Process(pid)
        return "" if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
    return ""
