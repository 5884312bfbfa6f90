"""Another code of the user: `compare`, `resume`, a sweep and weights say so."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from helpers import Done, forked

pytestmark = pytest.mark.slow

WORDS = ("experiment=first", "device=cpu", "launcher.threads=1", "steps=2", "checkpoint.every=1")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new project in a repository, and a run of it."""
    folder = tmp_path_factory.mktemp("projects")
    done = forked("lockstep", "new", "mine", cwd=folder)
    assert done.code == 0, done.err
    author = ("-c", "user.name=someone", "-c", "user.email=someone@example.org")
    for words in (("init", "-q"), ("add", "."), (*author, "commit", "-qm", "first")):
        subprocess.run(["git", "-C", str(folder / "mine"), *words], check=True)
    train(folder / "mine", "a")
    return folder / "mine"


@pytest.fixture
def project(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "mine"))


def train(project: Path, name: str, *words: str, code: int = 0) -> Done:
    place = [f"hydra.run.dir=outputs/{name}"] if name else []
    done = forked("train.py", *WORDS, *place, *words, cwd=project)
    assert done.code == code, done.err
    return done


def change(project: Path, old: str = "nn.ReLU", new: str = "nn.GELU") -> None:
    file = project / "mine" / "model.py"
    file.write_text(file.read_text().replace(old, new))


def compare(project: Path, second: str = "b") -> list[dict[str, Any]]:
    done = forked("lockstep", "compare", "outputs/a", f"outputs/{second}", "--json", cwd=project)
    assert done.code == 0, done.err
    return list(json.loads(done.out))


def forget(project: Path, name: str) -> None:
    """Have a run be as an earlier version has written it."""
    facts = environment(project, name)
    del facts["code"], facts["earlier_code"]
    (project / "outputs" / name / "env.json").write_text(json.dumps(facts))


def environment(project: Path, name: str) -> dict[str, Any]:
    return dict(json.loads((project / "outputs" / name / "env.json").read_text()))


def test_a_run_records_the_code_of_its_extension(project: Path) -> None:
    code = environment(project, "a")["code"]["mine"]
    assert [*code["files"]] == ["__init__.py", "data.py", "loss.py", "model.py"]
    assert (code["place"], code["git_changes"], len(code["git"])) == ("mine", False, 40)


def test_two_ranks_record_it_once(project: Path) -> None:
    change(project)
    for name, words in (("forks", ()), ("fresh", ("launcher=elastic",))):
        train(project, name, "launcher.ranks=2", *words)
        assert (project / "outputs" / name / "code.diff").read_text().count("+            nn.GELU()") == 2
    assert environment(project, "forks")["code"] == environment(project, "fresh")["code"]


def test_a_resume_says_what_has_changed_and_keeps_both(project: Path) -> None:
    silent = train(project, "a", "steps=3")
    assert "code has changed" not in silent.err
    change(project)
    done = forked("train.py", "resume=latest", "steps=4", cwd=project)
    assert done.code == 0, done.err
    assert done.err.count("resume: code has changed since the run last began: mine (model.py)") == 1
    (earlier,) = environment(project, "a")["earlier_code"]
    assert (earlier["until_step"], earlier["git_changes"]) == (3, False)


def test_compare_names_the_files_first(project: Path) -> None:
    change(project)
    train(project, "b", "seed=1", "optimizer.lr=0.02")
    rows = compare(project)
    assert [row["cause"] for row in rows[:4]] == ["your code", "config", "seed", "code"]
    assert (rows[0]["key"], rows[3]["key"]) == ("mine/model.py", "mine.git_changes")
    table = forked("lockstep", "compare", "outputs/a", "outputs/b", cwd=project).out
    assert "your code" in table.splitlines()[3]


def test_compare_says_that_nothing_differs_only_of_equal_code(project: Path) -> None:
    train(project, "b")
    assert compare(project) == []
    change(project, "Two convolutions", "2 convolutions")
    train(project, "c")
    assert [row["key"] for row in compare(project, "c")] == ["mine/model.py", "mine.git_changes"]
    train(project, "c", "steps=3")
    change(project, "2 convolutions", "Two convolutions")
    train(project, "b", "steps=3")
    train(project, "a", "steps=3")
    train(project, "c", "steps=4")
    assert compare(project, "c")[0]["key"] == "mine until step 3"


def test_compare_says_which_code_was_not_recorded(project: Path) -> None:
    train(project, "b")
    for name, names in (("a", "A"), ("b", "A and B")):
        forget(project, name)
        done = forked("lockstep", "compare", "outputs/a", "outputs/b", cwd=project)
        assert f"the code of {names} was not recorded" in done.out
        assert "nothing differs" not in done.out
    assert compare(project) == []


def test_a_sweep_names_the_jobs_of_other_code(project: Path) -> None:
    words = ("-m", "seed=0,1,2", "sweep.objectives=[score]")
    train(project, "", *words)
    assert "other code" not in train(project, "", *words).out
    change(project)
    done = train(project, "", "-m", "seed=0,1,2,3", "sweep.objectives=[score]")
    assert "warning: trained with other code of mine (model.py): jobs 0-2; sweep.resume=new trains all" in done.out


