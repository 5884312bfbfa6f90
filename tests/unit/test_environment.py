"""`env.json`: what a run ran on."""

from __future__ import annotations

import json
import platform
import subprocess
from pathlib import Path

import pytest
import torch

from lockstep import __version__, environment
from lockstep.world import World


def test_the_versions_of_what_matters_are_there() -> None:
    facts = json.loads(environment.as_json(World.solo()))
    assert facts["python"] == platform.python_version()
    assert facts["packages"]["lockstep"] == __version__
    assert facts["packages"]["torch"] == torch.__version__.partition("+")[0]
    assert all(facts["packages"][name] for name in ("torchvision", "timm", "hydra-core", "omegaconf", "numpy"))
    assert facts["world_size"] == 1
    assert facts["threads"] == torch.get_num_threads()


def test_no_environment_variable_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "a-secret-that-nobody-should-see")
    written = environment.as_json(World.solo())
    assert "a-secret-that-nobody-should-see" not in written
    assert "SOME_TOKEN" not in written


def test_a_package_that_is_not_installed_is_null(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "PACKAGES", ("torch", "no-such-package"))
    assert environment.facts(World.solo())["packages"]["no-such-package"] is None


def test_the_state_of_the_checkout_is_there_and_its_absence_is_null(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert environment.facts(World.solo())["git"] is None
    identity = ("-c", "user.name=someone", "-c", "user.email=someone@example.org")
    for arguments in (("init", "-q"), (*identity, "commit", "-q", "--allow-empty", "-m", "first")):
        subprocess.run(["git", *arguments], check=True)
    facts = environment.facts(World.solo())
    assert len(facts["git"]) == 40
    assert facts["git_changes"] is False
    (tmp_path / "new.txt").write_text("new")
    assert environment.facts(World.solo())["git_changes"] is True
