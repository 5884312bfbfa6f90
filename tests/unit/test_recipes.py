"""What `conf/` promises: every recipe composes and builds, every option fits its class, every key is documented.

No data is read and no weights are made: networks are built on the meta device.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from torch import nn

from helpers import ROOT, built, composed
from lockstep.config import components, schema
from lockstep.config.schema import Job
from lockstep.core.plan import Plan
from lockstep.training.fingerprint import plan_of

CONF = ROOT / "conf"
REFERENCE = ROOT / "docs" / "configuration.md"
RECIPES = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
OPTIONS = sorted((group, path.stem) for group in schema.GROUPS for path in (CONF / group).glob("*.yaml"))
HEADER = ("command", "reproduces", "expected", "wall clock", "hardware")
# What an option does not have a value for.
MANDATORY = {("dataset", each): ["dataset.path=photos"] for each in ("folder", "packed")}
EXAMPLES = {"MNIST": 60_000, "CIFAR10": 50_000}


def header(recipe: str) -> dict[str, str]:
    """The `key: value` lines at the top of a recipe, with what continues them."""
    found: dict[str, str] = {}
    key = ""
    for line in (CONF / "experiment" / f"{recipe}.yaml").read_text().splitlines():
        if not line.startswith("#"):
            break
        if match := re.fullmatch(r"# ([a-z ]+):\s+(.+)", line):
            key, found[match[1]] = match[1], match[2]
        elif key:
            found[key] += " " + line.removeprefix("#").strip()
    return found


def planned(recipe: str, *overrides: str) -> tuple[Job, Plan]:
    """A recipe's job and its plan over the training split that it has."""
    job = built(f"experiment={recipe}", *overrides)
    return job, plan_of(job, EXAMPLES[type(job.dataset).__name__])


def rates(recipe: str, *overrides: str) -> list[float]:
    """The learning rate of the first step of each epoch."""
    job, plan = planned(recipe, *overrides)
    steps = range(1, plan.total_steps + 1, plan.steps_per_epoch)
    return [job.optimizer.lr * job.schedule.factor(step, plan) for step in steps]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_says_how_to_run_it_and_what_to_expect(recipe: str) -> None:
    said = header(recipe)
    assert tuple(said) == HEADER
    python, script, *overrides = shlex.split(said["command"])
    assert (python, script, overrides[0]) == ("python", "train.py", f"experiment={recipe}")
    built(*overrides)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_builds_into_a_network_that_classifies_its_images(recipe: str) -> None:
    job, _ = planned(recipe)
    with torch.device("meta"):
        network = job.model.build(job.dataset.classes, job.dataset.input_shape)
        logits = network(torch.zeros(2, *job.dataset.input_shape))
    assert logits.shape == (2, job.dataset.classes)
    job.optimizer.build(nn.Linear(2, 2))


def test_the_resnet34_recipe_takes_a_tenth_of_the_rate_every_five_epochs() -> None:
    expected = [0.01] * 5 + [0.001] * 5 + [0.0001] * 5
    assert rates("cifar10_resnet34") == pytest.approx(expected)
    assert rates("cifar10_resnet34", "batch=256") == pytest.approx(expected)


def test_the_tutorial_recipes_train_at_a_constant_rate_for_as_long_as_the_tutorials_do() -> None:
    assert rates("mnist_tutorial") == [0.001]
    assert rates("cifar10_tutorial") == [0.01] * 5


def test_the_modern_recipe_warms_up_to_its_rate_and_ends_near_zero() -> None:
    by_epoch = rates("cifar10_resnet34_modern")
    assert max(by_epoch) == pytest.approx(by_epoch[3]) == pytest.approx(0.4)
    assert by_epoch[0] < 0.01
    assert by_epoch[-1] < 0.002


