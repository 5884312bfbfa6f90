"""The functions for other programs: what each passes on, and what it refuses before anything is written."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lockstep
from lockstep import api
from lockstep.core import log
from lockstep.core.console import terminal
from lockstep.core.errors import InputError, StorageError
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_write import Lock
from lockstep.optim import SGD
from lockstep.runtime import signals
from lockstep.training.objects import DatasetObject

CALLS: dict[str, Callable[..., Any]] = {"train": api.train, "sweep": api.sweep, "compose": api.compose}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("words", ["epochs=3", {"epochs": 3}], ids=str)
def test_words_that_are_no_list_are_refused(name: str, words: Any) -> None:
    with pytest.raises(InputError, match=r"^overrides is .*, expected a list of words: \[\"epochs=3\"\]$"):
        CALLS[name](words)


@pytest.mark.parametrize("name", ["train", "sweep"])
def test_a_run_begins_neither_in_a_thread_nor_in_a_rank(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(InputError, match=rf"^lockstep\.{name} was called in a thread"):
        pool.submit(CALLS[name]).result()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="WORLD_SIZE=2, but no RANK"):
        CALLS[name]()
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(InputError, match=rf"^lockstep\.{name} was called in one of 2 ranks"):
        CALLS[name]()


def test_the_first_flag_among_the_words_of_a_sweep_is_named() -> None:
    with pytest.raises(InputError, match=r"^'-m' is a flag, expected KEY=VALUE$"):
        lockstep.sweep(["seed=1,2", "-m", "--cfg", "job"])
    with pytest.raises(InputError, match=r"'-m' is a flag, expected KEY=VALUE; a sweep is lockstep\.sweep"):
        lockstep.train(["-m", "seed=1,2"])


@pytest.fixture
def guests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Sequence[str], bool]]:
    """The extensions of each call, and whether it shows what it does."""
    entered: list[tuple[Sequence[str], bool]] = []

    @contextmanager
    def guest(extensions: Sequence[str], *, verbose: bool = True) -> Iterator[None]:
        entered.append((extensions, verbose))
        yield

    monkeypatch.setattr(api, "_guest", guest)
    return entered


@pytest.mark.parametrize("verbose", [True, False])
def test_a_training_has_the_words_the_objects_and_the_callbacks_of_its_call(
    verbose: bool, guests: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    callbacks = [lockstep.Callback()]
    monkeypatch.setattr(api, "_trained", lambda *given_on: given_on)
    for ranks, more in ((None, []), (0, ["launcher.ranks=0"]), (2, ["launcher.ranks=2"])):
        passed = lockstep.train(["seed=1"], callbacks=callbacks, ranks=ranks, extensions=["mine"], verbose=verbose)
        assert passed == (["seed=1", *more], {}, callbacks)
        assert guests.pop() == (["mine"], verbose)
    module = torch.nn.Linear(64, 10)
    words, objects, _ = lockstep.train(["seed=1"], model=module, optimizer=SGD(lr=0.125))  # type: ignore[misc]
    assert {"seed=1", "model=object", "optimizer=sgd", "optimizer.lr=0.125"} <= {*words}
    assert objects == {"model": module}
    empty: Any = torch.nn.Sequential()  # its length is 0
    words, objects, _ = lockstep.train(["seed=1"], model=empty, metric=[])  # type: ignore[misc]
    assert {"seed=1", "model=object", "metric=[]"} <= {*words}
    assert objects["model"] is empty


@pytest.mark.parametrize("verbose", [True, False])
def test_a_sweep_has_the_words_and_the_objects_of_its_call_and_gives_the_rows_of_its_folder(
    verbose: bool, guests: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_sweep(words: list[str], objects: Any, *, verbose: bool) -> str:
        swept.append((words, objects, verbose))
        return "its folder"

    swept: list[Any] = []
    monkeypatch.setattr("lockstep.cli.sweep.run_sweep", run_sweep)
    monkeypatch.setattr(api, "runs", lambda folder: [folder])
    assert lockstep.sweep(["seed=1,2"], extensions=["mine"], verbose=verbose) == ["its folder"]
    assert (swept.pop(), guests.pop()) == ((["seed=1,2"], {}, verbose), (["mine"], verbose))
    module = torch.nn.Linear(64, 10)
    lockstep.sweep(["seed=1,2"], model=module, optimizer=SGD(lr=0.125))
    ((words, objects, is_shown),) = swept
    assert {"seed=1,2", "model=object", "optimizer=sgd", "optimizer.lr=0.125"} <= {*words}
    assert (objects, is_shown) == ({"model": module}, True)
    lockstep.sweep(["seed=1,2"], metric=[])
    assert swept[1:] == [(["metric=[]", "seed=1,2"], {}, True)]


def test_the_parts_of_a_job_and_a_predictor_are_made_with_what_the_call_has(
    guests: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.job.prepare.job_of", lambda words: SimpleNamespace(launcher=words[0]))
    monkeypatch.setattr("lockstep.training.experiment.build_parts", lambda job: job.launcher.ranks)
    assert api.compose([SimpleNamespace(ranks=1)], extensions=["mine"]) == 1  # type: ignore[list-item, comparison-overlap]
    with pytest.raises(InputError, match=r"launcher\.ranks is 2, but a loop of your own has one rank; use launcher"):
        api.compose([SimpleNamespace(ranks=2)])  # type: ignore[list-item]
    monkeypatch.setattr("lockstep.inference.predictor.load_predictor", lambda path, **parts: (path, parts))
    module = torch.nn.Linear(2, 2)
    loaded: Any = api.load("run", device="cuda", model=module, extensions=["hers"])
    assert loaded == ("run", {"device": "cuda", "module": module})
    assert guests == [(["mine"], True), ((), True), (["hers"], True)]


def test_a_call_that_is_quiet_shows_nothing_and_uses_its_extensions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def use(extensions: Sequence[str]) -> None:
        monkeypatch.setenv("LOCKSTEP_OF_AN_EXTENSION", "1")
        used.append((extensions, terminal.quiet))

    used: list[tuple[Sequence[str], bool]] = []
    monkeypatch.setattr("lockstep.config.extensions.use", use)
    for verbose in (True, False):
        with api._guest(["mine"], verbose=verbose):
            log.show("a line")
        assert ("a line" in capsys.readouterr().out) is verbose
        assert "LOCKSTEP_OF_AN_EXTENSION" not in os.environ, "what it has set stays in the call"
    assert used == [(["mine"], False), (["mine"], True)]


def test_the_training_command_of_a_program_has_its_extensions(monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[Any] = []
    monkeypatch.setattr(signals, "begin", lambda **options: began.append(options))
    monkeypatch.setattr("lockstep.cli.train.train_command", began.append)
    lockstep.main(["mine", "another"])
    assert began == [{"says": signals.STOPPED_EARLY}, ["mine", "another"]]


def test_a_refused_training_leaves_the_folders_that_were_there_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["script.py"])
    (here := tmp_path / "here").mkdir()
    for folder in (here, tmp_path / "a" / "b" / "c"):
        with pytest.raises(InputError, match=r"^epochs is 0"):
            lockstep.train(["epochs=0", "device=cpu", f"hydra.run.dir={folder}"])
    assert [*tmp_path.iterdir()] == [here]
    with pytest.raises(StorageError, match="/dev/null/run cannot be written"):
        lockstep.train(["device=cpu", "hydra.run.dir=/dev/null/run"])


def test_datasets_of_a_program_are_an_option_with_their_names_and_channels() -> None:
    train, val, test = [(0, 1)], ((2, 3),), {4: 5}
    plain: Any = lockstep.dataset(train)
    assert isinstance(plain, DatasetObject)
    assert vars(plain)["original"] == (train, None, None)
    assert (plain.type, plain.module) == ("list", "builtins")
    assert (plain.labels, plain.channel_mean, plain.channel_std) == (None, None, None)
    whole: Any = lockstep.dataset(train, val, test, classes="ab", mean=(0.5,), std=(0.25,), skip=3)
    assert vars(whole)["original"] == (train, val, test)
    assert (whole.labels, whole.channel_mean, whole.channel_std, whole.skip) == (["a", "b"], [0.5], [0.25], 3)
    assert vars(lockstep.dataset(train, test=test))["original"] == (train, None, test)
    named: Any = lockstep.dataset(train, classes=[], mean=(), std=())
    assert (named.labels, named.channel_mean, named.channel_std) == ([], [], [])


def test_a_notebook_shows_names_scores_and_states_and_where_rows_differ() -> None:
    rows: list[dict[str, Any]] = [
        {"lr": 0.1234567 * number, "seed": 1, "state": "done", "name": f"<b>{number}", "score": None}
        for number in (1, 2)
    ]
    rows[1]["batch"] = 8
    table = lockstep.Rows(rows)._repr_html_()
    assert re.findall("<td>(.*?)</td>", table)[:5] == ["name", "score", "state", "lr", "batch"]
    assert "<td>&lt;b&gt;1</td><td></td><td>done</td><td>0.1235</td><td></td></tr>" in table
    alone = lockstep.Rows([{"seed": 1, "score": 2.0}])._repr_html_()
    assert "seed" not in alone


def test_rows_are_a_table_of_pandas_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = lockstep.Rows([{"name": "a", "lr": 0.5}, {"name": "b", "seed": 3}])
    assert [*rows.to_pandas().columns] == ["name", "lr", "seed"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="needs pandas, which is not installed: pip install pandas"):
        rows.to_pandas()


@pytest.mark.parametrize("rows", [[], [{"name": "a"}]])
def test_a_damaged_run_is_an_error_whatever_the_others_are(rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.records.runs.existing", Path)
    monkeypatch.setattr("lockstep.report.runs.list_runs", lambda root, **options: (rows, None, ["a/b is damaged"]))
    monkeypatch.setattr("lockstep.report.compare.compare_runs", lambda paths, **options: (0, rows, ["it, too"], 0))
    with pytest.raises(InputError, match=r"^a/b is damaged$"):
        lockstep.runs("a")
    with pytest.raises(InputError, match=r"^it, too$"):
        lockstep.compare("a", "b")


@dataclass(frozen=True)
class Decided:
    """What a command continues."""

    words: tuple[Any, ...] = ()
    objects: Any = None
    callbacks: Any = None


@pytest.mark.parametrize("starts_ranks", [True, False])
@pytest.mark.parametrize("objective", [0.0, None])
def test_a_training_gives_what_the_folder_of_its_run_has(
    starts_ranks: bool, objective: float | None, guests: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir.at(tmp_path / "runs" / "one")
    run.write_summary(status="completed", best_step=2)
    lines = [{"step": 1, "loss/train": 2.5}, {"step": 2, "loss/train": 1.5, "loss/val": None, "acc/val_top1": 50.0}]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    passed: list[Any] = []

    @contextmanager
    def context(name: str, entered: Any) -> Iterator[Any]:
        passed.append(name)
        yield entered
        passed.append(f"end of {name}")

    def create_run(resume: Decided, lock: Lock) -> Any:
        lock.take(tmp_path / "lock")
        passed.append((resume, type(lock)))
        return context("folder", run), SimpleNamespace(launcher=SimpleNamespace(starts_ranks=starts_ranks))

    def start_job(run_dir: RunDir, job: Any, named: Any) -> float | None:
        passed.append((run_dir, named))
        return objective

    invocation = SimpleNamespace(folder=tmp_path / "new" / "run")
    monkeypatch.setattr(
        "lockstep.config.composition.invoked", lambda words: nullcontext(({"words": words}, invocation))
    )
    monkeypatch.setattr("lockstep.job.resume.decide_resume", lambda *arguments: Decided(arguments))
    monkeypatch.setattr("lockstep.job.prepare.create_run", create_run)
    monkeypatch.setattr("lockstep.job.worker.start_job", start_job)
    monkeypatch.setattr("lockstep.job.validate.named_objects", lambda job, callbacks: {"named": callbacks})
    monkeypatch.setattr("lockstep.runtime.guest.sleeping_soon", lambda: context("sleep", None))
    monkeypatch.setattr(api, "sleep_soon", lambda: passed.append("soon"))
    callbacks = [lockstep.Callback()]
    result = lockstep.train(["seed=1"], callbacks=callbacks)
    values = {"words": ["seed=1"]}
    assert passed[:2] == ["soon", (Decided((values, invocation), {}, callbacks), Lock)]
    sleeps = [] if starts_ranks else ["sleep"]
    ended = [f"end of {name}" for name in (*sleeps, "folder")]
    assert passed[2:] == ["folder", *sleeps, (run, {"named": callbacks}), *ended]
    assert (result.folder, result.weights, result.objective) == (run.path, run.weights, objective)
    assert (result.summary["status"], result.summary["best_step"]) == ("completed", 2)
    assert result.metrics == [lines[0], {"step": 2, "loss/train": 1.5, "acc/val_top1": 50.0}]
    assert not (tmp_path / "lock").exists()
    assert not (tmp_path / "new").exists(), "the run is elsewhere, so the folder that was made for it goes"


def test_a_result_is_shown_with_its_monitor_score_step_folder_and_weights() -> None:
    facts: Any = {"folder": Path("a/b"), "metrics": [], "weights": Path("a/b/w.safetensors")}
    result = api.Result(objective=97.12345, summary={"monitor": "top1", "best_step": 7}, **facts)
    assert repr(result) == "Result: top1 97.12 at step 7\n  folder   a/b\n  weights  a/b/w.safetensors"
    bare = api.Result(objective=None, summary={}, **facts)
    assert repr(bare).splitlines()[0] == "Result: objective no score at step None"


def test_the_rows_of_a_program_have_their_folder_and_what_the_command_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def list_runs(root: Path, **options: Any) -> tuple[list[Any], None, list[str]]:
        questions.append((root, options))
        return [{"name": "a", "score": None}], None, []

    def compare_runs(paths: list[str], **options: Any) -> tuple[None, list[Any], list[str], None]:
        questions.append((paths, options))
        return None, [{"key": "lr", "difference": 0.5}], [], None

    questions: list[Any] = []
    monkeypatch.setattr("lockstep.records.runs.existing", lambda text: Path("root", text))
    monkeypatch.setattr("lockstep.report.runs.list_runs", list_runs)
    monkeypatch.setattr("lockstep.report.runs.without_status", lambda row: {**row, "bare": True})
    monkeypatch.setattr("lockstep.report.compare.compare_runs", compare_runs)
    rows = lockstep.runs(Path("a"), sort="lr", filters=["lr>1"], columns=["lr"])
    assert (rows, rows.folder) == ([{"name": "a", "score": None, "bare": True}], Path("root/a"))
    lockstep.runs()
    compared = lockstep.compare(Path("b"), "a", by=["lr"], sort="score", columns=["kwh"])
    assert (compared, compared.folder) == ([{"key": "lr", "difference": 0.5}], None)
    lockstep.compare("a")
    assert questions == [
        (Path("root/a"), {"sort": "lr", "filters": ["lr>1"], "columns": ["lr"]}),
        (Path("root/outputs"), {"sort": "when", "filters": (), "columns": ()}),
        (["b", "a"], {"by": ["lr"], "sort": "score", "columns": ["kwh"]}),
        (["a"], {"by": (), "sort": None, "columns": ()}),
    ]


def test_the_page_of_rows_has_names_scores_and_states_first_and_of_equal_columns_those_alone() -> None:
    rows = lockstep.Rows([{"lr": 1, "state": "done", "name": "a"}, {"lr": True, "state": "done", "name": "b"}])
    assert re.findall("<td>(.*?)</td>", rows._repr_html_())[:3] == ["name", "state", "lr"]
    assert lockstep.Rows()._repr_html_().count("<td>") == 0


def test_a_call_in_the_only_rank_of_a_launcher_is_no_call_of_several(
    guests: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "_trained", lambda *arguments: "trained")
    for name, value in {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert lockstep.train() == "trained"  # type: ignore[comparison-overlap]
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(
        InputError, match=r"one of 3 ranks, and each would train alone; start the script once and giv"
    ):
        lockstep.train()


def test_the_objects_of_a_call_are_passed_on_by_their_groups(
    guests: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_objects(words: Sequence[str], parts: Any) -> tuple[list[str], Any]:
        return [*words, "and more"], parts

    monkeypatch.setattr(api, "_with_objects", with_objects)
    monkeypatch.setattr(api, "_trained", lambda words, objects, callbacks: (words, objects))
    monkeypatch.setattr("lockstep.cli.sweep.run_sweep", lambda words, objects, verbose: (words, objects))
    monkeypatch.setattr(api, "runs", lambda folder: folder)
    parts: dict[str, Any] = {"model": 1, "dataset": 2, "loss": 3, "optimizer": 4}
    for call in (lockstep.train, lockstep.sweep):
        assert call(["seed=1"], **parts) == (["seed=1", "and more"], parts)
        assert call(["seed=1"]) == (["seed=1", "and more"], dict.fromkeys(("model", "dataset", "loss")))
    assert lockstep.train(ranks=3, **parts) == (["launcher.ranks=3", "and more"], parts)  # type: ignore[comparison-overlap]
