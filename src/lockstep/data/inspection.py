"""Looks at the data of a job before a run: labels, classes, broken images, and images that are there twice."""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from lockstep.core.data_protocols import Source, Split
from lockstep.core.errors import BrokenImage, InputError
from lockstep.core.finding import Finding, Level
from lockstep.data.datasets.files import class_notes
from lockstep.data.datasets.splits import check_labels
from lockstep.data.loading.prefetch import in_order
from lockstep.runtime.host import cores

CHUNK = 64  # images that a thread looks at in a row
ResultT = TypeVar("ResultT")


def inspect(source: Source, seconds: float) -> Iterator[Finding]:
    """Look at the splits of a data set, and at its images for at most `seconds`.

    Data that is missing is not downloaded, and no error if a run would do it.

    Raises:
        InputError: a label is not a class.
    """
    try:
        train, val = source.train(), source.eval()
    except InputError as error:
        yield Finding("data", str(error), Level.warning if source.downloads else Level.error)
        return
    for split, where in ((train, "the training split"), (val, "the evaluation split")):
        check_labels(split.labels, source.classes, where)
    notes = class_notes(source.class_names or tuple(map(str, range(source.classes))), train.labels, val.labels)
    for note in dict.fromkeys([*source.notes(), *notes]):
        yield Finding("classes", note, Level.warning)
    if not notes:
        counts = f"{len(train):,} to train on, {len(val):,} to evaluate"
        yield Finding("classes", f"all {source.classes} have images in both splits: {counts}")
    images = _Images(train, val)
    yield from _broken(images, seconds / 2)
    yield from _repeated(images, seconds / 2)


@dataclass(frozen=True)
class _Images:
    """The images of both splits by one number, those of the evaluation split first."""

    train: Split
    val: Split

    def __len__(self) -> int:
        return len(self.train) + len(self.val)

    def __getitem__(self, number: int) -> tuple[Split, int]:
        return (self.val, number) if number < len(self.val) else (self.train, number - len(self.val))

    def label(self, number: int) -> int:
        split, index = self[number]
        return int(split.labels[index])

    def evaluated(self, number: int) -> bool:
        return number < len(self.val)

    def pair(self, numbers: tuple[int, int]) -> str:
        first, second = (split.name(index) for split, index in map(self.__getitem__, numbers))
        return f"{first} and {second}"

    def look(self, numbers: Any, look: Callable[[Split, int], ResultT], seconds: float) -> dict[int, ResultT]:
        """The results of `look` for these images, in their order, as many as there is time for."""
        deadline = time.monotonic() + seconds
        chunks = (numbers[start : start + CHUNK].tolist() for start in range(0, len(numbers), CHUNK))
        in_time = itertools.takewhile(lambda _: time.monotonic() < deadline, chunks)

        def results(chunk: list[int]) -> list[tuple[int, ResultT]]:
            return [(number, look(*self[number])) for number in chunk]

        return dict(itertools.chain.from_iterable(in_order(results, in_time, workers=cores(), prefetch=2)))

    def extent(self, looked: int, total: int) -> str:
        return f"{looked:,} images" if looked == total else f"{looked:,} of {total:,} images (--all looks at all)"


def _broken(images: _Images, seconds: float) -> Iterator[Finding]:
    """Decode files as a run does, in random order."""
    numbers = np.random.default_rng(0).permutation(len(images))
    stored = images.train.images is not None, images.val.images is not None
    numbers = numbers[[not stored[images.evaluated(number)] for number in numbers.tolist()]]
    if not len(numbers):
        yield Finding("images", f"{len(images):,} in memory or packed, nothing to decode")
        return
    failures = images.look(numbers, _failure, seconds)
    broken = [failure for failure in failures.values() if failure]
    extent, skip = images.extent(len(failures), len(numbers)), max(images.train.skip, images.val.skip)
    if not broken:
        yield Finding("images", f"{extent} can be decoded")
        return
    expected = math.ceil(len(broken) * len(numbers) / len(failures))
    remedy, level = f"dataset.skip={skip} leaves them out", Level.warning
    if expected > skip:
        remedy, level = f"remove or replace them, or use dataset.skip={expected}", Level.error
    yield Finding("images", f"{len(broken):,} of {extent} broken, such as {broken[0]}; {remedy}", level)


def _failure(split: Split, index: int) -> str:
    try:
        split.fetch([index])
    except BrokenImage as error:
        return error.failure
    return ""


def _repeated(images: _Images, seconds: float) -> Iterator[Finding]:
    """Compare images by their bytes: all to evaluate first, then those to train on, in random order."""
    rng = np.random.default_rng(0)
    order = [rng.permutation(len(images.val)), len(images.val) + rng.permutation(len(images.train))]
    digests = images.look(np.concatenate(order), _digest, seconds)
    first: dict[bytes, int] = {}
    evaluated = images.evaluated
    pairs = [(first.setdefault(digest, number), number) for number, digest in digests.items() if digest]
    pairs = [pair for pair in pairs if pair[0] != pair[1]]
    for place, effect, fits in (
        ("in both splits", "the score is too good", lambda first, second: evaluated(first) != evaluated(second)),
        ("in one split", "they count twice", lambda first, second: evaluated(first) == evaluated(second)),
        ("with two labels", "one is wrong", lambda first, second: images.label(first) != images.label(second)),
    ):
        if of_kind := [pair for pair in pairs if fits(*pair)]:
            text = f"{len(of_kind):,} twice {place}, such as {images.pair(of_kind[0])}: {effect}; remove one of each"
            yield Finding("twice", text, Level.warning)
    if not pairs:
        yield Finding("twice", f"none, among {images.extent(len(digests), len(images))}")


def _digest(split: Split, index: int) -> bytes:
    """A hash of the bytes of an image; empty for one that cannot be read, which `_broken` reports."""
    with suppress(OSError, ValueError):
        return hashlib.blake2b(split.content(index), digest_size=16).digest()
    return b""
