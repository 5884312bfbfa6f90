"""The files that a line chooses: recipes, files of a user's own groups, and what these list and say to Hydra."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.override_parser.overrides_parser import OverridesParser

from lockstep.config.recipes import EXTENSION, ChosenFiles, is_own_group, read_chosen, words_for_hydra
from lockstep.config.schema import GLOBAL
from lockstep.core.errors import InputError

MINE = f"{EXTENSION} mine"


def source(folder: Path, files: dict[str, Any], provider: str = "hydra.searchpath") -> FileConfigSource:
    """A source of configs with these files: their text, or their defaults or keys behind the usual first line."""
    for name, content in files.items():
        (file := folder / f"{name}.yaml").parent.mkdir(parents=True, exist_ok=True)
        values = {"defaults": content} if isinstance(content, list) else content
        file.write_text(content if isinstance(content, str) else f"{GLOBAL}\n{yaml.safe_dump(values)}")
    return FileConfigSource(provider=provider, path=f"file://{folder}")


def read(folder: Path, line: str, files: dict[str, Any], provider: str = "hydra.searchpath") -> ChosenFiles:
    return read_chosen(OverridesParser.create().parse_overrides(line.split()), [source(folder, files, provider)])


MISTAKES = {
    "seed: 3\n": f"begin it with the line `{GLOBAL}`, or its keys are no job's",
    "": f"begin it with the line `{GLOBAL}`, or its keys are no job's",
    "# @package _group_\nseed: 3\n": f"begin it with the line `{GLOBAL}`, or its keys are no job's",
}
MISTAKES |= {
    f"{GLOBAL}\n{text}\n": sentence
    for text, sentence in {
        "- seed: 3": "is a list, expected keys without dashes, such as `seed: 3`",
        "defaults:\n  - optimizer: sgd": "has `- optimizer: sgd`, expected `- override /optimizer: sgd`",
        "defaults:\n  - /optimizer: sgd": "has `- /optimizer: sgd`, expected `- override /optimizer: sgd`",
        "defaults:\n  - override optimizer: sgd": (
            "has `- override optimizer: sgd`, expected `- override /optimizer: sgd`"
        ),
        "defaults:\n  - override  optimiser: sgd": (
            "has `- override  optimiser: sgd`, expected `- override /optimizer: sgd`"
        ),
        "defaults:\n  - override /optimizer:sgd": (
            "has `- override /optimizer:sgd`, expected `- override /optimizer: sgd`"
        ),
        "defaults:\n  - /experiment: parent.yaml": "has `- /experiment: parent.yaml`, expected `- parent`",
        "defaults:\n  - override /experiment: parent": "has `- override /experiment: parent`, expected `- parent`",
        "defaults:\n  - /parent": "has `- /parent`, expected `- parent`",
        "defaults:\n  - experiment/parent": "has `- experiment/parent`, expected `- parent`",
        "defaults:\n  - debug: fast": "has `- debug: fast`, expected `- /debug: fast`",
        "defaults:\n  - override debug: fast": "has `- override debug: fast`, expected `- /debug: fast`",
        "defaults:\n  - override  debug: fast": "has `- override  debug: fast`, expected `- /debug: fast`",
        "defaults:\n  - override  /hydra/launcher: ray": (
            "cannot choose hydra/launcher; remove its line, and type -m hydra/launcher=ray"
        ),
        "defaults:\n  - override /debug: fast": (
            "has `- override /debug: fast`, expected `- /debug: NAME`: the default job has no debug to override"
        ),
        "defaults:\n  - override /hydra/launcher: ray": (
            "cannot choose hydra/launcher; remove its line, and type -m hydra/launcher=ray"
        ),
        "defaults:\n  - /hydra/sweeper: optuna": (
            "cannot choose hydra/sweeper; remove its line, and type -m hydra/sweeper=optuna"
        ),
        "defaults:\n  override /optimizer: sgd": (
            "has `defaults: {'override /optimizer': 'sgd'}`, expected `defaults:` with dashes below it: "
            "`- override /GROUP: NAME`"
        ),
        "optimizer: sgd": "has `optimizer: sgd`, expected `- override /optimizer: sgd` below `defaults:`",
        "metric: [f1]": "has `metric: ['f1']`, expected `- override /metric: ['f1']` below `defaults:`",
        "model: timm.resnet-50": (
            "has `model: timm.resnet-50`, expected `- override /model: timm.resnet-50` below `defaults:`"
        ),
        "optimizer:\n  - lr: 0.2": "has `optimizer: [{'lr': 0.2}]`, expected `optimizer: {KEY: VALUE}`",
        "train:": "has `train: null`, expected `train: {KEY: VALUE}`",
        "train: true": "has `train: true`, expected `train: {KEY: VALUE}`",
        "train: 'None'": "has `train: None`, expected `train: {KEY: VALUE}`",
        "train.mixup:": "has `train.mixup: null`, expected `train: {mixup: null}`",
        "augment:": "has `augment: null`, expected `augment: {KEY: VALUE}`",
        "model: 3": "has `model: 3`, expected `model: {KEY: VALUE}`",
        "train: fast": "has `train: fast`, expected `train: {KEY: VALUE}`",
        "train.mixup: 0.2": "has `train.mixup: 0.2`, expected `train: {mixup: 0.2}`",
        "metric.f1.average: micro": "has `metric.f1.average: micro`, expected `metric: {f1: {average: micro}}`",
        "seed = 3": "has `seed = 3`, expected `seed: 3`",
        "notes=a = b": "has `notes=a = b`, expected `notes: a = b`",
    }.items()
}


@pytest.mark.parametrize("text", MISTAKES, ids=lambda text: re.sub(r"\W+", " ", text.removeprefix(GLOBAL)).strip())
def test_a_recipe_that_hydra_would_ignore_or_misread_is_refused_with_what_to_write(text: str, tmp_path: Path) -> None:
    files = {"experiment/mine": text, "experiment/parent": {"seed": 1}, "debug/fast": {"steps": 3}}
    sign = ":" * MISTAKES[text].startswith("begin")
    with pytest.raises(InputError, match=f"^{re.escape(f'experiment/mine.yaml{sign} {MISTAKES[text]}')}$") as refused:
        read(tmp_path, "experiment=mine", files)
    assert len(str(refused.value).splitlines()) == 1


RIGHT: tuple[Any, ...] = (
    {"train": "${other}", "optimizer": "${other}", "input": {"mean": [1]}, "model": {"width": 3}, "metric": {}},
    {"a.b": 3, "a=b": 3, "notes": "a=b"},
    ["parent", "_self_", {"override /optimizer": "sgd"}, {"/debug": "fast"}, {"optional other/optimizer": "x"}],
    ["parent.yaml", "/experiment/parent"],
)


@pytest.mark.parametrize("content", RIGHT, ids=["values", "names", "defaults", "spellings"])
def test_what_hydra_reads_as_it_is_meant_is_left_alone(content: Any, tmp_path: Path) -> None:
    files = {"experiment/mine": content, "experiment/parent": {"seed": 1}, "debug/fast": {"steps": 3}}
    listed = frozenset({"debug"} if "debug" in str(content) else ())
    assert read(tmp_path, "experiment=mine", files) == ChosenFiles(listed, {}, frozenset())


@pytest.mark.parametrize(
    ("line", "is_read"),
    [
        ("experiment=mine", ["experiment/mine", "experiment/parent", "debug/fast", "paths/here.v2"]),
        ("experiment=mine debug=slow", ["experiment/mine", "experiment/parent", "debug/slow"]),
        ("experiment=mine +debug=slow", ["experiment/mine", "experiment/parent", "debug/slow"]),
        ("experiment=mine debug=[slow,other]", ["experiment/mine", "experiment/parent", "debug/slow", "debug/other"]),
        ("experiment=mine debug=null", ["experiment/mine", "experiment/parent"]),
        ("experiment=mine ~debug", ["experiment/mine", "experiment/parent"]),
        ("experiment=mine ~debug=fast", ["experiment/mine", "experiment/parent"]),
        ("debug=slow", ["debug/slow"]),
        ("debug=0", ["debug/0"]),
        ("experiment=zero", ["experiment/zero", "debug/0"]),
        ("debug=fast debug=slow", ["debug/slow"]),
        ("experiment=none debug=none seed=3", []),
        ("", []),
    ],
)
def test_the_files_of_a_line_and_those_that_they_list_are_read_and_no_others(
    line: str, is_read: list[str], tmp_path: Path
) -> None:
    files = {
        "experiment/mine": ["parent", {"/debug": "fast"}, "_self_"],
        "experiment/parent": {"seed": 1},
        "experiment/zero": [{"/debug": 0}],
        "debug/fast": [{"/paths": "here.v2.yaml"}],
        "debug/0": {"seed": 2},
        **{
            name: {"seed": 2}
            for name in ("debug/slow", "debug/other", "paths/here", "paths/here.v2", "experiment/idle", "debug/idle")
        },
    }
    read(tmp_path, line, files)
    for name in files:
        right = (tmp_path / f"{name}.yaml").read_text()
        (tmp_path / f"{name}.yaml").write_text("seed: 3\n")  # of no package, which is refused where it is read
        if name in is_read:
            with pytest.raises(InputError, match=rf"^{name}\.yaml: begin it with the line"):
                read(tmp_path, line, {})
        else:
            read(tmp_path, line, {})
        (tmp_path / f"{name}.yaml").write_text(right)


CIRCLES: tuple[tuple[dict[str, Any], str], ...] = (
    ({"debug/ring": ["ring"]}, "debug/ring.yaml lists itself in its defaults; remove that line"),
    ({"debug/ring": ["one"], "debug/one": ["two"], "debug/two": ["one"]}, "lists itself by way of debug/"),
    ({"debug/ring": [{"/paths": "one"}], "paths/one": [{"/debug": "ring"}]}, "lists itself by way of "),
    ({"debug/ring": ["one", "two"], "debug/one": ["three"], "debug/two": ["three"], "debug/three": {"seed": 1}}, ""),
)


@pytest.mark.parametrize(("files", "sentence"), CIRCLES)
def test_a_file_that_lists_itself_is_named_once(files: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    if not sentence:  # several files may list one
        assert read(tmp_path, "debug=ring", files).listed == frozenset()
        return
    with pytest.raises(InputError, match=re.escape(sentence)) as refused:
        read(tmp_path, "debug=ring", files)
    named = re.findall(r"\w+/\w+\.yaml", str(refused.value))
    assert len(named) == len({*named}), "each file of the circle once"


def test_another_file_may_override_a_group_that_one_lists(tmp_path: Path) -> None:
    files = {"experiment/mine": ["parent", {"override /debug": "slow"}], "experiment/parent": [{"/debug": "fast"}]}
    for name in ("fast", "slow"):
        files[f"debug/{name}"] = []
    assert read(tmp_path, "experiment=mine", files).listed == {"debug"}


SEARCH = {
    "defaults": ["parent", {"override /hydra/sweeper": "optuna"}, {"override hydra/launcher": "ray"}],
    "hydra": {"sweeper": {"n_trials": 2, "params": {"seed": "1,2"}}, "job": {"chdir": True}, "launcher": {"jobs": 3}},
}


def test_an_extensions_file_chooses_a_search_and_sets_its_values_and_no_other_of_hydras(tmp_path: Path) -> None:
    files = {"experiment/mine": SEARCH, "experiment/parent": [{"override /hydra/sweeper": "grid"}]}
    search = read(tmp_path, "experiment=mine", files, MINE)
    assert search.choices == {"hydra/sweeper": "optuna", "hydra/launcher": "ray"}, "of the file that lists the other"
    keys = {("sweeper", "n_trials"): "2", ("sweeper", "params", "seed"): "1,2", ("launcher", "jobs"): "3"}
    assert search.values == {*keys.items()}
    with pytest.raises(InputError, match=r"^experiment/mine\.yaml cannot choose hydra/sweeper; .* hydra/sweeper=opt"):
        read(tmp_path, "experiment=mine", {})
    typed = "experiment=mine hydra/sweeper=optuna hydra/launcher=ray"
    with pytest.raises(
        InputError, match=r"^experiment/parent\.yaml cannot choose hydra/sweeper; .* hydra/sweeper=gr"
    ):
        read(tmp_path, typed, {})
    (tmp_path / "experiment" / "parent.yaml").write_text(f"{GLOBAL}\n")
    theirs = read(tmp_path, typed, {})
    assert (theirs.choices, theirs.values) == ({}, frozenset())
    for wrong in ({"/hydra/sweeper": "optuna"}, {"override /hydra/job_logging": "none"}):
        with pytest.raises(InputError, match=r"^experiment/wrong\.yaml cannot choose hydra/"):
            read(tmp_path, "experiment=wrong", {"experiment/wrong": [wrong]}, MINE)


@pytest.mark.parametrize(
    ("line", "listed", "expected"),
    [
        ("seed=1", (), "hydra/sweeper=optuna seed=1"),
        ("hydra/sweeper=grid", (), "hydra/sweeper=grid"),
        ("debug=fast,slow", ("debug",), "hydra/sweeper=optuna debug=fast,slow"),
        ("debug=fast,slow", (), "hydra/sweeper=optuna debug=fast,slow"),
        ("debug=null", ("debug",), "hydra/sweeper=optuna ~debug"),
        ("debug=null", (), "hydra/sweeper=optuna"),
        ("debug=fast debug=null", ("debug",), "hydra/sweeper=optuna ~debug"),
        ("debug=null debug=fast", (), "hydra/sweeper=optuna +debug=fast"),
        ("+debug=fast", ("debug",), "hydra/sweeper=optuna debug=fast"),
        ("++debug=fast", (), "hydra/sweeper=optuna +debug=fast"),
        ("paths=here", (), "hydra/sweeper=optuna paths=here"),
    ],
)
def test_hydra_gets_the_choices_of_files_before_the_line_and_groups_as_it_needs_them(
    line: str, listed: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    sources = [source(tmp_path / "empty", {}), source(tmp_path, {"debug/fast": {"steps": 3}})]
    files = ChosenFiles(frozenset(listed), {"hydra/sweeper": "optuna"}, frozenset())
    words = OverridesParser.create().parse_overrides(line.split())
    assert words_for_hydra(words, files, sources) == expected.split()


def test_a_folder_is_a_group_if_one_of_the_sources_has_it_and_no_key_has_its_name(tmp_path: Path) -> None:
    sources = [source(tmp_path / name, {f"{name}/x": {}, "seed/x": {}, "model/x": {}}) for name in ("one", "two")]
    names = {"one": True, "two": True, "three": False, "seed": False, "model": False, "one/x": False}
    assert {name: is_own_group(name, sources) for name in names} == names
