"""Groups of a user's own: folders of a project's `conf`, chosen on the line, in recipes and in sweeps."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from helpers import Done, command, first_on_path, forked

pytestmark = pytest.mark.slow

GLOBAL = "# @package _global_\n"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `lockstep new mine` writes, with more files of its own group and recipes."""
    folder = tmp_path_factory.mktemp("projects")
    assert forked("lockstep", "new", "mine", cwd=folder).code == 0
    conf = folder / "mine" / "mine" / "conf"
    write(conf / "debug" / "slow.yaml", {"steps": 12, "seed": 5})
    write(conf / "debug" / "other.yaml", {"defaults": ["slow", {"override /model": "linear"}, "_self_"], "batch": 8})
    write(conf / "experiment" / "lists.yaml", {"defaults": ["first", {"/debug": "fast"}], "batch": 24})
    return folder / "mine"


def write(file: Path, values: object) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(GLOBAL + yaml.safe_dump(values))
    return file


def install(project: Path, site: Path, name: str = "mine") -> None:
    """Install the package as pip does it: on the path, with its entry point in the metadata beside it."""
    metadata = site / f"{name}-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / name).symlink_to(project / name)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text(f"[lockstep.extensions]\n{name} = {name}\n")


def train(project: Path, *words: str) -> Done:
    return forked("train.py", *words, cwd=project)


def config(project: Path, *words: str) -> dict[str, object]:
    """The keys of the job that a line describes."""
    done = train(project, *words, "--cfg", "job")
    assert done.code == 0, done.err
    values = yaml.safe_load(done.out)
    return {"steps": values["steps"], "batch": values["batch"], "limit": values["dataset"].get("limit")}


FAST = {"steps": 10, "batch": 16, "limit": 64}


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["experiment=first"], {"steps": None, "batch": 32, "limit": None}),
        (["experiment=first", "debug=fast"], FAST),
        (["debug=fast", "experiment=first"], FAST),
        (["experiment=first", "+debug=fast"], FAST),
        (["experiment=first", "debug=slow", "debug=fast"], FAST),
        (["experiment=first", "debug=[slow,fast]"], FAST),
        (["experiment=first", "debug=null"], {"steps": None, "batch": 32, "limit": None}),
        (["experiment=first", "debug=fast", "steps=3"], {**FAST, "steps": 3}),
        (["experiment=lists"], {**FAST, "batch": 24}),
        (["experiment=lists", "debug=slow"], {"steps": 12, "batch": 24, "limit": None}),
        (["experiment=lists", "debug=null"], {"steps": None, "batch": 24, "limit": None}),
        (["experiment=first", "debug=fast", "~debug"], {"steps": None, "batch": 32, "limit": None}),
        (["experiment=lists", "~debug"], {"steps": None, "batch": 24, "limit": None}),
        (["experiment=first", "debug=other"], {"steps": 12, "batch": 8, "limit": None}),
    ],
)
def test_the_line_wins_over_its_groups_and_these_over_the_recipe(
    project: Path, words: list[str], values: dict[str, object]
) -> None:
    assert config(project, *words) == values


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["debug=fsat"], "debug=fsat: there is no debug of that name. Did you mean 'fast'?"),
        (["debug=zzz"], "debug=zzz: there is no debug of that name. It is one of fast, other, slow."),
        (["dbug=fast"], "dbug: there is no such key in the config. Did you mean debug=fast?"),
        (
            ["debug=fast,slow"],
            "debug=fast,slow names several values; `python train.py -m debug",
        ),
    ],
)
def test_a_misspelt_group_or_name_is_one_sentence(project: Path, words: list[str], sentence: str) -> None:
    done = train(project, "experiment=first", *words)
    assert (done.code, sentence in done.err) == (2, True), done.err


