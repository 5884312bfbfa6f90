"""What a field of a config may hold: its range stands in the class that has the field.

    lr: float = ranged(1e-3, above=0, most=1e6)

`lockstep.config.components` checks all values of a component by these rules before it is made, so no class checks a
range by hand. A subclass that only changes a default keeps the rule. A rule says what fits and how that is
called; the sentence for what does not fit is made here.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

_RULE = "rule"
# More steps than any run has; its product with the examples of a data set still fits into 63 bits.
LONGEST = 10**9
# Of a time, in seconds: 500 hours. What waits for sockets counts milliseconds in 31 bits, which end at 596 hours.
LONGEST_S = 500 * 3600.0
# Of a name in a path, in bytes, as file systems have it; and of a path, which leaves room for the files of a run.
NAME_BYTES, PATH_BYTES = 255, 3500
TEXT_CHARACTERS = 1000
# What is shown of a value, and the digits of the largest number that is shown whole.
SHOWN_CHARACTERS, SHOWN_DIGITS = 80, 30

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ep|%)?")
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|h)?")
_SECONDS = {"s": 1, "min": 60, "h": 3600}


class Rule(Protocol):
    """What a value has to be. A rule of a list holds for each of its items."""

    @property
    def expected(self) -> str:
        """What fits, in words."""

    def fits(self, value: Any) -> bool:
        """Whether `value`, which is not null, is that."""


@dataclass(frozen=True, kw_only=True)
class Number:
    """A number between two bounds, which belong to the range or not, or one of a few words. NaN is in no range.

    That it is `whole` is seen to by the field's type, and said here.
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
    """Steps, epochs or a share of the run; above zero where something recurs, and where `timed` also by the clock."""

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
    """Any text that a file can hold."""

    @property
    def expected(self) -> str:
        return f"at most {TEXT_CHARACTERS:,} characters of Unicode"

    def fits(self, value: Any) -> bool:
        return isinstance(value, str) and len(value) <= TEXT_CHARACTERS and _is_unicode(value)


@dataclass(frozen=True)
class PathText:
    """The path of a file or folder, as far as that can be told from its text."""

    @property
    def expected(self) -> str:
        return f"a path of at most {PATH_BYTES:,} bytes and {NAME_BYTES} a name, without control characters"

    def fits(self, value: Any) -> bool:
        if not isinstance(value, str) or not value.strip() or not _is_unicode(value):
            return False
        if any(ord(each) < 32 or ord(each) == 127 for each in value) or len(value.encode()) > PATH_BYTES:
            return False
        known_home = not value.startswith("~") or os.path.expanduser(value) != value  # noqa: PTH111, raises nothing
        return known_home and all(len(name.encode()) <= NAME_BYTES for name in value.split("/"))


@dataclass(frozen=True)
class Options:
    """A mapping that goes to a library's constructor: no number in it, however deep, is out of all proportion."""

    most: float

    @property
    def expected(self) -> str:
        return f"numbers of at most {_figure(self.most)}, and texts"

    def fits(self, value: Any) -> bool:
        return all(
            _is_unicode(each)
            if isinstance(each, str)
            else not isinstance(each, float | int) or abs(each) <= self.most
            for each in _leaves(value)
        )


def ranged(
    default: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    words: tuple[str, ...] = (),
) -> Any:
    """A field that holds a number, or a list of numbers, in a range that has both ends.

    Args:
        default: its default; a whole number asks for whole ones, as `least` does where the default is none.
        least, above: the lower end, that belongs to the range or does not.
        most, below: the upper end, likewise.
        words: what it may say instead, such as `auto`.
    """
    low, high = least if above is None else above, most if below is None else below
    assert low is not None, "a range has two ends"
    assert high is not None, "a range has two ends"
    sample = default[0] if isinstance(default, list) else low if default is None or default in words else default
    rule = Number(
        low=low,
        high=high,
        low_open=above is not None,
        high_open=below is not None,
        words=words,
        whole=isinstance(sample, int),
    )
    return ruled(default, rule)


