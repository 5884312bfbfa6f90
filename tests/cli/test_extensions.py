"""Packages of a user's own: their models and data sets are options, and nothing but the program names them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import forks
from helpers import Done, command, first_on_path, forked, own_project, weights
from processes import FRESH

pytestmark = pytest.mark.slow

LOCKSTEP = (sys.executable, "-m", "lockstep")
MODEL = """
import lockstep
from lockstep.models.nets import Network
from torch import nn

{decorator}
class Flat(Network):
    {field}

    def build(self, classes, input_shape):
        channels, height, width = input_shape
        return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, classes))
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `lockstep new mine` writes."""
    folder = tmp_path_factory.mktemp("projects")
    done = forked("lockstep", "new", "mine", cwd=folder)
    assert done.code == 0, done.err
    return folder / "mine"


def train(project: Path, *overrides: str) -> Done:
    """Run the project's own `train.py`, for a few steps."""
    return forked("train.py", "experiment=first", "device=cpu", *overrides, cwd=project)


def written(folder: Path, decorator: str = '@lockstep.option("model")', field: str = "width: int = 3") -> Path:
    """A project with one model in it, and a program that names it."""
    return own_project(folder, MODEL.format(decorator=decorator, field=field))


def run(folder: Path, *overrides: str) -> Done:
    return forked("train.py", "steps=1", *overrides, cwd=folder)


def test_a_new_project_is_linted_and_passes_its_own_tests(project: Path) -> None:
    assert command(sys.executable, "-m", "ruff", "check", "--isolated", "--ignore=I001", ".", cwd=project).code == 0
    done = forked("test_extensions:own_tests", cwd=project)
    assert done.code == 0, done.out
    assert "6 passed" in done.out


def own_tests() -> None:
    """Run the tests of the current folder's project, with forks in place of the interpreters that they start."""
    plain = subprocess.run

    def run(words: list[str], cwd: Path, check: bool) -> None:
        assert check
        if os.fork() == 0:
            os.chdir(cwd)
            subprocess.run = plain
            try:
                forks.run([], *words[1:])
            except SystemExit as left:
                os._exit(left.code or 0)
            os._exit(0)
        assert os.wait()[1] == 0

    torch.set_num_threads(1)  # a fork has no threads of its parent
    subprocess.run = run
    sys.path.insert(0, "")
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider"]))


def test_a_model_and_data_of_ones_own_go_on_to_the_bit_on_fresh_ranks(project: Path, tmp_path: Path) -> None:
    words = (*FRESH, "schedule=constant", "optimizer=sgd")
    assert train(project, *words, "launcher=elastic", "steps=3", f"hydra.run.dir={tmp_path}/part").code == 0
    assert train(project, f"resume={tmp_path}/part", "launcher=spawn", "steps=6").code == 0
    done = train(project, *words, "steps=6", f"hydra.run.dir={tmp_path}/whole")
    assert done.code == 0, done.err
    part, whole = weights(tmp_path / "part"), weights(tmp_path / "whole")
    assert all(part[name].equal(whole[name]) for name in whole)
    facts = json.loads((tmp_path / "whole" / "env.json").read_text())
    assert facts["extensions"] == {"mine": "named by the program"}


def test_a_run_whose_extension_is_not_here_says_which_it_was(project: Path, tmp_path: Path) -> None:
    assert train(project, "steps=1", f"hydra.run.dir={tmp_path}/run").code == 0
    done = forked("lockstep", "train", f"resume={tmp_path}/run", "steps=2", cwd=tmp_path)
    assert done.code == 2
    assert "The run had extensions that are not here: mine (named by the program)" in done.err


def test_an_installed_extension_serves_every_command(project: Path, tmp_path: Path) -> None:
    """Installed as pip does it: the package on the path, and its entry point in the metadata beside it."""
    site = tmp_path / "site"
    metadata = site / "mine-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / "mine").symlink_to(project / "mine")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text("[lockstep.extensions]\nmine = mine\n")
    run_dir = tmp_path / "run"
    words = ("experiment=first", "steps=1", "device=cpu", f"hydra.run.dir={run_dir}")
    done = command(*LOCKSTEP, "train", *words, cwd=tmp_path, PYTHONPATH=first_on_path(site))
    assert done.code == 0, done.err
    assert "SmallConv" in done.out
    assert json.loads((run_dir / "env.json").read_text())["extensions"] == {"mine": "installed by mine 0.1.0"}


