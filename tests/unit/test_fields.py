"""Every number of a config has a range with two ends, which is checked before the number is used."""

import dataclasses
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers import built, composed
from lockstep.cli.pack import pack
from lockstep.config import components
from lockstep.config.options import classes_of
from lockstep.config.schema import GROUPS, MANY, CheckpointBlock, Job, TelemetryBlock, TrainBlock
from lockstep.core import fields
from lockstep.core.errors import InputError
from lockstep.core.fields import PATH, PATTERN, TEXT, TIME_CHECK, Number, parse_duration, parse_time, problems
from lockstep.core.plan import seconds, steps
from lockstep.optim import AdamW
from lockstep.optim.schedule import Constant
from lockstep.training import evaluate

BLOCKS = {"train.": TrainBlock, "checkpoint.": CheckpointBlock, "telemetry.": TelemetryBlock}


def keys() -> Iterator[tuple[str, type[Any], dataclasses.Field[Any]]]:
    """Every key of the schema and of every option of every group, with its class and field."""
    for prefix, cls in {"": Job, **BLOCKS}.items():
        yield from ((f"{prefix}{field.name}", cls, field) for field in dataclasses.fields(cls))
    for group in GROUPS:
        for option in classes_of(group).values():
            yield from ((f"{group}.{field.name}", option, field) for field in dataclasses.fields(option))


# Ends of lines for Python, shells, terminals and spreadsheets; writing direction; what no file can hold.
HOSTILE = [*"\n\r\0\t\v\f\x1b\x1c\x7f\x85\x9b", *"\u2028\u2029\u200e\u202e\u2066\ufeff", "\udc80"]


RULED = [(key, cls, field.name) for key, cls, field in keys() if fields.rule_of(cls, field.name) is not None]


def test_every_number_and_every_text_of_a_config_has_a_rule() -> None:
    unruled = [(key, field) for key, cls, field in keys() if fields.rule_of(cls, field.name) is None]
    assert {key for key, field in unruled if re.search(r"\b(int|float|str)\b", str(field.type))} == set(MANY)


def beyond(end: float, direction: float, rule: Number) -> float:
    """The next number after an end of a range in a direction: whole, or of floating point."""
    return end + math.copysign(1, direction) if rule.whole else math.nextafter(end, direction)


def outside(rule: Any) -> list[Any]:
    """Values that a rule must refuse."""
    if isinstance(rule, Number):
        below, above = beyond(rule.low, -math.inf, rule), beyond(rule.high, math.inf, rule)
        ends = [rule.low if rule.low_open else below, rule.high if rule.high_open else above]
        far = [math.nan, math.inf, -math.inf, True, 10**400, -(10**400)]
        return [end for end in ends if math.isfinite(end)] + far + ["automatic"] * bool(rule.words)
    if rule.short.startswith("sizes by"):
        return [128, [], {}, {5: 128}, {0: 128, "0ep": 192}, {0: 0}, {0: [3, 4, 5]}, {0: 128, "half": 192}, {0.5: 9}]
    if rule.lists:
        return [0, -1, 2**14 + 1, True, 1.5, math.nan, "automatic", [], [3], [3, 4, 5], [0, 4], [[3, 4], 4]]
    if rule.values:
        return [math.nan, "neither", -1]
    if rule.short.startswith("a duration"):
        zero = [] if rule.fits(0) else [0, "0ep", "0%"]
        return [*zero, -1, "-1ep", "9" * 400, "9" * 400 + "ep", "101%", "nan", "inf", "", 10**10, "1e3", math.nan]
    if rule is TIME_CHECK:
        return ["0s", "-1s", "nan", "inf", "501h", "9" * 400 + "min", ""]
    if rule.short == "a mapping":
        texts = [{"a": f"a{character}b"} for character in HOSTILE] + [{character: 1} for character in HOSTILE]
        numbers = [{"a": math.nan}, {"a": [{"b": math.inf}]}, {"a": 10**400}, {"a": [-(10**400)]}]
        return [*numbers, *texts]
    broken = [f"a{character}b" for character in HOSTILE] + ["a\n", "\na"]
    broken += ["(", "[a", "*", "a{2,1}", "a{99999999999}", "(?P<a>", "\\"] * (rule is PATTERN)
    return broken + ["", " ", "a\0b", "a\nb", "a" * 256, "a/" * 2000, "~no-such-user/x"] * (rule is PATH)


