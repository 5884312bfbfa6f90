"""The files of options, and the lists in the documents and in `--help`, are made from the classes."""

import dataclasses
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import reference
from helpers import ROOT
from lockstep.config.meanings import as_yaml, config_text, meaning_of, meanings_of
from lockstep.config.options import PRESETS, default_node
from lockstep.config.schema import CONF, GROUPS, MANY, Job, TrainBlock
from lockstep.core.fields import config_defaults, in_config, problems, ranged
from lockstep.data.loading import Auto
from lockstep.models import DigitNet
from lockstep.optim import AdamW
from lockstep.optim.schedule import Linear, Step
from lockstep.strategy import DDP


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ramp(Linear):
    """A line that
    ends at a tenth.

    Its docstring says more.
    """

    # share of the rate
    # that stays
    final: float = ranged(0.1, least=0, most=1)
    tiny: float = in_config("1e-5", ranged(1e-8, least=0, most=1))  # a number with `#`, a sign
    texts: list[str] = dataclasses.field(default_factory=lambda: ["33%", "a: b"])  # several


@dataclasses.dataclass(frozen=True, kw_only=True)
class Late(Ramp):
    """Another default."""

    final: float = 0.2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bare(Linear):
    pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unclear(Linear):
    """A schedule."""

    # not at the field

    slope: float = 1.0


