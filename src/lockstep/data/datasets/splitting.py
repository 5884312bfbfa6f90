"""Cuts a split by hashes of names: a share or a fold to evaluate or to test, and the part that a limit leaves."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lockstep.core.data_protocols import SPLIT_NAMES, Source
from lockstep.core.errors import InputError, shown
from lockstep.core.fields import ranged
from lockstep.core.model_card import LABELS

FOLDS_NAMED = 5  # the most folds that an error lists
Chosen = NDArray[np.bool_]


class Units(NamedTuple):
    """What a cut leaves whole, ranked in each stratum by the hashes of their names.

    `of` is the unit of each example, (N,); `place` is its rank in its stratum, from 0; `total` the number of units in
    it.
    """

    of: NDArray[np.int64]
    place: NDArray[np.int64]
    total: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Examples:
    """The examples of a split, to be divided. Those of a group, or else of a name, stay together.

    A hash of the name of each decides, within its stratum: its class, or its rarest label, or all values. The stratum
    of a group is the commonest of its examples. With `apart`, examples of one name are different ones. `names` and
    `groups` are (N,); `labels`, `targets`: see `Split` and `Source`; `classes` may be empty.
    """

    names: Sequence[bytes]
    labels: Tensor
    classes: Sequence[str]
    targets: str
    groups: Sequence[bytes] | None = None
    apart: bool = False

    def share(self, key: str, share: float) -> Chosen:
        """The examples in a share, which the field `key` of a data set requests.

        Of each stratum, the share of the units with the smallest hashes: at least one of two or more, and never all.
        If a unit is added, at most one other changes sides. Raises InputError if every stratum has one unit, or a
        side would have none of a class or label with several units.
        """
        units = self.units(key)
        taken = np.minimum(np.maximum(1, np.rint(share * units.total)), units.total - 1)
        chosen: Chosen = (units.place < taken)[units.of]
        if not chosen.any():
            owner = "every class has" if len(units.place) > 1 else "there is"
            raise InputError(f"dataset.{key} is {share:g}, but {owner} one {self.unit}, expected two or more")
        self._check(key, share, units, chosen.astype(np.int64), 2)
        return chosen

    def fold(self, folds: int, fold: int) -> Chosen:
        """The examples of a fold. Raises InputError if a fold would have none of a class or label.

        Each stratum is cut in the order of the hashes, so the folds have as many units of it, within one.
        """
        units = self.units("folds")
        sides = (((units.place + 1) * folds - 1) // units.total)[units.of]
        self._check("folds", folds, units, sides, folds)
        return sides == fold

    def within(self, limit: float) -> Chosen:
        """The examples within a limit: a share up to 1 of each stratum, or a number; at least one unit per stratum.

        A number is divided by the largest remainders. If units have several examples, it is at most that number.
        """
        of, place, total = self.units("limit")
        if limit <= 1:
            chosen = place < np.maximum(1, np.floor(limit * total + 0.5))
        else:
            quota_left = np.where(place == 0, np.inf, limit / len(of) * total - place)
            order = np.argsort(-quota_left, kind="stable")
            chosen = place == 0
            chosen[order] |= np.bincount(of)[order].cumsum() <= limit
        return chosen[of]

    @property
    def unit(self) -> str:
        return "image" if self.groups is None else "group"

    def units(self, key: str) -> Units:
        """The units, by hashes that differ for each `key`."""
        hash_key = f"lockstep {key}".encode()
        names, apart = (self.names, self.apart) if self.groups is None else (self.groups, False)
        digests = (hashlib.blake2b(name, digest_size=16, key=hash_key).digest() for name in names)
        places = (at.to_bytes(8, "big") if apart else b"" for at in range(len(names)))
        # Numbered in the order of their hashes.
        of = np.unique(np.array([*map(bytes.__add__, digests, places)], dtype="S24"), return_inverse=True)[1]
        strata = self.strata()
        width = strata.max(initial=0) + 1
        pairs, sizes = np.unique(of * width + strata, return_counts=True)
        stratum = (pairs % width)[_first_of(pairs // width, -sizes)]  # the commonest of a unit
        order = np.argsort(stratum, kind="stable")
        first, end = (np.searchsorted(stratum[order], stratum, side) for side in ("left", "right"))
        return Units(of, np.argsort(order) - first, end - first)

    def strata(self) -> NDArray[np.int64]:
        example, label = self._labels()
        counts = np.bincount(label)
        rarest = _first_of(example, counts[label])
        strata = np.full(len(self.labels), len(counts))  # of those without a label
        strata[example[rarest]] = label[rarest]
        return strata

    def _check(self, key: str, value: float, units: Units, side: NDArray[np.int64], number: int) -> None:
        """Raise InputError if one of the `number` sides, (N,), has none of a class or label."""
        example, owner = self._labels()
        shape = int(owner.max(initial=0)) + 1, number
        counts = np.bincount(owner * number + side[example], minlength=math.prod(shape)).reshape(shape)
        for label, at in np.argwhere((counts == 0) & counts.any(1, keepdims=True)).tolist():
            own = len(np.unique(units.of[example[owner == label]]))
            if key != "folds" and at != 0 and own == 1:
                continue
            kind = "label" if self.targets == LABELS else "class" if self.labels.ndim == 1 else ""
            name = f"the {kind} {self.classes[label] if self.classes else label}" if kind else "the data set"
            part = key.removesuffix("_share") if at else "train"
            where = "a fold" if key == "folds" else f"the {SPLIT_NAMES[part]} split"
            other = f"use {f'dataset.folds={own}' if key == 'folds' else 'another share'}" * (own > 1)
            remedies = [other, f"remove the {kind}" if kind else f"remove dataset.{key}"]
            raise InputError(
                f"dataset.{key} is {value:g}, but {name} has {own:,} {self.unit}{'s' * (own != 1)}, and "
                f"{where} would have none; {', or '.join(filter(None, remedies))}"
            )

    def _labels(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The example and the number of each class or label that an example has; all values are one class."""
        labels = self.labels.numpy()
        if labels.ndim == 2:
            labels = labels if self.targets == LABELS else np.ones((len(labels), 1))
            example, label = np.nonzero(labels)
            return example, label
        return np.arange(len(labels)), labels


