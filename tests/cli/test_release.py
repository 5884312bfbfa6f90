"""`.ci/release` builds and tags nothing before the commit is ready."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import lockstep
from helpers import ROOT, command

VERSION = lockstep.__version__
FILES = (".ci/release", ".gitignore", "CHANGELOG.md", "CITATION.cff", "src/lockstep/__init__.py")


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    return subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with a commit that has all that `.ci/release` reads, and has passed the tests."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    git(tmp_path, "init", "-q")
    passed(tmp_path)
    return tmp_path


def passed(folder: Path) -> None:
    """Commit the folder, and note as `.ci/run` does that its tests have passed."""
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "A commit")
    (folder / "build").mkdir(exist_ok=True)
    (folder / "build" / "green").write_text(git(folder, "rev-parse", "HEAD"))


def replaced(name: str, old: str, new: str) -> Callable[[Path], None]:
    def replace(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))
        passed(folder)

    return replace


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda folder: (folder / "new.py").touch(), "the checkout has changes"),
        (replaced("CITATION.cff", VERSION, "0.9.0"), "CITATION.cff does not have version: 1"),
        (replaced("CHANGELOG.md", "## 1", "## 0"), "CHANGELOG.md does not begin with ## 1"),
        (lambda folder: git(folder, "tag", f"v{VERSION}"), "there is a tag v1"),
        (lambda folder: git(folder, "commit", "-q", "--allow-empty", "-m", "Another"), "not all tests have passed"),
        (lambda folder: (folder / "build" / "green").unlink(), "not all tests have passed"),
    ],
    ids=["changes", "citation", "changelog", "tag", "another commit", "no tests"],
)
def test_a_commit_that_is_not_ready_is_refused_in_one_sentence(
    checkout: Path, spoil: Callable[[Path], None], sentence: str
) -> None:
    spoil(checkout)
    before = git(checkout, "tag")
    done = command("bash", ".ci/release", "no-python", cwd=checkout)
    assert done.code == 2
    assert sentence in done.err
    assert done.err.count("\n") == 1
    assert not (checkout / "build" / "release").exists()
    assert git(checkout, "tag") == before


def test_the_version_is_the_same_in_every_file_that_has_it() -> None:
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == VERSION


def test_a_run_of_all_tests_notes_its_commit_last() -> None:
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1].startswith("git rev-parse HEAD > build/green")
