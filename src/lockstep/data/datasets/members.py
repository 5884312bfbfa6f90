"""Image files inside other files: in a tar shard, or in a row of a table."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lockstep.core.errors import InputError
from lockstep.data.datasets.listing import hold_out


class Member(Protocol):
    """An image file inside another file. `str` gives its name for errors."""

    def contents(self) -> bytes:
        """Its bytes. Raises OSError or ValueError."""


@dataclass(frozen=True, eq=False)
class Members:
    """The image files of a split, in the order in which they are stored.

    Fields:
        member: returns the member at a position.
        positions: the positions of the split's examples, int64 (N,).
        labels: int64 (N,).
        classes: the names of the classes, by label.
        identity: identifies the stored data, whatever its path.
        notes: sentences about the files that are left out.
    """

    member: Callable[[int], Member]
    positions: np.ndarray
    labels: Tensor
    classes: tuple[str, ...]
    identity: str
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: int) -> Member:
        return self.member(int(self.positions[index]))

    def fingerprint(self) -> dict[str, str]:
        """The number of examples, the identity of the stored data, and a hash of positions and labels."""
        digest = hashlib.sha256(self.positions.tobytes() + self.labels.numpy().tobytes()).hexdigest()[:16]
        return {"examples": f"{len(self):,} of {self.identity} ({digest})"}

    def split(self, names: Sequence[str], share: float) -> tuple[Members, Members]:
        """Divide into training and evaluation: `share` of each class is evaluated, chosen by `names` (`hold_out`).

        Raises:
            InputError: every class has one example.
        """
        labels = self.labels.tolist()
        by_class: list[dict[str, int]] = [{} for _ in self.classes]
        for number in sorted(range(len(self)), key=lambda number: names[number]):
            by_class[labels[number]][names[number]] = number
        evaluated = np.zeros(len(self), dtype=bool)
        for numbers in by_class:
            evaluated[[numbers[name] for name in hold_out(list(numbers), share)[1]]] = True
        if not evaluated.any():
            raise InputError(f"dataset.val_share is {share:g}, but every class has one image; expected two or more")
        return self._subset(~evaluated), self._subset(evaluated)

    def _subset(self, mask: np.ndarray) -> Members:
        labels = self.labels[torch.from_numpy(mask)]
        return Members(self.member, self.positions[mask], labels, self.classes, self.identity, self.notes)