def _first_of(units: NDArray[np.int64], order: NDArray[np.int64]) -> NDArray[np.int64]:
    """The position of the first of each unit by `order`, the units in their order."""
    positions = np.lexsort((order, units))
    return positions[np.unique(units[positions], return_index=True)[1]]


@dataclass(frozen=True, kw_only=True)
class CutSource(Source):
    """A data set of which the evaluation split can be cut from the training split, and that can be limited."""

    # share of each class of the training split to evaluate if there is no evaluation split. A hash of the names
    # (`hf`: of the row numbers) chooses the images, so that later files move almost no others
    val_share: float | None = ranged(None, above=0.0, below=1)
    # cross-validation: cut the training split into so many folds, the same share of each class in each, by a hash of
    # the names, and evaluate `fold`: `dataset.folds=5 dataset.fold=0,1,2,3,4 -m`. null: off
    folds: int | None = ranged(None, least=2, most=1000)
    fold: int | None = ranged(None, least=0, most=999)  # the fold to evaluate, from 0
    # a first try: train and evaluate with this share of each class (0.1), or with so many examples of each split;
    # chosen by a hash. null: all
    limit: float | None = ranged(None, above=0.0, most=1e9)

    def __post_init__(self) -> None:
        folds = self.folds
        if folds is None and self.fold is not None:
            raise InputError(f"dataset.fold is {self.fold}, but dataset.folds is null; add dataset.folds=5")
        if folds is not None and (self.fold is None or self.fold >= folds):
            every = ",".join(map(str, range(folds))) if folds <= FOLDS_NAMED else f"0,1,...,{folds - 1}"
            raise InputError(
                f"dataset.fold is {shown(self.fold)}, expected a fold from 0 to "
                f"{folds - 1} to evaluate; all of them: dataset.fold={every} -m"
            )
        if folds is not None and self.val_share is not None:
            raise InputError("dataset.folds and dataset.val_share both choose the evaluation split; remove one")

    @property
    def is_cut(self) -> bool:
        """Whether the evaluation split is cut from the training split."""
        return self.val_share is not None or self.folds is not None

    def evaluated(self, examples: Examples) -> Chosen:
        """The training examples that are evaluated instead. Raises InputError."""
        if self.folds is not None and self.fold is not None:
            return examples.fold(self.folds, self.fold)
        assert self.val_share is not None
        return examples.share("val_share", self.val_share)
