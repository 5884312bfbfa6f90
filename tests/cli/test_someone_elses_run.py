"""A run folder that someone else sent runs no code and has nothing written outside of it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from helpers import ROOT, command, composed, train, train_here

# Whatever an interpreter imports at its start, or torch and its helpers do; by name, from the folder they are in.
MODULES = ("yaml", "pickle", "json", "random", "socket", "numpy", "torch", "lockstep", "sitecustomize")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_here(tmp_path_factory.mktemp("runs") / "done", "steps=1").path


@pytest.fixture
def sent(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "sent"))


def keep(run: Path, *overrides: str) -> None:
    """Have a run folder say that it was made with these overrides, in both places that are compared."""
    words = ["steps=1", "name=test", *overrides]
    (run / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(words))
    (run / ".hydra" / "config.yaml").write_text(yaml.safe_dump(composed(*words)))


@pytest.mark.slow
def test_no_interpreter_of_a_resume_imports_from_the_run_folder(sent: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for name in MODULES:
        (sent / f"{name}.py").write_text(f"open({str(mark)!r}, 'w')\n")
    words = ("resume=.", "steps=2", "device=cpu", "launcher=elastic", "launcher.ranks=1")
    done = command(sys.executable, str(ROOT / "train.py"), *words, cwd=sent)
    assert not mark.exists()
    assert done.code == 0, done.err
    assert json.loads((sent / "summary.json").read_text())["step"] == 2


def test_a_kept_output_root_is_not_obeyed(sent: Path, tmp_path: Path) -> None:
    keep(sent, f"output_root={tmp_path / 'theirs'}")
    done = train(f"resume={sent}", "steps=2", "device=cpu", cwd=tmp_path)
    assert done.code == 0, done.err
    assert not (tmp_path / "theirs").exists()
    assert yaml.safe_load((sent / "config.yaml").read_text())["output_root"] == str(tmp_path / "outputs")


def test_a_resume_downloads_nothing_to_a_folder_that_only_the_run_names(sent: Path, tmp_path: Path) -> None:
    keep(sent, "dataset=mnist", f"data_root={tmp_path / 'theirs'}")
    done = train(f"resume={sent}", "steps=2", "device=cpu", cwd=tmp_path)
    assert done.code == 2, done.err
    assert "nothing is downloaded to a folder that only the run or a config file names" in done.err
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize(
    "word",
    [
        "+model.options={{cache_dir:'{0}',pretrained_cfg_overlay:{{url:'http://127.0.0.1:9/x.pt'}}}}",
        "model.name='local-dir:{0}'",
    ],
)
def test_a_kept_model_reads_and_writes_no_file_of_its_choice(sent: Path, tmp_path: Path, word: str) -> None:
    theirs = tmp_path / "theirs"
    keep(sent, "model=resnet18", "model.pretrained=true", word.format(theirs))
    before = sorted(os.walk(sent))
    done = train(f"resume={sent}", "steps=2", "device=cpu", cwd=tmp_path)
    assert done.code == 2, done.err
    assert done.err.startswith("lockstep: model.")
    assert len(done.err.splitlines()) == 1
    assert not theirs.exists()
    assert sorted(os.walk(sent)) == before


PERSONAL = {
    "logger.mlflow.folder": ("mlflow", "{0}/theirs"),
    "logger.mlflow.experiment": ("mlflow", "theirs"),
    "logger.wandb.mode": ("wandb", "online"),
    "logger.wandb.entity": ("wandb", "theirs"),
    "logger.wandb.project": ("wandb", "theirs"),
}


def assert_refused(folder: Path, key: str, *words: str) -> None:
    """The command is refused with a line that has the user's own override, and has left no folder."""
    before = sorted(os.walk(folder))
    done = train(*words, "device=cpu", cwd=folder)
    assert done.code == 2, done.err
    assert len(done.err.splitlines()) == 1
    assert done.err.startswith(f"lockstep: {key} is ")
    assert re.search(rf"from the command line alone; type '?{key}=", done.err)
    assert sorted(os.walk(folder)) == before


@pytest.mark.parametrize("key", PERSONAL)
def test_a_run_folder_names_no_place_outside(sent: Path, tmp_path: Path, key: str) -> None:
    logger, value = PERSONAL[key]
    keep(sent, f"logger={logger}", f"{key}={value.format(tmp_path)}")
    assert_refused(tmp_path, key, f"resume={sent}", "steps=2")


def test_all_places_of_a_run_are_refused_and_allowed_at_once(sent: Path, tmp_path: Path) -> None:
    places = ("logger.wandb.project=a b", "logger.wandb.mode=offline", f"logger.mlflow.folder={tmp_path}/ml")
    keep(sent, "logger=[wandb,mlflow]", *places)
    refused = train(f"resume={sent}", "steps=2", "device=cpu", cwd=tmp_path)
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    typed, removed = re.findall(r"(?:type|remove it with) (.+?)(?=, or remove|$)", refused.err, re.MULTILINE)
    assert shlex.split(typed) == ["logger.wandb.project=a b", *places[1:]]
    assert shlex.split(removed) == [f"{place.partition('=')[0]}=null" for place in places]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["mlflow", "{0}/outputs/mlflow", "{0}/sent/mlflow"])