def test_each_object_has_a_list_of_its_own() -> None:
    lists = [field for _, _, field in keys() if isinstance(fields.default_of(field), list | dict)]
    assert len(lists) > 3
    assert [field.name for field in lists if fields.default_of(field) is fields.default_of(field)] == []


def test_a_value_out_of_range_is_refused_in_one_short_sentence_and_a_default_is_in_range() -> None:
    for key, cls, name in RULED:
        field = next(candidate for candidate in dataclasses.fields(cls) if candidate.name == name)
        assert list(fields.problems(cls, {name: fields.default_of(field)})) == []
        for value in outside(fields.rule_of(cls, name)):
            listed = [value] if "list" in str(field.type) else value
            (sentence,) = fields.problems(cls, {name: listed}, key.removesuffix(name))
            assert re.match(rf"{re.escape(key)} is (?s:.*), expected .", sentence)
            assert len(sentence) < 400
            assert len(sentence.splitlines()) == 1


@pytest.mark.parametrize("text", ["naïve café", "日本語", "👩\u200d💻", "می\u200cخواهم", "a\u00a0b", "$(touch x)"])
def test_other_text_is_text_and_a_name_in_a_path_is_measured_in_bytes(text: str) -> None:
    assert TEXT.fits(text)
    assert PATH.fits(text)
    assert [PATH.fits(name) for name in ("photos/" + "é" * 127, "photos/" + "é" * 128, "é/" * 1166, "é/" * 1167)] == [
        *(True, False),
        *(True, False),
    ]


def test_the_first_and_the_last_number_of_a_range_are_in_it() -> None:
    for _, cls, name in RULED:
        rule = fields.rule_of(cls, name)
        if isinstance(rule, Number):
            least = beyond(rule.low, math.inf, rule) if rule.low_open else rule.low
            most = beyond(rule.high, -math.inf, rule) if rule.high_open else rule.high
            assert rule.fits(least)
            assert rule.fits(most)


def test_durations_and_times_are_read_as_they_are_checked() -> None:
    warmup = fields.rule_of(Constant, "warmup")
    assert warmup is not None
    for value in outside(warmup):
        with pytest.raises(InputError, match=r"^schedule\.warmup is .{1,80}, expected steps"):
            steps("schedule.warmup", value, steps_per_epoch=10**9, total_steps=10**18)
    for value in outside(TIME_CHECK):
        with pytest.raises(InputError, match=r"^launcher\.timeout is .{1,80}, expected a time"):
            seconds("launcher.timeout", value)
    assert steps("key", "1000000000ep", steps_per_epoch=10**9, total_steps=1) == 10**18


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *[("500h", 1_800_000), ("30000min", 1_800_000), ("1800000", 1_800_000), ("0.1s", 0.1), ("1.5min", 90)],
        *[("500.1h", None), ("30001min", None), ("1800001", None), ("0", None), ("0h", None)],
    ],
)
def test_the_longest_time_is_one_and_none_is_none(text: str, expected: float | None) -> None:
    assert parse_time(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *[("100%", (100, "%")), (10**9, (10**9, "")), ("1000000000ep", (10**9, "ep")), ("2.5ep", (2.5, "ep"))],
        *[("100.1%", None), (10**9 + 1, None), ("1000000001ep", None), ("2.0", None), ("0", (0, "")), ("-1", None)],
    ],
)
def test_the_longest_duration_is_one(text: str | int, expected: tuple[float, str] | None) -> None:
    assert parse_duration(text) == expected


