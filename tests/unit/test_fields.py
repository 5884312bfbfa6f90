"""Every number of a config has a range with two ends, which is checked before the number is used."""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest

from helpers import built, composed
from lockstep.cli.pack import pack
from lockstep.config import components
from lockstep.config.options import classes_of
from lockstep.config.schema import GROUPS, MANY, CheckpointBlock, Job, TelemetryBlock, TrainBlock
from lockstep.core import fields
from lockstep.core.errors import InputError
from lockstep.core.fields import PATH, TEXT, TIME_CHECK, Number, parse_duration, parse_time, problems
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
    assert [PATH.fits(name) for name in ("photos/" + "é" * 127, "photos/" + "é" * 128, "é/" * 2000)] == [
        True,
        False,
        False,
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