RAMP = """\
# A line that ends at a tenth.
_target_: test_reference.Ramp  # written by docs/reference.py from this class
tiny: 1e-5               # a number with `#`, a sign
texts: ["33%", "a: b"]   # several
final: 0.1               # share of the rate that stays
warmup: 5%               # length of the linear warm-up, which reaches the base rate at its last step
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the files that the lists are generated from and written to."""
    for name in ("conf", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("README.md", "tests/public.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> dict[str, type[Any]]:
    """More schedules, by name."""
    ours, more = reference.classes, {}
    monkeypatch.setattr(reference, "classes", lambda group: {**ours(group), **(more if group == "schedule" else {})})
    return more


def test_the_files_and_the_lists_are_up_to_date() -> None:
    reference.main(["--check"])


def test_a_new_class_is_put_into_its_file_the_reference_the_readme_and_the_help(
    options: dict[str, type[Any]], checkout: Path
) -> None:
    options["ramp"] = Ramp
    changed = "conf/schedule/ramp.yaml, docs/configuration.md, README.md, conf/config.yaml, tests/public.txt"
    stale = re.escape(f"out of date: {changed};")
    with pytest.raises(SystemExit, match=stale):
        reference.main(["--check"], checkout)
    reference.main([], checkout)
    reference.main(["--check"], checkout)
    assert (checkout / "conf" / "schedule" / "ramp.yaml").read_text() == RAMP
    text = (checkout / "docs" / "configuration.md").read_text()
    assert "| `ramp` | A line that ends at a tenth. |" in text
    assert "| `schedule.warmup` | `cosine` `linear` `polynomial` `ramp` | duration | `5%` | yes: schedule |" in text
    row = "| `schedule.final` | `ramp` | float in [0, 1] | `0.1` | yes: schedule | share of the rate that stays |"
    assert row in text
    assert "`plateau` `polynomial` `ramp` `step`" in (checkout / "README.md").read_text()
    assert " linear plateau polynomial ramp step\n" in (checkout / "conf" / "config.yaml").read_text()


def test_an_edited_file_of_an_option_is_named_with_what_to_do(checkout: Path) -> None:
    file = checkout / "conf" / "optimizer" / "adamw.yaml"
    file.write_text(file.read_text().replace("weight_decay: 0.01", "weight_decay: 0.02"))
    says = "out of date: conf/optimizer/adamw.yaml; run `python docs/reference.py`, which writes them"
    with pytest.raises(SystemExit, match=says):
        reference.main(["--check"], checkout)
    reference.main([], checkout)
    assert file.read_text() == (ROOT / "conf" / "optimizer" / "adamw.yaml").read_text()


def test_a_file_without_a_class_is_refused(checkout: Path) -> None:
    (checkout / "conf" / "schedule" / "ramp.yaml").write_text(RAMP)
    with pytest.raises(SystemExit, match=r"ramp\.yaml: no class declares this option"):
        reference.main([], checkout)


def test_a_class_or_a_field_without_its_meaning_is_refused(options: dict[str, type[Any]]) -> None:
    options["bare"] = Bare
    with pytest.raises(SystemExit, match=r"test_reference\.py: Bare has no docstring that says what the option is"):
        reference.generated(ROOT)
    options["bare"] = Unclear
    with pytest.raises(SystemExit, match=r"Unclear\.slope has no comment that says what it is"):
        reference.generated(ROOT)


def test_a_field_keeps_the_comment_of_the_base_class_if_it_has_none() -> None:
    option = reference.read_option("schedule", "late", Late, default_node("schedule", Late), "")
    assert ("schedule.final", "0.2", "share of the rate that stays") in [
        (key.name, key.default, key.meaning) for key in option.keys
    ]


def test_hydra_reads_the_defaults_of_each_class_from_its_file() -> None:
    for group in GROUPS:
        classes = reference.classes(group)
        names = {path.stem for path in (CONF / group).glob("*.yaml")}
        assert names == {*classes, *(name for of, name in PRESETS if of == group)}
        for name, cls in classes.items():
            assert list(problems(cls, config_defaults(cls))) == []
            values = yaml.safe_load((CONF / group / f"{name}.yaml").read_text())
            assert (values[name] if group in MANY else values) == default_node(group, cls)


def test_the_meaning_of_a_key_is_at_its_field_alone() -> None:
    classes = {base for group in GROUPS for cls in reference.classes(group).values() for base in cls.__mro__}
    assert len(classes) > 80
    assert [cls.__name__ for cls in classes if "Fields:" in str(cls.__doc__)] == []


def test_a_document_that_lost_its_markers_is_refused(checkout: Path) -> None:
    (checkout / "README.md").write_text("# Lockstep\n")
    with pytest.raises(SystemExit, match=r"README.md: there is no '<!-- generated by docs/reference.py: groups -->'"):
        reference.main([], checkout)


def test_a_type_is_that_of_the_field_and_its_rule() -> None:
    def types(cls: type[Any], *fields: str) -> list[str]:
        return [reference.type_of(cls, field) for field in fields]

    assert types(DigitNet, "dropout") == ["float in [0, 1)"]
    assert types(AdamW, "lr", "betas") == ["auto or float > 0", "list of float in [0, 1)"]
    assert types(Step, "milestones") == ["list of duration"]
    assert types(Auto, "workers") == ["auto or int in [0, 256]"]
    assert types(DDP, "static_graph", "comm_hook") == ["true, false or null", "none, fp16 or bf16"]
    assert types(TrainBlock, "eval_views") == ["1, 2 or 6"]
    assert types(Job, "resume") == ["path or null"]


@dataclasses.dataclass
class Entries:
    """What it is,
    in one paragraph.

    More of it.

    Fields:
        size: outputs of each layer,
            from the first one.
        name: what it is called.
        other: of no field
    """

    size: int = 3
    # what is written
    # at the field
    name: str = "a"  # wins
    bare: int = 1
    long: tuple[str, ...] = (
        "a default of several lines",
        "ends with a comment",
    )  # behind the last of them


@dataclasses.dataclass
class Further(Entries):
    last: int = 4  # of its own
    size: int = 5  # anew

    class Entries:
        bare: int = 2  # of another class of that name


def test_the_meaning_of_an_option_is_its_first_paragraph_and_of_a_key_its_comment_or_else_its_entry() -> None:
    @dataclasses.dataclass
    class Inside:
        """Inside.

        Fields:
            size: an entry alone can be read.
        """

        size: int = 3  # not this one

    assert meaning_of(Entries) == "What it is, in one paragraph."
    assert meaning_of(Further) == meaning_of(dataclasses.make_dataclass("Made", [("x", int)])) == ""
    size = "outputs of each layer, from the first one."
    assert [*meanings_of(Entries).items()] == [
        ("size", size),
        ("name", "what is written at the field wins"),
        ("bare", ""),
        ("long", "behind the last of them"),
    ]
    assert [*meanings_of(Further).items()] == [
        *(("last", "of its own"), ("size", "anew")),
        *(("name", "what is written at the field wins"), ("bare", ""), ("long", "behind the last of them")),
    ]
    assert meanings_of(Inside) == {"size": "an entry alone can be read."}


@pytest.mark.parametrize("module", ["no_such_module", "builtins", "written_in_a_console", "broken_source"])
def test_a_class_whose_source_cannot_be_read_has_keys_without_comments(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if module == "written_in_a_console":
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
        monkeypatch.setattr(sys.modules[module], "__file__", str(tmp_path / "gone.py"), raising=False)
    if module == "broken_source":
        (tmp_path / "broken.py").write_text("class = 3\n")
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
        monkeypatch.setattr(sys.modules[module], "__file__", str(tmp_path / "broken.py"), raising=False)
    cls = dataclasses.make_dataclass("Made", [("size", int)], namespace={"__module__": module})
    assert cls.__module__ == module
    assert meanings_of(cls) == {"size": ""}


def test_a_value_is_one_line_of_yaml_and_a_comment_stands_beside_it_if_the_line_has_room() -> None:
    values = [
        None,
        True,
        "",
        "null",
        "a b",
        "x" * 300,
        "a few words " * 80 + "end",
        "a: b",
        "#",
        1e-5,
        [1, "a"],
        {"a": None, "b": [1]},
        ["x" * 90] * 3,
        {},
    ]
    texts = [as_yaml(value) for value in values]
    assert [yaml.safe_load(text) for text in texts] == values
    assert not any("\n" in text or text != text.strip() for text in texts)
    node = {"_target_": "x.Y", "a": 1, "b": "two"}
    room = 118 - len("a: 1".ljust(23)) - len("  # ")
    for indent, group, width in (("", "model", room), ("  ", "metric", room - 2)):
        head = "" if group == "model" else "mine:\n"
        for length, comment in ((width, "c" * width), (width + 1, "c" * (width + 1))):
            beside = (
                f"{indent}{'a: 1':<23}  # {comment}\n" if length == width else f"{indent}# {comment}\n{indent}a: 1\n"
            )
            text = config_text(group, "mine", "What it is.", node, {"a": comment, "b": ""}, "  # note")
            assert text == f"# What it is.\n{head}{indent}_target_: x.Y  # note\n{beside}{indent}b: two\n"
            assert max(map(len, text.splitlines())) <= 118 + (length > width) * 2 * bool(indent)
    short = " ".join("a" * 300)
    for group in ("model", "metric"):
        text = config_text(group, "mine", short, node, {"a": short})
        assert max(map(len, text.splitlines())) in (117, 118), "a line has all the words that fit"
    words = " ".join(["long-winded"] * 30)
    text = config_text("metric", "mine", words, {**node, "defaults": [{"/loss": "bce"}]}, {"a": words})
    assert text.count("\n  # ") == 4
    assert "long-\n" not in text
    assert "mine:\ndefaults:\n  - /loss: bce\n  _target_: x.Y\n" in text
    assert max(map(len, text.splitlines())) <= 118
