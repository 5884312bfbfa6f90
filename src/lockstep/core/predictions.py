"""What a model predicts for the evaluation split, in one small file: who looks at it later needs no data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.core.safe_read import MB, UnreadableFile, read_json
from lockstep.core.safe_write import write_atomic

LIMIT = 64 * MB  # the file of 100 classes has 0.3 MB
BINS = 127  # of a curve of precision and recall: the most that TensorBoard reads


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """The predictions for a split with C classes. Broken images do not count.

    Fields:
        step: the step after which the model was evaluated.
        names: the names of the classes, by label.
        examples, predicted, hits: by class, how many examples have it, how many are predicted to have it, and both.
        confusion: examples by label (C rows) and prediction (C columns); empty for many classes.
        curves: (C, 2, BINS): how many examples of each class, and how many others, have a probability of the class in
            each of the equal intervals from 0 to 1; empty for many classes.
        worst: the examples with the highest losses, the highest first: `sample` is the file or the number of the
            example, `label` and `predicted` are classes, `probability` (of the predicted class) and `loss` are None
            if they are not finite, and `png` is the image in base64, with at most 128 pixels a side.
    """

    step: int
    names: Sequence[str]
    examples: Sequence[int]
    predicted: Sequence[int]
    hits: Sequence[int]
    confusion: Sequence[Sequence[int]]
    curves: Sequence[Sequence[Sequence[int]]]
    worst: Sequence[Mapping[str, Any]]

    def write(self, path: Path) -> None:
        """Write the file. Raises StorageError."""
        write_atomic(path, json.dumps(vars(self), allow_nan=False, separators=(",", ":")) + "\n")

    @classmethod
    def read(cls, path: Path) -> Predictions:
        """Read a file. Somebody else may have written it: its fields can have other types.

        Raises:
            UnreadableFile: it is missing, or not one of ours.
        """
        try:
            return cls(**read_json(path, LIMIT))
        except TypeError as error:
            raise UnreadableFile(path, "is not a file of predictions") from error