@pytest.mark.parametrize(
    ("defaults", "sentence"),
    [
        (["first", {"debug": "fast"}], "has `- debug: fast`, expected `- /debug: fast`"),
        (["first", {"override /debug": "fast"}], "expected `- /debug: NAME`"),
        (["first", {"/debug": "fsat"}], "there is no debug of that name"),
    ],
)
def test_a_recipe_that_lists_a_group_in_vain_is_told_how(
    project: Path, defaults: list[object], sentence: str
) -> None:
    file = write(project / "mine" / "conf" / "experiment" / "wrong.yaml", {"defaults": defaults})
    done = train(project, "experiment=wrong")
    file.unlink()
    assert (done.code, sentence in done.err) == (2, True), done.err


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"ring": ["ring"]}, "debug/ring.yaml lists itself in its defaults; remove that line"),
        ({"ring": ["one"], "one": ["two"], "two": ["one"]}, ".yaml in its defaults; remove that line"),
        ({"ring": [{"/paths": "one"}], "../paths/one": [{"/debug": "ring"}]}, "lists itself by way of "),
    ],
)
def test_a_file_that_lists_itself_is_named(project: Path, files: dict[str, list[object]], sentence: str) -> None:
    folder = project / "mine" / "conf" / "debug"
    written = [write(folder / f"{name}.yaml", {"defaults": names}) for name, names in files.items()]
    done = train(project, "experiment=first", "debug=ring")
    for file in written:
        file.unlink()
    assert (done.code, sentence in done.err) == (2, True), done.err


def test_a_wrong_file_of_a_group_is_refused_where_it_is_chosen_alone(project: Path) -> None:
    file = project / "mine" / "conf" / "debug" / "wrong.yaml"
    file.write_bytes(b"steps: 3 # \xe9\n")
    assert config(project, "experiment=first", "debug=fast") == FAST
    file.write_text("steps: 3\n")
    done = train(project, "experiment=first", "debug=wrong")
    file.unlink()
    assert (done.code, f"begin it with the line `{GLOBAL.strip()}`" in done.err) == (2, True), done.err


@pytest.mark.parametrize(("folder", "text"), [("train", GLOBAL), ("modle", "width: 3\n"), ("hydra", GLOBAL)])
def test_a_folder_with_the_name_of_a_key_or_without_the_first_line_is_no_group(
    project: Path, folder: str, text: str
) -> None:
    file = project / "mine" / "conf" / folder / "x.yaml"
    file.parent.mkdir()
    file.write_text(text)
    done = train(project, "experiment=first")
    file.unlink()
    file.parent.rmdir()
    assert (done.code, f"{folder!r} is not a config group" in done.err) == (2, True), done.err


def test_a_sweep_over_a_group_runs_each_file_and_resumes_by_it(project: Path) -> None:
    words = ["experiment=first", "debug=fast,slow,null", "epochs=1", "-m", "hydra.sweep.dir=swept"]
    assert train(project, *words).code == 0
    jobs = sorted((project / "swept").glob("0*-debug=*/summary.json"))
    assert [json.loads(job.read_text())["steps"] for job in jobs] == [10, 12, 16]
    assert "3 of 3 jobs are done" in train(project, *words).out
    table = forked("lockstep", "compare", "swept", cwd=project).out
    assert "dataset.limit" not in table.splitlines()[0], "values that follow from files have no column"


def test_a_run_of_a_group_is_resumed_and_evaluated_with_its_values(project: Path) -> None:
    assert train(project, "experiment=first", "debug=fast", "hydra.run.dir=run").code == 0
    words = yaml.safe_load((project / "run" / ".hydra" / "overrides.yaml").read_text())
    assert words == ["experiment=first", "debug=fast"]
    assert train(project, "resume=run", "steps=14").code == 0
    assert json.loads((project / "run" / "summary.json").read_text())["steps"] == 14
    install(project, project / "site")
    words = ("-m", "lockstep", "evaluate", "run", "dataset.limit=16")
    done = command(sys.executable, *words, cwd=project, PYTHONPATH=first_on_path(project / "site"))
    assert done.code == 0, done.err
    assert "16 images" in done.out, done.out


