"""The rules for the values of a config, written at the fields: `lr: float = ranged(1e-3, above=0, most=1e6)`.

`lockstep.config.components` checks them before it creates a component. A subclass that only changes a default keeps
the rule.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Protocol

from lockstep.core.errors import InputError, is_one_line, shown

_RULE, _PERSONAL, _IN_CONFIG, ROLE = "rule", "personal", "in config", "role"
_BEFORE, _NAMES = "before", "former names"
FOLDER, PLACE, SHELL = "folder", "place", "shell"  # see `personal`
BEGINS_WITH_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
# The most bytes of a name in a path (the limit of file systems), and of a path (with space for the files of a run).
NAME_BYTES, PATH_BYTES = 255, 3500
TEXT_CHARACTERS = 1000
OPTION_VALUES = 1000  # in a mapping for a constructor of a library
# The largest number of steps of a run: its product with the number of examples of any data set fits into 63 bits.
MOST_STEPS = 10**9
# The longest time, in seconds. The timeout of a socket is in milliseconds and has 31 bits, which end at 596 hours.
LONGEST_S = 500 * 3600.0
# How images can be resized, always with antialiasing; the first is the default.
INTERPOLATIONS = ("bilinear", "bicubic")
LARGEST_SIDE = 16_384  # in pixels: one such image is 3 GB of float32
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ep|%)?")
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|h)?")
_SECONDS = {"s": 1, "min": 60, "h": 3600}


class Role(StrEnum):
    """What another value of a key makes of a run. docs/configuration.md explains it to users."""

    identity = "identity"  # another run
    schedule = "schedule"  # another run, whose steps take the same time and memory
    pixels = "pixels"  # another run, on the same images, which look different
    start = "start"  # another run, with other initial weights, which a resume does not need
    sample = "sample"  # another run of the same setting, which tables show in one row
    rounding = "rounding"  # the same run, except for its last bits
    place = "place"  # the same run, which is, reads or writes in another place
    display = "display"  # the same run, which shows, records or keeps something else
    limit = "limit"  # the same run, which may take more or less
    shared = "shared"  # the same run; all jobs of a sweep share the value

    @property
    def makes_another_run(self) -> bool:
        return self in (Role.identity, Role.schedule, Role.pixels, Role.start, Role.sample)


class Component(Protocol):
    """One option of a config group: a dataclass, frozen but for a callback, with the keys as its fields."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    imports: ClassVar[tuple[str, ...]] = ()
    """Modules that take seconds to import, and that each rank imports."""

    @property
    def library_name(self) -> str | None:
        """The name by which a library has what the option builds; None if it is the option's own."""
        return None


@dataclass(frozen=True)
class Check:
    """A condition on a value that is not null; in a list, on each item. With `lists`, on null and a whole list."""

    expected: str  # says which values fit
    fits: Callable[[Any], bool]
    short: str = ""  # says it in a few words, which docs/configuration.md explains
    values: tuple[Any, ...] = ()  # all that fit, if they are a few
    lists: bool = False
    durations: bool = False  # whether it is of a duration, or of a list or mapping of them


@dataclass(frozen=True, kw_only=True)
class Number:
    """The check of a number between two bounds, each open or closed, or one of a few words. NaN is in no range."""

    low: float
    high: float
    low_open: bool = False
    high_open: bool = False
    words: tuple[str, ...] = ()
    whole: bool = False
    short: ClassVar[str] = ""
    values: ClassVar[tuple[Any, ...]] = ()
    lists: ClassVar[bool] = False
    durations: ClassVar[bool] = False

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


Rule = Check | Number


def ruled(default: Any, rule: Rule) -> Any:
    """A field of a dataclass whose values must fit `rule`."""
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata={_RULE: rule})
    return dataclasses.field(default=default, metadata={_RULE: rule})


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
    low: Any = least if above is None else above
    high: Any = most if below is None else below
    assert None not in (low, high), "a range has two ends"
    sample = default[0] if isinstance(default, list) else low if default is None or default in words else default
    whole, low_open, high_open = isinstance(sample, int), above is not None, below is not None
    rule = Number(low=low, high=high, low_open=low_open, high_open=high_open, words=words, whole=whole)
    return ruled(default, rule)


def pixels(default: Any, *words: Any) -> Any:
    """A field for a size in pixels: the side of a square, [height, width], or one of `words`."""
    return ruled(default, _pixels(*words))


def _pixels(*words: Any) -> Check:
    side = Number(low=1, high=LARGEST_SIDE, whole=True)

    def fits(value: Any) -> bool:
        if isinstance(value, list):
            return len(value) == 2 and all(map(side.fits, value))
        return value in words or side.fits(value)

    expected, short = (
        " or ".join([*("null" if word is None else word for word in words), of_side, "[height,width]"])
        for of_side in (side.expected, "int ≥ 1")
    )
    return Check(expected, fits, short, lists=True)


