"""A wheel has what the checkout has: its files, and the commands of two documents work where it is installed."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_documents import DOCUMENTS, assert_shows, commands_of, shortened

from forks import Forks
from helpers import ROOT, build_wheel, command, copied_source, forks_of, installed, origin, result

PACKAGES = ("lockstep", "hydra_plugins")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def python(wheel: Path) -> Path:
    """The interpreter of an environment with the wheel."""
    return installed(wheel.parent / "environment", str(wheel))


def packed_files(wheel: Path) -> set[str]:
    names = zipfile.ZipFile(wheel).namelist()
    return {name for name in names if name.startswith(PACKAGES) and ".dist-info/" not in name}


def source_files(source: Path) -> set[str]:
    """The files of both packages, also behind the link to `conf`, without what Python leaves among them."""
    names = {
        str(Path(folder, name).relative_to(source))
        for package in PACKAGES
        for folder, _, names in os.walk(source / package, followlinks=True)
        for name in names
    }
    return {name for name in names if "__pycache__/" not in name}


def test_the_wheel_has_every_file_of_the_checkout_and_no_other(wheel: Path) -> None:
    assert packed_files(wheel) == source_files(ROOT / "src")


def test_a_new_kind_of_file_is_in_the_wheel_but_not_what_python_leaves(tmp_path: Path) -> None:
    source = copied_source(tmp_path / "source")
    package = source / "src" / "lockstep"
    for name in ("report/pages/new.css", "conf/model/new.json", "new_folder/data.bin", "template/new.cfg", "new"):
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).touch()
    expected = source_files(source / "src")
    for name in ("cli/__pycache__/main.cpython-311.pyc", "template/__pycache__/train.cpython-311.pyc"):
        (package / name).parent.mkdir()
        (package / name).touch()
    assert packed_files(build_wheel(tmp_path, source)) == expected


@pytest.mark.slow
def test_a_wheel_that_is_built_from_the_sdist_has_the_same_content(wheel: Path, tmp_path: Path) -> None:
    code = "from setuptools import build_meta; import sys; build_meta.build_sdist(sys.argv[1])"
    done = command(sys.executable, "-c", code, str(tmp_path), cwd=copied_source(tmp_path / "source"))
    assert done.code == 0, done.err
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    shutil.rmtree(tmp_path / "source")
    first, second = (zipfile.ZipFile(path) for path in (wheel, build_wheel(tmp_path, source)))
    assert {name: first.read(name) for name in first.namelist()} == {
        name: second.read(name) for name in second.namelist()
    }


@pytest.fixture(scope="module")
def installed_forks(python: Path) -> Iterator[Forks]:
    """That interpreter, for commands as its forks: test_first_hour.py has fresh ones."""
    started = forks_of(str(python))
    yield started
    started.close()


@pytest.mark.slow
@pytest.mark.parametrize("document", ["docs/use.md", "docs/sweeps.md"])
def test_the_commands_of_a_document_work_where_the_wheel_is_installed(
    document: str, python: Path, installed_forks: Forks, tmp_path: Path
) -> None:
    assert origin(python).is_relative_to(python.parents[1])
    environment = {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": ""}
    assert result(installed_forks.start(str(ROOT / "docs" / "photos.py"), cwd=tmp_path)).code == 0
    for documented in commands_of(document):
        text = re.sub(r"^python train\.py", "lockstep train", shortened(documented))
        if text.startswith("python docs/"):
            continue
        process = installed_forks.start(*shlex.split(text), cwd=tmp_path, **environment)
        if re.match("lockstep (demo|watch) ", text):
            assert_shows(text, process)
            continue
        done = result(process)
        assert (done.code, "could not be written" in done.err) == (0, False), f"{text}\n{done.err}"


@pytest.mark.slow
@pytest.mark.parametrize("editable", [True, False])
def test_installing_an_extra_as_errors_and_documents_propose_keeps_the_installation(
    editable: bool, wheel: Path, tmp_path: Path
) -> None:
    source = copied_source(tmp_path / "source")
    python = installed(tmp_path / "environment", *(["-e", str(source)] if editable else [str(wheel)]))
    before = origin(python)
    assert before.is_relative_to(source) == editable
    pip = (sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index")
    done = command(*pip, "lockstep[demo]", PYTHONPATH="")
    assert "already satisfied: lockstep[demo]" in done.out
    if editable:
        assert command(*pip, "--no-build-isolation", "-e", ".[demo]", cwd=source, PYTHONPATH="").code == 0
    assert origin(python) == before


def test_every_proposed_installation_of_an_extra_names_one_and_no_copy_replaces_an_editable_checkout() -> None:
    """`lockstep[EXTRA]` keeps what is installed, as the test above shows; `.[EXTRA]` does so with `-e` only."""
    paths = [ROOT / name for name in DOCUMENTS]
    paths += [path for name in ("src/**/*.py", "conf/**/*.yaml") for path in ROOT.glob(name)]
    proposed = [line for path in paths for line in re.findall(r"pip install (?:-e )?'?[^\s{]*\[.*", path.read_text())]
    assert len(proposed) > 10
    for line in proposed:
        assert re.match(r"pip install (-e '\.|'lockstep)\[(\w+)\]'", line), line
        assert re.findall(r"\[(\w+)\]", line)[0] in EXTRAS
