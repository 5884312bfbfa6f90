"""Every recipe in `conf/` composes and builds, and every option fits its class.

The tests read no data and allocate no weights: networks are built on the meta device.
"""

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from helpers import ROOT, built, composed
from lockstep.config import schema
from lockstep.config.schema import Job
from lockstep.core.plan import Plan
from lockstep.data.datasets import Folder
from lockstep.models import Timm
from lockstep.models.nets import sketch
from lockstep.training.resolved_job import plan_of

CONF = ROOT / "conf"
RECIPES = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
HEADER = ("command", "reproduces", "expected", "wall clock", "hardware")
EXAMPLES = {"MNIST": 60_000, "CIFAR10": 50_000, "Digits": 1_442, "ImageNet": 1_281_167}
DOCUMENT = ROOT / "docs" / "recipes.md"
TABLES = dict(re.findall(r"(?m)^### (\S+)$(.+?)(?=^##|\Z)", DOCUMENT.read_text(), re.S))


def header(recipe: str) -> dict[str, str]:
    """The `key: value` lines at the top of a recipe, each with its continuation lines."""
    fields: dict[str, str] = {}
    key = ""
    for line in (CONF / "experiment" / f"{recipe}.yaml").read_text().splitlines():
        if not line.startswith("#"):
            break
        if match := re.fullmatch(r"# ([a-z ]+):\s+(.+)", line):
            key, fields[match[1]] = match[1], match[2]
        elif key:
            fields[key] += " " + line.removeprefix("#").strip()
    return fields


def planned(recipe: str, *overrides: str) -> tuple[Job, Plan]:
    """A recipe's job and its plan over the training split that it has."""
    job = built(f"experiment={recipe}", *overrides)
    return job, plan_of(job, EXAMPLES[type(job.dataset).__name__])


def rates(recipe: str, *overrides: str) -> list[float]:
    """The learning rate of the first step of each epoch."""
    job, plan = planned(recipe, *overrides)
    steps = range(1, plan.total_steps + 1, plan.steps_per_epoch)
    return [job.optimizer.lr * job.schedule.factor(step, plan, ()) for step in steps]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_says_how_to_run_it_and_builds_into_a_network_that_classifies_its_images(recipe: str) -> None:
    fields = header(recipe)
    assert tuple(fields) == HEADER
    python, script, *overrides = shlex.split(fields["command"])
    assert (python, script, overrides[0]) == ("python", "train.py", f"experiment={recipe}")
    job = built(*overrides)
    of_files = isinstance(job.dataset, Folder)
    classes, shape = (1000, (3, 224, 224)) if of_files else (job.dataset.classes, job.dataset.input_shape)
    network = sketch(job.model, classes, shape)
    with torch.device("meta"):
        logits = network(torch.zeros(2, *shape))
    assert logits.shape == (2, classes)
    job.optimizer.build(nn.Linear(2, 2))


def test_the_resnet34_recipe_takes_a_tenth_of_the_rate_every_five_epochs() -> None:
    expected = [0.01] * 5 + [0.001] * 5 + [0.0001] * 5
    assert rates("cifar10_resnet34") == pytest.approx(expected)
    assert rates("cifar10_resnet34", "batch=256") == pytest.approx(expected)


def test_the_tutorial_begins_with_published_weights_and_its_offline_variant_with_random_ones() -> None:
    (tutorial, plan), (offline, its_plan) = planned("cifar10_tutorial"), planned("cifar10_tutorial_offline")
    assert isinstance(tutorial.model, Timm)
    assert tutorial.model.pretrained
    assert offline == replace(tutorial, model=replace(tutorial.model, pretrained=False))
    assert plan == its_plan


def test_the_page_of_the_formats_names_every_file_of_a_run_folder() -> None:
    source = (ROOT / "src" / "lockstep" / "core" / "run_dir.py").read_text()
    names = {name.rpartition("/")[2] for name in re.findall(r'\bPathBelow\("([^"]+)"\)', source)}
    text = (ROOT / "docs" / "formats.md").read_text()
    assert names
    assert not {name for name in names if name not in text}


def test_every_group_has_a_folder_and_every_folder_is_a_group() -> None:
    folders = {path.name for path in Path(CONF).iterdir() if path.is_dir() and any(path.glob("*.yaml"))}
    assert folders == {*schema.GROUPS, "experiment"}


def test_the_documents_compare_each_recipe_with_its_source() -> None:
    text = DOCUMENT.read_text()
    assert not [recipe for recipe in RECIPES if recipe not in text]


def leaves(values: dict[str, Any], above: str = "") -> dict[str, Any]:
    """Every value of a config by its key, with dots between the parts."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= leaves(value, f"{above}{key}.") if isinstance(value, dict) else {above + key: value}
    return flat


@pytest.mark.parametrize("recipe", TABLES)
def test_the_table_of_a_recipe_has_the_values_that_train(recipe: str) -> None:
    rows = dict(re.findall(r"(?m)^\| `([^`]+)` \| .+ \| `([^`]+)` \|$", TABLES[recipe]))
    recipe_file = yaml.safe_load((CONF / "experiment" / f"{recipe}.yaml").read_text())
    choices = [pair for choice in recipe_file.pop("defaults") for pair in choice.items()]
    options = {key.removeprefix("override /"): option for key, option in choices}
    values = leaves(composed(f"experiment={recipe}")) | options
    shown = {key: yaml.safe_load(value) for key, value in rows.items()}
    assert shown == {key: values[key] for key in shown}
    assert {*options, *leaves(recipe_file)} <= shown.keys()