def pixels_by_start() -> Any:
    """A field for sizes in pixels by the durations after which they begin, the first of them 0; or null."""
    size = _pixels()

    def fits(value: Any) -> bool:
        if not isinstance(value, Mapping) or not all(map(size.fits, value.values())):
            return value is None
        starts = [parse_duration(start) for start in value]
        return None not in starts and [start is not None and start[0] == 0 for start in starts].count(True) == 1

    example = "{0: 128, 50%: 192}"
    expected = f"sizes by the steps, epochs or shares of the run after which they begin, one of them 0: {example}"
    short = f"sizes by their starts ({example}), or null"
    return ruled(None, Check(expected, fits, short, lists=True, durations=True))


def sides(size: int | Sequence[int]) -> tuple[int, int]:
    """The (height, width) of a size in pixels."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def as_pixels(height: int, width: int) -> int | list[int]:
    """The value of a field for a size in pixels."""
    return height if height == width else [height, width]


def choice(default: Any, *values: Any) -> Any:
    """A field for one of a few values."""
    typed_values = [(type(value), value) for value in values]  # True is not 1
    expected = f"one of {', '.join(map(str, values))}"
    return ruled(default, Check(expected, lambda value: (type(value), value) in typed_values, values=values))


def duration(
    default: Any, *, zero: bool = False, timed: bool = False, unit: str = "steps", words: tuple[str, ...] = ()
) -> Any:
    """A field for steps, epochs or a share of the run. `zero` also allows 0, `timed` also a time such as `10min`.

    `unit` is what a number alone counts; `words` are texts that are also allowed, such as `auto`.
    """
    low = "from 0 to" if zero else "above 0 and at most"
    time = ", a time (10min)" * timed

    def fits(value: Any) -> bool:
        if value in words:
            return True
        if timed and is_timed(value):
            return parse_time(value) is not None
        parsed = parse_duration(value)
        return parsed is not None and (zero or parsed[0] > 0)

    number = 5 if unit == "evaluations" else 100
    expected = f"{unit} ({number}), epochs (2ep){time} or a share of the run (5%), {low} {MOST_STEPS:,}"
    short = " or ".join(["a duration", *["a time"] * timed, *words])
    return ruled(default, Check(" or ".join([*words, expected]), fits, short, durations=True))


def mapping(*, most: float) -> Any:
    """A field for a mapping of arguments for a library's constructor, without absurdly large numbers and lists."""

    def fits(value: Any) -> bool:
        leaves = list(nested(value))
        texts = [*(name for key, _ in leaves for name in key), *(leaf for _, leaf in leaves if isinstance(leaf, str))]
        numbers = [leaf for _, leaf in leaves if isinstance(leaf, int | float)]
        are_few = len(leaves) <= OPTION_VALUES
        return are_few and all(map(is_one_line, texts)) and all(abs(number) <= most for number in numbers)

    lists = f"lists of at most {OPTION_VALUES:,}"
    expected = f"numbers of at most {_figure(most)}, {lists}, and texts without control characters"
    return ruled({}, Check(expected, fits, "a mapping"))


def with_role(role: Role, field: Any) -> Any:
    """A field, or a default value, whose key has a role other than `Role.identity`."""
    field = field if isinstance(field, dataclasses.Field) else dataclasses.field(default=field)
    field.metadata = {**field.metadata, ROLE: role}
    return field


def declared_role(cls: type[Any], name: str) -> Role | None:
    """The role that is written at a field, which may come from a base class; None without one."""
    return _declared(cls, name, ROLE)


def with_history(field: Any, *, names: Sequence[str] = (), **before: Any) -> Any:
    """A field whose key had other `names`, or did not exist: a run then did `before=VALUE`, or else the default."""
    field = field if isinstance(field, dataclasses.Field) else dataclasses.field(default=field)
    field.metadata = {**field.metadata, _NAMES: names, _BEFORE: [*before.values()]}
    return field


def former_names(cls: type[Any]) -> dict[str, str]:
    """The present names of the keys of a class, by their earlier ones."""
    return {old: new for new in cls.__dataclass_fields__ for old in _declared(cls, new, _NAMES) or ()}


def values_before(cls: type[Any]) -> dict[str, Any]:
    """What a run did before a key of a class existed, by key."""
    values = ((name, _declared(cls, name, _BEFORE)) for name in cls.__dataclass_fields__)
    return {name: value[0] for name, value in values if value}


def personal(field: Any, kind: str = PLACE) -> Any:
    """A field for the user's own line: where a run writes (`FOLDER`) or sends to (`PLACE`), or what a shell runs."""
    field.metadata = {**field.metadata, _PERSONAL: kind}
    return field


def in_config(text: str, field: Any) -> Any:
    """A field with another default in the config, such as a reference to a key of the job."""
    field.metadata = {**field.metadata, _IN_CONFIG: text}
    return field


def config_defaults(cls: type[Component]) -> dict[str, str]:
    """The defaults of the fields that `in_config` gives another one."""
    fields = dataclasses.fields(cls)
    return {field.name: field.metadata[_IN_CONFIG] for field in fields if _IN_CONFIG in field.metadata}