def test_a_duration_ends_with_the_run_and_only_some_may_be_nothing() -> None:
    zeros = set()
    for _, cls, name in RULED:
        rule = fields.rule_of(cls, name)
        if rule is None or not rule.durations or rule is fields.rule_of(TrainBlock, "sizes"):
            continue
        nothing = {rule.fits(value) for value in (0, "0", "0ep", "0%", "0.0ep")}
        assert nothing in ({True}, {False}), name
        zeros |= {f"{cls.__name__}.{name}"} if nothing == {True} else set()
        assert nothing == {"from 0 to" in rule.expected}, name
        assert all(map(rule.fits, (fields.MOST_STEPS, "1", "0.5ep", "0.5%", "100%", f"{fields.MOST_STEPS}ep"))), name
        beyond_it = fields.MOST_STEPS + 1, -1, "0.5", "100.01%", f"{fields.MOST_STEPS + 1}ep"
        assert not any(map(rule.fits, beyond_it)), name
    schedules = {f"{cls}.warmup" for cls in ("Chain", "Constant", "Cosine", "Exponential", "Linear", "Plateau")}
    schedules |= {"Polynomial.warmup", "Step.warmup", "Step.milestones"}
    assert zeros == schedules


def test_a_path_a_name_and_a_text_may_be_as_long_as_is_told_and_no_longer() -> None:
    for rule, most, text in ((TEXT, fields.TEXT_CHARACTERS, "é"), (PATH, fields.NAME_BYTES, "x")):
        assert [rule.fits(text * number) for number in (most, most + 1)] == [True, False]
    names = ["x" * 250] * 13
    path = "/".join([*names, "y" * (fields.PATH_BYTES - 251 * 13)])
    assert len(path) == fields.PATH_BYTES
    assert [PATH.fits(path), PATH.fits(f"{path}y")] == [True, False]
    of_paths = dataclasses.make_dataclass("OfPaths", [("place", str, fields.pathname("a"))])
    values = (path, f"{path}y", "x" * 256, "", "b")
    refused = [[*problems(of_paths, {"place": value})] != [] for value in values]
    assert refused == [False, True, True, True, False], "a field for a path takes a path"


def test_all_values_out_of_range_are_reported_at_once() -> None:
    job = composed("epochs=0", "train.ema=nan", "optimizer.lr=inf", "optimizer.eps=-1", "schedule.warmup=101%")
    with pytest.raises(InputError) as caught:
        components.build_job(job)
    refused = [line.split()[0] for line in str(caught.value).splitlines()]
    assert refused == ["epochs", "train.ema", "optimizer.lr", "optimizer.eps", "schedule.warmup"]


def test_the_flags_of_pack_have_the_ranges_of_the_keys_that_they_stand_for() -> None:
    with pytest.raises(InputError, match=r"^dataset.decode_size is 0, expected auto or a whole number from 1 to 16"):
        pack(["photos", "packed"], decode_size="0", skip="0")
    with pytest.raises(InputError, match=r"^dataset.skip is -1, expected a whole number from 0 to 1,000,000,000"):
        pack(["photos", "packed"], decode_size="8", skip="-1")


def test_a_subclass_keeps_the_rule_of_a_field_whose_default_it_changes() -> None:
    @dataclasses.dataclass(kw_only=True)
    class Base:
        rate: float = fields.ranged(0.1, above=0, most=1)

    @dataclasses.dataclass(kw_only=True)
    class Faster(Base):
        rate: float = 0.9

    (sentence,) = fields.problems(Faster, {"rate": 2.0}, "x.")
    assert sentence == "x.rate is 2.0, expected a number above 0 and at most 1: x.rate=0.9"

    @dataclasses.dataclass(kw_only=True)
    class Wider(Faster):
        rate: float = fields.ranged(3.0, above=0, most=9)

    @dataclasses.dataclass(kw_only=True)
    class Last(Wider):
        rate: float = 4.0

    for cls, default in ((Wider, 3.0), (Last, 4.0)):
        assert [*fields.problems(cls, {"rate": 9}, "x.")] == []
        (sentence,) = fields.problems(cls, {"rate": 10}, "x.")
        assert sentence == f"x.rate is 10, expected a number above 0 and at most 9: x.rate={default}"


def test_the_views_of_an_evaluation_are_those_that_a_config_may_name() -> None:
    rule = fields.rule_of(TrainBlock, "eval_views")
    assert rule is not None
    assert rule.values == evaluate.VIEWS
    assert TEXT.fits("ä" * 1000)


@pytest.mark.parametrize("number", ["2", "9223372036854775808"])
def test_a_number_is_refused_where_an_option_would_take_it_for_true(number: str) -> None:
    sentence = rf"^augment.alternate is {number}, expected true or false: augment.alternate=true$"
    with pytest.raises(InputError, match=sentence):
        built("augment=crop_flip", f"augment.alternate={number}")
    built("augment=crop_flip", "augment.alternate=1")