def ruled(default: Any, rule: Rule) -> Any:
    """A field of a dataclass whose values `rule` holds for."""
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata={_RULE: rule})
    return dataclasses.field(default=default, metadata={_RULE: rule})


def choice(default: Any, *values: Any) -> Any:
    """A field that holds one of a few values."""
    return ruled(default, Choice(values))


def duration(default: Any, *, zero: bool = False, timed: bool = False) -> Any:
    """A field that holds a duration; see `Duration`."""
    return ruled(default, Duration(zero=zero, timed=timed))


def pathname(default: str | None) -> Any:
    """A field that holds a path, or null."""
    return ruled(default, PathText())


def rule_of(cls: type[Any], name: str) -> Rule | None:
    """The rule of a field, which a subclass need not repeat."""
    for base in cls.__mro__:
        field = base.__dict__.get("__dataclass_fields__", {}).get(name)
        if field is not None and _RULE in field.metadata:
            rule: Rule = field.metadata[_RULE]
            return rule
    return None


def problems(cls: type[Any], values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """A sentence for each of `values` that the field of its name in `cls` must not hold; `prefix` is before its key.

    Null is left to the field's type.
    """
    for field in dataclasses.fields(cls):
        value = values.get(field.name)
        if isinstance(value, Mapping) and dataclasses.is_dataclass(field.default_factory):
            yield from problems(field.default_factory, value, f"{prefix}{field.name}.")
        elif (rule := rule_of(cls, field.name)) is not None and value is not None:
            items = value if isinstance(value, list) else [value]
            if not all(map(rule.fits, items)):
                key = f"{prefix}{field.name}"
                expected = f"{'each ' * isinstance(value, list)}{rule.expected}"
                yield f"{key} is {shown(value)}, expected {expected}{_remedy(key, field)}"


def wide(node: Any, prefix: str = "") -> Iterator[str]:
    """A sentence for each whole number of a config that has no 64 bits, whatever a field would make of it."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from wide(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(node, list):
        for value in node:
            yield from wide(value, prefix)
    elif isinstance(node, int) and not -(2**63) <= node < 2**63:
        yield f"{prefix} is {shown(node)}, expected at most 64 bits"


def shown(value: Any) -> str:
    """A value as a sentence shows it: cut where it is long, a number of very many digits by their number."""
    if isinstance(value, int) and abs(value) >= 10**SHOWN_DIGITS:
        return f"a number of more than {SHOWN_DIGITS} digits"
    if isinstance(value, list):
        return _cut(f"[{', '.join(map(shown, value[:SHOWN_CHARACTERS]))}]")
    return _cut(repr(value) if isinstance(value, str) else str(value))


def parse_duration(value: Any) -> tuple[float, str] | None:
    """The amount and the unit (`ep`, `%`, or empty for steps) of a duration; None for what is none."""
    found = _DURATION.fullmatch(str(value).strip()) if isinstance(value, int | str) else None
    if found is None or (found[2] is None and "." in found[1]):
        return None
    amount, unit = float(found[1]), found[2] or ""
    return (amount, unit) if amount <= (100 if unit == "%" else LONGEST) else None


def parse_time(value: Any) -> float | None:
    """A time such as `30s`, `10min`, `2h` or a bare number of seconds, in seconds; None for what is none."""
    found = _TIME.fullmatch(str(value).strip())
    seconds = float(found[1]) * _SECONDS[found[2] or "s"] if found is not None else 0.0
    return seconds if 0 < seconds <= LONGEST_S else None


def is_timed(value: Any) -> bool:
    """Whether something has the unit of a time."""
    return re.search(r"\d\s*(s|min|h)\s*$", str(value)) is not None


def _remedy(key: str, field: dataclasses.Field[Any]) -> str:
    """An override that would do: the default."""
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if default in ("???", {}):
        return ""
    value = "null" if default is None else str(default).replace(" ", "") if isinstance(default, list) else default
    return f": {key}={value}"


def _figure(bound: float) -> str:
    return f"{int(bound):,}" if bound == int(bound) else f"{bound:g}"


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."


def _is_unicode(text: str) -> bool:
    """Whether a file can hold it: what is typed may be bytes that are no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


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
