"""Explains the input and the learning rate of a job in the banner, if they were `auto`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.data.datasets.files import AUTO, SIZES
from lockstep.training.resolved_job import ResolvedJob


@dataclass(frozen=True)
class Usual:
    """Explanations of the keys that are `auto` in `composed`, the config of the job as the user gave it."""

    job: ResolvedJob
    composed: Mapping[str, Any]

    @property
    def sizes(self) -> frozenset[str]:
        """The sizes of the data set that were `auto`."""
        return frozenset(name for name in SIZES if self._setting("dataset", name) == AUTO)

    @property
    def rate_reason(self) -> str:
        """The text behind a learning rate that was `auto`: that it is the usual one."""
        if self._setting("optimizer", "lr") != AUTO:
            return ""
        return f" (usual at batch {self.job.batch}" + " for trained weights" * self.job.starts_trained + ")"

    @property
    def input_reason(self) -> str:
        """The text behind the shape of the input: which of its settings were chosen, and why."""
        source = self.job.dataset
        if self.job.starts_trained:
            words = [
                "size" * ("input_size" in self.sizes),
                "crop" * ("crop" in self.sizes),
                "mean and std" * (self._setting("input", "mean") is None and self._setting("input", "std") is None),
                self.job.input.interpolation * (self._setting("input", "interpolation") == AUTO),
            ]
            origin = "as the weights were trained"
        else:
            words = ["size" * ("input_size" in self.sizes and source.input_shape != source.image_shape)]
            origin = f"usual for dataset={type(source).__name__.lower()}"
        chosen = ", ".join(word for word in words if word)
        return f" ({chosen} {origin})" if chosen else ""

    def _setting(self, group: str, key: str) -> Any:
        return (self.composed.get(group) or {}).get(key)