def test_every_value_of_a_list_and_of_a_block_is_checked() -> None:
    refused = [*problems(Job, {"train": {"eval_every": "1ep", "mixup": -1}})]
    assert refused == [*problems(Job, {"train": {"mixup": -1}})] != []
    (sentence,) = problems(AdamW, {"betas": [0.9, 2]})
    assert sentence.startswith("betas is [0.9, 2], expected each a number from 0")


def test_a_path_is_inside_a_folder_and_not_beside_one_whose_name_begins_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    inside = {
        *((path, ()) for path in ("", ".", "a", "a/../b", "./a/b")),
        *((path, ("/data",)) for path in ("a", "/data", "/data/", "/data/a", "/data/a/../b")),
        *((path, ("/data", "/more")) for path in ("/more/a", "/data/a")),
        *((path, ("~",)) for path in ("~", "~/a", f"{tmp_path}/home/a")),
    }
    outside = {
        *((path, ()) for path in ("..", "a/../..", "../x", "/", "/data", "~", str(tmp_path))),
        *((path, ("/data",)) for path in ("..", "/", "/data2", "/data2/a", "/data/../a", "~/a", f"{tmp_path}/a")),
        *((path, ("~",)) for path in ("~/..", "~/../a", f"{tmp_path}/home2")),
    }
    assert [case for case in inside if not fields.is_inside(case[0], *case[1])] == []
    assert [case for case in outside if fields.is_inside(case[0], *case[1])] == []