def test_the_help_names_every_option() -> None:
    shown = composed_help()
    for group in [*schema.GROUPS, "experiment"]:
        named = re.search(rf"^ +{group}  .*(\n {{12,}}.*)*", shown, re.MULTILINE)
        assert named
        missing = {path.stem for path in (CONF / group).glob("*.yaml")} - set(re.findall(r"\w+", named[0]))
        assert not missing, f"--help does not name {group}={missing}"


def composed_help() -> str:
    """The text of `--help`, where the config keeps it."""
    loaded = yaml.safe_load((CONF / "config.yaml").read_text())
    text = loaded["hydra"]["help"]["template"]
    assert isinstance(text, str)
    return text.partition("Groups, ")[2]


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_an_option_has_the_keys_of_its_class_and_values_that_it_accepts(group: str, option: str) -> None:
    node = composed(f"{group}={option}", *MANDATORY.get((group, option), []))[group]
    cls = components.locate(group, node["_target_"])
    assert set(node) - {"_target_"} == {field.name for field in dataclasses.fields(cls)}
    assert isinstance(components.build(group, node), cls)


def test_a_model_of_timm_has_the_keys_of_its_class_too() -> None:
    node = composed("model=resnet18")["model"]
    cls = components.locate("model", node["_target_"])
    assert set(node) - {"_target_"} == {field.name for field in dataclasses.fields(cls)}


def documented() -> Iterator[tuple[str, frozenset[str], Any]]:
    """The rows of the reference's key tables: key, the options that have it (empty: not of a group), default."""
    column: dict[str, int] = {}
    for line in REFERENCE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            column = {}
        elif cells[0] == "key":
            column = {name: number for number, name in enumerate(cells)}
        elif column and cells[0].startswith("`"):
            options = re.findall(r"`([^`]+)`", cells[column["options"]]) if "options" in column else []
            default = yaml.safe_load(cells[column["default"]].strip("`"))
            yield cells[0].strip("`"), frozenset(options), default


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key below the blocks of the config, with its value."""
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def test_the_reference_has_every_key_with_its_default() -> None:
    rows = {key: default for key, options, default in documented() if not options}
    loaded = yaml.safe_load((CONF / "config.yaml").read_text())
    keys = dict(leaves({key: value for key, value in loaded.items() if key not in ("defaults", "hydra")}))
    assert rows == keys


def test_the_reference_has_every_key_of_every_option_with_its_default() -> None:
    rows = {(key, option): default for key, options, default in documented() for option in options}
    keys: dict[tuple[str, str], Any] = {}
    for group, option in OPTIONS:
        loaded = yaml.safe_load((CONF / group / f"{option}.yaml").read_text())
        keys |= {(f"{group}.{key}", option): value for key, value in loaded.items() if key != "_target_"}
    any_timm = OmegaConf.to_container(OmegaConf.create(composed("model=resnet50d")["model"]))
    assert isinstance(any_timm, dict)
    keys |= {(f"model.{key}", "NAME"): any_timm[key] for key in any_timm if key not in ("_target_", "name")}
    assert rows == keys


def test_the_reference_names_every_option() -> None:
    text = REFERENCE.read_text()
    for group, option in [*OPTIONS, *(("experiment", recipe) for recipe in RECIPES)]:
        assert re.search(rf"^\| `{option}` \|", text, re.MULTILINE), f"{group}={option} has no row"


def test_the_reference_names_every_file_of_a_run_folder() -> None:
    source = (ROOT / "src" / "lockstep" / "core" / "run_dir.py").read_text()
    names = set(re.findall(r'self\.(?:path|hydra|logs) / f?"([^"{]+)', source)) - {"rank"}
    text = REFERENCE.read_text()
    assert names
    assert not {name for name in names if name not in text}


def test_every_group_has_a_folder_and_every_folder_is_a_group() -> None:
    folders = {path.name for path in Path(CONF).iterdir() if path.is_dir() and any(path.glob("*.yaml"))}
    assert folders == {*schema.GROUPS, "experiment"}
