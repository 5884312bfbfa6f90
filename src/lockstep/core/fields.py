"""The rules for the values of a config. Each rule is written at the field of the class.

    lr: float = ranged(1e-3, above=0, most=1e6)

`lockstep.config.components` checks all values of a component by these rules before it creates the component, so no
class checks a range by hand. A subclass that only changes a default keeps the rule.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, ClassVar, Protocol

from lockstep.core.errors import InputError
from lockstep.core.rules import Choice, Duration, Number, PathText, Rule

_RULE = "rule"
BEGINS_WITH_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
# An error shows at most this many characters of a value, and this many digits of a number.
SHOWN_CHARACTERS, SHOWN_DIGITS = 80, 30


class Component(Protocol):
    """One option of a config group: a frozen dataclass, whose fields are the keys."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


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
        default: the default value. If it is an integer, or null and `least` is an integer, only integers fit.
        least, above: the lower end, included or excluded.
        most, below: the upper end, included or excluded.
        words: texts that are also allowed, such as `auto`.
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
    """A field of a dataclass whose values must fit `rule`."""
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


def check_whole(key: str, value: object, least: int) -> None:
    """Refuse what is no whole number from `least`, for a key of a plugin of Hydra, which no class describes."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{key} is {value!r}, expected a whole number from {least}: {key}={least}")


def rule_of(cls: type[Any], name: str) -> Rule | None:
    """The rule of a field, which may come from a base class."""
    for base in cls.__mro__:
        field = base.__dict__.get("__dataclass_fields__", {}).get(name)
        if field is not None and _RULE in field.metadata:
            return field.metadata[_RULE]
    return None


def as_number(cls: type[Any], name: str, value: Any) -> Any:
    """The number that a text spells, for a field that takes numbers and words; any other value unchanged.

    OmegaConf converts the text only if the field's type is a number, not if it is a number or a text.
    """
    rule = rule_of(cls, name)
    if isinstance(rule, Number) and isinstance(value, str) and rule.words and value not in rule.words:
        with suppress(ValueError):
            return int(value) if rule.whole else float(value)
    return value


def problems(cls: type[Any], values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """A sentence for each of `values` that breaks the rule of its field in `cls`. `prefix` is put before its key.

    Null is not checked here: the field's type allows or forbids it.
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
                yield f"{key} is {shown(value)}, expected {expected}{_remedy(key, field, rule, value)}"


def leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a config with their full keys."""
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def shown(value: Any) -> str:
    """A value for use in a sentence. A long text is cut; a very long number is replaced by its length."""
    if isinstance(value, int) and abs(value) >= 10**SHOWN_DIGITS:
        return f"a number of more than {SHOWN_DIGITS} digits"
    if isinstance(value, list):
        return _cut(f"[{', '.join(map(shown, value[:SHOWN_CHARACTERS]))}]")
    return _cut(repr(value) if isinstance(value, str) else str(value))


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The default of a field, from its value or its factory; `dataclasses.MISSING` if it has none."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _remedy(key: str, field: dataclasses.Field[Any], rule: Rule, value: Any) -> str:
    """The override that sets a field to the number that a text begins with, if that fits, or else to its default."""
    if isinstance(value, str) and isinstance(rule, Number) and (match := BEGINS_WITH_NUMBER.match(value)):
        number = float(match[0])
        if rule.fits(int(number) if number.is_integer() else number):  # the rest is a unit or a slip
            return f": {key}={match[0]}"
    default = default_of(field)
    if default in ("???", {}):
        return ""
    shown_default = str(default).replace(" ", "") if isinstance(default, list) else default
    return f": {key}={'null' if default is None else shown_default}"


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."