def test_a_mapping_for_a_library_has_a_limit_for_its_values_and_its_numbers() -> None:
    rule = fields.mapping(most=10).metadata["rule"]
    most = fields.OPTION_VALUES
    fitting: list[Any] = [{}, {"a": 10, "b": [-10, {"c": None}]}, {"a": [0] * most}, {"a": True, "b": "text"}]
    too_much: list[Any] = [{"a": 10.1}, {"a": [0, {"b": -11}]}, {"a": [0] * (most + 1)}]
    too_much += [{str(number): 0 for number in range(most + 1)}]
    assert [*map(rule.fits, fitting)] == [True] * len(fitting)
    assert [*map(rule.fits, too_much)] == [False] * len(too_much)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Number(low=0, high=1), "a number from 0 to 1"),
        (Number(low=0, high=1, low_open=True), "a number above 0 and at most 1"),
        (Number(low=0, high=1, high_open=True), "a number from 0 to below 1"),
        (Number(low=0, high=0.5, low_open=True, high_open=True), "a number above 0 and below 0.5"),
        (Number(low=1.5, high=2.25), "a number from 1.5 to 2.25"),
        (Number(low=1e-6, high=1e6, words=("auto", "max")), "auto or max or a number from 1e-06 to 1,000,000"),
        (Number(low=1, high=16_384, whole=True), "a whole number from 1 to 16,384"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_range_is_told_with_its_ends_as_they_are(rule: Number, expected: str) -> None:
    assert rule.expected == expected


@pytest.mark.parametrize(
    ("default", "least", "words", "whole"),
    [
        *((2, 1, (), True), (2.0, 1, (), False), ([2, 3.5], 1, (), True), ([2.5, 3], 1, (), False)),
        *((None, 1, (), True), (None, 1.0, (), False), ("auto", 1, ("auto",), True), ("auto", 1.0, ("auto",), False)),
    ],
)
def test_a_range_is_of_whole_numbers_if_its_default_is_one_or_else_its_end(
    default: Any, least: float, words: tuple[str, ...], whole: bool
) -> None:
    rule = fields.ranged(default, least=least, most=9, words=words).metadata["rule"]
    assert [rule.fits(value) for value in (1, 9, 2.5, "auto")] == [True, True, not whole, words == ("auto",)]


def test_one_is_not_true_where_a_field_has_a_few_values() -> None:
    rule = fields.choice("auto", True, 2, "auto").metadata["rule"]
    values = (
        {"True": True, "2": 2, "auto": "auto"},
        {"1": 1, "2.0": 2.0, "False": False, "text": "True", "None": None},
    )
    assert [{name: rule.fits(value) for name, value in kind.items()} for kind in values] == [
        dict.fromkeys(values[0], True),
        dict.fromkeys(values[1], False),
    ]
    assert rule.expected == "one of True, 2, auto"


def test_a_square_is_one_number_and_a_size_has_its_height_first() -> None:
    assert [fields.as_pixels(3, 3), fields.as_pixels(3, 5), fields.as_pixels(5, 3)] == [3, [3, 5], [5, 3]]
    assert [fields.sides(3), fields.sides([3, 5]), fields.sides((5, 3))] == [(3, 3), (3, 5), (5, 3)]


def test_a_duration_is_told_with_what_it_may_be() -> None:
    most = f"{fields.MOST_STEPS:,}"
    rules: dict[str, dict[str, Any]] = {
        f"steps (100), epochs (2ep) or a share of the run (5%), above 0 and at most {most}": {},
        f"steps (100), epochs (2ep) or a share of the run (5%), from 0 to {most}": {"zero": True},
    }
    timed = {"words": ("auto",), "timed": True, "unit": "evaluations"}
    says = "auto or evaluations (5), epochs (2ep), a time (10min) or a share of the run (5%)"
    rules[f"{says}, above 0 and at most {most}"] = timed
    for expected, options in rules.items():
        rule = fields.duration(1, **options).metadata["rule"]
        assert rule.expected == expected
        times = [rule.fits(value) for value in ("10min", "2h", "30 s", "auto", "0s", "501h")]
        assert times == [options is timed] * 4 + [False] * 2


def test_spaces_around_and_within_a_duration_or_a_time_change_nothing() -> None:
    durations: dict[str, tuple[float, str]] = {" 5 ": (5, ""), " 2 ep": (2, "ep"), "2.5% ": (2.5, "%")}
    assert {text: parse_duration(text) for text in durations} == durations
    times = {" 30 s": 30.0, "1.25h": 4500.0, "0.125min": 7.5, "1.5h ": 5400.0, " 10 min ": 600.0, " 45 ": 45.0}
    assert {text: parse_time(text) for text in times} == times
    timed: list[Any] = ["30s", "10min", "2h", "1.5 h", " 30 s ", "10 min ", "2h "]
    untimed: list[Any] = ["30", 30, "30ep", "5%", "h", "soon", "2 hours", None]
    assert [*map(fields.is_timed, timed + untimed)] == [True] * len(timed) + [False] * len(untimed)


def test_a_plugins_number_is_whole_and_at_least_the_least() -> None:
    for value in (1, 2, 10**30):
        fields.check_whole("hydra.sweeper.n_trials", value, 1)
    wrong: list[tuple[Any, str]] = [(0, "0"), (-1, "-1"), (True, "true"), (1.0, "1.0"), ("1", "'1'"), (None, "null")]
    for value, as_yaml in wrong:
        with pytest.raises(InputError) as caught:
            fields.check_whole("key", value, 1)
        assert str(caught.value) == f"key is {as_yaml}, expected a whole number from 1: key=1"


@dataclasses.dataclass(kw_only=True)
class Inner:
    folder: str = fields.personal(fields.pathname("here"), fields.FOLDER)
    rate: float = fields.ranged(0.1, above=0, most=1)


@dataclasses.dataclass(kw_only=True)
class Outer:
    number: int = fields.ranged(3, least=1, most=20)
    workers: Any = fields.ranged("auto", least=0, most=9, words=("auto",))
    share: Any = fields.ranged("auto", least=0.0, most=1.0, words=("auto",))
    limit: int | None = fields.ranged(None, least=1, most=9)
    betas: list[float] = fields.ranged([0.9, 0.99], least=0, below=1)
    side: Any = fields.pixels(8)
    name: str = fields.ruled("???", TEXT)
    options: dict[str, Any] = fields.mapping(most=9)
    inner: Inner = dataclasses.field(default_factory=Inner)
    several: dict[str, Inner] = dataclasses.field(default_factory=dict)


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        *(({"inner": {"rate": "0.5x"}}, ": k.inner.rate=0.5"), ({"inner": {"rate": "5x"}}, ": k.inner.rate=0.1")),
        *(
            ({"inner": {"rate": "1e-3s"}}, ": k.inner.rate=1e-3"),
            ({"inner": {"rate": "5E-1 s"}}, ": k.inner.rate=5E-1"),
        ),
        *(
            ({"number": "4 px"}, ": k.number=4"),
            ({"number": "4.5px"}, ": k.number=3"),
            ({"number": "x4"}, ": k.number=3"),
        ),
        *(
            ({"number": 0}, ": k.number=3"),
            ({"limit": 0}, ": k.limit=null"),
            ({"betas": [1]}, ": k.betas=[0.9,0.99]"),
        ),
        *(
            ({"name": 3}, ""),
            ({"options": {"a": 10}}, ""),
            ({"side": None}, ": k.side=8"),
            ({"workers": 0.5}, ": k.workers=auto"),
        ),
    ],
)
def test_a_mistake_ends_with_the_override_that_mends_it(value: dict[str, Any], remedy: str) -> None:
    (sentence,) = problems(Outer, value, "k.")
    assert sentence.partition(", expected ")[2].endswith(remedy)
    assert remedy or ": k." not in sentence


