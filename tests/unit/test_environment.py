"""`env.json`: the software and hardware of a run."""

import json
import platform
import subprocess
from pathlib import Path

import pytest
import torch

from lockstep import __version__
from lockstep.core.world import World
from lockstep.runtime import environment, host


def test_the_versions_of_what_matters_are_there() -> None:
    facts = json.loads(json.dumps(environment.facts(World.solo())))
    assert facts["python"] == platform.python_version()
    assert facts["packages"]["lockstep"] == __version__
    assert facts["packages"]["torch"] == torch.__version__.partition("+")[0]
    assert all(facts["packages"][name] for name in ("torchvision", "timm", "hydra-core", "omegaconf", "numpy"))
    assert facts["world_size"] == 1
    assert facts["threads"] == torch.get_num_threads()


def test_no_environment_variable_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "a-secret-that-nobody-should-see")
    written = json.dumps(environment.facts(World.solo()))
    assert "a-secret-that-nobody-should-see" not in written
    assert "SOME_TOKEN" not in written


def test_a_package_that_is_not_installed_is_null(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "PACKAGES", ("torch", "no-such-package"))
    assert environment.facts(World.solo())["packages"]["no-such-package"] is None


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit, which contains a package."""
    root = tmp_path / "repository"
    (root / "package").mkdir(parents=True)
    (root / "package" / "__init__.py").write_text("")
    author = ("-c", "user.name=someone", "-c", "user.email=someone@example.org")
    for arguments in (("init", "-q"), ("add", "."), (*author, "commit", "-q", "-m", "first")):
        subprocess.run(["git", "-C", str(root), *arguments], check=True)
    return root


def test_the_state_of_the_source_is_its_commit_and_whether_it_was_changed(repository: Path) -> None:
    package = repository / "package"
    clean = environment.source_state(package)
    assert isinstance(clean["git"], str)
    assert len(clean["git"]) == 40
    assert clean["git_changes"] is False
    (package / "new.py").write_text("new")
    assert environment.source_state(package) == {**clean, "git_changes": True}


def test_source_that_no_repository_tracks_is_of_an_unknown_commit(repository: Path, tmp_path: Path) -> None:
    unknown = {"git": "unknown", "git_changes": "unknown"}
    for package in (tmp_path / "alone", repository / ".venv" / "site-packages" / "lockstep"):
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        assert environment.source_state(package) == unknown


def test_neither_the_current_folder_nor_a_variable_is_taken_for_the_source(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = environment.facts(World.solo())["git"]
    monkeypatch.chdir(repository)
    monkeypatch.setenv("GIT_DIR", str(repository / ".git"))
    assert environment.facts(World.solo())["git"] == here != environment.source_state(repository / "package")["git"]


@pytest.mark.parametrize(
    ("flags", "has"), [("fpu avx2 avx512f", False), ("fpu avx512_bf16", True), ("Features : fp asimd bf16", True)]
)
def test_a_processor_has_bfloat16_if_it_lists_the_flag(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: str, has: bool
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: f"flags : {flags}\n")
    monkeypatch.setattr("torch.ops.mkldnn._is_mkldnn_bf16_supported", lambda: True)
    assert host.has_bfloat16() is has
