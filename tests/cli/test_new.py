"""`lockstep new`: a project whose files have its name, or a sentence and nothing else."""

import compileall
import os
import re
from pathlib import Path

import pytest

from lockstep.cli.new import NAME, TEMPLATE, new
from lockstep.core.errors import InputError, StorageError


def test_a_project_has_every_file_of_the_template_under_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b").mkdir()
    new("a b/_Mine2")
    root = tmp_path / "a b" / "_Mine2"
    assert (
        capsys.readouterr().out
        == "created a b/_Mine2; continue with: cd 'a b/_Mine2' && python train.py experiment=first\n"
    )
    sources = [path.relative_to(TEMPLATE) for path in TEMPLATE.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    names = {str(path).replace(NAME, "_Mine2") for path in sources}
    assert {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()} == names
    assert any("_Mine2" in name for name in names)
    for path in sources:
        text = (TEMPLATE / path).read_text()
        assert (root / str(path).replace(NAME, "_Mine2")).read_text() == text.replace(NAME, "_Mine2"), path
    assert any(NAME in (TEMPLATE / path).read_text() for path in sources)
    assert compileall.compile_dir(root, quiet=2)
    assert [path.name for path in (tmp_path / "a b").iterdir()] == ["_Mine2"]


def test_what_python_has_compiled_of_the_template_is_no_file_of_a_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "template"
    for name in ("__pycache__/a.pyc", f"{NAME}/__pycache__/b.pyc", f"{NAME}/b.py"):
        (template / name).parent.mkdir(parents=True, exist_ok=True)
        (template / name).write_bytes(b"\xff" if name.endswith("pyc") else b"")
    monkeypatch.setattr("lockstep.cli.new.TEMPLATE", template)
    new(str(tmp_path / "mine"))
    assert [path.relative_to(tmp_path / "mine") for path in (tmp_path / "mine").rglob("*")] == [
        Path("mine"),
        Path("mine/b.py"),
    ]


REFUSED = {
    **dict.fromkeys(
        ("not-a-name", "2nd", "class", "é", "a b", ""), "cannot be the name of a Python package; use letters"
    ),
    **dict.fromkeys(("no/such/mine",), "no/such is not a folder, expected one in which to create mine"),
    **dict.fromkeys(("there", "dangling"), "exists; name a new folder: lockstep new (there|dangling)2"),
    **dict.fromkeys(
        ("torch", "lockstep", "json"), "there is a package (torch|lockstep|json) in this environment already"
    ),
}


@pytest.mark.parametrize("project", REFUSED)
def test_a_name_that_no_project_can_have_is_refused(
    project: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    before = {*tmp_path.iterdir()}
    with pytest.raises(InputError, match=REFUSED[project]):
        new(project)
    assert {*tmp_path.iterdir()} == before


def test_a_project_that_no_disk_can_hold_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        assert re.fullmatch(r"\.mine\..+", next(tmp_path.iterdir()).name), "beside the place of the project"
        raise OSError(28, os.strerror(28), str(path))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(StorageError, match=r"mine.* cannot be written"):
        new(str(tmp_path / "mine"))
    assert not any(tmp_path.iterdir())


def test_a_project_that_exists_is_answered_with_a_line_for_one_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b" / "mine").mkdir(parents=True)
    with pytest.raises(InputError, match=r"^a b/mine exists; name a new folder: lockstep new 'a b/mine2'$"):
        new("a b/mine")
    new("a b/mine2")
    with pytest.raises(
        InputError, match=r"^'a b/mine 2' cannot be the name of a Python package; use letters, digits"
    ):
        new("a b/mine 2")