def test_a_strict_run_is_not_resumed_with_other_code(project: Path) -> None:
    train(project, "strict", "repro=strict")
    change(project)
    done = train(project, "strict", "repro=strict", "steps=3", code=2)
    assert "since the run last began: mine (model.py), and repro=strict continues with the same code" in done.err
    assert "init_from=outputs/strict" in done.err
    change(project, "nn.GELU", "nn.ReLU")
    train(project, "strict", "repro=strict", "steps=3")


def test_a_run_from_before_is_resumed_in_silence(project: Path) -> None:
    forget(project, "a")
    change(project)
    assert "code has changed" not in train(project, "a", "steps=3").err


REFUSES = """

@lockstep.option("logger")
class Refuses:
    def build(self, run):
        raise lockstep.InputError("this logger cannot be used")
"""


def test_a_run_that_a_rank_refuses_leaves_no_diff(project: Path) -> None:
    change(project, "import lockstep\n", "import lockstep\n" + REFUSES)
    assert "this logger cannot be used" in train(project, "none", "logger=refuses", code=2).err
    assert not (project / "outputs" / "none").exists()


def test_weights_name_the_package_that_they_need(project: Path, tmp_path: Path) -> None:
    weights = str(project / "outputs" / "a" / "model.safetensors")
    image = tmp_path / "image.png"
    code = f"import lockstep; lockstep.load({weights!r}, extensions=['mine'])"
    done = forked("lockstep", "predict", weights, str(image), cwd=tmp_path)
    assert done.code == 2
    assert f"{weights} needs the package mine, which is not an extension here; install it with pip" in done.err
    assert "was trained with other code" not in forked("-c", code, cwd=project).err
    change(project)
    done = forked("-c", code, cwd=project)
    assert done.code == 0, done.err
    assert done.err.count(f"{weights} was trained with other code of mine") == 1


PROGRAM = """
import sys
import torch
import lockstep
from lockstep.models.nets import Network
from losses import own_loss

@lockstep.option("model")
class Own(Network):
    def build(self, classes, input_shape):
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, classes))

class Idle(lockstep.Callback):
    def step_end(self, run):
        pass

if __name__ == "__main__":
    if "-m" in sys.argv:
        lockstep.main()
    elif "sweep" in sys.argv:
        sys.argv.remove("sweep")
        lockstep.sweep(sys.argv[1:], loss=own_loss)
    else:
        lockstep.train(sys.argv[1:], loss=own_loss, callbacks=[Idle()])
"""
LOSSES = """
from torch.nn.functional import cross_entropy

def own_loss(logits, targets):
    return cross_entropy(logits, targets, reduction="none")
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A folder with a script that declares an option and a callback, and a module with a loss."""
    (tmp_path / "script.py").write_text(PROGRAM)
    (tmp_path / "losses.py").write_text(LOSSES)
    return tmp_path


def call(program: Path, name: str, *words: str, code: int = 0) -> Done:
    place = [f"hydra.run.dir=outputs/{name}"] if name else []
    done = forked(
        "script.py", "model=own", "device=cpu", "launcher.threads=1", "steps=2", *place, *words, cwd=program
    )
    assert done.code == code, done.err
    return done


def edit(program: Path, file: str) -> None:
    (program / file).write_text((program / file).read_text() + "# another line\n")


def test_the_code_of_a_script_and_of_its_modules_is_a_cause_and_tells_runs_apart(program: Path) -> None:
    call(program, "a")
    edit(program, "script.py")
    call(program, "b", "launcher.ranks=2", "launcher=elastic")
    call(program, "b1", "launcher.ranks=2")
    assert environment(program, "b")["code"] == environment(program, "b1")["code"]
    edit(program, "losses.py")
    call(program, "c")
    assert compare(program)[0]["key"] == "__main__/script.py"
    assert [row["key"] for row in compare(program, "c")] == ["__main__/script.py", "losses/losses.py"]
    done = forked("lockstep", "compare", "outputs", "--json", cwd=program)
    rows = json.loads(done.out)
    shown = [(row["code of __main__"], row["code of losses"]) for row in rows]
    assert len({*shown}) == 3, shown


def test_a_resume_with_another_script_says_so_and_a_strict_one_is_refused(program: Path) -> None:
    call(program, "a")
    call(program, "strict", "repro=strict")
    edit(program, "script.py")
    assert "code has changed since the run last began: __main__ (script.py)" in call(program, "a", "steps=3").err
    done = call(program, "strict", "repro=strict", "steps=3", code=1)
    assert "__main__ (script.py), and repro=strict continues with the same code" in done.err


@pytest.mark.parametrize("kind", ["-m", "sweep"])
def test_a_sweep_of_a_script_names_the_jobs_of_another_one(program: Path, kind: str) -> None:
    words = (kind, "seed=0,1", "sweep.objectives=[score]")
    call(program, "", *words)
    edit(program, "script.py")
    assert "trained with other code of __main__ (script.py): jobs 0, 1" in call(program, "", *words).out
