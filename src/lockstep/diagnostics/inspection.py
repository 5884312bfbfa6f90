"""Looks at the data of a job before a run: labels, classes, corrupt images, and images that are there twice."""

import enum
import hashlib
import itertools
import math
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from lockstep.core.data_protocols import SPLIT_NAMES, Source, Split, splits_of
from lockstep.core.errors import BrokenImage, InputError
from lockstep.core.model_card import CLASSES, LABELS
from lockstep.data.datasets.arrays import check_labels
from lockstep.data.datasets.targets import class_notes
from lockstep.data.loading.reading import map_in_order
from lockstep.runtime.host import cores

INSPECTION_CHUNK = 64  # images that a thread looks at in a row
MOST_COLUMNS = 8  # the most labels or values that a finding names
Image = tuple[Split, int]  # an image by its split and its number there
ResultT = TypeVar("ResultT")


class Level(enum.StrEnum):
    """Whether a run would start: yes, with a doubt, or not."""

    ok = "ok"
    warning = "warning"
    error = "error"


@dataclass(frozen=True)
class Finding:
    """A check's result, with a suggested fix for a problem.

    Fields:
        amount: the seconds or bytes reported.
        paths: of all images that the finding is about.
    """

    check: str
    text: str
    level: Level = Level.ok
    amount: float = 0.0
    paths: tuple[str, ...] = ()


def inspect(source: Source, seconds: float) -> Iterator[Finding]:
    """Look at the splits, and at images for at most `seconds`. Raises InputError for a wrong label."""
    try:
        splits = splits_of(source)
    except InputError as error:
        yield Finding("data", str(error), Level.warning if source.downloads else Level.error)
        return
    for name, split in splits.items():
        check_labels(split.labels, source.classes, f"the {SPLIT_NAMES[name]} split", source.targets)
    names = source.class_names or tuple(map(str, range(source.classes)))
    kind = source.targets
    notes = class_notes(names, {name: split.labels for name, split in splits.items()}, kind)
    for note in dict.fromkeys([*source.notes(), *notes]):
        yield Finding(kind, note, Level.warning)
    counts = f"{len(splits['train']):,} to train on, {len(splits['val']):,} to evaluate"
    if "test" in splits:
        counts += f", {len(splits['test']):,} to test"
    if kind != CLASSES:
        yield Finding(kind, f"{_columns(names, splits['train'].labels, kind)}: {counts}")
    elif all(len(split.labels.unique()) == source.classes for split in splits.values()):
        yield Finding(kind, f"all {source.classes} have images in every split: {counts}")
    yield from _broken([*splits.values()], seconds / 2)
    yield from _repeated([image for split in reversed(splits.values()) for image in _shuffled(split)], seconds / 2)


def _columns(names: Sequence[str], labels: Tensor, targets: str) -> str:
    """The images to train on that have each label, or the range and the mean of each value."""
    few = [
        f"{name} {int(column.sum()):,}"
        if targets == LABELS
        else f"{name} {column.min():.4g} to {column.max():.4g} (mean {column.mean():.4g})"
        for name, column in zip(names[:MOST_COLUMNS], labels.T, strict=False)
    ]
    return ", ".join(few + [f"and {len(names) - MOST_COLUMNS} more"] * (len(names) > MOST_COLUMNS))


def _shuffled(*splits: Split) -> list[Image]:
    images = [(split, index) for split in splits for index in range(len(split))]
    random.Random(0).shuffle(images)
    return images


def _look(
    images: Sequence[Image], look: Callable[[Split, int], ResultT], seconds: float
) -> tuple[list[tuple[Image, ResultT]], str]:
    """The results of `look` for the first of these images, as many as there is time for, and how many that are."""
    deadline = time.monotonic() + seconds
    chunks = (images[start : start + INSPECTION_CHUNK] for start in range(0, len(images), INSPECTION_CHUNK))
    in_time = itertools.takewhile(lambda _: time.monotonic() < deadline, chunks)

    def results(chunk: Sequence[Image]) -> list[tuple[Image, ResultT]]:
        return [(image, look(*image)) for image in chunk]

    looked = list(itertools.chain.from_iterable(map_in_order(results, in_time, workers=cores(), prefetch=2)))
    extent = "" if len(looked) == len(images) else f" of {len(images):,}"
    return looked, f"{len(looked):,}{extent} images{' (--all looks at all)' * bool(extent)}"


def _broken(splits: Sequence[Split], seconds: float) -> Iterator[Finding]:
    """Decode files as a run does, in random order; a finding for each reason why some cannot be decoded."""
    images = _shuffled(*(split for split in splits if split.images is None))
    if not images:
        yield Finding("images", f"{sum(map(len, splits)):,} in memory or packed, nothing to decode")
        return
    looked, extent = _look(images, _failure, seconds)
    failures = [failure for _, failure in looked if failure]
    if not failures:
        yield Finding("images", f"{extent} can be decoded")
        return
    damaged = sum(not failure.needs_package for failure in failures)
    skip, expected = max(split.skip for split in splits), math.ceil(damaged * len(images) / len(looked))
    by_reason: dict[str, list[BrokenImage]] = {}
    for failure in failures:
        by_reason.setdefault(_reason(failure), []).append(failure)
    for alike in sorted(by_reason.values(), key=len, reverse=True):
        example, level = alike[0], Level.warning if len(failures) <= skip and expected <= skip else Level.error
        remedy = f"; dataset.skip={skip} skips them"
        if expected > skip:
            remedy = f"; remove or replace them, or use dataset.skip={expected}"
        text = f"{len(alike):,} of {extent} broken, such as {example.failure}{remedy * (not example.needs_package)}"
        yield Finding("images", text, level, paths=tuple(sorted(str(failure.args[1]) for failure in alike)))


def _failure(split: Split, index: int) -> BrokenImage | None:
    try:
        split.fetch([index])
    except BrokenImage as error:
        return error
    return None


def _reason(failure: BrokenImage) -> str:
    """Why an image is broken, alike for files that differ in a number or a name."""
    return re.sub(r"\d+|'[^']*'", "", str(failure.args[2]))


def _repeated(images: Sequence[Image], seconds: float) -> Iterator[Finding]:
    digests, extent = _look(images, _digest, seconds)
    first: dict[bytes, Image] = {}
    pairs = [(first.setdefault(digest, image), image) for image, digest in digests if digest]
    pairs = [(one, other) for one, other in pairs if one is not other]
    in_two = [pair for pair in pairs if pair[0][0] is not pair[1][0]]
    in_one = [pair for pair in pairs if pair[0][0] is pair[1][0]]
    two_labels = [pair for pair in pairs if not torch.equal(*(split.labels[index] for split, index in pair))]
    for of_kind, where, effect in (
        (in_two, "in two splits", "the score is too good"),
        (in_one, "in one split", "they count twice"),
        (two_labels, "with two labels", "one is wrong"),
    ):
        if of_kind:
            example = " and ".join(split.name(index) for split, index in of_kind[0])
            text = f"{len(of_kind):,} twice {where}, such as {example}: {effect}; remove one of each"
            yield Finding("twice", text, Level.warning)
    if not pairs:
        yield Finding("twice", f"none, among {extent}")


def _digest(split: Split, index: int) -> bytes:
    """A hash of the bytes of an image; empty for one that cannot be read, which `_broken` reports."""
    with suppress(OSError, ValueError):
        return hashlib.blake2b(split.content(index), digest_size=16).digest()
    return b""