def test_what_a_config_lacks_or_has_as_null_is_no_mistake_where_null_may_be() -> None:
    assert [*problems(Outer, {})] == [*problems(Outer, {"limit": None, "number": None, "name": None})] == []


def test_a_text_that_spells_a_number_is_one_where_numbers_and_words_are() -> None:
    texts: dict[tuple[str, str], Any] = {
        **{("workers", text): 3 for text in ("3", " 3 ")},
        **{("workers", text): text for text in ("auto", "1.5", "many")},
        **{(name, "3"): "3" for name in ("number", "name")},
        **{("share", text): value for text, value in (("0.5", 0.5), ("auto", "auto"))},
    }
    numbers = {(name, text): fields.as_number(Outer, name, text) for name, text in texts}
    assert numbers == texts
    assert isinstance(numbers["workers", "3"], int)
    assert fields.as_number(Outer, "workers", 2) == 2


def test_personal_values_of_parts_have_their_whole_keys() -> None:
    outer = Outer(name="x", inner=Inner(folder="a"), several={"one": Inner(folder="b"), "two": Inner()})
    keys = {"k.inner.folder": "a", "k.several.one.folder": "b", "k.several.two.folder": "here"}
    assert [*fields.personal_values(outer, "k.")] == [(key, "folder", value, "here") for key, value in keys.items()]


def test_every_value_of_a_config_has_its_key_also_an_empty_mapping_and_those_of_lists() -> None:
    config = {"a": {}, "b": {"c": {}, "d": [1, {"e": 2}]}, "f": None}
    assert [*fields.leaves(config)] == [("a", {}), ("b.c", {}), ("b.d", [1, {"e": 2}]), ("f", None)]
    assert [*fields.nested(config)] == [(("b", "d", "0"), 1), (("b", "d", "1", "e"), 2), (("f",), None)]


def test_a_field_keeps_each_fact_that_is_written_at_it_in_any_order() -> None:
    facts: list[Callable[[Any], Any]] = [
        lambda field: fields.with_role(fields.Role.place, field),
        lambda field: fields.with_history(field, names=("old",), before="b"),
        lambda field: fields.personal(field, fields.SHELL),
        lambda field: fields.in_config("${seed}", field),
    ]
    for order in itertools.permutations(facts):
        field = fields.ruled("a", TEXT)
        for fact in order:
            field = fact(field)
        written: Any = dataclasses.make_dataclass("Written", [("key", str, field)])
        derived: Any = dataclasses.make_dataclass("Derived", [("more", int, 1)], bases=(written,))
        other: Any = dataclasses.make_dataclass("Other", [("key", str, "b")], bases=(written,))
        for cls in (written, derived, other):
            assert fields.declared_role(cls, "key") is fields.Role.place
        for cls in (written, derived):
            assert fields.rule_of(cls, "key") is TEXT
            assert (fields.former_names(cls), fields.values_before(cls)) == ({"old": "key"}, {"key": "b"})
            assert fields.config_defaults(cls) == {"key": "${seed}"}
            assert [*fields.personal_values(cls())] == [("key", "shell", "a", "a")]


