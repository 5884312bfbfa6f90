"""What the files of a run folder say. Reports, tables and sweeps read them here, with one policy.

Each file may be missing, damaged, of another version, or somebody else's. A missing file is empty. So is a damaged
one, and `damage` has a sentence about it: who needs the file raises it, who can do without shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from lockstep.config import yaml_io
from lockstep.config.schema import GROUPS
from lockstep.core import safe_read
from lockstep.core.errors import InputError
from lockstep.core.predictions import Predictions
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_read import MB

Figures = Sequence[tuple[int, Mapping[str, float]]]
Content = TypeVar("Content")


class RunFiles:
    """The files of a run, each read once, when it is first used.

    Fields:
        damage: a sentence for each file that was read so far and is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.run_dir = RunDir(folder)
        self.damage: list[str] = []

    def read(self, path: Path, reader: Callable[[Path], Any], empty: Content) -> Content:
        """What `reader` makes of a file, of the type of `empty`; `empty` without a whole file."""
        try:
            if not (path.is_symlink() or path.exists()):
                return empty
            content = reader(path)
            if isinstance(content, type(empty)):
                return content
            self.damage.append(f"{path} is not a file of a run: expected {'a list' if empty == [] else 'keys'}")
        except InputError as error:
            self.damage.append(str(error))
        except PermissionError as error:
            self.damage.append(f"{self.run_dir.path} cannot be read ({error.strerror})")
        return empty

    @cached_property
    def summary(self) -> dict[str, Any]:
        """`summary.json`, whose values have the types of `core.run_dir`."""
        return self.read(self.run_dir.summary, lambda _: self.run_dir.read_summary(), {})

    @cached_property
    def environment(self) -> dict[str, Any]:
        return self.read(self.run_dir.environment, safe_read.read_json, {})

    @cached_property
    def composed(self) -> dict[str, Any]:
        """The config as Hydra composed it; that of another app may have interpolations."""
        return self.read(self.run_dir.composed, safe_read.read_yaml, {})

    @cached_property
    def choices(self) -> dict[str, str]:
        """The option of each group that the config was composed of."""
        match self.read(self.run_dir.hydra / "hydra.yaml", safe_read.read_yaml, {}):
            case {"hydra": {"runtime": {"choices": {**choices}}}}:
                return {group: str(choices[group]) for group in (*GROUPS, "experiment") if choices.get(group)}
        return {}

    @cached_property
    def overrides(self) -> list[str]:
        return self.read(self.run_dir.overrides, yaml_io.load_list, [])

    @cached_property
    def figures(self) -> Figures:
        """The steps of `metrics.jsonl`; NaN is a figure that was not finite."""
        from lockstep.telemetry.sinks import read_figures  # needs torch

        return self.read(self.run_dir.metrics, lambda path: [*read_figures(path, nulls=True)], [])

    @cached_property
    def gpu(self) -> Figures:
        """The steps of `gpu.jsonl`."""
        from lockstep.telemetry.gpu import read_samples  # needs torch

        return self.read(self.run_dir.gpu, lambda path: [*read_samples(path)], [])

    def series(self, *tags: str) -> list[tuple[int, float]]:
        """The steps that have one of these figures, with the first of them that is finite."""
        values = ((step, [figures[tag] for tag in tags if tag in figures]) for step, figures in self.figures)
        finite = ((step, [value for value in row if value == value]) for step, row in values)
        return [(step, row[0]) for step, row in finite if row]

    @cached_property
    def predictions(self) -> Predictions | None:
        return next(iter(self.read(self.run_dir.validation, lambda path: [Predictions.read(path)], [])), None)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What the newest checkpoint says that its run is."""
        facts = self.run_dir.checkpoints.glob("step-*/facts.json")
        newest = max(facts, default=self.run_dir.checkpoints / "facts.json")
        checkpoint: dict[str, Any] = self.read(newest, partial(safe_read.read_json, limit=64 * MB), {})
        identity = checkpoint.get("identity")
        return identity if isinstance(identity, dict) else {}
