"""What Hydra would answer with a hint that leads to the next error is answered with the line that works."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from helpers import ROOT, train

JOB = ("model=linear", "device=cpu", "--cfg=job")
HEADER = "# @package _global_\n"
RECIPES = {
    "seed: 3\n": "begin it with the line `# @package _global_`",
    f"{HEADER}defaults:\n  - optimizer: sgd\n": "`- override /optimizer: sgd`",
    f"{HEADER}defaults:\n  - /optimizer: sgd\n": "`- override /optimizer: sgd`",
    f"{HEADER}defaults:\n  - override optimizer: sgd\n": "`- override /optimizer: sgd`",
    f"{HEADER}defaults:\n  - /experiment: parent\n": "`- parent`",
    f"{HEADER}defaults:\n  - override /experiment: parent\n": "`- parent`",
    f"{HEADER}defaults:\n  - override /hydra/launcher: ray\n": "-m hydra/launcher=ray",
    f"{HEADER}defaults:\n  - override hydra/launcher: ray\n": "-m hydra/launcher=ray",
    f"{HEADER}defaults:\n  - /hydra/sweeper: optuna\n": "-m hydra/sweeper=optuna",
    f"{HEADER}optimizer: sgd\n": "`- override /optimizer: sgd`",
    f"{HEADER}metric: [f1]\n": "`- override /metric: ['f1']`",
    f"{HEADER}defaults:\n  - optimiser: sgd\n": "`- override /optimizer: sgd`",
    f"{HEADER}defaults:\n  - override optimiser: sgd\n": "`- override /optimizer: sgd`",
    f"{HEADER}defaults:\n  - override /optimiser: sgd\n": "`- override /optimizer: sgd`",
    f"{HEADER}defaults:\n  - override /optimizer:sgd\n": "`- override /optimizer: sgd`",
    f"{HEADER}defaults:\n  - /parent\n": "`- parent`",
    f"{HEADER}defaults:\n  - experiment/parent\n": "`- parent`",
    f"{HEADER}defaults:\n  override /optimizer: sgd\n": "`- override /GROUP: NAME`",
    f"{HEADER}train.mixup: 0.2\n": "`train: {mixup: 0.2}`",
    f"{HEADER}seed = 3\n": "`seed: 3`",
    f"{HEADER}train:\nmixup: 0.2\n": "`train: {KEY: VALUE}`",
    f"{HEADER}optimizer:\n  - lr: 0.2\n": "`optimizer: {KEY: VALUE}`",
    f"{HEADER}- seed: 3\n": "`seed: 3`",
    "": "begin it with the line `# @package _global_`",
}
"""Recipes with a mistake, and what the answer says to write."""
WORDS = {
    "+experiment=parent": "experiment=parent",
    "++experiment=parent": "experiment=parent",
    "+optimizer=sgd": "optimizer=sgd",
    "+metric=[f1]": "metric=[f1]",
    "+seed=3": "seed=3",
    "~metric": "metric=[]",
    "optimizer/lr=0.5": "optimizer.lr=0.5",
    "optimizer.lrr=0.5": "optimizer.lr=0.5",
    "experiment=parent,parent2": "-m experiment=parent,parent2",
    "optimizer=sgd,adamw": "-m optimizer=sgd,adamw",
    "hydra.sweeper.params.seed=1,2": "-m seed=1,2",
    "~seed": "",
    "~train.ema": "",
    "~train.emma": "",
    "~hydra.job.env_set.A": "",
    "~optimizer": "",
}
"""Words with a mistake, and the words of the answer that work."""


def configs(folder: Path, recipe: str = "") -> tuple[str, ...]:
    """The words that find the user's recipes: `mine`, which derives from nothing by itself, and two others."""
    (folder / "experiment").mkdir(exist_ok=True)
    for name, text in {"parent": f"{HEADER}seed: 7\n", "parent2": f"{HEADER}seed: 8\n", "mine": recipe}.items():
        (folder / "experiment" / f"{name}.yaml").write_text(text)
    return f"--config-dir={folder}", f"output_root={folder}/runs"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda text: text.strip()[22:])
