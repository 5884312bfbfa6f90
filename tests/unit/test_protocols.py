"""Options that derive from nothing: each has what its protocol has a default for."""

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from lockstep.config import options
from lockstep.config.options import protocol_of
from lockstep.config.schema import GROUPS
from lockstep.core.errors import InputError
from lockstep.core.world import World

QUESTIONS = {group: [name for name in dir(protocol_of(group)) if name[0] != "_"] for group in GROUPS}
REQUIRED = {group: sorted(protocol_of(group).__abstractmethods__) for group in GROUPS}


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "_DECLARED", {})


def plain(group: str, *without: str, **values: Any) -> Any:
    """An option of a class of its own that has what its group requires, and `values` for the rest."""
    required = {name: lambda self, *_: None for name in REQUIRED[group] if name not in without}
    return options.option(group, "own")(type("Own", (), {**required, **values}))


@pytest.mark.parametrize("group", GROUPS)
def test_a_plain_class_answers_every_question_of_its_protocol(group: str) -> None:
    own = plain(group)()
    for name in {*QUESTIONS[group]} - {"memory_format", "node_range", "world_size", *REQUIRED[group]}:
        answer, protocol = getattr(own, name), vars(protocol_of(group)).get(name)
        assert callable(answer) == callable(protocol) or isinstance(protocol, property | None), name


@pytest.mark.parametrize("group", [group for group in GROUPS if REQUIRED[group]])
def test_a_class_without_what_its_group_requires_is_one_sentence(group: str) -> None:
    for name in REQUIRED[group]:
        with pytest.raises(InputError, match=f"Own has no {name}, which an option of {group} needs; write"):
            plain(group, name)
    derived = type("Own", (protocol_of(group),), {})
    with pytest.raises(InputError, match=f"Own has no {' and no '.join(REQUIRED[group])}, which an option of"):
        options.option(group, "own")(derived)


@pytest.mark.parametrize("group", GROUPS)
def test_what_a_plain_class_has_itself_is_not_replaced(group: str) -> None:
    for name in QUESTIONS[group]:
        assert vars(plain(group, **{name: property(lambda self: "own")}))[name].fget(None) == "own"
        annotated = {"__annotations__": {name: ClassVar[str]}, name: "own"}
        assert getattr(plain(group, **annotated), name) == "own"
        without_default = plain(group, name, __annotations__={name: str})
        assert getattr(without_default(**{name: "own"}), name) == "own"


def test_a_member_of_the_protocol_needs_no_annotation() -> None:
    assert plain("metric", higher_is_better=False).higher_is_better is False
    with pytest.raises(InputError, match=r"Own\.lower has no type, so it is no key of the config"):
        plain("metric", lower=False)


def test_defaults_of_a_protocol_do_what_it_says() -> None:
    assert plain("metric", build=lambda self, classes: classes)().build_for("classes", ["cat", "dog"]) == 2
    assert plain("strategy")().grad_divisor(World.solo()) == 1
    assert plain("model", channels_last=True)().memory_format is torch.channels_last
    assert plain("optimizer")().algorithm == "Own"


def test_a_data_set_is_fetched_with_all_its_splits() -> None:
    names = list[str]()
    splits = {name: lambda self, name=name: names.append(name) for name in ("train", "eval", "test")}
    plain("dataset", **splits)().prepare()
    assert names == [*splits]


@pytest.mark.parametrize("group", ["callback", "schedule"])
def test_each_object_of_an_option_has_lists_and_dictionaries_of_its_own(group: str) -> None:
    annotations = {"__annotations__": {"steps": list[int], "names": dict[str, int]}}
    own = plain(group, steps=[1], names={"a": 1}, **annotations)
    one, other = own(), own()
    assert one == other
    one.steps.append(2)
    one.names["b"] = 2
    assert (other.steps, other.names, own().steps, own().names) == ([1], {"a": 1}, [1], {"a": 1})


def test_the_preprocessing_of_a_data_set_has_all_that_it_says() -> None:
    values = {"image_shape": (3, 9, 8), "input_shape": (3, 5, 4), "eval_crop": 0.5, "fit": "pad"}
    values |= {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}
    preprocessing = protocol_of("dataset").preprocessing.fget(SimpleNamespace(**values))
    assert {name: getattr(preprocessing, name) for name in values} == values
