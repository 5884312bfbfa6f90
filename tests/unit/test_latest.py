"""`latest` is the newest run of the `output_root` in effect, and a job keeps the run that it was at its begin."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import OmegaConf

from helpers import ROOT, composed, forked, train_here
from lockstep.config import components, composition
from lockstep.config.commands import latest_starts, parsed
from lockstep.config.composition import Invocation
from lockstep.config.hydra_versions import initialize_config_dir
from lockstep.core.errors import InputError
from lockstep.core.fields import leaves
from lockstep.core.run_dir import RunDir
from lockstep.job.resume import Resume, decide_resume
from lockstep.records.ledger import Ledger
from lockstep.sweeps.line import choose_folder

KEYS = {"init_from=latest": (), "task.teacher=latest": ("task=distill",)}
ROOTS = ("runs", "nested/runs/", "{}/elsewhere", "outputs")


def started(root: str, name: str, decided: Resume | None = None) -> str:
    """A run below an output root, the newest one; its path."""
    run = RunDir.at(Path(root, name))
    if decided is not None:
        run.composed.write_text(components.dump(decided.composed))
        run.overrides.write_text(components.dump(decided.overrides))
    run.mark_latest(Path(root))
    return str(run.path)


def decided(*words: str, folder: Path | None = None, earlier: str = "") -> Resume:
    called = Invocation(overrides=words, sweep=False, folder=folder, hydra="")
    return decide_resume(composed(*words), called, earlier)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    started("outputs", "of the default root")


@pytest.mark.parametrize("word", KEYS)
@pytest.mark.parametrize("root", ROOTS)
def test_a_job_keeps_the_run_that_latest_was(tmp_path: Path, word: str, root: str) -> None:
    root, key = root.format(tmp_path), word.partition("=")[0]
    words = (*KEYS[word], word, f"output_root={root}", "seed=3")
    base = started(root, "base")

    def named(resume: Resume) -> Path:
        (typed,) = (text.partition("=")[2] for text in resume.overrides if text.startswith(f"{key}="))
        assert typed == dict(leaves(resume.composed))[key] == dict(leaves(resume.values))[key]
        assert f"{key}={typed}" in resume.typed
        return Path(typed.strip('"'))

    first = decided(*words)
    assert named(first).resolve() == Path(base).resolve()
    own = Path(started(root, "own", first))
    for again in (decided(*words), decided(*words, folder=own), decided(*words, earlier=str(own))):
        assert named(again) == named(first), "it takes neither itself nor what has come between"
    started(root, "between")
    assert named(decided(*words, folder=own)) == named(first)
    assert named(decided(*words, "epochs=9")).name == "between"
    with pytest.raises(InputError, match=f"^{key}=latest is .*between, the run itself; name another one with {key}="):
        decided(*words, folder=Path(root, "between").absolute())


@pytest.mark.parametrize("word", KEYS)
def test_latest_that_is_none_names_the_output_root(word: str) -> None:
    with pytest.raises(InputError, match=f"^{word}: no run has been started in empty yet; name a run folder$"):
        decided(*KEYS[word], word, "output_root=empty")


@pytest.mark.parametrize("words", [("seed=1,2", "init_from=latest"), ("init_from=latest,null",)], ids=str)
def test_all_jobs_of_a_sweep_start_from_one_run_also_when_its_line_is_typed_again(words: tuple[str, ...]) -> None:
    base = started("runs", "base")
    folders = []
    for _ in range(2):
        with initialize_config_dir(str(ROOT / "conf")):
            loader = GlobalHydra.instance().config_loader()
            config = loader.load_configuration("config", [*words, "output_root=runs", "name=x"], RunMode.MULTIRUN)
            folders.append(choose_folder(config).folder)
        started("runs", "job")
        started_from = [word.replace("latest", base) for word in words]
        assert [*config.hydra.overrides.task] == [*started_from, "output_root=runs", "name=x"]
    assert folders[0] == folders[1]
    assert Ledger(folders[0]).identity().latest == base


def test_the_path_of_the_run_that_a_sweep_starts_from_is_taken_as_it_is() -> None:
    base = started("runs", r"a\d, \1")
    words = ["seed=1,2", "init_from=latest", "output_root=runs", "name=x"]
    with initialize_config_dir(str(ROOT / "conf")):
        loader = GlobalHydra.instance().config_loader()
        config = loader.load_configuration("config", words, RunMode.MULTIRUN)
        choose_folder(config)
    assert parsed(config.hydra.overrides.task[1]) == base


def test_a_recipe_says_latest_and_where(tmp_path: Path) -> None:
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    recipe = "# @package _global_\noutput_root: runs\ninit_from: latest\n"
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text(recipe)
    base = started("runs", "base")
    with composition.invoked([f"hydra.searchpath=[{tmp_path}/conf]", "experiment=mine"]) as (values, invocation):
        resume = decide_resume(values, invocation)
    assert (resume.values["init_from"], resume.overrides[-1]) == (base, f"init_from={base}")


@pytest.mark.parametrize("command", ["runs", "report", "evaluate"])
def test_a_command_takes_the_latest_run_of_the_output_root_that_is_typed(tmp_path: Path, command: str) -> None:
    for name in ("outputs", "mine"):
        train_here(tmp_path / name / "run", "steps=1")
        (tmp_path / name / "latest").write_text("run")
    done = forked("lockstep", command, "latest", "output_root=mine", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "ignored" not in done.err
    assert "mine/run" in done.out + done.err
    assert "outputs/run" not in done.out + done.err


def chosen_words(*words: str, **of_files: str) -> tuple[list[str], Ledger]:
    """The words of the jobs of a line, and its sweep; files have set some keys."""
    with initialize_config_dir(str(ROOT / "conf")):
        loader = GlobalHydra.instance().config_loader()
        config = loader.load_configuration("config", [*words, "output_root=runs"], RunMode.MULTIRUN)
        for key, value in of_files.items():
            OmegaConf.update(config, key, value)
        ledger = choose_folder(config)
    return [*config.hydra.overrides.task], ledger


def test_only_a_start_that_is_latest_is_the_newest_run_of_a_sweep() -> None:
    base = started("runs", "base")
    words = ("init_from=latest,x/latest,latest.st,my-latest", "name=latest", "seed=1,2")
    expected = [f"init_from={base},x/latest,latest.st,my-latest", *words[1:], "output_root=runs"]
    assert chosen_words(*words)[0] == expected


def test_the_starts_of_files_come_behind_the_line_in_their_order_unless_it_types_them() -> None:
    base = started("runs", "base")
    both = {"init_from": "latest", "task.teacher": "latest"}
    words, _ = chosen_words("task=distill", "name=x", **both)
    assert words == ["task=distill", "name=x", "output_root=runs", f"init_from={base}", f"task.teacher={base}"]
    words, _ = chosen_words("task=distill", "name=y", "task.teacher=latest", **both)
    assert words[2:] == [f"task.teacher={base}", "output_root=runs", f"init_from={base}"]


def test_all_jobs_of_a_sweep_start_from_the_run_that_a_recipe_names() -> None:
    base, folders = started("runs", "base"), []
    for _ in range(2):
        words, ledger = chosen_words("seed=1,2", "name=x", init_from="latest")
        assert words[-1] == f"init_from={base}"
        assert ledger.identity().latest == base
        folders.append(ledger.folder)
        started("runs", "job")  # is newer when the line is typed again
    assert folders[0] == folders[1]


def test_the_newest_run_is_below_an_output_root_of_the_home_and_a_kept_one_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    started(str(tmp_path / "mine"), "one")
    newest = str(Path("mine", "one"))
    values = {"init_from": "latest", "task": {"teacher": "latest"}, "output_root": "~/mine"}
    assert latest_starts(values) == {"init_from": newest, "task.teacher": newest}
    earlier = {"init_from": "a", "task": {"teacher": "b"}}
    assert latest_starts(values, earlier) == {"init_from": "a", "task.teacher": "b"}
    assert latest_starts(values, {"init_from": "a"}) == {"init_from": newest, "task.teacher": newest}
    assert latest_starts({**values, "init_from": "there"}) == {"task.teacher": newest}
    assert latest_starts({**values, "init_from": None, "task": {}}, earlier) == {}
    with pytest.raises(InputError, match=r"^task\.teacher=latest: no run has been started in empty yet"):
        latest_starts({"init_from": "x", "task": {"teacher": "latest"}, "output_root": "empty"})
