"""Image files inside of other files: in a tar shard, or in a row of a table."""

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
    """An image file that is not a file of its own. `str` gives what an error calls it."""

    def contents(self) -> bytes:
        """Its bytes. Raises OSError or ValueError."""


@dataclass(frozen=True, eq=False)
class Members:
    """The image files of a split, in the order in which they are stored.

    Fields:
        member: the member at a position.
        positions: int64 (N,), of the examples of the split.
        labels: int64 (N,).
        classes: their names, by label.
        identity: identifies the stored data, wherever it is kept.
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
        """Their number and hashes of their places and labels, and of what they lie in."""
        digest = hashlib.sha256(self.positions.tobytes() + self.labels.numpy().tobytes()).hexdigest()[:16]
        return {"examples": f"{len(self):,} of {self.identity} ({digest})"}

    def split(self, names: Sequence[str], share: float) -> tuple[Members, Members]:
        """Without and with only a `share` of each class, by the `names` of all examples. See `hold_out`.

        Raises:
            InputError: every class has one example.
        """
        labels = self.labels.tolist()
        by_class: list[dict[str, int]] = [{} for _ in self.classes]
        for number in sorted(range(len(self)), key=lambda number: names[number]):
            by_class[labels[number]][names[number]] = number
        evaluated = np.zeros(len(self), dtype=bool)
        for own in by_class:
            evaluated[[own[name] for name in hold_out(list(own), share)[1]]] = True
        if not evaluated.any():
            raise InputError(f"dataset.val_share is {share:g}, but every class has one image; expected two or more")
        return self._chosen(~evaluated), self._chosen(evaluated)

    def _chosen(self, which: np.ndarray) -> Members:
        labels = self.labels[torch.from_numpy(which)]
        return Members(self.member, self.positions[which], labels, self.classes, self.identity, self.notes)