def test_no_config_run_folder_or_current_folder_names_code(project: Path, tmp_path: Path) -> None:
    """The package lies in the current folder, and an override names its class: neither makes it an extension."""
    target = "model._target_=mine.model.SmallConv"
    done = forked("lockstep", "train", target, cwd=project, PYTHONSAFEPATH="1")
    assert done.code == 2
    assert "model._target_ is 'mine.model.SmallConv', expected a class of lockstep.models" in done.err
    assert "extensions here: none" in done.err
    (tmp_path / "conf.yaml").write_text("defaults: [config, _self_]\nmodel:\n  _target_: mine.model.SmallConv\n")
    named = command(*LOCKSTEP, "train", "--config-dir", str(tmp_path), "--config-name=conf", cwd=project)
    assert named.code == 2
    assert "extensions here: none" in named.err


def test_only_a_declared_class_of_an_extension_is_an_option(tmp_path: Path) -> None:
    folder = written(tmp_path / "project")
    for target in ("own.Network", "own.nn.Linear", "own.Flat.build"):
        done = run(folder, f"model._target_={target}")
        assert (done.code, f"model._target_ is '{target}'" in done.err) == (2, True), done.err
    done = run(folder, "dataset._target_=own.Flat")  # declared, but for another group
    assert (done.code, "dataset._target_ is 'own.Flat'" in done.err) == (2, True), done.err


@pytest.mark.parametrize(
    ("decorator", "field", "sentence"),
    [
        ('@lockstep.option("modle")', "width: int = 3", "Flat declares an option of 'modle', which is not a group."),
        ('@lockstep.option("model", "linear")', "width: int = 3", "model=linear is an option of Lockstep"),
        ('@lockstep.option("model", "resnet50d")', "width: int = 3", "model=resnet50d is an option of Lockstep"),
        ('@lockstep.option("model")', "width = 3", "Flat.width has no type, so it is no key of the config; write"),
        ('@lockstep.option("model")', "width: nn.Module = None", "has a type that a config cannot hold"),
        ('@lockstep.option("model")', "width: int = 1 / 0", "ZeroDivisionError: division by zero"),
        ('@lockstep.option("model")', "width: int = = 3", "SyntaxError"),
    ],
)
def test_a_mistake_in_an_extension_is_one_sentence_with_its_place(
    tmp_path: Path, decorator: str, field: str, sentence: str
) -> None:
    folder = written(tmp_path / "project", decorator, field)
    done = run(folder, "model=flat", f"output_root={tmp_path}/outputs")
    assert done.code == 2
    assert sentence in done.err
    assert f"{folder}/own/__init__.py:" in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "outputs").exists()


def test_a_config_of_an_extension_has_a_place_and_a_name_of_its_own(tmp_path: Path) -> None:
    folder = written(tmp_path / "project")
    mistakes = {"models/mine.yaml": "'models' is not a config group", "model/linear.yaml": "is an option of Lockstep"}
    for name, sentence in mistakes.items():
        file = folder / "own" / "conf" / name
        file.parent.mkdir(parents=True)
        file.write_text("_target_: own.Flat\n")
        done = run(folder)
        assert (done.code, sentence in done.err, str(file) in done.err) == (2, True, True), done.err
        file.unlink()


def test_an_extension_that_does_not_exist_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import lockstep\nlockstep.main(extensions=['nowhere'])\n")
    done = run(tmp_path)
    assert done.code == 2
    assert "the extension nowhere (named by train.py) is not a package that can be imported" in done.err


def test_a_project_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    for name, sentence in {
        "not-a-name": "cannot be the name of a Python package",
        "torch": "there is a package torch",
        "no/such/mine": "no/such is not a folder, expected one in which to create mine",
    }.items():
        done = forked("lockstep", "new", name, cwd=tmp_path)
        assert (done.code, sentence in done.err) == (2, True), done.err
    (tmp_path / "mine").mkdir()
    assert "mine exists" in forked("lockstep", "new", "mine", cwd=tmp_path).err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_fresh_process_of_a_program_has_its_extensions_without_its_import_path(tmp_path: Path) -> None:
    folder = written(tmp_path / "project")
    named = {"PYTHONSAFEPATH": "1", "LOCKSTEP_EXTENSIONS": json.dumps({"own": str(folder)})}
    done = command(sys.executable, "train.py", "model=flat", "--cfg", "job", cwd=folder, **named)
    assert done.code == 0, done.err
    done = command(sys.executable, "train.py", "model=flat", "--cfg", "job", cwd=folder, PYTHONSAFEPATH="1")
    assert "the extension own (named by train.py) is not a package that can be imported" in done.err