def test_two_runs_with_the_same_values_are_one_setting(project: Path) -> None:
    assert train(project, "experiment=first", "debug=slow", "hydra.run.dir=named").code == 0
    assert train(project, "experiment=first", "steps=12", "seed=5", "hydra.run.dir=typed").code == 0
    done = forked("lockstep", "compare", "named", "typed", cwd=project)
    assert done.code == 0, done.err
    assert "nothing differs" in done.out, done.out


SEARCH = {
    "defaults": ["first", {"override /hydra/sweeper": "optuna"}],
    "steps": 2,
    "hydra": {"sweeper": {"n_trials": 2, "sampler": "random", "params": {"optimizer.lr": "interval(0.001, 0.1)"}}},
}


def test_a_search_in_a_file_of_the_project_runs_and_resumes(project: Path) -> None:
    write(project / "mine" / "conf" / "experiment" / "search.yaml", SEARCH)
    done = train(project, "-m", "experiment=search", "output_root=searched")
    assert done.code == 0, done.err
    assert done.out.count("started") == 2
    assert "no effect" not in done.out + done.err
    alone = train(project, "experiment=search", "output_root=alone")
    says = "hydra/sweeper=optuna has no effect on one job; add -m for the search: python train.py -m experiment="
    assert (alone.code, says in alone.out + alone.err) == (0, True), alone.out + alone.err
    again = train(project, "-m", "sweep.resume=latest", "output_root=searched")
    assert (again.code, "2 of 2 jobs are done" in again.out, again.out.count("started")) == (0, True, 0), again.err
    more = train(project, "-m", "sweep.resume=latest", "output_root=searched", "hydra.sweeper.n_trials=3")
    assert (more.code, more.out.count("started")) == (0, 1), more.err
    job = next((project / "searched" / "sweeps").glob("*/000-*"))
    assert train(project, f"resume={job}", "steps=3").code == 0


def test_a_search_of_words_resumes_without_them(project: Path) -> None:
    words = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "optimizer.lr=interval(0.001,0.1)", "steps=2"]
    assert train(project, "-m", "experiment=first", *words, "output_root=typed_search").code == 0
    again = train(project, "-m", "sweep.resume=latest", "output_root=typed_search")
    assert (again.code, "2 of 2 jobs are done" in again.out) == (0, True), again.err


@pytest.mark.parametrize("where", ["--config-dir=sent", "hydra.searchpath=[sent]"])
def test_a_search_in_a_file_of_somebody_else_is_refused(project: Path, where: str) -> None:
    write(project / "sent" / "experiment" / "theirs.yaml", SEARCH)
    done = train(project, "-m", where, "experiment=theirs")
    assert (done.code, "hydra" in done.err) == (2, True), done.err
    settings = {"hydra": {"sweeper": {"n_trials": 2}}}
    write(project / "sent" / "experiment" / "set.yaml", settings)
    done = train(project, "-m", where, "experiment=set", "hydra/sweeper=optuna", "seed=1,2")
    assert (done.code, "hydra.sweeper.n_trials is 2 in a config file" in done.err) == (2, True), done.err


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("job", {"chdir": True}, "hydra.job.chdir is true in a config file"),
        ("job", {"env_copy": ["HOME"]}, "hydra.job.env_copy copies environment variables"),
        ("launcher", {"gpus": 2}, "hydra.launcher.gpus=2 has no effect"),
        ("sweeper", {"direction": "minimize"}, "hydra.sweeper.direction=minimize, but the jobs are compared by"),
    ],
)
def test_what_an_extensions_file_may_not_say_to_hydra(
    project: Path, key: str, value: dict[str, object], sentence: str
) -> None:
    node = {key: value} | ({"launcher": {"jobs": 1}} if key != "launcher" else {})
    file = write(project / "mine" / "conf" / "experiment" / "wrong.yaml", {"hydra": node})
    done = train(project, "-m", "experiment=wrong", "seed=1,2", "hydra/sweeper=optuna")
    file.unlink()
    assert (done.code, sentence in done.err) == (2, True), done.err