def test_what_a_config_has_in_place_of_a_default_may_be_empty() -> None:
    field = fields.in_config("", fields.ruled("a", TEXT))
    written: Any = dataclasses.make_dataclass("Written", [("key", str, field), ("other", str, "b")])
    assert fields.config_defaults(written) == {"key": ""}


def test_sizes_and_mappings_are_told_with_their_limits_and_words() -> None:
    rules = {
        "auto or null or a whole number from 1 to 16,384 or [height,width]": fields.pixels("auto", "auto", None),
        "sizes by the steps, epochs or shares of the run after which they begin, one of them 0: {0: 128, 50%: 192}": (
            fields.pixels_by_start()
        ),
        "numbers of at most 1,500, lists of at most 1,000, and texts without control characters": (
            fields.mapping(most=1500)
        ),
    }
    assert [field.metadata["rule"].expected for field in rules.values()] == [*rules]
    shorts = [field.metadata["rule"].short for field in rules.values()]
    assert shorts[0] == "auto or null or int ≥ 1 or [height,width]"
    assert shorts[1:] == ["sizes by their starts ({0: 128, 50%: 192}), or null", "a mapping"]
    timed = fields.duration(1, timed=True, words=("auto", "never")).metadata["rule"]
    assert (timed.short, fields.duration(1).metadata["rule"].short) == (
        "a duration or a time or auto or never",
        "a duration",
    )


@pytest.mark.parametrize("before", [None, False, 0, "", [], "auto"], ids=repr)
def test_what_a_run_did_before_a_key_existed_may_be_nothing(before: Any) -> None:
    cls: Any = dataclasses.make_dataclass(
        "Newer",
        [
            ("key", Any, fields.with_history(3, before=before)),
            ("other", Any, fields.with_history(4, names=("old",))),
            ("role", Any, fields.with_role(fields.Role.limit, 5)),
        ],
    )
    assert fields.values_before(cls) == {"key": before}
    assert fields.former_names(cls) == {"old": "other"}
    assert [fields.declared_role(cls, name) for name in ("key", "role", "none")] == [None, fields.Role.limit, None]
    assert vars(cls()) == {"key": 3, "other": 4, "role": 5}


def test_a_pattern_that_is_nested_too_deeply_for_python_is_none() -> None:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)  # a library may have raised it
    try:
        assert [PATTERN.fits("(" * number + "a" + ")" * number) for number in (3, 499)] == [True, False]
    finally:
        sys.setrecursionlimit(limit)
    assert [PATTERN.fits(value) for value in (r"^a\.b$", "", 3, None, b"a")] == [True, True, False, False, False]


def test_a_personal_value_is_a_place_unless_it_is_more() -> None:
    own: Any = [("folder", str, fields.personal(fields.pathname("a"), fields.FOLDER))]
    own += [("place", str, fields.personal(fields.pathname(None))), ("free", str, fields.pathname("b"))]
    cls: Any = dataclasses.make_dataclass("Personal", own)
    assert fields.declared_role(cls, "free") is None, "a path alone says what a run is"
    expected = [("folder", "folder", "c", "a"), ("place", "place", None, None)]
    assert [*fields.personal_values(cls(folder="c"))] == expected
    derived: Any = dataclasses.make_dataclass("Derived", [("place", str, "theirs"), ("free", str, "b")], bases=(cls,))
    expected = [("folder", "folder", "a", "a"), ("place", "place", "mine", "theirs")]
    assert [*fields.personal_values(derived(place="mine"))] == expected, "also where only the default is another one"


def test_each_item_of_a_list_has_its_range_and_a_list_is_told_as_one() -> None:
    refused = {"betas": [0.5, 1], "side": [3], "number": [3, 21], "limit": [1, 2]}
    sentences = [*problems(Outer, refused, "k.")]
    assert [*problems(Outer, {"side": [3, 5]}, "k.")] == []
    assert len([*problems(Outer, {"side": [3, 5, 7]}, "k.")]) == 1, "there are two sides"
    assert sentences == [
        "k.number is [3, 21], expected each a whole number from 1 to 20: k.number=3",
        "k.betas is [0.5, 1], expected each a number from 0 to below 1: k.betas=[0.9,0.99]",
        "k.side is [3], expected a whole number from 1 to 16,384 or [height,width]: k.side=8",
    ]