def test_a_run_continues_at_a_place_inside_or_that_the_command_names(sent: Path, tmp_path: Path, place: str) -> None:
    pytest.importorskip("mlflow")
    keep(sent, "logger=mlflow", f"logger.mlflow.folder={place.format(tmp_path)}")
    done = train(f"resume={sent}", "steps=2", "device=cpu", cwd=tmp_path)
    assert done.code == 0, done.err
    assert Path(tmp_path, place.format(tmp_path), "mlflow.db").is_file()


@pytest.mark.slow
def test_the_command_that_continues_a_run_has_the_places_that_the_user_named(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    (home := tmp_path / "home").mkdir()
    done = train("steps=1", "device=cpu", "logger=mlflow", f"logger.mlflow.folder={tmp_path}/mine", cwd=home)
    assert done.code == 0, done.err
    (proposed,) = (line.split()[2:] for line in done.out.splitlines() if line.strip().startswith("train longer"))
    words = proposed[proposed.index("train.py") + 1 :] if "train.py" in proposed else proposed[1:]
    assert f"logger.mlflow.folder={tmp_path}/mine" in words
    done = train(*words, "device=cpu", cwd=home)
    assert done.code == 0, done.err


def recipe(folder: Path, form: str, key: str, value: str) -> list[str]:
    """The words of a command that composes somebody else's file, in one of the ways to do so."""
    group, name, *_ = key.split(".") if "." in key else ("", key)
    defaults = [{f"override /{group}": [name]}] if group else []
    content: dict[str, object] = {}
    node = content
    for part in key.split(".")[:-1]:
        node = node.setdefault(part, {})  # type: ignore[assignment]
    node[key.rpartition(".")[2]] = value
    (folder / "theirs" / "experiment").mkdir(parents=True)
    if form == "primary":
        text = yaml.safe_dump({"defaults": ["config", *defaults, "_self_"], **content})
        (folder / "theirs" / "primary.yaml").write_text(text)
        return ["--config-dir", "theirs", "--config-name", "primary"]
    text = "# @package _global_\n" + yaml.safe_dump({"defaults": defaults, **content})
    (folder / "theirs" / "experiment" / "theirs.yaml").write_text(text)
    search = ["--config-dir", "theirs"] if form == "config-dir" else [f"hydra.searchpath=[{folder}/theirs]"]
    return [*search, "experiment=theirs"]


@pytest.mark.parametrize("form", ["config-dir", "searchpath", "primary"])
@pytest.mark.parametrize("value", ["~/theirs", "/tmp/theirs", "../theirs"])
def test_a_recipe_names_no_output_root_outside(tmp_path: Path, form: str, value: str) -> None:
    (here := tmp_path / "here").mkdir()
    words = recipe(here, form, "output_root", value)
    assert_refused(here, "output_root", *words, "steps=1")
    assert_refused(here, "output_root", *words, "steps=1", "-m", "seed=1,2")


@pytest.mark.parametrize("key", PERSONAL)
def test_a_recipe_names_no_place_outside(tmp_path: Path, key: str) -> None:
    (here := tmp_path / "here").mkdir()
    words = recipe(here, "config-dir", key, PERSONAL[key][1].format(tmp_path))
    assert_refused(here, key, *words, "steps=1")


def test_a_recipe_downloads_nothing_to_a_folder_of_its_choice(tmp_path: Path) -> None:
    (here := tmp_path / "here").mkdir()
    words = recipe(here, "config-dir", "data_root", str(tmp_path / "theirs"))
    done = train(*words, "dataset=mnist", "steps=1", "device=cpu", cwd=here)
    assert done.code == 2, done.err
    assert "nothing is downloaded to a folder that only the run or a config file names" in done.err
    assert not (tmp_path / "theirs").exists()


def test_a_recipe_may_name_places_inside_and_the_command_any(tmp_path: Path) -> None:
    (here := tmp_path / "here").mkdir()
    words = recipe(here, "config-dir", "output_root", "runs")
    done = train(*words, "steps=1", "device=cpu", cwd=here)
    assert done.code == 0, done.err
    assert (here / "runs" / "latest").exists()
    done = train(*words, "steps=1", "device=cpu", f"output_root={tmp_path}/mine", cwd=here)
    assert done.code == 0, done.err
    assert (tmp_path / "mine" / "latest").exists()


def test_a_sweep_of_a_file_is_not_the_command(tmp_path: Path) -> None:
    (here := tmp_path / "here").mkdir()
    words = recipe(here, "primary", "hydra.sweeper.params", "")
    (here / "theirs" / "primary.yaml").write_text(
        yaml.safe_dump(
            {
                "defaults": ["config", {"override /logger": ["mlflow"]}, "_self_"],
                "hydra": {"sweeper": {"params": {"logger.mlflow.folder": str(tmp_path / "theirs")}}},
            }
        )
    )
    done = train(*words, "-m", "seed=1", "steps=1", "device=cpu", cwd=here)
    assert done.code == 2, done.err
    assert "logger.mlflow.folder is " in done.err
    assert not (tmp_path / "theirs").exists()
