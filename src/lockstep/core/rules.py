"""The kinds of rules for the values of a config, each with a text that says what it expects."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from lockstep.core.durations import LONGEST, LONGEST_S, is_timed, parse_duration, parse_time

# The largest number of bytes of a name in a path (the limit of file systems), and of a path (with room for the files
# of a run).
NAME_BYTES, PATH_BYTES = 255, 3500
TEXT_CHARACTERS = 1000
OPTION_VALUES = 1000  # in a mapping for a constructor of a library
# The categories of Unicode for controls, formats (such as the writing direction), surrogates, and ends of lines.
UNSAFE = ("Cc", "Cf", "Cs", "Zl", "Zp")


class Rule(Protocol):
    """A condition on a value. The rule of a list applies to each item."""

    @property
    def expected(self) -> str:
        """A text that says which values fit."""

    def fits(self, value: Any) -> bool:
        """Whether `value`, which is not null, fits."""


@dataclass(frozen=True, kw_only=True)
class Number:
    """A number between two bounds, each open or closed, or one of a few words. NaN is in no range.

    `whole` only changes the text of `expected`: the field's type checks for integers.
    """

    low: float
    high: float
    low_open: bool = False
    high_open: bool = False
    words: tuple[str, ...] = ()
    whole: bool = False

    @property
    def expected(self) -> str:
        high = f"{'below ' * self.high_open}{_figure(self.high)}"
        to = f"from {_figure(self.low)} to {high}"
        if self.low_open:
            to = f"above {_figure(self.low)} and {'' if self.high_open else 'at most '}{high}"
        return " or ".join([*self.words, f"a {'whole ' * self.whole}number {to}"])

    def fits(self, value: Any) -> bool:
        if isinstance(value, str):
            return value in self.words
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        above = value > self.low if self.low_open else value >= self.low
        return above and (value < self.high if self.high_open else value <= self.high)


@dataclass(frozen=True)
class Choice:
    """One of a few values."""

    values: tuple[Any, ...]

    @property
    def expected(self) -> str:
        return f"one of {', '.join(map(str, self.values))}"

    def fits(self, value: Any) -> bool:
        return value in self.values


@dataclass(frozen=True, kw_only=True)
class Duration:
    """Steps, epochs or a share of the run. `zero` also allows 0, `timed` also a time such as `10min`."""

    zero: bool = False
    timed: bool = False

    @property
    def expected(self) -> str:
        clock = ", a time (10min)" * self.timed
        low = "from 0 to" if self.zero else "above 0 and at most"
        return f"steps (100), epochs (2ep){clock} or a share of the run (5%), {low} {LONGEST:,}"

    def fits(self, value: Any) -> bool:
        if self.timed and is_timed(value):
            return parse_time(value) is not None
        parsed = parse_duration(value)
        return parsed is not None and (self.zero or parsed[0] > 0)


@dataclass(frozen=True)
class Time:
    """A time above zero."""

    @property
    def expected(self) -> str:
        return f"a time such as 30s, 10min or 2h, at most {LONGEST_S / 3600:g}h"

    def fits(self, value: Any) -> bool:
        return parse_time(value) is not None


@dataclass(frozen=True)
class Text:
    """A text in one line, which can be a part of a file, a table or a script."""

    @property
    def expected(self) -> str:
        return f"at most {TEXT_CHARACTERS:,} characters of Unicode in one line, without control characters"

    def fits(self, value: Any) -> bool:
        return isinstance(value, str) and len(value) <= TEXT_CHARACTERS and is_one_line(value)


@dataclass(frozen=True)
class PathText:
    """The text of a path. Whether it exists is checked elsewhere."""

    @property
    def expected(self) -> str:
        return f"a path of at most {PATH_BYTES:,} bytes and {NAME_BYTES} a name, without control characters"

    def fits(self, value: Any) -> bool:
        if not isinstance(value, str) or not value.strip() or not is_one_line(value):
            return False
        if len(value.encode()) > PATH_BYTES:
            return False
        known_home = not value.startswith("~") or os.path.expanduser(value) != value  # noqa: PTH111, raises nothing
        return known_home and all(len(name.encode()) <= NAME_BYTES for name in value.split("/"))


@dataclass(frozen=True)
class Options:
    """A mapping of arguments for a library's constructor, in which no number and no list is absurdly large."""

    most: float

    @property
    def expected(self) -> str:
        return (
            f"numbers of at most {_figure(self.most)}, lists of at most {OPTION_VALUES:,}, and texts without control "
            "characters"
        )

    def fits(self, value: Any) -> bool:
        return sum(1 for _ in _leaves(value)) <= OPTION_VALUES and all(
            is_one_line(leaf)
            if isinstance(leaf, str)
            else not isinstance(leaf, float | int) or abs(leaf) <= self.most
            for leaf in _leaves(value)
        )


def _figure(bound: float) -> str:
    return f"{int(bound):,}" if bound == int(bound) else f"{bound:g}"


def is_one_line(text: str) -> bool:
    """Whether a text is valid Unicode without control characters: none that ends a line, or changes its direction.

    The two joiners are allowed: scripts of India and Persia, and emoji, are written with them.
    """
    return all(unicodedata.category(char) not in UNSAFE or char in "\u200c\u200d" for char in text)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    else:
        yield value
