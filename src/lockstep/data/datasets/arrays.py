"""Splits in memory, and the check of their labels."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lockstep.core.errors import InputError
from lockstep.core.model_card import CLASSES, LABELS, VALUES


@dataclass(frozen=True)
class ArraySplit:
    """Examples that are in memory: uint8 images (N, C, H, W) and int64 labels (N,).

    `numbers` are those in the split that they are cut from, int64 (N,); None for a whole split. Of `mapped` files
    only the rows in use are read, once for all ranks.
    """

    images: Tensor
    labels: Tensor
    numbers: Tensor | None = None
    mapped: bool = False

    skip: ClassVar[int] = 0

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, indices: list[int], epoch: int = 0) -> Tensor:
        # NumPy gets large pages for a large result: at 256 px 2.5 times as fast as index_select.
        return torch.from_numpy(self.images.numpy().take(torch.tensor(indices, dtype=torch.int64).numpy(), axis=0))

    def name(self, index: int) -> str:
        return str(index if self.numbers is None else int(self.numbers[index]))

    def content(self, index: int) -> bytes:
        return self.images[index].numpy().tobytes()


def check_labels(labels: Tensor, classes: int, where: str, targets: str = CLASSES) -> None:
    """Raise InputError for the first label that is not a class, no share of a label or no finite value."""
    many = targets in (LABELS, VALUES)
    fits = labels.is_floating_point() and labels.shape[1:] == (classes,) if many else labels.ndim == 1
    if not fits:
        expected = f"floats (N, {classes})" if many else "int64 (N,)"
        raise InputError(
            f"dataset: the {targets if many else CLASSES} of {where} are {str(labels.dtype)[6:]} "
            f"{(*labels.shape,)}, expected {expected}; correct them, or use another task"
        )
    inside = (labels >= 0) & (labels <= 1) if targets == LABELS else labels.isfinite()
    wrong = (~inside.all(1) if many else (labels < 0) | (labels >= classes)).nonzero()
    if len(wrong):
        index = int(wrong[0])
        expected = {LABELS: "shares from 0 to 1", VALUES: "finite numbers"}.get(targets, f"0 to {classes - 1}")
        raise InputError(
            f"dataset: example {index} of {where} has label {labels[index].tolist()}, expected {expected}"
        )
