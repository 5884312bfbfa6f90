"""Options of a user: in the help, in an environment with several projects, and with any default."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from test_own_groups import install, write

from helpers import Done, command, first_on_path, forked

pytestmark = pytest.mark.slow

WIDE = '''

@lockstep.option("model", "wide")
class Wide(Network):
    """One layer of each width.

    Fields:
        widths: outputs of each layer,
            from the first one.
    """

    widths: list[int] = [8, 16]
    drop: float = 0.1  # dropout rate

    def build(self, classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
        sizes = zip([64, *self.widths], [*self.widths, classes])
        return nn.Sequential(nn.Flatten(), *(nn.Linear(a, b) for a, b in sizes))
'''


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two projects of `lockstep new`, both installed in `site`; the first one has a model with a list as default."""
    folder = tmp_path_factory.mktemp("projects")
    for name in ("mine", "hers"):
        assert forked("lockstep", "new", name, cwd=folder).code == 0
    model = folder / "mine" / "mine" / "model.py"
    model.write_text(model.read_text() + WIDE)
    for name in ("mine", "hers"):
        install(folder / name, folder / "site", name)
    return folder


def train(project: Path, *words: str) -> Done:
    return forked("train.py", *words, cwd=project)


def test_the_help_lists_own_options_behind_ours_with_a_mark(projects: Path) -> None:
    text = train(projects / "mine", "--help").out
    groups = text.partition("Groups,")[2].partition("\n\n")[0]
    model, loss = (
        groups.partition(f"\n  {name} ")[2].partition("\n  task ")[0].split() for name in ("model", "loss")
    )
    assert {"digitnet", "small_conv*", "wide*"} <= {*model}
    assert "poly*" in loss
    assert "\n  debug       fast*\n  * of mine" in groups


def test_the_help_of_an_own_option_has_its_keys_defaults_and_meanings(projects: Path) -> None:
    done = train(projects / "mine", "model=wide", "debug=fast", "--help")
    assert done.code == 0, done.err
    assert "# One layer of each width." in done.out
    assert "widths: [8, 16]          # outputs of each layer, from the first one." in done.out
    assert "drop: 0.1                # dropout rate" in done.out
    assert "compile: false" in done.out, "of the base class"
    assert "debug=fast sets:" in done.out
    assert "steps: 10" in done.out


def test_a_list_can_be_the_default_of_a_field(projects: Path) -> None:
    done = train(projects / "mine", "model=wide", "steps=1", "hydra.run.dir=wide")
    assert done.code == 0, done.err
    assert train(projects / "mine", "model=wide", "model.widths=[4]", "steps=1").code == 0


def test_each_project_of_an_environment_has_its_own_recipe_of_one_name(projects: Path) -> None:
    site = {"PYTHONPATH": first_on_path(projects / "site")}
    for name in ("mine", "hers"):
        words = ("train.py", "experiment=first", "--cfg", "job", "--package", "model")
        done = command(sys.executable, *words, cwd=projects / name, **site)
        assert (done.code, f"_target_: {name}.model.SmallConv" in done.out) == (0, True), done.err
    both = command(sys.executable, "-m", "lockstep", "train", "experiment=first", cwd=projects, **site)
    assert both.code == 2
    assert "is an option of" in both.err
    assert "use the train.py of one project" in both.err


def test_an_option_in_a_file_that_its_package_does_not_import_is_refused_with_the_import(projects: Path) -> None:
    for name, module in {"hello.py": "mine.hello", "more/__init__.py": "mine.more"}.items():
        file = projects / "mine" / "mine" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(
            'import lockstep\n\n@lockstep.option("callback")\nclass Hello(lockstep.Callback):\n    """Hi."""\n'
        )
        done = train(projects / "mine", "callback=hello")
        assert f"{file} declares it, but the package does not import it: add `import {module}` to" in done.err
        file.unlink()


def test_a_line_that_lacks_the_project_of_its_folder_says_so(projects: Path) -> None:
    done = forked("lockstep", "train", "experiment=first", cwd=projects / "mine")
    assert (done.code, "there is no experiment of that name" in done.err) == (2, True), done.err
    assert "The package mine of this folder is not installed: use python train.py, or pip install -e ." in done.err
    write(projects / "empty" / "pyproject.toml", {})
    (projects / "empty" / "pyproject.toml").write_text("not toml")
    broken = forked("lockstep", "train", "experiment=first", cwd=projects / "empty")
    assert (broken.code, "not installed" in broken.err) == (2, False), broken.err
