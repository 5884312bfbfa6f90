"""The list of public names only grows: a user's commands, configs and code of 1.0 work in each later 1.x."""

import dataclasses

import pytest

import lockstep
import public
from helpers import ROOT
from lockstep.config.options import classes_of
from lockstep.config.schema import GROUPS
from lockstep.core.fields import ranged, with_history

LIST = (ROOT / "tests" / "public.txt").read_text()
LINES = LIST.removeprefix(public.HEADER).splitlines()


def test_every_option_command_exit_code_and_name_of_the_package_is_in_the_list() -> None:
    named = {line.partition(": ")[0] for line in LINES}
    options = {
        f"option {group}={name}"
        for group in GROUPS
        for name, cls in classes_of(group).items()
        if cls.__module__.startswith("lockstep.")
    }
    assert options <= named
    assert {f"python lockstep.{name}" for name in lockstep.__all__} <= named
    assert {"key epochs", "command lockstep train", "command lockstep runs --json", "exit code 75"} <= named


@pytest.mark.parametrize("kind", ["key", "option", "command", "exit code", "python"])
def test_a_public_name_that_goes_or_changes_is_refused_with_the_way_to_do_it(kind: str) -> None:
    index = next(
        index for index, line in enumerate(LINES) if line.startswith(f"{kind} ") and "lockstep train" not in line
    )
    shorter = LINES[:index] + LINES[index + 1 :]
    with pytest.raises(SystemExit, match=r"is public, and is gone; CONTRIBUTING\.md says"):
        public.extended(LIST, shorter)
    with pytest.raises(SystemExit, match=r"is public, and means now .* take the line out"):
        public.extended(LIST, [*shorter, f"{LINES[index].partition(': ')[0]}: another meaning"])


def test_a_deprecated_name_stays_in_the_list_until_it_is_taken_out() -> None:
    deprecated = public.extended("key old: int = 1\n", ["key old: is now new", "key new: int = 1"])
    assert public.extended(deprecated, ["key old: is now new", "key new: int = 1"]) == deprecated
    with pytest.raises(SystemExit, match="'key old: is now new' is public, and is gone"):
        public.extended(deprecated, ["key new: int = 1"])


@dataclasses.dataclass(frozen=True)
class Rates:
    rate: float = with_history(ranged(0.1, above=0, most=1), names=("lr",))


def test_a_key_that_has_an_old_name_need_not_be_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public, "BLOCKS", {"train": Rates})
    names = ["key train.rate: float in (0, 1] = 0.1", *public.former_keys()]
    assert names[-1] == "key train.lr: is now train.rate"
    assert public.extended("key train.lr: float in (0, 1] = 0.1\n", names).splitlines()[1:] == names


def test_a_new_public_name_is_added_in_its_place() -> None:
    assert public.extended(LIST, LINES) == LIST
    assert public.extended(LIST, ["key new: int = 1", *LINES]).splitlines()[1] == "key new: int = 1"