def test_a_recipe_is_answered_with_the_line_that_works(tmp_path: Path, recipe: str) -> None:
    words, expected = configs(tmp_path, recipe), RECIPES[recipe]
    refused = train("experiment=mine", *JOB[:2], "steps=1", *words)
    assert (refused.code, refused.err.count("\n")) == (2, 1), refused.err
    assert expected in refused.err
    names = {"GROUP": "optimizer", "NAME": "sgd", "KEY": "ema" if "train" in recipe else "lr", "VALUE": "0.5"}
    written = re.sub("[A-Z]+", lambda word: names.get(word[0], word[0]), expected.strip("`"))
    typed: tuple[str, ...] = ()
    if "begin it" in expected:
        recipe = f"{HEADER}{recipe}"
    elif written.startswith("- "):
        recipe = f"{HEADER}defaults:\n  {written}\n"
    elif ": " in written:
        recipe = f"{HEADER}{written}\n"
    else:
        typed = tuple(written.split())
        recipe = HEADER
    configs(tmp_path, recipe)
    if typed:  # a sweep shows no config; it is refused for a value that it reads behind what was wrong
        refused = train(*typed, "experiment=mine", *JOB[:2], "epochs=0", "batch=32,48", *words)
        assert "epochs is 0" in refused.err
        return
    done = train("experiment=mine", *JOB, *words)
    assert done.code == 0, done.err


@pytest.mark.parametrize("word", WORDS)
def test_a_word_is_answered_with_the_word_that_works(tmp_path: Path, word: str) -> None:
    words, proposal = configs(tmp_path), WORDS[word]
    refused = train(word, *JOB[:2], "steps=1", *("-m",) * word.startswith("hydra"), *words)
    assert (refused.code, refused.err.count("\n")) == (2, 1), refused.err
    assert proposal in refused.err if proposal else f"remove {word}" in refused.err
    assert not re.search(r"\+\+|override '|force-add|_self_", refused.err.replace(word, ""))
    if proposal.startswith("-m"):  # a sweep shows no config; without a value that fits it would start
        refused = train(*shlex.split(proposal), *JOB[:2], "epochs=0", *words)
        assert "job 0" in refused.err
        assert "epochs is 0" in refused.err
        return
    done = train(*shlex.split(proposal), *JOB, *words)
    assert done.code == 0, done.err


def test_the_recipe_its_child_and_the_option_of_the_documents_work(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    recipe, option = re.findall(r"```yaml\n(.*?)```", text[text.index("### experiment") :], re.DOTALL)[:2]
    words = configs(tmp_path, f"{HEADER}defaults:\n  - pets\n  - override /optimizer: slow\n")
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "experiment" / "pets.yaml").write_text(recipe)
    (tmp_path / "optimizer" / "slow.yaml").write_text(option)
    for name, (lr, momentum) in {"pets": (0.05, 0.9), "mine": (0.05, 0.5)}.items():
        done = train(f"experiment={name}", "dataset.path=photos", "--cfg=job", *words)
        assert done.code == 0, done.err
        config = yaml.safe_load(done.out)
        assert (config["epochs"], [*config["metric"]], config["optimizer"]["lr"]) == (30, ["f1"], lr)
        assert config["optimizer"]["momentum"] == momentum


@pytest.mark.parametrize("name", ["experiment/parent2", "/recipes/experiment/parent2", "mine/parent2"])
def test_a_recipe_that_is_not_there_is_named_as_it_was_typed(tmp_path: Path, name: str) -> None:
    refused = train(f"experiment={name}", *JOB, *configs(tmp_path))
    assert refused.code == 2
    assert f"experiment={name}: there is no experiment of that name. Did you mean 'parent2'" in refused.err
