"""The kinds of rules for the values of a config, each with a text that says what it expects."""

import os
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

# The largest number of bytes of a name in a path (the limit of file systems), and of a path (with room for the files
# of a run).
NAME_BYTES, PATH_BYTES = 255, 3500
TEXT_CHARACTERS = 1000
OPTION_VALUES = 1000  # in a mapping for a constructor of a library
# The categories of Unicode for controls, formats (such as the writing direction), surrogates, and ends of lines.
UNSAFE = ("Cc", "Cf", "Cs", "Zl", "Zp")
# The largest number of steps of a run: its product with the number of examples of any data set fits into 63 bits.
LONGEST = 10**9
# The longest time, in seconds. The timeout of a socket is in milliseconds and has 31 bits, which end at 596 hours.
LONGEST_S = 500 * 3600.0

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ep|%)?")
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|h)?")
_SECONDS = {"s": 1, "min": 60, "h": 3600}


class Rule(Protocol):
    """A condition on a value. The rule of a list applies to each item."""

    @property
    def expected(self) -> str:
        """A text that says which values fit."""

    def fits(self, value: Any) -> bool:
        """Whether `value`, which is not null, fits."""


@dataclass(frozen=True)
class Check:
    """A rule without a kind of its own."""

    expected: str
    fits: Callable[[Any], bool]


@dataclass(frozen=True, kw_only=True)
class Number:
    """A number between two bounds, each open or closed, or one of a few words. NaN is in no range."""

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
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
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
        return (type(value), value) in [(type(allowed), allowed) for allowed in self.values]  # True is not 1


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

    expected: ClassVar[str] = f"a time such as 30s, 10min or 2h, at most {LONGEST_S / 3600:g}h"

    def fits(self, value: Any) -> bool:
        return parse_time(value) is not None


@dataclass(frozen=True)
class Text:
    """A text in one line, which can be a part of a file, a table or a script."""

    expected: ClassVar[str] = (
        f"at most {TEXT_CHARACTERS:,} characters of Unicode in one line, without control characters"
    )

    def fits(self, value: Any) -> bool:
        return isinstance(value, str) and len(value) <= TEXT_CHARACTERS and is_one_line(value)


@dataclass(frozen=True)
class PathText:
    """The text of a path. Whether it exists is checked elsewhere."""

    expected: ClassVar[str] = (
        f"a path of at most {PATH_BYTES:,} bytes and {NAME_BYTES} a name, without control characters"
    )

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
        leaves = list(nested(value))
        texts = [*(name for key, _ in leaves for name in key), *(leaf for _, leaf in leaves if isinstance(leaf, str))]
        numbers = [leaf for _, leaf in leaves if isinstance(leaf, int | float)]
        return (
            len(leaves) <= OPTION_VALUES
            and all(map(is_one_line, texts))
            and all(abs(number) <= self.most for number in numbers)
        )


def parse_duration(value: Any) -> tuple[float, str] | None:
    """The amount and the unit (`ep`, `%`, or empty for steps) of a duration; None if it is not one."""
    match = _DURATION.fullmatch(str(value).strip()) if isinstance(value, int | str) else None
    if match is None or (match[2] is None and "." in match[1]):
        return None
    amount, unit = float(match[1]), match[2] or ""
    return (amount, unit) if amount <= (100 if unit == "%" else LONGEST) else None


def parse_time(value: Any) -> float | None:
    """The seconds of a time such as `30s`, `10min`, `2h` or a bare number (seconds); None if it is not one."""
    match = _TIME.fullmatch(str(value).strip())
    seconds = float(match[1]) * _SECONDS[match[2] or "s"] if match is not None else 0.0
    return seconds if 0 < seconds <= LONGEST_S else None


def is_timed(value: Any) -> bool:
    """Whether a value ends with the unit of a time."""
    return re.search(r"\d\s*(s|min|h)\s*$", str(value)) is not None


def _figure(bound: float) -> str:
    return f"{int(bound):,}" if bound == int(bound) else f"{bound:g}"


def is_one_line(text: str) -> bool:
    """Whether a text is valid Unicode without control characters: none that ends a line, or changes its direction.

    The two joiners are allowed: scripts of India and Persia, and emoji, are written with them.
    """
    return all(unicodedata.category(char) not in UNSAFE or char in "\u200c\u200d" for char in text)


def nested(node: Any, key: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value of a plain config with its key. The key of a list item ends with its index."""
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from nested(value, (*key, str(name)))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from nested(value, (*key, str(index)))
    else:
        yield key, node
