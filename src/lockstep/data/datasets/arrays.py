"""Splits in memory, what arrays of pixels and labels mean, and the check of labels."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.core.errors import InputError
from lockstep.core.model_card import CLASSES, LABELS, VALUES

ARRAY_TO_8_BITS = "((x - LOW) / (HIGH - LOW) * 255).clip(0, 255).astype('uint8')"


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


def as_array(values: Any) -> NDArray[Any]:
    """Tensors, arrays and lists as an array of NumPy. Raises ValueError for a ragged list."""
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def as_bytes(pixels: NDArray[Any], what: str) -> NDArray[np.uint8]:
    """Pixels of any shape as uint8, from uint8, booleans or floats from 0 to 1. Raises ValueError about `what`."""
    if pixels.dtype == np.bool_:
        return pixels.astype(np.uint8) * 255
    if np.issubdtype(pixels.dtype, np.floating):
        low, high = float(pixels.min(initial=np.inf)), float(pixels.max(initial=-np.inf))
        if pixels.size and not (low >= 0 and high <= 1):  # also of NaN
            raise ValueError(
                f"{what} has floats from {low:.4g} to {high:.4g}, expected 0 to 1; leave out a Normalize "
                f"(the option's `mean` and `std` do it), or return {ARRAY_TO_8_BITS}"
            )
        return np.rint(pixels * np.asarray(255, pixels.dtype)).astype(np.uint8)
    if pixels.dtype != np.uint8:
        raise ValueError(
            f"{what} is {pixels.dtype}, expected uint8, or floats from 0 to 1; choose the values LOW and HIGH that "
            f"are to be 0 and 255 in the whole data set, and return {ARRAY_TO_8_BITS}"
        )
    return np.require(pixels, requirements=("C", "W"))  # as torch takes an array without a warning


def as_labels(values: Any, classes: int, targets: str, where: str) -> Tensor:
    """Labels as a split has them (see `Split.labels`), from numbers of any width. Raises InputError."""
    many = targets in (LABELS, VALUES)
    try:
        labels = as_array(values)
        stored = f"{labels.dtype} {labels.shape}"
    except ValueError as error:
        labels, stored = np.empty(0, object), f"no array ({error})"
    if labels.dtype.kind not in ("biuf" if many else "iu"):
        expected = f"numbers (N, {classes})" if many else "integers (N,)"
        raise InputError(f"dataset: the {targets} of {where} are {stored}, expected {expected}; correct them")
    tensor = torch.from_numpy(np.require(labels, np.float32 if many else np.int64, ("C", "W")))
    if many and classes == tensor.ndim == 1:
        tensor = tensor[:, None]
    check_labels(tensor, classes, where, targets)
    return tensor


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