def personal_values(component: Any, prefix: str = "") -> Iterator[tuple[str, str, Any, Any]]:
    """The key, the kind, the value and the default of each `personal` field of a job, or of an option."""
    for field in dataclasses.fields(component):
        key, value = f"{prefix}{field.name}", getattr(component, field.name)
        if kind := _declared(type(component), field.name, _PERSONAL):
            yield key, kind, value, default_of(field)
        for name, part in value.items() if isinstance(value, Mapping) else [("", value)]:
            if dataclasses.is_dataclass(part):
                yield from personal_values(part, f"{key}.{name}." if name else f"{key}.")


def is_inside(path: str, *folders: str) -> bool:
    """Whether a relative path is below the current folder, or any path below one of some folders."""
    names = (path, *folders, *[""] * (path[:1] not in ("/", "~")))
    here, *others = (os.path.abspath(os.path.expanduser(name)) for name in names)  # noqa: PTH100, PTH111
    return any(os.path.commonpath([here, other]) == other for other in others)


def pathname(default: str | None) -> Any:
    """A field for a path, or null."""
    return ruled(default, PATH)


def _is_path(value: Any) -> bool:
    """Whether a value can be a path. Whether the path exists is checked elsewhere."""
    if not isinstance(value, str) or not value.strip() or not is_one_line(value):
        return False
    if len(value.encode()) > PATH_BYTES:
        return False
    known_home = not value.startswith("~") or os.path.expanduser(value) != value  # noqa: PTH111, raises nothing
    return known_home and all(len(name.encode()) <= NAME_BYTES for name in value.split("/"))


def _is_pattern(value: Any) -> bool:
    with suppress(re.error, TypeError, OverflowError, RecursionError):
        return bool(re.compile(value))
    return False


def parse_duration(value: Any) -> tuple[float, str] | None:
    """The amount and the unit (`ep`, `%`, or empty for steps) of a duration; None if it is not one."""
    match = _DURATION.fullmatch(str(value).strip()) if isinstance(value, int | str) else None
    if match is None or (match[2] is None and "." in match[1]):
        return None
    amount, unit = float(match[1]), match[2] or ""
    return (amount, unit) if amount <= (100 if unit == "%" else MOST_STEPS) else None


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


TIME_CHECK = Check(
    f"a time such as 30s, 10min or 2h, at most {LONGEST_S / 3600:g}h",
    lambda value: parse_time(value) is not None,
    "a time",
)
# A text in one line, which can be a part of a file, a table or a script.
TEXT = Check(
    f"at most {TEXT_CHARACTERS:,} characters of Unicode in one line, without control characters",
    lambda value: isinstance(value, str) and len(value) <= TEXT_CHARACTERS and is_one_line(value),
    "a text",
)
PATH = Check(
    f"a path of at most {PATH_BYTES:,} bytes and {NAME_BYTES} a name, without control characters", _is_path, "a path"
)
PATTERN = Check(
    "a regular expression of Python in one line, without control characters",
    lambda value: TEXT.fits(value) and _is_pattern(value),
    "a regular expression",
)


def check_whole(key: str, value: object, least: int) -> None:
    """Reject anything but a whole number from `least`, for a key of a Hydra plugin, which no class describes."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{key} is {shown(value)}, expected a whole number from {least}: {key}={least}")


def rule_of(cls: type[Any], name: str) -> Rule | None:
    """The rule of a field, which may come from a base class."""
    return _declared(cls, name, _RULE)


def _declared(cls: type[Any], name: str, what: str) -> Any:
    for base in cls.__mro__:
        field = base.__dict__.get("__dataclass_fields__", {}).get(name)
        if field is not None and what in field.metadata:
            return field.metadata[what]
    return None


def as_number(cls: type[Any], name: str, value: Any) -> Any:
    """The number that a text spells, if the field takes numbers and words; otherwise the value itself."""
    rule = rule_of(cls, name)
    if isinstance(rule, Number) and isinstance(value, str) and rule.words:
        with suppress(ValueError):
            return int(value) if rule.whole else float(value)
    return value


def problems(cls: type[Any], values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """A sentence for each of `values` that breaks the rule of its field. `prefix` is put before the key."""
    for field in dataclasses.fields(cls):
        value = values.get(field.name)
        if isinstance(value, Mapping) and dataclasses.is_dataclass(field.default_factory):
            yield from problems(field.default_factory, value, f"{prefix}{field.name}.")
        elif (rule := rule_of(cls, field.name)) is not None and (
            value is not None or (rule.lists and field.name in values)
        ):
            items, key = value if isinstance(value, list) and not rule.lists else [value], f"{prefix}{field.name}"
            if not all(map(rule.fits, items)):
                expected = f"{'each ' * (items is value)}{rule.expected}"
                yield f"{key} is {shown(value)}, expected {expected}{_remedy(key, field, rule, value)}"


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


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The default of a field, from its value or its factory; `dataclasses.MISSING` if it has none."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a config with their full keys."""
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def nested(node: Any, key: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value of a plain config with its key. The key of a list item ends with its index."""
    if isinstance(node, Mapping | list):
        for name, value in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from nested(value, (*key, str(name)))
    else:
        yield key, node
