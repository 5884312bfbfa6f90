"""A run folder that someone else sent runs no code and has nothing written outside of it."""

from __future__ import annotations

import json
import os
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
    assert "a resume downloads nothing to a folder that only the run names" in done.err
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
