"""The rules for the values of a config. Each rule stands at the field, in the class that has it.

    lr: float = ranged(1e-3, above=0, most=1e6)

`lockstep.config.components` checks all values of a component by these rules before it is made, so no class checks a
range by hand. A subclass that only changes a default keeps the rule.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from lockstep.core.durations import LONGEST, LONGEST_S, is_timed, parse_duration, parse_time

_RULE = "rule"
# The most bytes of a name in a path (the limit of file systems), and of a path (with room for the files of a run).
NAME_BYTES, PATH_BYTES = 255, 3500
TEXT_CHARACTERS = 1000
# The most characters of a value that an error shows, and the most digits of a number.
SHOWN_CHARACTERS, SHOWN_DIGITS = 80, 30


class Rule(Protocol):
    """A condition on a value. A rule of a list applies to each item."""

    @property
    def expected(self) -> str:
        """What fits, in words."""

    def fits(self, value: Any) -> bool:
        """Whether `value`, which is not null, fits."""


@dataclass(frozen=True, kw_only=True)
class Number:
    """A number between two bounds, each open or closed, or one of a few words. NaN is in no range.

    `whole` only changes the words: the field's type checks it.
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
    """Steps, epochs or a share of the run. `zero` allows 0, `timed` also a time by the clock."""

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
    """A text that can be written to a file."""

    @property
    def expected(self) -> str:
        return f"at most {TEXT_CHARACTERS:,} characters of Unicode"

    def fits(self, value: Any) -> bool:
        return isinstance(value, str) and len(value) <= TEXT_CHARACTERS and _is_unicode(value)


@dataclass(frozen=True)
class PathText:
    """The text of a path. Whether it exists is checked elsewhere."""

    @property
    def expected(self) -> str:
        return f"a path of at most {PATH_BYTES:,} bytes and {NAME_BYTES} a name, without control characters"

    def fits(self, value: Any) -> bool:
        if not isinstance(value, str) or not value.strip() or not _is_unicode(value):
            return False
        if (
            any(ord(character) < 32 or ord(character) == 127 for character in value)
            or len(value.encode()) > PATH_BYTES
        ):
            return False
        known_home = not value.startswith("~") or os.path.expanduser(value) != value  # noqa: PTH111, raises nothing
        return known_home and all(len(name.encode()) <= NAME_BYTES for name in value.split("/"))


@dataclass(frozen=True)
class Options:
    """A mapping of arguments for a library's constructor, in which no number is absurdly large."""

    most: float

    @property
    def expected(self) -> str:
        return f"numbers of at most {_figure(self.most)}, and texts"

    def fits(self, value: Any) -> bool:
        return all(
            _is_unicode(leaf)
            if isinstance(leaf, str)
            else not isinstance(leaf, float | int) or abs(leaf) <= self.most
            for leaf in _leaves(value)
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
    """A field for a number, or a list of numbers, in a range with two ends.

    Args:
        default: its default. If it is an integer, or null and `least` is one, only integers fit.
        least, above: the lower end, included or excluded.
        most, below: the upper end, included or excluded.
        words: texts that fit as well, such as `auto`.
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
    """A field of a dataclass whose values have to fit `rule`."""
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata={_RULE: rule})
    return dataclasses.field(default=default, metadata={_RULE: rule})


def choice(default: Any, *values: Any) -> Any:
    """A field for one of a few values."""
    return ruled(default, Choice(values))


def duration(default: Any, *, zero: bool = False, timed: bool = False) -> Any:
    """A field for a duration; see `Duration`."""
    return ruled(default, Duration(zero=zero, timed=timed))


def pathname(default: str | None) -> Any:
    """A field for a path, or null."""
    return ruled(default, PathText())


def rule_of(cls: type[Any], name: str) -> Rule | None:
    """The rule of a field, which may come from a base class."""
    for base in cls.__mro__:
        field = base.__dict__.get("__dataclass_fields__", {}).get(name)
        if field is not None and _RULE in field.metadata:
            rule: Rule = field.metadata[_RULE]
            return rule
    return None


def as_number(cls: type[Any], name: str, value: Any) -> Any:
    """A text that is a number, for a field that also takes words; any other value as it is.

    OmegaConf makes the number where the type is one, but not where it is a number or a text.
    """
    rule = rule_of(cls, name)
    if isinstance(rule, Number) and isinstance(value, str) and rule.words and value not in rule.words:
        with suppress(ValueError):
            return int(value) if rule.whole else float(value)
    return value


def problems(cls: type[Any], values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """A sentence for each of `values` that does not fit the rule of its field in `cls`. `prefix` goes before its key.

    The field's type decides about null.
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
    """A sentence for each integer of a config that does not fit into 64 bits."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from wide(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(node, list):
        for value in node:
            yield from wide(value, prefix)
    elif isinstance(node, int) and not -(2**63) <= node < 2**63:
        yield f"{prefix} is {shown(node)}, expected at most 64 bits"


def shown(value: Any) -> str:
    """A value for use in a sentence: cut if it is long; of a very long number only its length."""
    if isinstance(value, int) and abs(value) >= 10**SHOWN_DIGITS:
        return f"a number of more than {SHOWN_DIGITS} digits"
    if isinstance(value, list):
        return _cut(f"[{', '.join(map(shown, value[:SHOWN_CHARACTERS]))}]")
    return _cut(repr(value) if isinstance(value, str) else str(value))


def _remedy(key: str, field: dataclasses.Field[Any]) -> str:
    """An override that fits: the default."""
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
    """Whether a text can be written to a file: the command line may have bytes that are no text."""
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
