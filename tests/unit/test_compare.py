"""`lockstep compare` and `lockstep runs`: what they read, what they compute, what they refuse."""

import csv
import io
import itertools
import json
import os
import re
import shlex
import shutil
import socket
import string
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.stats import ttest_ind
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

import lockstep
from lockstep.config import components
from lockstep.config.options import value_text
from lockstep.core import console, log
from lockstep.core.errors import InputError
from lockstep.core.fields import Role
from lockstep.core.observer import RunInfo
from lockstep.core.plan import make_plan
from lockstep.core.run import Run, State, born
from lockstep.core.run_dir import RunDir, relative, slug
from lockstep.core.tags import Direction, Monitor
from lockstep.records.ledger import Identity, Ledger
from lockstep.records.record import (
    Record,
    best_of,
    cells,
    columns_of,
    directions_of,
    figure_of,
    head,
    job_key,
    objectives_of,
    score_text,
    swept_keys,
    unmeasured,
    varied,
)
from lockstep.records.runs import (
    JobRun,
    differing,
    existing,
    groups,
    is_below,
    ordered,
    read_jobs,
    read_runs,
    read_single,
    run_folders,
    setting,
    settings,
    welch,
)
from lockstep.records.tables import _difference, column_of_figure, columns_of_keys, errors_of, job_numbers
from lockstep.report.compare import causes, compare
from lockstep.report.report import report
from lockstep.report.runs import _fits, list_runs, runs
from lockstep.report.sweep_page import sweep_page
from lockstep.report.watch import watch
from lockstep.telemetry.loggers import TensorBoard
from lockstep.telemetry.progress import format_timestamp
from lockstep.training.trained import find_weights

COMPOSED = {
    "batch": 64,
    "seed": 0,
    "output_root": "outputs",
    "model": {"_target_": "lockstep.models.DigitNet", "width": 32},
    "optimizer": {"_target_": "lockstep.optim.AdamW", "lr": "auto"},
    "loader": {"_target_": "lockstep.data.loading.Auto", "workers": "auto"},
    "cost": {"usd_per_gpu_hour": None},
}
CAPSYS = pytest.CaptureFixture[str]


def run(folder: Path, *words: str, status: str = "completed", score: Any = None, **env: Any) -> Path:
    """The folder of a run as a run leaves it, with these overrides."""
    run_dir = RunDir.at(folder)
    config = json.loads(json.dumps(COMPOSED))
    choices = {"model": "digitnet", "optimizer": "adamw", "loader": "auto", "experiment": None}
    for key, value in (word.split("=", 1) for word in words):
        if key in choices:
            choices[key] = value
        elif "." in key:
            config[key.split(".")[0]][key.split(".")[1]] = value
        else:
            config[key] = value
    run_dir.composed.write_text(components.dump(config))
    run_dir.overrides.write_text(components.dump([*words]))
    (run_dir.hydra / "hydra.yaml").write_text(json.dumps({"hydra": {"runtime": {"choices": choices}}}))
    run_dir.environment.write_text(json.dumps({"git": "a1", "packages": {"torch": "2.15.0"}, "threads": 1, **env}))
    run_dir.start_summary(run="r", started=1.0)
    run_dir.write_summary(status=status, **({} if score is None else {"objective": score}))
    return folder


def sweep(folder: Path, scores: dict[tuple[str, ...], float | None]) -> Ledger:
    """A sweep with a job for each combination of overrides; one without a score has failed before its folder."""
    ledger = Ledger(folder)
    keys = sorted({word.split("=")[0] for words in scores for word in words})
    ledger.create(Identity(figure="top1", swept=tuple(keys), words=tuple(f"{key}=1,2" for key in keys)))
    records = ledger.enter((words, slug(",".join(words))) for words in scores)
    for record, score in zip(records, scores.values(), strict=True):
        started = ledger.start(record)
        if score is None:
            ledger.end(started, State.failed, exit_code=2, error="it is wrong")
        else:
            run(folder / record.folder, *record.overrides, score=score)
            ledger.end(started, State.done, objective=score)
    return ledger


@pytest.fixture
def swept(tmp_path: Path) -> Ledger:
    scores = {"0.1": (90.0, 92.0, 91.0), "0.2": (90.5, 91.0, 91.5), "0.5": (10.0, 12.0, None)}
    jobs = {(f"optimizer.lr={lr}", f"seed={seed}"): score for lr in scores for seed, score in enumerate(scores[lr])}
    return sweep(tmp_path / "outputs" / "sweeps" / "one", jobs)


def table(capsys: CAPSYS) -> str:
    return capsys.readouterr().out


@pytest.mark.parametrize(("first", "second"), [((3, 2), (4, 1)), ((2, 2), (9, 5)), ((30, 1), (2, 8))])
def test_the_interval_is_the_one_of_welch(first: tuple[int, float], second: tuple[int, float]) -> None:
    generator = np.random.default_rng(1)
    samples = [generator.normal(90, spread, size).tolist() for size, spread in (first, second)]
    expected = ttest_ind(*samples, equal_var=False).confidence_interval(0.95)
    assert welch(*samples) == pytest.approx(tuple(expected), rel=1e-12)
    assert welch([3.0, 3.0], [1.0, 1.0]) == (2.0, 2.0), "without spread, it is one point"


@pytest.mark.parametrize("number", ["0", "-1", "0.5", "2.", "1e-3", "-2.5e-07", "1e5"])
def test_a_condition_takes_a_number_in_any_form_and_not_the_number_itself(number: str) -> None:
    limit = float(number)
    for sign, value in (("<", limit - 1), (">", limit + 1)):
        fits = [_fits({"lr": of}, f"lr{sign}{number}", {"lr"}) for of in (value, limit, 2 * limit - value)]
        assert fits == [True, False, False]


def test_a_program_has_each_argument_of_the_commands(swept: Ledger, capsys: CAPSYS) -> None:
    folder, usual = str(swept.folder), {"by": [], "sort": None, "columns": []}
    for options in ({"by": ["seed"]}, {"sort": "optimizer.lr"}, {"columns": ["started"]}, {}):
        compare([folder], **{**usual, **options}, form="json")  # type: ignore[arg-type]
        assert lockstep.compare(folder, **options) == json.loads(table(capsys))  # type: ignore[arg-type]
    usual = {"filters": [], "sort": "when", "columns": []}
    for options in ({"filters": ["seed=1"]}, {"sort": "score"}, {"columns": ["started"]}, {}):
        runs(folder, **{**usual, **options}, form="json")  # type: ignore[arg-type]
        assert lockstep.runs(folder, **options) == json.loads(table(capsys))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((0.0, -1.0, 0.0), "+0.00 [-1.00, +0.00]"),
        ((-0.5, -1.0, 0.25), "-0.50 [-1.00, +0.25]"),
        ((-0.5, None, None), "-0.50"),
        ((0.0, None, None), ""),
        ((None, None, None), ""),
    ],
)
def test_a_difference_and_its_ends_have_signs_and_zero_a_plus(numbers: tuple[float | None, ...], text: str) -> None:
    assert _difference(dict(zip(("difference", "low", "high"), numbers, strict=True)), "top1") == text


def test_seeds_are_grouped_the_best_first_and_failures_counted(swept: Ledger, capsys: CAPSYS) -> None:
    rows = groups(read_runs(swept.folder))
    assert [(row["optimizer.lr"], row["score"], row["done"], row["state"]) for row in rows] == [
        ("0.1", 91.0, 3, "3 done"),
        ("0.2", 91.0, 3, "3 done"),
        ("0.5", 11.0, 2, "2 done, 1 failed"),
    ]
    assert [row["within_spread"] for row in rows] == [None, True, False]
    compare([str(swept.folder)], by=[], sort=None, form="table")
    shown = table(capsys)
    assert re.search(r"^0-2 +0\.1 +91\.00 ± 1\.00 +3 done *$", shown, re.MULTILINE)
    assert "Welch's 95 % interval" in shown
    assert "best: job 1 with 92.00 % top-1, " in shown
    assert re.findall(r"^\d+ [a-z]+: .*$", shown, re.MULTILINE) == ["1 failed: it is wrong"]


def test_a_row_has_all_values_of_a_key_in_which_its_runs_differ(swept: Ledger) -> None:
    rows = groups(read_runs(swept.folder), names=["seed", "batch"])
    assert [(row["seed"], row["batch"]) for row in rows] == [("0,1,2", "64")] * 3
    row, *_ = groups(read_runs(swept.folder), by=["batch"], names=["optimizer.lr"])
    assert row["optimizer.lr"] == "0.1,0.2,0.5"


def test_a_sweep_of_seeds_is_listed_by_the_mean_that_compare_shows(swept: Ledger, capsys: CAPSYS) -> None:
    root = swept.folder.parent
    for form in ("table", "markdown"):
        runs(str(root), sort="when", filters=["score<91.5"], form=form)
        assert "91.00 ± 1.00" in table(capsys)
    runs(str(root), sort="score", filters=[], form="json")
    (row,) = json.loads(table(capsys))
    assert (row["score"], row["spread"]) == (91.0, 1.0)


def test_a_setting_of_which_a_pruner_has_stopped_a_job_has_no_mean(swept: Ledger) -> None:
    swept.end(swept.records()[0], State.pruned, objective=50.0)
    rows = {row["optimizer.lr"]: row for row in groups(read_runs(swept.folder))}
    assert (rows["0.1"]["score"], rows["0.1"]["state"]) == (None, "1 pruned, 2 done")
    assert rows["0.2"]["score"] == 91.0
    best = groups(read_runs(swept.folder), by=["batch"])[0]  # over all settings, without that one
    assert best["score"] == pytest.approx(np.mean([90.5, 91.0, 91.5, 10.0, 12.0]))


TIES = {
    (90.0, 80.0, 90.0, 70.0): 2,
    (90.0, 90.0, 90.0, 90.0): 0,
    (90.001, 90.002, 80.0, 70.0): 2,
    (90.0, 80.0, 70.0, 60.0): 1,
    (90.0, None, None, None): 0,
}


@pytest.mark.parametrize("scores", TIES)
@pytest.mark.parametrize("form", ["latex", "markdown", "table"])
def test_all_scores_that_are_shown_as_the_best_are_bold(
    tmp_path: Path, scores: tuple[float | None, ...], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep(tmp_path, {(f"batch={2**number}",): score for number, score in enumerate(scores)})
    printed: list[Any] = []
    monkeypatch.setattr(console.terminal, "print", lambda line, **_: printed.append(line))
    for show in (
        lambda: compare([str(tmp_path)], by=[], sort=None, form=form),
        lambda: runs(str(tmp_path), sort="score", filters=[], form=form),
    ):
        printed.clear()
        show()
        if form == "table":
            number = sum(span.style == "bold" for line in printed[1:] for span in line.spans)
        else:
            number = "".join(printed).count({"latex": r"\textbf{9", "markdown": "| **9"}[form])
        assert number == TIES[scores], printed


def test_only_what_differs_is_shown_and_not_what_follows_from_an_option(tmp_path: Path) -> None:
    run(tmp_path / "a", "model=digitnet", "output_root=x", score=1.0)
    run(tmp_path / "b", "model=basicnet", "model.width=32", "optimizer.lr=0.1", "output_root=y", score=2.0)
    for name, of_model in (("a", {}), ("b", {"_target_": "lockstep.models.BasicNet", "depth": 3})):
        composed = components.read_config(RunDir(tmp_path / name).composed)
        composed["model"] |= {**of_model, "head": {"layers": {"first": f"of {name}"}}}
        RunDir(tmp_path / name).composed.write_text(components.dump(composed))
    assert differing(read_runs(tmp_path)) == ["model", "optimizer.lr"]


def test_a_typed_key_of_an_option_that_differs_is_shown_too(tmp_path: Path) -> None:
    for model, width in (("digitnet", 16), ("basicnet", 32)):
        run(tmp_path / model, f"model={model}", f"model.width={width}", score=1.0)
        composed = components.read_config(RunDir(tmp_path / model).composed)
        composed["model"] |= {"width": width, "depth": width}
        RunDir(tmp_path / model).composed.write_text(components.dump(composed))
    assert differing(read_runs(tmp_path)) == ["model", "model.width"]


def test_runs_are_together_if_each_key_has_the_same_value_and_not_if_the_values_are_swapped(tmp_path: Path) -> None:
    pairs = [*itertools.product(("1", "2"), repeat=2)]
    jobs: dict[tuple[str, ...], float | None] = {
        (f"optimizer.lr={lr}", f"batch={batch}"): float(lr + batch) for lr, batch in pairs
    }
    rows = groups(read_runs(sweep(tmp_path, jobs).folder))
    assert [(row["optimizer.lr"], row["batch"], row["score"]) for row in rows] == [
        (lr, batch, float(lr + batch)) for lr, batch in reversed(pairs)
    ]


def test_an_option_that_a_recipe_has_changed_is_shown(tmp_path: Path) -> None:
    for name, model in (("a", "digitnet"), ("b", "basicnet")):
        folder = run(tmp_path / name, "experiment=mine", score=1.0)
        (RunDir(folder).hydra / "hydra.yaml").write_text(
            json.dumps({"hydra": {"runtime": {"choices": {"model": model, "experiment": "mine"}}}})
        )
    runs = read_runs(tmp_path)
    assert differing(runs) == ["model"]
    assert [(row["key"], row["A"], row["B"]) for row in causes(runs)] == [("model", "digitnet", "basicnet")]
    assert [row["model"] for row in groups(runs)] == ["digitnet", "basicnet"]


def test_a_value_typed_in_another_way_is_the_same_value(tmp_path: Path) -> None:
    for name, word in (("a", "optimizer.lr=0.1"), ("b", "optimizer.lr=1e-1")):
        run(tmp_path / name, word, score=1.0)
        composed = {**COMPOSED, "optimizer": {"lr": 0.1}}
        RunDir(tmp_path / name).composed.write_text(components.dump(composed))
    assert differing(read_runs(tmp_path)) == []


def test_a_sweep_of_a_key_that_changes_no_run_is_one_row_unless_the_key_is_asked_for(tmp_path: Path) -> None:
    folder = sweep(tmp_path / "one", {("cost.usd_per_gpu_hour=1",): 80.0, ("cost.usd_per_gpu_hour=2",): 80.0}).folder
    (row,) = groups(read_runs(folder))
    assert (row["score"], row["state"]) == (80.0, "2 done")
    rows = groups(read_runs(folder), by=["cost.usd_per_gpu_hour"])
    assert [row["cost.usd_per_gpu_hour"] for row in rows] == ["1", "2"]


def test_rows_are_sorted_and_grouped_by_any_key(swept: Ledger, capsys: CAPSYS) -> None:
    compare([str(swept.folder)], by=["seed"], sort="seed", form="csv")
    rows = list(csv.DictReader(io.StringIO(table(capsys))))
    assert [(row["seed"], row["done"]) for row in rows] == [("0", "3"), ("1", "3"), ("2", "2")]
    compare([str(swept.folder)], by=[], sort="optimizer.lr", form="json")
    assert [row["optimizer.lr"] for row in json.loads(table(capsys))] == [0.1, 0.2, 0.5]


def test_runs_of_several_folders_are_compared_once_each(swept: Ledger, tmp_path: Path, capsys: CAPSYS) -> None:
    alone = run(tmp_path / "alone", "optimizer.lr=0.1", "seed=7", score=93.0)
    job = swept.folder / swept.records()[0].folder
    paths = [swept.folder, alone, job, alone / ".." / alone.name, os.path.relpath(job)]
    compare([*map(str, paths)], by=[], sort=None, form="json")
    best = json.loads(table(capsys))[0]
    assert (best["optimizer.lr"], best["done"], best["state"]) == (0.1, 4, "4 done")


def test_two_runs_are_told_apart_by_their_likeliest_cause(tmp_path: Path, capsys: CAPSYS) -> None:
    first = run(tmp_path / "a", "optimizer.lr=0.1", "seed=1", score=1.0)
    packages = {"torch": "2.11.0"}
    words = ("optimizer.lr=0.2", "seed=2", "loader.workers=3")
    second = run(tmp_path / "b", *words, score=2.0, git="b2", packages=packages, threads=8)
    for folder, digest in ((first, "aa"), (second, "bb")):
        (RunDir(folder).checkpoints / "step-00000001").mkdir()
        facts = {"identity": {"train": {"images": digest}, "seed": 1}}
        (RunDir(folder).checkpoints / "step-00000001" / "facts.json").write_text(json.dumps(facts))
    ranked = [(row["cause"], row["key"], row["A"], row["B"]) for row in causes(read_runs(tmp_path))]
    assert ranked == [
        ("data", "train.images", "aa", "bb"),
        ("config", "optimizer.lr", "0.1", "0.2"),
        ("seed", "seed", "1", "2"),
        ("code", "git", "a1", "b2"),
        ("versions", "torch", "2.15.0", "2.11.0"),
        ("machine", "threads", "1", "8"),
        ("config, to rounding", "loader.workers", "auto", "3"),
    ]
    compare([str(first), str(second)], by=[], sort=None, form="table")
    assert "A  done  1.00 % top-1  " in table(capsys)
    compare([str(first), str(second)], by=[], sort=None, form="json")
    assert len(json.loads(table(capsys))) == 7


@pytest.mark.parametrize(
    ("role", "expected"),
    [
        (Role.rounding, [("config, to rounding", "optimizer.lr")]),
        (Role.identity, [("config", "optimizer.lr"), ("config", "optimizer.lr before a resume")]),
    ],
)
def test_what_a_key_changes_is_what_the_options_of_its_run_say(
    role: Role, expected: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "a", "optimizer.lr=0.1", score=1.0)
    run(tmp_path / "b", "optimizer.lr=0.3", "optimizer.lr=0.2", score=1.0)
    both = read_runs(tmp_path)
    configs = [of.composed for of in both]
    monkeypatch.setattr(
        "lockstep.report.compare.role_of", lambda key, values=None: role if values in configs else Role.display
    )
    assert [(row["cause"], row["key"]) for row in causes(both)] == expected


def test_a_key_that_changes_nothing_by_the_options_of_its_run_is_no_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "a", "optimizer.lr=0.1", "seed=3", score=1.0)
    (of,) = read_runs(tmp_path)
    config = of.composed
    roles = {"seed": Role.sample, "optimizer.lr": Role.display}
    monkeypatch.setattr(
        "lockstep.records.runs.role_of",
        lambda key, values=None: roles.get(key, Role.identity) if values == config else Role.identity,
    )
    of_run = settings(of)
    assert (of_run["seed"], "optimizer.lr" in of_run) == ("3", False)


def test_what_a_recipe_sets_is_a_cause_and_no_line_of_its_own(tmp_path: Path) -> None:
    for name, rate in (("a", "0.1"), ("b", "0.2")):
        run_dir = RunDir(run(tmp_path / name, f"experiment={name}", score=1.0))
        run_dir.composed.write_text(components.dump({**COMPOSED, "optimizer": {"lr": rate}}))
    both = read_runs(tmp_path)
    assert [[*row][:1] for row in groups(both)] == [["experiment"], ["experiment"]]
    assert [row["key"] for row in causes(both)] == ["experiment", "optimizer.lr"]


def test_runs_with_the_values_of_another_recipe_or_of_none_are_the_same_run(tmp_path: Path) -> None:
    for name, words in (("a", ("experiment=a",)), ("b", ("experiment=b",)), ("c", ()), ("d", ("seed=1",))):
        run(tmp_path / name, *words, score=1.0)
    one, other, typed, _ = both = read_runs(tmp_path)
    assert causes([one, other]) == causes([one, typed]) == []
    assert [(row["done"], row["state"]) for row in groups(both)] == [(2, "4 done")]
    assert [(row["experiment"], row["done"]) for row in groups(both, names=["experiment"])] == [("a,b", 2)]


def test_a_recipe_whose_values_have_changed_is_shown_by_its_values(tmp_path: Path) -> None:
    for name, (recipe, rate) in enumerate((("a", "0.1"), ("a", "0.2"), ("b", "0.2"))):
        run_dir = RunDir(run(tmp_path / str(name), f"experiment={recipe}", score=1.0))
        run_dir.composed.write_text(components.dump({**COMPOSED, "optimizer": {"lr": rate}}))
    assert {row["optimizer.lr"]: row["state"] for row in groups(read_runs(tmp_path))} == {
        "0.1": "done",
        "0.2": "2 done",
    }


def test_runs_of_other_code_are_rows_of_their_own(tmp_path: Path) -> None:
    for name, (digest, seed) in enumerate((("a" * 64, 0), ("b" * 64, 0), ("b" * 64, 1))):
        code = {"mine": {"sha256": digest, "files": {"model.py": digest[:12]}}}
        run(tmp_path / str(name), f"seed={seed}", score=90.0 - name, code=code, earlier_code=[])
    rows = groups(read_runs(tmp_path))
    assert [(row["code of mine"], row["done"]) for row in rows] == [("#aaaaaaa", 1), ("#bbbbbbb", 2)]


@pytest.mark.parametrize(("recorded", "names"), [("", "A and B"), ("a", "B"), ("b", "A"), ("ab", None)])
def test_code_that_one_of_two_runs_did_not_record_is_no_cause(
    tmp_path: Path, capsys: CAPSYS, recorded: str, names: str | None
) -> None:
    for name in "ab":
        code = {"mine": {"sha256": name * 64, "files": {"model.py": name * 12}}}
        run(tmp_path / name, extensions=["mine"], **({"code": code, "earlier_code": []} if name in recorded else {}))
    assert ("your code" in {row["cause"] for row in causes(read_runs(tmp_path))}) == (names is None)
    compare([str(tmp_path / "a"), str(tmp_path / "b")], by=[], sort=None, form="table")
    expected = [f"the code of {names} was not recorded"] if names else []
    assert re.findall(r"^the .*$", table(capsys), re.MULTILINE) == expected


def test_a_run_that_used_no_code_of_its_extensions_has_recorded_that(tmp_path: Path, capsys: CAPSYS) -> None:
    for name in "ab":
        run(tmp_path / name, extensions=["mine"], code={}, earlier_code=[])
    compare([str(tmp_path / "a"), str(tmp_path / "b")], by=[], sort=None, form="table")
    assert re.findall(r"^the .*$", table(capsys), re.MULTILINE)[0].startswith("the same run: nothing differs")


@pytest.fixture
def rates(tmp_path: Path) -> Path:
    """Runs of two rates, the default and one with many digits, with two seeds each and a loss."""
    for number, (rate, seed) in enumerate(itertools.product(("auto", "0.004043878"), (0, 1))):
        folder = run(tmp_path / str(number), f"optimizer.lr={rate}", f"seed={seed}", score=80.0 + 2 * number)
        loss = {"step": 5, "loss/val": 1 + 0.25 * number}
        (folder / "metrics.jsonl").write_text(json.dumps(loss) + "\n" + json.dumps({"step": 9, "loss/train": 0.1}))
    return tmp_path


def test_a_table_for_a_paper_has_the_best_in_bold(rates: Path, capsys: CAPSYS) -> None:
    compare([str(rates)], by=[], sort=None, columns=["score", "loss/val"], form="latex")
    latex = r"""\begin{tabular}{lrrl}
\toprule
optimizer.lr & val top-1 & val loss & state \\
\midrule
0.00404 & \textbf{85.00 $\pm$ 1.41} & 1.625 $\pm$ 0.1768 & 2 done \\
auto & 81.00 $\pm$ 1.41 & \textbf{1.125 $\pm$ 0.1768} & 2 done \\
\bottomrule
\end{tabular}
"""
    assert table(capsys) == latex
    compare([str(rates)], by=[], sort="loss/val", columns=["loss/val"], form="markdown")
    markdown = """| optimizer.lr | val loss | state |
|---|---|---|
| auto | **1.125 ± 0.1768** | 2 done |
| 0.00404 | 1.625 ± 0.1768 | 2 done |
"""
    assert table(capsys) == markdown
    assert [row["optimizer.lr"] for row in listed(capsys, rates, filters=["seed=1"])] == ["auto", 0.004043878]


def on_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> io.StringIO:
    file = io.StringIO()
    terminal = console.Terminal(width=width, file=file, color_system="standard", highlight=False)
    monkeypatch.setattr(log, "has_terminal", lambda stream="stdout": True)
    monkeypatch.setattr(console, "terminal", terminal)
    monkeypatch.setenv("COLUMNS", str(width))
    return file


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_each_key_has_a_column_and_what_does_not_fit_is_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    keys = ("model.width", "optimizer.lr", "loader.workers", "batch")
    for number, value in enumerate(("0.25", "0.123456789", "0.5")):
        run(tmp_path / str(number), *(f"{key}={value}" for key in keys), score=80.0 + number)
    file = on_terminal(monkeypatch, width)
    compare([str(tmp_path)], by=[], sort=None, form="table")
    shown = re.sub(r"\x1b\[\d*m", "", file.getvalue())
    lines = shown[: shown.index("best:")].splitlines()
    assert max(map(len, lines)) <= width
    assert all(key.split(".")[-1] in shown for key in keys)
    assert shown.count("0.123") == 4
    assert "0.1234" not in shown


def test_the_value_of_a_config_without_overrides_is_pale(rates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = on_terminal(monkeypatch, 80)
    compare([str(rates)], by=[], sort=None, form="table")
    assert "\x1b[2mauto" in file.getvalue()
    assert "\x1b[2m0.004" not in file.getvalue()


def test_one_run_is_shown_with_its_config_scores_and_commands_to_use_it(judged_runs: Path, capsys: CAPSYS) -> None:
    (judged_runs / "d" / "model.safetensors").touch()
    RunDir(judged_runs / "d").write_summary(seconds=75.0, best=0.9, best_step=30, verdict={"sentence": "it is fast"})
    listing("d")(judged_runs)
    shown = table(capsys)
    assert re.findall(r"^ +(\w+)  (\S.*)$", shown, re.MULTILINE) == [
        ("run", str(relative(judged_runs / "d"))),
        ("state", "done, started 1970-01-01 00:00, took 1:15"),
        ("overrides", "model=d"),
        ("best", "map 0.9 at step 30"),
        ("scores", "map 0.9"),
        ("test", "map 0.75, loss 1"),
        ("speed", "it is fast"),
    ]
    assert re.search(r"^model +d +digitnet$", shown, re.MULTILINE)
    assert f"lockstep evaluate {relative(judged_runs / 'd')}\n" in shown


def test_equal_runs_are_said_to_be_equal(tmp_path: Path, capsys: CAPSYS) -> None:
    words = {"a": ["logger=jsonl", "name=a"], "b": ["output_root=other", "cost.usd_per_gpu_hour=2"]}
    paths = [str(run(tmp_path / name, "batch=64", *words[name], score=1.0)) for name in "ab"]
    compare(paths, by=[], sort=None, form="table")
    assert "the same run: nothing differs that makes another run" in table(capsys)


def test_a_run_that_was_resumed_to_a_longer_plan_is_not_the_same_run(tmp_path: Path, capsys: CAPSYS) -> None:
    words = {"a": ["steps=4", "name=a"], "b": ["steps=2", "name=c", "steps=4", "name=b"]}
    paths = [str(run(tmp_path / name, "batch=64", *words[name], score=1.0)) for name in "ab"]
    compare(paths, by=[], sort=None, form="table")
    shown = table(capsys)
    assert re.search(r"^config +steps before a resume +none +2$", shown, re.MULTILINE), shown
    assert "the same run" not in shown
    assert "name before" not in shown


def test_a_table_shows_values_in_the_words_of_a_config() -> None:
    texts = {"null": None, "true": True, "0.5": 0.5, "a": "a", "none": [], "1, null": [1, None]}
    assert [*map(value_text, texts.values())] == [*texts]


def listed(capsys: CAPSYS, folder: Path, **options: Any) -> list[dict[str, Any]]:
    runs(str(folder), **{"sort": "when", "filters": [], "form": "json", **options})
    return list(json.loads(table(capsys)))


def test_the_runs_and_sweeps_of_a_folder_are_listed(swept: Ledger, capsys: CAPSYS) -> None:
    outputs = swept.folder.parent.parent
    run(outputs / "a", "batch=8", score=50.0)
    run(outputs / "b", "batch=16", status="failed")
    rows = {row["name"]: row for row in listed(capsys, outputs)}
    assert rows["sweeps/one"]["overrides"] == ["optimizer.lr=1,2", "seed=1,2"]
    assert (rows["sweeps/one"]["score"], rows["sweeps/one"]["state"]) == (91.0, "8 done, 1 failed")
    assert [rows[name]["overrides"] for name in "ab"] == [["batch=8"], ["batch=16"]]
    assert rows["a"]["size"] == sum(path.stat().st_size for path in (outputs / "a").rglob("*") if path.is_file())
    assert [row["name"] for row in listed(capsys, outputs, sort="score")] == ["sweeps/one", "a", "b"]
    assert [row["name"] for row in listed(capsys, outputs, filters=["state=failed"])] == ["b"]
    assert [row["name"] for row in listed(capsys, outputs, filters=["batch<10", "score>40"])] == ["a"]
    run(outputs / "c", "batch=16", score=0.0)
    for limit, names in {
        "score<50": ["c"],
        "score>50": ["sweeps/one"],
        "score<0": [],
        "score>-1": ["a", "c", "sweeps/one"],
        "score>.5e+2": ["sweeps/one"],
        "score<+5E-1": ["c"],
        "score>50.": ["sweeps/one"],
    }.items():
        assert sorted(row["name"] for row in listed(capsys, outputs, filters=[limit])) == names, limit
    assert listed(capsys, outputs, filters=["overrides<1"]) == [], "a list is neither less nor more"
    shutil.rmtree(outputs / "c")
    assert len(listed(capsys, swept.folder)) == 9
    runs(str(outputs), sort="when", filters=[], form="table")
    assert "sweeps/one" in table(capsys)
    runs(str(outputs), sort="when", filters=["score>99"], form="table")
    assert table(capsys) == "no run fits score>99\n"
    runs(str(outputs / "a"), sort="when", filters=["state=failed"], form="table")
    assert table(capsys) == "no run fits state=failed\n", "also of a single run"


def test_a_listing_of_several_sweeps_has_the_keys_of_all_of_them(swept: Ledger) -> None:
    outputs = swept.folder.parent.parent
    sweep(outputs / "sweeps" / "two", {("batch=8",): 1.0, ("batch=16",): 2.0})
    _, shown, _ = list_runs(outputs)
    assert sorted(shown.keys) == ["batch", "optimizer.lr", "seed"]


def test_a_job_after_the_first_thousand_has_its_number(swept: Ledger, capsys: CAPSYS) -> None:
    job = swept.folder / "jobs" / "003.json"
    folder = swept.records()[3].folder.replace("003-", "1003-")
    (swept.folder / swept.records()[3].folder).rename(swept.folder / folder)
    facts = json.loads(job.read_text())
    job.with_name("1003.json").write_text(json.dumps({**facts, "number": 1003, "folder": folder}))
    job.unlink()
    runs(str(swept.folder), sort="when", filters=[], form="table")
    assert re.search(r"^ *1003 ", table(capsys), re.MULTILINE)


@pytest.mark.parametrize("alive", [True, False])
def test_a_run_that_was_killed_is_not_shown_as_running(tmp_path: Path, capsys: CAPSYS, alive: bool) -> None:
    run_dir = RunDir(run(tmp_path / "a", status="running"))
    pid = os.getpid() if alive else 2**22 + 1
    run_dir.lock.write_text(json.dumps({"pid": pid, "host": socket.gethostname(), "since": ""}))
    assert listed(capsys, tmp_path)[0]["state"] == ("running" if alive else "killed")


def test_texts_of_files_cannot_move_the_cursor_or_be_computed(tmp_path: Path, capsys: CAPSYS) -> None:
    words = ("optimizer.lr=\x1b[2J", "optimizer.lr==HYPERLINK(1)", "optimizer.lr=[red]x[/]")
    for number, word in enumerate(words):
        run(tmp_path / f"{number}-\x1b]0;x\x07", word, score=1.0 + number)
    for form in ("table", "csv", "json"):
        compare([str(tmp_path)], by=[], sort=None, form=form)
        shown = table(capsys)
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", shown)
        assert form != "csv" or "'=HYPERLINK(1)" in shown
        assert form != "table" or "[red]x[/]" in shown
    for form in ("table", "json"):
        runs(str(tmp_path), sort="when", filters=[], form=form)
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", table(capsys))


Command = Callable[[Path], None]


def compared(folder: str = "", **options: Any) -> Command:
    words: dict[str, Any] = {"by": [], "sort": None, "form": "table", **options}
    return lambda root: compare([str(root / folder)], **words)


def listing(folder: str = "", **options: Any) -> Command:
    words: dict[str, Any] = {"sort": "when", "filters": [], "form": "table", **options}
    return lambda root: runs(str(root / folder), **words)


WRONG: dict[str, tuple[Command, str]] = {
    "compare: no folder": (compared("x"), "x is not a folder"),
    "compare: no run": (compared("no"), "has no run in it"),
    "compare: a key": (compared(by=["lr"]), "--by lr: no run has"),
    "compare: a column": (compared(sort="lr", form="csv"), "--sort lr: there is no"),
    "runs: no run": (listing("no", form="json"), "has no run in it"),
    "runs: a column": (listing(sort="lr"), "--sort lr: there is no"),
    "runs: a key": (listing(filters=["lr=1"]), "--filter lr=1: no run"),
    "runs: a word": (listing(filters=["done"]), "expected KEY=VALUE"),
    "runs: a number": (listing(filters=["batch>x"]), "batch>x: it is no"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_words_are_one_sentence(tmp_path: Path, name: str) -> None:
    run(tmp_path / "a", "batch=8", score=1.0)
    run(tmp_path / "b", "batch=9", score=1.0)
    (tmp_path / "no").mkdir()
    act, sentence = WRONG[name]
    with pytest.raises(InputError, match=re.escape(sentence)) as caught:
        act(tmp_path)
    assert len(caught.value.args) == 1
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", ["summary", "overrides", "composed", "hydra.yaml"])
@pytest.mark.parametrize("text", ["{", "[]", '{"status": 3}', '{"objective": NaN}'])
def test_a_damaged_run_is_named_and_others_are_shown(tmp_path: Path, capsys: CAPSYS, file: str, text: str) -> None:
    run(tmp_path / "a", "batch=8", score=91.25)
    run_dir = RunDir(run(tmp_path / "b", "batch=9", score=2.0))
    path = run_dir.hydra / file if "." in file else getattr(run_dir, file)
    path.write_text(text)
    for act in (compared(), listing()):
        try:
            act(tmp_path)
        except InputError as error:
            assert str(path) in str(error)  # noqa: PT017, some texts are whole files of another kind
            assert len(error.args) == 1  # noqa: PT017
        else:
            assert file != "summary"
        assert "91.25" in table(capsys)


def test_a_damaged_ledger_is_named(swept: Ledger, capsys: CAPSYS) -> None:
    run(swept.folder.parent / "alone", score=91.25)
    (swept.folder / "jobs" / "000.json").write_text("{")
    with pytest.raises(InputError, match=r"000\.json"):
        runs(str(swept.folder.parent), sort="when", filters=[], form="table")
    assert "91.25" in table(capsys)
    with pytest.raises(InputError, match=r"000\.json"):
        compare([str(swept.folder)], by=[], sort=None, form="table")
    assert "1 damaged" in table(capsys)
    with pytest.raises(InputError, match=r"000\.json"):
        report(str(swept.folder))
    assert "000.json" in (swept.folder / "report.html").read_text()
    (swept.folder / "sweep.json").write_text("{")
    with pytest.raises(InputError, match=r"sweep\.json") as caught:
        compare([str(swept.folder.parent)], by=[], sort=None, form="table")
    assert len(caught.value.args) == 1
    assert "91.25" in table(capsys)
    record = swept.records()[3]
    assert swept.end(record, State.done, objective=99.0).objective == 99.0, "it ends no other job"


def test_the_jobs_of_another_app_of_hydra_are_compared_too(tmp_path: Path, capsys: CAPSYS) -> None:
    ledger = sweep(tmp_path, {("x=1",): 1.0, ("x=2",): 4.0})
    for record, text in zip(ledger.records(), ("{}", "x: 2\ny: ${x}\n"), strict=True):
        shutil.rmtree(tmp_path / record.folder)
        (tmp_path / record.folder / ".hydra").mkdir(parents=True)
        (tmp_path / record.folder / ".hydra" / "config.yaml").write_text(text)
    compare([str(tmp_path)], by=[], sort=None, form="json")
    assert [(row["x"], row["score"]) for row in json.loads(table(capsys))] == [(2, 4.0), (1, 1.0)]


def test_a_smaller_score_is_first_where_it_is_better(swept: Ledger, tmp_path: Path, capsys: CAPSYS) -> None:
    other = sweep(tmp_path / "outputs" / "sweeps" / "two", {(f"batch={size}",): float(size) for size in (8, 4, 16)})
    other.create(replace(other.identity(), direction=Direction.minimize))
    rows = groups(read_runs(other.folder))
    assert [(row["batch"], row["difference"]) for row in rows] == [("4", 0.0), ("8", 4.0), ("16", 12.0)]
    compare([str(other.folder)], by=(), sort="score", form="table")
    assert "best: job 1 with 4.00 % top-1" in table(capsys)
    runs(str(other.folder), sort="score", filters=(), form="json")
    assert [row["score"] for row in json.loads(table(capsys))] == [4.0, 8.0, 16.0]
    runs(str(tmp_path / "outputs"), sort="score", filters=(), form="json")
    assert [row["score"] for row in json.loads(table(capsys))] == [91.0, 4.0]
    compare([str(tmp_path / "outputs")], by=(), sort="score", form="json")
    rows = json.loads(table(capsys))
    assert [row["score"] for row in rows] == [91.0, 91.0, 11.0, 4.0, 8.0, 16.0]
    assert [row["direction"] for row in rows] == ["maximize"] * 3 + ["minimize"] * 3


def judged(folder: Path, *words: str, monitor: str, score: float | None, **facts: Any) -> Path:
    """A run that says by which figure it was judged; without a score, that had no value."""
    RunDir(run(folder, *words, score=score)).write_summary(status="completed", monitor=monitor, **facts)
    composed = components.read_config(RunDir(folder).composed)
    RunDir(folder).composed.write_text(components.dump({**composed, "metric": {"f1": {}, "mae": {}, "recall": {}}}))
    return folder


@pytest.fixture
def judged_runs(tmp_path: Path) -> Path:
    for seed, losses in enumerate(((0.25, 0.5), (0.75, 1.5))):
        for name, loss in zip("ab", losses, strict=True):
            words = (f"model={name}", f"seed={seed}")
            scores = {"loss": loss, "top1": 50.0, "f1": loss / 2, "recall/cat": 0.1}
            judged(tmp_path / f"{name}{seed}", *words, monitor="-loss", score=loss, scores=scores)
    judged(tmp_path / "c", "model=c", monitor="-loss", score=None, scores={"loss": None, "f1": None})
    judged(tmp_path / "d", "model=d", monitor="map", score=0.9, scores={"map": 0.9}, test={"map": 0.75, "loss": 1})
    judged(tmp_path / "e", "model=e", monitor="map", score=0.95, scores={"map": 0.95})
    judged(tmp_path / "g", "model=g", monitor="-mae", score=2.0, scores={"mae": 2.0, "f1": 0.5})
    run(tmp_path / "f", "model=f", status="failed")
    return tmp_path


def test_each_monitor_has_a_table_with_its_direction_and_a_column_for_each_metric_and_the_test(
    judged_runs: Path, capsys: CAPSYS
) -> None:
    compare([str(judged_runs)], by=[], sort=None, form="csv")
    rows = list(csv.DictReader(io.StringIO(table(capsys))))
    assert [tuple(row[key] for key in ("model", "monitor", "score", "f1", "test")) for row in rows] == [
        ("e", "map", "0.95", "", ""),
        ("d", "map", "0.9", "", "0.75"),
        ("a", "loss", "0.5", "0.25", ""),
        ("b", "loss", "1.0", "0.5", ""),
        ("c", "loss", "", "", ""),
        ("", "mae", "2.0", "0.5", ""),
        ("", "top1", "", "", ""),
    ]
    compare([str(judged_runs)], by=[], sort=None, form="table")
    shown = table(capsys)
    heads = re.findall("^(?:model +)?(val .*?) +state", shown, re.MULTILINE)
    assert [re.split("  +", names) for names in heads] == [
        ["val map", "test"],
        ["val loss", "val f1"],
        ["val mae", "val f1"],
        ["val top-1"],
    ]
    assert re.search(r"^a +0\.5 ± 0\.3536 +0\.25 ± 0\.1768 +2 done *$", shown, re.MULTILINE)
    assert re.search(r"^d +0\.9 +0\.75 +done +-0\.05 *$", shown, re.MULTILINE)
    assert re.findall(r"^best: (.*), .*/(\w+)$", shown, re.MULTILINE) == [
        ("map 0.95", "e"),
        ("loss 0.25", "a0"),
        ("mae 2", "g"),
    ]


def test_a_run_says_which_figures_of_its_options_are_better(tmp_path: Path, capsys: CAPSYS) -> None:
    directions = {"loss/val": "minimize", "metric/cost": "minimize", "metric/worth": "maximize", "my/gap": "minimize"}
    for name, value in (("a", 1.0), ("b", 2.0)):
        scores = {"top1": 50.0, "cost": value, "cost/x": value, "worth": value}
        folder = judged(
            tmp_path / name, f"model={name}", monitor="top1", score=50.0, scores=scores, directions=directions
        )
        RunDir(folder).metrics.write_text(json.dumps({"step": 1, "loss/val": value, "my/gap": value}) + "\n")
    for column, order in (("cost", "ab"), ("metric/cost/x", "ab"), ("worth", "ba"), ("my/gap", "ab")):
        assert [row["name"] for row in listed(capsys, tmp_path, sort=column)] == [*order], column
        compare([str(tmp_path)], by=[], sort=column, form="markdown", columns=[column])
        lines = table(capsys).splitlines()
        assert f"**{2 if order == 'ba' else 1}**" in lines[2], column
    compare([str(tmp_path)], by=[], sort=None, form="markdown", columns=["cost/x", "worth", "my/gap"])
    assert "| model | val cost/x | val worth | my/gap |" in table(capsys)


def test_a_direction_is_that_of_the_last_run_that_names_it_with_a_score_or_without(tmp_path: Path) -> None:
    for name, score, of in (("a", 1.0, "minimize"), ("b", None, "maximize")):
        judged(tmp_path / name, monitor="top1", score=score, directions={"my/gap": of, f"my/{name}": "minimize"})
    expected = {"my/gap": Direction.maximize, "my/a": Direction.minimize, "my/b": Direction.minimize}
    assert directions_of([Run(tmp_path / "a"), Run(tmp_path / "b")]) == expected


def test_a_listing_has_a_table_for_each_monitor_too(judged_runs: Path, capsys: CAPSYS) -> None:
    names = [row["name"] for row in listed(capsys, judged_runs, sort="score")]
    assert names == ["e", "d", "a0", "b0", "a1", "b1", "c", "g", "f"]
    assert [row["name"] for row in listed(capsys, judged_runs, sort="f1", filters=["f1>0.3"])] == ["b1", "a1", "g"]
    assert [row["name"] for row in listed(capsys, judged_runs, sort="test", filters=["monitor=map"])] == ["d", "e"]
    runs(str(judged_runs), sort="when", filters=[], form="table")
    heads = [re.split("  +", line)[4:-2] for line in table(capsys).splitlines() if line.startswith("name ")]
    assert heads == [["val loss", "val f1"], ["val map", "test"], ["val top-1"], ["val mae", "val f1"]]


def test_a_pruned_job_has_one_form_in_every_table(swept: Ledger, capsys: CAPSYS) -> None:
    record = swept.write(replace(swept.records()[1], state=State.pruned, rung="1 of 3"))
    lines = [{"step": 10, "acc/val_top1": 61.25}, {"step": 30, "acc/val_top1": 60.5}, {"step": 40, "loss/train": 1}]
    metrics = swept.folder / record.folder / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    runs(str(swept.folder), sort="when", filters=(), form="table")
    compare([str(swept.folder)], by=["seed", "optimizer.lr"], sort=None, form="table")
    assert table(capsys).count("  pruned at step 30 with 61.25") == 2
    rows = {row["name"]: row["state"] for row in listed(capsys, swept.folder)}
    assert rows[record.folder] == "pruned", "one word for a program"
    runs(str(swept.folder), sort="when", filters=(), form="csv")
    assert {row["name"]: row["state"] for row in csv.DictReader(io.StringIO(table(capsys)))} == rows


def test_best_names_the_winner_while_a_sweep_runs_and_never_a_pruned_job(swept: Ledger) -> None:
    assert swept.best == swept.records()[1].folder
    winner = swept.folder / swept.best
    (winner / "model.safetensors").write_bytes(b"")
    assert find_weights(swept.folder / "best") == winner / "model.safetensors"
    second = swept.records()[1]
    swept.write(replace(second, state=State.pruned, objective=99.0))
    swept.mark_best()
    assert swept.best == swept.records()[5].folder
    assert best_of(swept.records(), Direction.maximize) == swept.records()[5]
    row = next(row for row in groups(read_runs(swept.folder)) if row["optimizer.lr"] == "0.1")
    assert (row["score"], row["done"], row["state"]) == (None, 0, "2 done, 1 pruned")


TEXTS = [*(f"a{character}b" for character in string.printable), "~/x", "$(ls)", "{a,b}", "*", "-n", "!!", "é", ""]


def test_the_folder_of_a_job_is_one_word_of_a_shell(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.create(Identity(base={}, swept=("k",), words=()))
    names = [record.folder for record in ledger.enter(((f"k={text}",), slug(f"k={text}")) for text in TEXTS)]
    shown = subprocess.run(["bash", "-c", f"printf '%s\n' {' '.join(names)}"], capture_output=True, check=True)
    assert shown.stdout.decode().splitlines() == names
    assert [name for name in names if name.isascii() and shlex.quote(name) != name] == []


def test_tensorboard_shows_what_a_sweep_varies_alone(swept: Ledger, tmp_path: Path) -> None:
    job = RunDir(swept.folder / swept.records()[3].folder)
    assert Run(job.path).swept == {"optimizer.lr": "0.2", "seed": "0"}
    assert Run(run(tmp_path / "alone", "seed=1")).swept == {}
    every: dict[str, Any] = {"log_every": 1, "eval_every": 1, "save_every": 1}
    plan = make_plan(examples=64, batch=64, epochs=1, total_steps=None, micro_batches=1, **every)
    annotations = {"tags": ["a", "b"], "notes": "why"}
    facts = RunInfo(
        run_dir=job, plan=plan, step=0, after=0, config=annotations, hyperparameters={"lr": 0.2, "batch": 64}
    )
    TensorBoard().build(facts).end("completed")
    content = EventAccumulator(str(job.path)).Reload().SummaryMetadata("_hparams_/session_start_info")
    session = plugin_data_pb2.HParamsPluginData.FromString(content.plugin_data.content).session_start_info
    hparams = {key: value.string_value or value.number_value for key, value in session.hparams.items()}
    assert hparams == {"optimizer.lr": 0.2, "seed": 0.0, "tags": "a, b"}
    (notes,) = EventAccumulator(str(job.path)).Reload().Tensors("run/notes/text_summary")
    assert notes.tensor_proto.string_val == [b"    why"]
    for damage in ("", '{"swept": [[]]}'):
        (swept.folder / "sweep.json").write_text(damage)
        assert Run(job.path).swept == {}


def test_runs_are_shown_and_filtered_by_the_tags_notes_and_group_that_a_user_gave_them(
    swept: Ledger, tmp_path: Path, capsys: CAPSYS
) -> None:
    folder = tmp_path / "outputs"
    runs(str(folder), sort="when", filters=[], form="table")
    assert "tags" not in table(capsys), "no run has one"
    tagged = RunDir(run(folder / "tagged", score=1.0))
    annotations = {"tags": ["a", "b c"], "run_group": "paper", "notes": "why this run"}
    tagged.composed.write_text(components.dump({**COMPOSED, **annotations}))
    job = RunDir(swept.folder / swept.records()[1].folder)  # the best
    job.composed.write_text(components.dump({**Run(job.path).composed, "tags": ["c"]}))
    runs(str(folder), sort="when", filters=[], form="table")
    shown = table(capsys)
    assert "a, b c  paper      why this run" in shown
    for condition, names in {
        "tags=a": ["tagged"],
        "tags=b c": ["tagged"],
        "tags=b": [],
        "tags=c": ["sweeps/one"],
        "run_group=paper": ["tagged"],
    }.items():
        runs(str(folder), sort="when", filters=[condition], form="json")
        rows = json.loads(table(capsys))
        assert [row["name"] for row in rows] == names, condition
        assert all(row["tags"] for row in rows)
    assert {key: rows[0][key] for key in annotations} == annotations
    assert differing(read_runs(folder)) == ["optimizer.lr", "seed"], "they make no other run"
    runs(str(folder), sort="when", filters=["tags=a"], form="csv")
    assert "paper,why this run" in table(capsys)
    assert "why this run" in report_text(tagged)


def test_a_job_that_has_not_begun_has_the_tags_of_its_sweep(swept: Ledger, capsys: CAPSYS) -> None:
    swept.create(replace(swept.identity(), base={"tags": ["paper"], "notes": "why"}))
    failed = swept.records()[-1]
    swept.write(replace(failed, state=State.waiting))
    runs(str(swept.folder), sort="when", filters=["tags=paper"], form="json")
    assert [row["name"] for row in json.loads(table(capsys))] == [failed.folder]


def report_text(run_dir: RunDir) -> str:
    report(str(run_dir.path))
    return run_dir.report.read_text()


def test_a_run_that_was_made_twice_is_one_sample_of_the_spread(tmp_path: Path) -> None:
    for number, seed in enumerate((1, 1, 2)):
        run(tmp_path / str(number), f"seed={seed}", score=90.0 + seed)
    (row,) = groups(read_runs(tmp_path))
    assert (row["done"], row["score"]) == (2, 91.5)


def test_a_run_that_was_made_twice_with_other_code_is_two_samples(tmp_path: Path) -> None:
    for number, score in enumerate((90.0, 92.0)):
        run(tmp_path / str(number), score=score, code={"mine": {"files": {}, "sha256": str(number) * 64}})
    (row,) = groups(read_runs(tmp_path), by=["seed"])
    assert (row["done"], row["score"]) == (2, 91.0)


def test_a_job_whose_process_is_gone_was_killed_as_far_as_its_own_machine_can_see(tmp_path: Path) -> None:
    record = Record(number=0, overrides=(), folder="000-a", state=State.running, host=socket.gethostname(), pid=1)
    assert record.present_state is State.killed
    elsewhere = replace(record, host="elsewhere")
    assert elsewhere.present_state is State.running
    runs = [JobRun(Ledger(tmp_path), of_job, Monitor()) for of_job in (record, elsewhere)]
    assert [of_job.state for of_job in runs] == [State.killed, State.running]
    assert replace(record, pid=os.getpid(), born=born(os.getpid())).present_state is State.running
    assert replace(record, state=State.done).present_state is State.done


OTHER_IMAGES = [{"path": ("photos", "other")}, {"val_share": (0.1, 0.2)}, {"val_folder": ("val", "test")}]
SAME_IMAGES = [{"input_size": (32, 64)}, {"decode_size": (64, 256)}]


@pytest.mark.parametrize("keys", [*OTHER_IMAGES, *SAME_IMAGES], ids=str)
def test_scores_are_compared_where_they_are_of_the_same_images(keys: dict[str, Any], tmp_path: Path) -> None:
    for number, score in enumerate((90.0, 80.0)):
        node = {"_target_": "lockstep.data.datasets.Folder", "path": "photos", "input_size": 64}
        node |= {key: values[number] for key, values in keys.items()}
        folder = run(tmp_path / str(number), score=score)
        config = components.read_config(RunDir(folder).composed)
        RunDir(folder).composed.write_text(components.dump({**config, "dataset": node}))
    first, second = groups(read_runs(tmp_path))
    assert (first["difference"], second["difference"]) == (0.0, -10.0 if keys in SAME_IMAGES else 0.0)


def test_the_rungs_of_a_ladder_are_no_rivals_of_runs(tmp_path: Path, capsys: CAPSYS) -> None:
    run(tmp_path / "alone", score=90.0)
    sweep(tmp_path / "ladders" / "one", {("rung=ddp", "repeat=0"): 99.0, ("rung=dp", "repeat=0"): 98.0})
    compare([str(tmp_path)], by=[], sort=None, form="json")
    assert [row["score"] for row in json.loads(capsys.readouterr().out)] == [90.0]
    compare([str(tmp_path / "ladders")], by=[], sort=None, form="json")
    assert len(json.loads(capsys.readouterr().out)) >= 1


def test_what_a_link_in_a_run_leads_to_is_not_of_its_size(tmp_path: Path, capsys: CAPSYS) -> None:
    folder = run(tmp_path / "runs" / "a", score=1.0)
    (tmp_path / "large").write_bytes(bytes(10**6))
    (before,) = listed(capsys, folder.parent)
    for name, target in (("link", tmp_path / "large"), ("gone", tmp_path / "gone")):
        (folder / name).symlink_to(target)
    (row,) = listed(capsys, folder.parent)
    assert row["size"] == before["size"] + len(str(tmp_path / "large")) + len(str(tmp_path / "gone"))


def test_runs_behind_a_link_have_their_names_below_it(tmp_path: Path, capsys: CAPSYS) -> None:
    run(tmp_path / "disk" / "a", score=1.0)
    (tmp_path / "outputs").symlink_to(tmp_path / "disk")
    assert [row["name"] for row in listed(capsys, tmp_path / "outputs")] == ["a"]


def test_a_sweep_began_when_its_first_job_did(swept: Ledger, capsys: CAPSYS) -> None:
    for record, started in zip(swept.records(), (0.0, 7200.0, 3600.0), strict=False):
        swept.write(replace(record, started=started))
    for record in swept.records()[3:]:
        swept.write(replace(record, started=86400.0))
    (row,) = listed(capsys, swept.folder.parent)
    assert row["when"] == format_timestamp(3600.0)


def test_the_largest_parts_of_the_time_are_shown_first_down_to_one_percent(tmp_path: Path, capsys: CAPSYS) -> None:
    time = {"data": 0.01, "forward": 0.6, "checkpoint": 0.0099, "step": 0.3801}
    RunDir(run(tmp_path / "a", score=1.0)).write_summary(time=time)
    listing()(tmp_path / "a")
    assert "time  forward 60 %, step 38 %, waiting for data 1 %\n" in table(capsys)


def test_a_score_from_1_on_has_two_digits_behind_the_point() -> None:
    scores = {1.0: "1.00", -1.0: "-1.00", 0.0: "0.00", 0.99: "0.99", 0.123456: "0.1235", 12.345: "12.35", None: ""}
    assert {score: score_text(score, "score") for score in scores} == scores


def test_a_logged_figure_is_that_of_the_best_evaluation_or_else_the_last(tmp_path: Path) -> None:
    run_dir = RunDir(run(tmp_path / "a", score=1.0))
    run_dir.metrics.write_text("".join(f'{{"step": {step}, "my/gap": {step}}}\n' for step in (10, 20, 30)))
    assert figure_of(Run(run_dir.path), "my/gap") == 30
    run_dir.write_summary(best_step=20)
    assert figure_of(Run(run_dir.path), "my/gap") == 20
    run_dir.write_summary(best_step=25)  # it was not logged there
    assert figure_of(Run(run_dir.path), "my/gap") == 30


def test_a_key_that_some_jobs_lack_varies() -> None:
    assert swept_keys([["a=1", "b=2"], ["a=1"], ["c=3", "a=1"]]) == ("b", "c")
    assert swept_keys([["a=1", "b=2"], ["b=2", "a=1"]]) == ()


def test_settings_with_the_same_scores_at_all_seeds_are_within_the_spread(tmp_path: Path) -> None:
    for name, score in (("x", 3.0), ("y", 3.0), ("z", 2.0)):
        for seed in (0, 1):
            run(tmp_path / f"{name}{seed}", f"model={name}", f"seed={seed}", score=score)
    rows = {row["model"]: row for row in groups(read_runs(tmp_path))}
    assert [rows[name]["within_spread"] for name in "xyz"] == [None, True, False]
    assert (rows["y"]["low"], rows["y"]["high"]) == (0.0, 0.0)


@pytest.mark.parametrize("name", ["completed", "failed", "stopped", "running"])
def test_a_run_is_shown_with_the_commands_that_its_files_allow(name: str, tmp_path: Path, capsys: CAPSYS) -> None:
    folder = run(tmp_path / "a", status=name)
    listing("a")(tmp_path)
    commands = re.findall(r"^ +(\w+)  +(lockstep .*)$", table(capsys), re.MULTILINE)
    resume = [("resume", f"lockstep train resume={folder}")] * (name in ("stopped", "running"))
    assert commands == [*resume, ("report", f"lockstep report {folder}")]
    RunDir(folder).weights.touch()
    listing("a")(tmp_path)
    commands = re.findall(r"^ +(\w+)  +(lockstep .*)$", table(capsys), re.MULTILINE)
    usual = ("evaluate", "predict", "export", "demo")
    assert [label for label, _ in commands] == [*usual, *["resume"] * len(resume), "report"]
    assert ("predict", f"lockstep predict {folder} FILE") in commands


def test_a_run_is_shown_with_its_error_and_what_it_has_learnt_and_a_best_of_zero(
    tmp_path: Path, capsys: CAPSYS
) -> None:
    run_dir = RunDir(run(tmp_path / "a", "optimizer.lr=0.123456789", status="failed"))
    time = {"data": 0.0, "forward": 1.0, "step": None}
    scores = {"top1": 0.0, "f1": None, "recall/cat": 0.5}
    run_dir.write_summary(error="the loss is nan", best=0.0, learning={"sentence": "nothing yet"}, time=time)
    run_dir.write_summary(scores=scores, started=None)
    listing("a")(tmp_path)
    shown = table(capsys)
    rows = dict(re.findall(r"^ +(\w+)  (\S.*)$", shown, re.MULTILINE))
    assert {name: rows[name] for name in ("state", "error", "best", "learning", "time", "scores")} == {
        "state": "failed",
        "error": "the loss is nan",
        "best": "0.00 % top-1",
        "learning": "nothing yet",
        "time": "forward 100 %",
        "scores": "0.00 % top-1",
    }
    assert rows["overrides"] == "optimizer.lr=0.1235"
    bare = run(tmp_path / "b", score=1.0)
    RunDir(bare).write_summary(error="it has 0.123456789")
    listing("b")(tmp_path)
    shown = table(capsys)
    assert re.search(r"^ +overrides  none$", shown, re.MULTILINE)
    assert "error  it has 0.123456789\n" in shown


def test_a_damaged_run_is_shown_as_far_as_it_is_whole(tmp_path: Path, capsys: CAPSYS) -> None:
    folder = run(tmp_path / "a", score=1.0)
    RunDir(folder).summary.write_text("{")
    with pytest.raises(InputError, match=r"summary\.json"):
        listing("a")(tmp_path)
    assert f"lockstep report {folder}" in table(capsys)


def two(folder: Path, **env: Any) -> list[Any]:
    """Two runs, of which the second has another environment."""
    run(folder / "a", score=0.0)
    run(folder / "b", score=0.0, **env)
    return read_runs(folder)


@pytest.mark.parametrize(
    ("env", "cause", "rows"),
    [
        ({"git": "b2"}, "code", [("git", "a1", "b2")]),
        ({"git_changes": "x"}, "code", [("git_changes", "unknown", "x")]),
        ({"packages": {"torch": "2.15.0", "lockstep": "2"}}, "code", [("lockstep", "unknown", "2")]),
        ({"extensions": ["mine"], "code": {}}, "code", [("extensions", "unknown", "['mine']")]),
        ({"packages": {"torch": "3"}}, "versions", [("torch", "2.15.0", "3")]),
        *(({key: "9"}, "versions", [(key, "unknown", "9")]) for key in ("python", "cuda", "cudnn", "nccl", "driver")),
        ({"threads": 2, "pythons": 1}, "machine", [("pythons", "unknown", "1"), ("threads", "1", "2")]),
    ],
    ids=str,
)
def test_what_differs_of_an_environment_is_code_a_version_or_the_machine(
    env: dict[str, Any], cause: str, rows: list[tuple[str, str, str]], tmp_path: Path
) -> None:
    expected = [(cause, *row) for row in rows]
    assert [tuple(row.values()) for row in causes(two(tmp_path, **env))] == expected


IDENTITY = ("classes", "class_names", "train", "val", "images", "labels", "input_shape", "examples")


@pytest.mark.parametrize("key", [*IDENTITY, "seed", "training"])
def test_the_facts_of_a_checkpoint_that_are_of_the_data_are_a_cause(key: str, tmp_path: Path) -> None:
    runs = two(tmp_path)
    for name in "ab":
        checkpoint = RunDir(tmp_path / name).checkpoints / "step-00000001"
        checkpoint.mkdir()
        (checkpoint / "facts.json").write_text(json.dumps({"identity": {key: {"x": name}}}))
    runs = read_runs(tmp_path)
    expected = [("data", f"{key}.x", "a", "b")] if key in IDENTITY else []
    assert [tuple(row.values()) for row in causes(runs)] == expected


def test_the_users_code_is_compared_by_file_and_by_what_came_before(tmp_path: Path) -> None:
    plain = {"mine": {"sha256": "s1", "files": {}, "git": "g1", "git_changes": "c1"}}
    files = {"mine": {"sha256": "s2", "files": {"a.py": "1", "b.py": "2"}, "git": "g2", "git_changes": "c1"}}
    earlier = [{"package": "mine", "until_step": 5, "sha256": None}]
    run(tmp_path / "a", extensions=["mine"], code=plain, earlier_code=[])
    run(tmp_path / "b", extensions=["mine"], code=files, earlier_code=earlier)
    rows = [tuple(row.values()) for row in causes(read_runs(tmp_path))]
    assert rows == [
        ("your code", "mine", "s1", "none"),
        ("your code", "mine until step 5", "none", "not recorded"),
        ("your code", "mine/a.py", "none", "1"),
        ("your code", "mine/b.py", "none", "2"),
        ("code", "mine.git", "g1", "g2"),
    ]


def test_of_the_causes_of_a_kind_those_that_were_typed_come_first(tmp_path: Path) -> None:
    run(tmp_path / "a", "optimizer.lr=0.1", "seed=1")
    run(tmp_path / "b", "optimizer.lr=0.2", "seed=2")
    composed = components.read_config(RunDir(tmp_path / "b").composed)
    RunDir(tmp_path / "b").composed.write_text(components.dump({**composed, "batch": 8}))
    keys = [(row["cause"], row["key"]) for row in causes(read_runs(tmp_path))]
    assert keys == [("config", "optimizer.lr"), ("config", "batch"), ("seed", "seed")]


def test_two_runs_are_compared_by_causes_unless_scores_are_asked_for(tmp_path: Path, capsys: CAPSYS) -> None:
    two(tmp_path, git="b2")
    paths = [str(tmp_path / name) for name in "ab"]
    kinds = {}
    for name, (folders, options) in {
        "causes": (paths, {}),
        "by": (paths, {"by": ["seed"]}),
        "columns": (paths, {"columns": ["score"]}),
        "a folder": ([str(tmp_path)], {}),
    }.items():
        words: dict[str, Any] = {"by": [], "sort": None, "form": "json", **options}
        compare(folders, **words)
        kinds[name] = "cause" in json.loads(table(capsys))[0]
    assert kinds == {"causes": True, "by": False, "columns": False, "a folder": False}
    compare(paths, by=[], sort=None, form="markdown")
    shown = table(capsys)
    assert shown.startswith(f"A  done  0.00 % top-1  {tmp_path / 'a'}\n")
    assert "| likely cause | key | A | B |" in shown
    assert "the same run" not in shown
    RunDir(tmp_path / "b").environment.write_text("{")
    with pytest.raises(InputError, match=r"env\.json"):
        compare(paths, by=[], sort=None, form="json")


def test_errors_of_runs_are_counted_below_a_table_alone(tmp_path: Path, capsys: CAPSYS) -> None:
    for name, error in zip("abc", ("no", "no", "other"), strict=True):
        RunDir(run(tmp_path / name, f"batch={ord(name)}", status="failed")).write_summary(error=error)
    compared()(tmp_path)
    endings = re.findall(r"^\d failed: .*$", table(capsys), re.MULTILINE)
    assert endings == ["2 failed: no", "1 failed: other"]
    compared(form="markdown")(tmp_path)
    assert "failed: no" not in table(capsys).replace("| failed: no |", "")


def test_a_listing_says_what_it_is_of(swept: Ledger, monkeypatch: pytest.MonkeyPatch, capsys: CAPSYS) -> None:
    outputs = swept.folder.parent.parent
    monkeypatch.chdir(outputs)
    run(outputs / "alone", "batch=8", score=50.0)
    listing()(outputs)
    shown = table(capsys)
    assert "one job" not in shown
    assert "01-01 00:00" in shown
    assert "1970" not in shown
    assert "None" not in shown
    assert re.match(r"name +when +batch +optimizer\.lr +seed +score|name +when ", shown)
    assert re.search(r"\d+\.?\d* [kM]B", shown)
    listing()(swept.folder)
    shown = table(capsys)
    first, *_ = shown.splitlines()
    assert first.split()[:2] == ["job", "when"]
    job = re.search(r"^one job: lockstep runs sweeps/one/(\d)$", shown, re.MULTILINE)
    assert job is not None
    assert shown.splitlines()[1].split()[0] == job[1]
    listing(form="markdown")(swept.folder)
    assert "one job" not in table(capsys)
    (row,) = listed(capsys, outputs / "alone")
    assert (row["name"], "status" in row) == ("alone", False)
    runs(str(outputs / "alone"), sort="when", filters=["state=done"], form="table")
    assert table(capsys).startswith("name")
    runs(str(outputs), sort="when", filters=["state=done", "batch=7"], form="table")
    assert table(capsys) == "no run fits state=done and batch=7\n"
    runs(str(outputs), sort="when", filters=["batch=8", "state<1"], form="json")
    assert json.loads(table(capsys)) == []
    row = next(row for row in listed(capsys, outputs) if row["name"] == "sweeps/one")
    assert (row["optimizer.lr"], row["seed"]) == ("1,2", "1,2")
    for act in (listing(columns=["lr"]), compared(columns=["lr"], form="csv")):
        with pytest.raises(InputError, match="--columns lr: there is no such column"):
            act(outputs)


def test_a_chosen_column_is_there_once_and_a_person_finds_the_name_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        folder = run(tmp_path / f"run{number}", f"batch={number}", score=1.0)
        composed = components.read_config(RunDir(folder).composed)
        RunDir(folder).composed.write_text(components.dump({**composed, "tags": ["x"]}))
        (folder / "metrics.jsonl").write_text(f'{{"step": 1, "my/gap": {number - 1}}}\n')
    file = on_terminal(monkeypatch, 120)
    monkeypatch.setattr(console.Terminal, "is_terminal", True)
    runs(str(tmp_path), sort="my/gap", filters=[], form="table", columns=["batch", "tags", "my/gap"])
    head, *rows = re.sub(r"\x1b\[\d*m", "", file.getvalue()).splitlines()
    assert head.split() == ["when", "batch", "my/gap", "tags", "size", "state", "name"]
    assert [row.split()[-1] for row in rows] == ["run1", "run2"]
    assert [row.split()[3] for row in rows] == ["0", "1"], "0 is a figure"
    file = on_terminal(monkeypatch, 120)
    monkeypatch.setattr(console.Terminal, "is_terminal", False)
    runs(str(tmp_path), sort="my/gap", filters=[], form="table", columns=["batch", "tags", "my/gap"])
    head, *rows = re.sub(r"\x1b\[\d*m", "", file.getvalue()).splitlines()
    assert head.split() == ["name", "when", "batch", "my/gap", "tags", "size", "state"], "a program finds it first"
    assert [row.split()[0] for row in rows] == ["run1", "run2"]


def test_a_file_that_a_job_has_just_removed_has_no_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: CAPSYS
) -> None:
    folder = run(tmp_path / "a", score=1.0)
    (folder / "gone").write_bytes(bytes(10**6))
    lstat = os.lstat

    def vanishing(path: Any, **options: Any) -> os.stat_result:
        if str(path).endswith("gone"):
            raise FileNotFoundError(path)
        return lstat(path, **options)

    monkeypatch.setattr(os, "lstat", vanishing)
    assert listed(capsys, tmp_path)[0]["size"] < 10**6


@pytest.mark.parametrize(
    ("jobs", "text"),
    [([3], "3"), ([0, 1], "0, 1"), ([0, 1, 2], "0-2"), ([0, 2, 3], "0, 2, 3"), ([4, 5, 6, 7], "4-7")],
)
def test_three_jobs_in_a_row_are_a_range(jobs: list[int], text: str) -> None:
    assert job_numbers(jobs) == text


def test_each_line_of_an_error_has_the_jobs_that_have_it() -> None:
    errors = ("", "a\nb", "a\nb", "c", "")
    records = [Record(number=n, overrides=(), folder="", error=error) for n, error in enumerate(errors)]
    assert [(record.number, lines) for record, lines in errors_of(records)] == [
        (1, ["jobs 1, 2: a", "jobs 1, 2: b"]),
        (3, ["job 3: c"]),
    ]


@pytest.mark.parametrize(
    ("name", "score", "expected"),
    [
        ("score", "score", "score"),
        ("score", "top1", "val top-1"),
        ("f1", "top1", "val f1"),
        ("metric/f1", "top1", "val f1"),
        ("loss", "top1", "val loss"),
        ("test", "top1", "test"),
        ("seconds", "top1", "seconds"),
        ("my/gap", "top1", "my/gap"),
    ],
)
def test_the_head_of_a_column_says_of_what_it_is(name: str, score: str, expected: str) -> None:
    assert head(name, score, {"metric/f1": Direction.maximize}) == expected


def test_figures_have_the_digits_of_their_kind() -> None:
    shown = [
        score_text(12.345678, figure) for figure in ("score", "seconds", "kwh", "megabytes", "top1", "f1", "loss")
    ]
    assert shown == ["12.35", "12.3", "12.3", "12.3", "12.35", "12.35", "12.35"]
    assert [score_text(-0.5, "score"), score_text(-12.0, "score"), score_text(0.0, "top1")] == [
        "-0.5",
        "-12.00",
        "0.00",
    ]


def test_a_job_is_its_overrides_without_its_place_and_its_setting_is_without_samples() -> None:
    words = ("lr=0.1", "seed=1", "output_root=a", "dataset.fold=2")
    assert job_key(words) == {"lr=0.1", "seed=1", "dataset.fold=2"}
    assert job_key(words, samples=False) == {"lr=0.1"}
    record = Record(number=0, overrides=("a=b=c", "d="), folder="")
    assert record.values == {"a": "b=c", "d": ""}
    assert varied(("a=b=c", "ab=1", "a.b=2", "d="), ["a"]) == ["a=b=c"]
    assert swept_keys([("a=1=2",), ("a=1=3",)]) == ("a",)


@pytest.mark.parametrize("state", State)
def test_what_a_cluster_has_is_in_its_queue_or_runs_and_what_has_ended_trains_no_further(state: State) -> None:
    record = Record(number=0, overrides=(), folder="", state=state, submitted="7_1", objective=5.0)
    assert record.runs_elsewhere == (state in (State.waiting, State.running))
    assert not replace(record, submitted="").runs_elsewhere
    assert record.has_ended == (state in (State.done, State.failed, State.pruned))
    assert record.score == (None if state is State.pruned else 5.0)


def test_the_figures_of_a_run_are_found_by_their_names(tmp_path: Path) -> None:
    run_dir = RunDir(run(tmp_path / "a", score=5.0))
    run_dir.write_summary(
        spent={"kwh": 0.5, "usd": 0.0}, scores={"f1": 0.0, "mcc": None}, seconds=70.0, best_step=None
    )
    lines = [{"step": 10, "perf/step_ms": 100}, {"step": 30, "perf/step_ms": 50}, {"step": 30, "my/gap": 0.0}]
    run_dir.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    of = {name: figure_of(Run(run_dir.path), name) for name in ("score", "kwh", "usd", "f1", "metric/f1", "mcc")}
    assert of == {"score": 5.0, "kwh": 0.5, "usd": 0.0, "f1": 0.0, "metric/f1": 0.0, "mcc": None}
    of = {name: figure_of(Run(run_dir.path), name) for name in ("seconds", "my/gap", "status", "megabytes", "none")}
    assert of == {"seconds": 2.0, "my/gap": 0.0, "status": None, "megabytes": None, "none": None}
    run_dir.metrics.unlink()
    assert figure_of(Run(run_dir.path), "seconds") is None


@pytest.mark.parametrize("direction", Direction)
def test_of_equal_jobs_the_first_is_the_best_and_a_zero_is_a_score(direction: Direction) -> None:
    scores = (None, 0.0, 0.0, None)
    records = [Record(number=n, overrides=(), folder="", objective=score) for n, score in enumerate(scores)]
    assert best_of(records, direction) == best_of(records[::-1], direction) == records[1]
    assert best_of(records[:1], direction) is None


def test_columns_come_in_the_order_of_their_names_and_the_test_is_the_last(judged_runs: Path) -> None:
    assert columns_of([]) == ["score"]
    runs = [next(run for run in read_runs(judged_runs) if run.folder.name == name) for name in ("d", "g", "a0")]
    assert columns_of(runs) == ["score", "f1", "test"]
    more: Any = SimpleNamespace(columns=["top5"])
    assert columns_of([*runs, more]) == ["score", "f1", "top5", "test"]


@pytest.mark.parametrize(
    ("key", "heads", "below"),
    [("a", ["a"], True), ("a.b", ["a"], True), ("ab", ["a"], False), ("b", ["a", "b"], True), ("a", ["a.b"], False)],
)
def test_a_key_is_below_its_block_and_no_other(key: str, heads: list[str], below: bool) -> None:
    assert is_below(key, heads) == below


def test_a_column_is_sorted_numbers_first_then_texts_then_nothing() -> None:
    values = [None, "b", 2.0, "", "10", "a", -1]
    rows: list[dict[str, Any]] = [{"direction": Direction.maximize}]
    rows += [{"x": value, "direction": Direction.maximize} for value in values]
    assert [row.get("x", 0) for row in ordered(rows, "x", {})] == [-1, 2.0, "10", "a", "b", 0, None, ""]
    scores = [{"score": value, "direction": Direction.maximize} for value in (1.0, None, 3.0)]
    assert [row["score"] for row in ordered(scores, "score", {})] == [3.0, 1.0, None]
    tests = [{"test": value, "direction": Direction.minimize} for value in (3.0, 1.0)]
    assert [row["test"] for row in ordered(tests, "test", {})] == [1.0, 3.0]
    logged = [{"my/gap": value, "direction": Direction.minimize} for value in (1.0, 3.0)]
    assert [row["my/gap"] for row in ordered(logged, "my/gap", {"my/gap": Direction.maximize})] == [3.0, 1.0]
    apart = [
        {"x": value, "monitor": name, "direction": Direction.maximize}
        for value, name in zip([3, 1, 2], "aba", strict=True)
    ]
    assert [row["x"] for row in ordered(apart, "x", {})] == [1, 2, 3], "the table that has the first row comes first"
    assert ordered([], "anything", {}) == []
    with pytest.raises(InputError, match=r"--sort scor: there is no such column\. Did you mean '--sort score'\?"):
        ordered(scores, "scor", {})
    with pytest.raises(
        InputError, match=r"--sort zzz: there is no such column\. There are score, direction, and the"
    ):
        ordered(scores, "zzz", {})


def test_a_table_in_another_form_has_no_sentences_and_chosen_figures_no_differences(
    swept: Ledger, capsys: CAPSYS
) -> None:
    heads = {}
    for form, columns in (("table", []), ("table", ["score"]), ("markdown", []), ("table", ["seed"])):
        compare([str(swept.folder)], by=[], sort=None, form=form, columns=columns)
        shown = table(capsys)
        heads[form, *columns] = ("to the best" in shown, "Welch's" in shown, "best: job" in shown)
    assert heads == {
        ("table",): (True, True, True),
        ("table", "score"): (False, False, True),
        ("markdown",): (True, False, False),
        ("table", "seed"): (False, False, True),
    }
    alone = sweep(swept.folder.parent / "two", {("batch=1",): 0.0})
    compare([str(alone.folder)], by=[], sort=None, form="table")
    shown = table(capsys)
    assert "to the best" not in shown, "there is nothing to compare it with"
    assert "best: job 0 with 0.00 % top-1" in shown


def test_a_job_is_what_its_record_says_unless_its_files_are_damaged(swept: Ledger) -> None:
    record = swept.write(replace(swept.records()[0], started=7.0, error="odd"))
    monitor = swept.identity().monitor
    of_record = JobRun(swept, record, monitor)
    assert (of_record.state, of_record.score, of_record.error, of_record.started) == ("done", 90.0, "odd", 7.0)
    assert of_record.overrides == ["optimizer.lr=0.1", "seed=0"]
    assert of_record.path == swept.folder / "0"
    assert of_record.monitor == monitor, "its summary names none"
    RunDir(swept.folder / record.folder).summary.write_text("{")
    damaged = JobRun(swept, record, monitor)
    assert (damaged.state, damaged.score) == (State.damaged, None)
    assert "summary.json" in damaged.error
    waiting = JobRun(swept, Record(number=9, overrides=("seed=9",), folder="009-none"), Monitor.parse("-loss"))
    assert (waiting.state, waiting.score, waiting.error, waiting.overrides) == ("waiting", None, "", ["seed=9"])
    assert str(waiting.monitor) == "-loss"


def test_a_folder_has_its_runs_by_name_a_sweep_before_its_jobs_and_no_run_within_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("c", "a", "a/inner", "b/000-x", "locked/x", "gone/x"):
        run(tmp_path / name)
    Ledger(tmp_path / "b").create(Identity())
    scandir = os.scandir

    def refusing(path: Any) -> Any:
        if Path(path).name in ("locked", "gone"):
            raise (PermissionError if str(path).endswith("locked") else FileNotFoundError)(13, "no", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    names = [str(folder.relative_to(tmp_path)) for folder in run_folders(tmp_path)]
    assert names == ["a", "b", "b/000-x", "c", "locked"]
    assert [*run_folders(tmp_path / "a")] == [tmp_path / "a"]
    assert [*run_folders(tmp_path / "none")] == []


def test_a_folder_that_a_user_names_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(tmp_path / "outputs" / "a")
    (tmp_path / "outputs" / "latest").write_text("a\n")
    assert existing("outputs") == Path("outputs")
    assert existing("latest").resolve() == (tmp_path / "outputs" / "a").resolve()
    (tmp_path / "file").touch()
    for name in ("file", "none"):
        with pytest.raises(
            InputError, match=rf"^{name} is not a folder; name a run, a sweep, or a folder of them, such"
        ):
            existing(name)


def test_a_single_run_and_a_job_are_told_apart(swept: Ledger, tmp_path: Path) -> None:
    swept.create(replace(swept.identity(), figure="f1", direction=Direction.minimize))
    alone, (job, *_) = run(tmp_path / "000-alone", score=1.0), swept.records()
    assert type(read_single(alone)) is Run
    read = read_single(swept.folder / job.folder)
    assert isinstance(read, JobRun)
    assert (read.record, str(read.monitor)) == (job, "-f1")
    assert [one.record for one in read_jobs(swept) if isinstance(one, JobRun)] == swept.records()


def test_a_value_that_refers_to_the_seed_is_one_setting_of_all_seeds(tmp_path: Path) -> None:
    for name, word in (("a", "init_from=base/${seed}"), ("b", "init_from=base/${batch}")):
        for seed in (0, 1):
            folder = run(tmp_path / f"{name}{seed}", word, f"seed={seed}", score=float(seed))
            value = f"base/{seed if name == 'a' else 64}"
            RunDir(folder).composed.write_text(components.dump({**COMPOSED, "seed": seed, "init_from": value}))
    rows = groups(read_runs(tmp_path))
    assert sorted((row["init_from"], row["done"]) for row in rows) == [("base/${seed}", 2), ("base/64", 2)]


def test_a_monitor_that_was_chosen_by_itself_is_the_one_that_is_named(tmp_path: Path) -> None:
    for name, monitor in (("a", "auto"), ("b", "top1")):
        folder = judged(tmp_path / name, monitor="top1", score=1.0)
        composed = components.read_config(RunDir(folder).composed)
        RunDir(folder).composed.write_text(components.dump({**composed, "monitor": monitor}))
    assert differing(read_runs(tmp_path)) == []
    assert [row["done"] for row in groups(read_runs(tmp_path))] == [1]


def test_code_that_changed_in_a_run_has_all_its_words(tmp_path: Path) -> None:
    code = {"mine": {"sha256": "b" * 64, "files": {}}, "other": {"sha256": "c" * 64, "files": {}}}
    earlier = [{"package": "mine", "until_step": step, "sha256": digit * 64} for step, digit in ((5, "e"), (9, "a"))]
    run(tmp_path / "0", score=2.0, code=code, earlier_code=earlier)
    run(tmp_path / "1", score=1.0, code=code, earlier_code=[])
    rows = groups(read_runs(tmp_path))
    assert [row["code of mine"] for row in rows] == ["#eeeeeee, #aaaaaaa, #bbbbbbb", "#bbbbbbb"]
    assert not [key for row in rows for key in row if key == "code of other"], "it is the same"


def test_a_key_that_no_run_has_is_answered_with_those_that_differ(swept: Ledger, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^--by x: no run has this key; they differ in optimizer\.lr, seed$"):
        groups(read_runs(swept.folder), by=["seed", "x"])
    with pytest.raises(InputError, match=r"they differ in none$"):
        groups([Run(run(tmp_path / "alone"))], by=["x"])
    both = [Run(run(tmp_path / name, *words, score=1.0)) for name, words in (("a", ()), ("b", ("mine=3",)))]
    assert {row["mine"] for row in groups(both, by=["mine"])} == {"", "3"}


def test_runs_that_have_the_same_value_of_another_key_are_two_groups(tmp_path: Path) -> None:
    for number, key in enumerate(("batch_a", "batch_b")):
        run(tmp_path / key, f"{key}=8", score=float(number))
    rows = groups(read_runs(tmp_path), by=["batch_a", "batch_b"])
    assert [(row["batch_a"], row["batch_b"]) for row in rows] == [("", "8"), ("8", "")]


def test_the_numbers_of_jobs_are_those_of_one_sweep(swept: Ledger, tmp_path: Path) -> None:
    assert [row["jobs"] for row in groups(read_runs(swept.folder))] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    other = sweep(swept.folder.parent / "two", {("batch=8",): 50.0, ("batch=16",): 60.0})
    assert [row["jobs"] for row in groups(read_runs(other.folder))] == [[1], [0]]
    both = groups([*read_runs(swept.folder), *read_runs(other.folder)])
    alone = groups([*read_runs(other.folder), Run(run(tmp_path / "alone", score=1.0))])
    assert not [row for row in (*both, *alone) if "jobs" in row]


def test_figures_of_a_row_have_their_own_mean_and_spread(tmp_path: Path) -> None:
    for seed, (gap, f1) in enumerate(((1.0, 10.0), (2.0, 20.0), (6.0, None))):
        folder = judged(tmp_path / str(seed), f"seed={seed}", monitor="top1", score=50.0, scores={"f1": f1})
        RunDir(folder).metrics.write_text(json.dumps({"step": 1, "my/gap": gap}) + "\n")
    (row,) = groups(read_runs(tmp_path), names=["my/gap", "batch"])
    assert (row["my/gap"], row["my/gap_spread"]) == (3.0, pytest.approx(7**0.5))
    assert (row["f1"], row["f1_spread"]) == (15.0, pytest.approx(50**0.5))
    assert (row["score"], row["spread"], row["batch"]) == (50.0, 0.0, "64")
    assert (row["monitor"], row["direction"]) == ("top1", Direction.maximize)


def test_only_a_value_that_is_the_default_of_a_config_is_one(swept: Ledger, tmp_path: Path) -> None:
    price = "cost.usd_per_gpu_hour"  # null by default
    alone = Run(run(tmp_path / "a", "batch=128", f"{price}=2", "loader.workers=auto", score=1.0))
    keys = ("batch", "seed", "none", price, "loader.workers")
    values = {key: (setting(alone, key), setting(alone, key).is_default) for key in keys}
    assert values == {
        "batch": ("128", False),
        "seed": ("0", True),
        "none": ("", True),
        price: ("2", False),
        "loader.workers": ("auto", True),
    }
    waiting = JobRun(swept, Record(number=9, overrides=("seed=0",), folder="009-none"), Monitor())
    assert (setting(waiting, "seed"), setting(waiting, "seed").is_default) == ("0", False), "nothing is known of it"
    twice = JobRun(swept, Record(number=9, overrides=("seed=2", "seed=1"), folder="009-none"), Monitor())
    assert setting(twice, "seed") == "1", "the last one wins"


def test_chosen_keys_are_columns_alone_and_else_all(tmp_path: Path) -> None:
    rows = [{"a": "1", "b": "2"}, {"b": "3"}]
    heads = {
        names: [column.head for column in columns_of_keys(rows, ["a", "b"], names)] for names in ((), ("b", "x"))
    }
    assert heads == {(): ["a", "b"], ("b", "x"): ["b"]}
    assert [column.head for column in columns_of_keys(rows, ["a", "b"], ["x"])] == ["a", "b"]


def test_the_score_of_the_test_split_has_the_digits_and_the_direction_of_the_score() -> None:
    rows = [{"test": 91.5, "test_spread": 0.25, "score": 90.0}, {"test": 80.0, "score": None}, {"score": None}]
    column = column_of_figure(rows, "test", Monitor(), {})
    assert (column.cells, column.best) == (["91.50 ± 0.25", "80.00", ""], [0])
    column = column_of_figure(rows, "test", Monitor.parse("-top1"), {})
    assert column.best == [1]
    assert column_of_figure(rows, "score", Monitor(), {}).best == [], "it is the only one"
    losses = [{"score": 0.25}, {"score": 0.0}, {"score": None}]
    assert column_of_figure(losses, "score", Monitor.parse("-loss"), {}).best == [1]
    assert [column_of_figure(rows, name, Monitor(), {}).may_move for name in ("score", "test")] == [False, True]


def test_settings_of_one_run_have_no_interval_and_tables_a_line_between_them(
    judged_runs: Path, tmp_path: Path, capsys: CAPSYS
) -> None:
    other = sweep(tmp_path / "other", {("batch=1",): 1.0, ("batch=2",): 2.0})
    compared("other")(tmp_path)
    shown = table(capsys)
    assert "to the best" in shown
    assert "Welch" not in shown
    assert "best: job 1 with 2.00 % top-1, " in shown
    shutil.rmtree(other.folder)
    for show in (compared(), listing()):
        show(judged_runs)
        blocks = table(capsys).split("\n\n")
        assert [bool(re.match(r"(model|name|val) ", block)) for block in blocks] == [True] * 4


@pytest.mark.parametrize(("state", "known"), [(State.done, [5.0, 0.5]), (State.pruned, []), (State.failed, [])])
def test_only_a_job_that_is_done_has_objectives_and_only_all_of_them(
    state: State, known: list[float], tmp_path: Path
) -> None:
    RunDir.at(tmp_path / "000-a").write_summary(scores={"f1": 0.5}, spent={"kwh": 0.0})
    objective = None if state is State.failed else 5.0
    record = Record(number=0, overrides=(), folder="000-a", state=state, objective=objective)
    assert objectives_of(tmp_path, record, ["score", "f1"]) == known
    assert objectives_of(tmp_path, record, ["kwh"]) == [0.0] * bool(known)
    assert objectives_of(tmp_path, record, ["score", "megabytes"]) == []


def test_the_jobs_without_an_objective_are_named_for_each_of_them(tmp_path: Path) -> None:
    records = [Record(number=n, overrides=(), folder=f"{n:03}-a", state=State.done, objective=1.0) for n in range(4)]
    for record in records[:2]:
        RunDir.at(tmp_path / record.folder).write_summary(
            scores={"f1": 0.5}, spent={} if record.number else {"kwh": 1.0}
        )
    failed = replace(records[3], state=State.failed, objective=None)
    names = ["score", "f1", "kwh"]
    remedies = "which cannot be compared by it; remove it: sweep.objectives="
    assert unmeasured(tmp_path, [*records[:3], failed], names) == [
        f"sweep.objectives: f1 was not measured in job 2, {remedies}[score,kwh]",
        f"sweep.objectives: kwh was not measured in jobs 1, 2, {remedies}[score,f1]",
    ]


def test_a_pruned_run_may_be_resumed_and_a_job_has_the_short_path_of_its_sweep(
    swept: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: CAPSYS
) -> None:
    monkeypatch.chdir(tmp_path)
    for status, may_go_on in (("pruned", True), ("stopped", True), ("failed", False), ("completed", False)):
        run(tmp_path / status, status=status)
        listing(status)(tmp_path)
        assert (f"lockstep train resume={status}\n" in table(capsys)) == may_go_on
    listing(swept.records()[3].folder)(swept.folder)
    shown = table(capsys)
    assert re.findall(r"lockstep .*", shown) == ["lockstep report outputs/sweeps/one/3"]
    assert re.search(rf"^ +run  outputs/sweeps/one/{swept.records()[3].folder}$", shown, re.MULTILINE)


def test_a_run_without_the_options_of_its_groups_is_known_by_its_classes(tmp_path: Path) -> None:
    for name in ("DigitNet", "BasicNet"):
        folder = run(tmp_path / name, score=1.0)
        (RunDir(folder).hydra / "hydra.yaml").unlink()
        model = {"_target_": f"lockstep.models.{name}", "width": 32}
        RunDir(folder).composed.write_text(components.dump({**COMPOSED, "model": model}))
    assert differing(read_runs(tmp_path)) == ["model"]
    assert sorted(row["model"] for row in groups(read_runs(tmp_path))) == [
        "lockstep.models.BasicNet",
        "lockstep.models.DigitNet",
    ]


def test_a_key_that_one_run_does_not_have_is_no_difference(tmp_path: Path) -> None:
    run(tmp_path / "a", score=1.0)
    folder = run(tmp_path / "b", score=2.0, code={"mine": {"sha256": "a" * 64, "files": {}}}, earlier_code=[])
    RunDir(folder).composed.write_text(components.dump({**COMPOSED, "epochs": 3, "loader": {"workers": 1}}))
    assert differing(read_runs(tmp_path)) == ["loader.workers"], "it changes the last bits"
    assert not [row for row in groups(read_runs(tmp_path)) if "code of mine" in row]


def test_the_cells_of_a_row_have_the_digits_of_the_score_or_their_own() -> None:
    figures = {"score": 90.0, "test": 91.5, "f1": 0.51234, "seconds": 2.3456, "top5": 1.0}
    names = ["score", "test", "f1", "seconds", "top5", "none"]
    assert cells(figures, names, "top1") == ["90.00", "91.50", "0.5123", "2.35", "1.00", ""]
    assert cells(figures, names, "loss") == ["90", "91.5", "0.5123", "2.35", "1.00", ""]
    assert cells({"score": 0.0}, ["score"], "score") == ["0.00"]


def test_each_damaged_file_of_a_run_is_named(tmp_path: Path) -> None:
    two(tmp_path)
    damaged = [RunDir(tmp_path / "b").environment, RunDir(tmp_path / "b").summary]
    for path in damaged:
        path.write_text("{")
    with pytest.raises(InputError) as raised:
        causes([Run(tmp_path / "a"), Run(tmp_path / "b")])
    assert len(raised.value.args) == 2
    for path in damaged:
        assert str(path) in str(raised.value)


def test_each_damaged_run_of_a_comparison_is_named_once(tmp_path: Path, capsys: CAPSYS) -> None:
    for name in "abc":
        run(tmp_path / name, f"batch={ord(name)}", score=1.0)
    for name in "ab":
        RunDir(tmp_path / name).summary.write_text("{")
    for show in (lambda: compare([str(tmp_path)] * 2, by=[], sort=None, form="csv"), lambda: listing()(tmp_path)):
        with pytest.raises(InputError) as raised:
            show()
        assert [str(tmp_path / name) in sentence for name, sentence in zip("ab", raised.value.args, strict=True)] == [
            True,
            True,
        ]
        assert re.search(r"\b1\.00?\b", table(capsys)), "the whole one is there"


def test_a_run_is_shown_with_commas_in_its_steps_and_the_time_of_its_start(tmp_path: Path, capsys: CAPSYS) -> None:
    run_dir = RunDir(run(tmp_path / "a", score=1.0))
    run_dir.write_summary(best=98.765, best_step=12345, started=7200.0, seconds=3725.0)
    listing("a")(tmp_path)
    shown = table(capsys)
    assert "best  98.77 % top-1 at step 12,345\n" in shown
    assert f"state  done, started {format_timestamp(7200.0)}, took 1:02:05\n" in shown
    run_dir.write_summary(started=None, seconds=None, best_step=None)
    listing("a")(tmp_path)
    shown = table(capsys)
    assert "best  98.77 % top-1\n" in shown
    assert "state  done\n" in shown


SENTENCES: dict[str, tuple[Command, str]] = {
    "runs: none": (listing("no"), "{no} has no run in it; name a folder of runs: lockstep runs outputs"),
    "compare: none": (compared("no"), "{no} has no run in it; name a run, a sweep, or a folder of them"),
    "report: none": (
        lambda root: report(str(root / "no")),
        "{no} is neither a run nor a sweep; `lockstep runs {no}` lists those in it",
    ),
    "bundle: none": (
        lambda root: report(str(root / "no"), bundle=True),
        "{no} is neither a run nor a sweep; `lockstep runs {no}` lists those in it",
    ),
    "watch: none": (
        lambda root: watch(str(root / "no"), port=0),
        "{no} has no run in it; name a run, a sweep, or a folder of them: lockstep watch outputs",
    ),
    "a key": (
        listing(filters=["batch=8", "lr<1"]),
        "--filter lr<1: no run has lr; expected KEY=VALUE, KEY<NUMBER or KEY>NUMBER: --filter state=done",
    ),
    "a word": (
        listing(filters=["done"]),
        "--filter done: it is not a condition; expected KEY=VALUE, KEY<NUMBER or KEY>NUMBER: --filter state=done",
    ),
    "a number": (
        listing(filters=["batch>8x"]),
        "--filter batch>8x: it is not a condition; expected KEY=VALUE, KEY<NUMBER or KEY>NUMBER: --filter state=done",
    ),
    "a column": (listing(sort="scor"), "--sort scor: there is no such column. Did you mean '--sort score'?"),
    "columns": (
        compared(columns=["scor"]),
        "--columns scor: there is no such column. Did you mean '--columns score'?",
    ),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_what_a_command_cannot_do_is_said_with_what_was_typed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "no").mkdir()
    for number in (8, 9):
        run(tmp_path / str(number), f"batch={number}", score=1.0)
    act, sentence = SENTENCES[name]
    with pytest.raises(InputError) as raised:
        act(tmp_path)
    assert str(raised.value) == sentence.format(no=tmp_path / "no")


def test_a_number_of_a_summary_is_a_figure_and_the_metrics_come_before_it(tmp_path: Path) -> None:
    run_dir = RunDir(judged(tmp_path / "a", monitor="top1", score=5.0, scores={"f1": 0.25}, test={"top1": 4.0}))
    run_dir.write_summary(img_per_s=7.5, best_step=0, spent={"usd": 2.0, "step": 8.0}, step=9)
    names = ("img_per_s", "test", "f1", "usd", "step", "monitor")
    assert {name: figure_of(Run(run_dir.path), name) for name in names} == {
        "img_per_s": 7.5,
        "test": 4.0,
        "f1": 0.25,
        "usd": 2.0,
        "step": 8.0,
        "monitor": None,
    }


def test_a_sweep_that_is_damaged_is_named_in_a_listing_of_the_others(swept: Ledger, capsys: CAPSYS) -> None:
    other = sweep(swept.folder.parent / "two", {("batch=8",): 66.0})
    (swept.folder / "sweep.json").write_text("{")
    with pytest.raises(InputError, match=r"one/sweep\.json .*; start anew with sweep\.resume=new$") as raised:
        listing()(swept.folder.parent)
    assert len(raised.value.args) == 1
    shown = table(capsys)
    assert "66.00" in shown
    assert "no run fits" not in shown
    shutil.rmtree(other.folder)
    with pytest.raises(InputError, match=r"one/sweep\.json"):
        listing()(swept.folder.parent)
    assert table(capsys) == ""


def test_a_run_without_tags_beside_one_with_tags_has_an_empty_field(tmp_path: Path, capsys: CAPSYS) -> None:
    run(tmp_path / "a", score=1.0)
    folder = run(tmp_path / "b", score=2.0)
    RunDir(folder).composed.write_text(components.dump({**COMPOSED, "tags": ["x", 3]}))
    listing(form="markdown")(tmp_path)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table(capsys).splitlines()]
    assert [row[rows[0].index("tags")] for row in rows[2:]] == ["", "x, 3"]
    assert "notes" not in rows[0]


def test_two_runs_of_which_one_is_damaged_are_a_table_with_one_sentence(tmp_path: Path, capsys: CAPSYS) -> None:
    run(tmp_path / "a", "batch=8", score=91.25)
    RunDir(run(tmp_path / "b", "batch=9", score=2.0)).summary.write_text("{")
    with pytest.raises(InputError, match=r"b/summary\.json") as raised:
        compare([str(tmp_path / "a"), str(tmp_path / "b")], by=[], sort=None, form="table")
    assert len(raised.value.args) == 1
    shown = table(capsys)
    assert re.search(r"^ *91\.25 +1 done, 1 damaged *$", shown, re.MULTILINE), shown
    assert "likely cause" not in shown
    assert "damaged: " not in shown, "the sentence comes at the end"


def test_a_run_that_was_not_evaluated_has_no_score_among_the_causes(tmp_path: Path, capsys: CAPSYS) -> None:
    run(tmp_path / "a", "batch=8", status="failed")
    judged(tmp_path / "b", "batch=9", monitor="-loss", score=0.25)
    compare([str(tmp_path / "a"), str(tmp_path / "b")], by=[], sort=None, form="table")
    first, second, *_ = table(capsys).splitlines()
    assert (first, second) == (f"A  failed    {tmp_path / 'a'}", f"B  done  loss 0.25  {tmp_path / 'b'}")


def test_a_process_without_a_time_of_its_start_runs_nothing() -> None:
    facts: dict[str, Any] = {"overrides": (), "folder": "000-a", "state": State.running, "host": socket.gethostname()}
    for pid, time_of_start, runs_here in ((2**22 + 1, "", False), (os.getpid(), "", False), (0, "", False)):
        record = Record(number=0, **facts, pid=pid, born=time_of_start)
        assert (record.runs_here, record.present_state) == (runs_here, State.killed)


def test_the_job_of_a_table_is_the_best_of_its_monitor_and_of_equal_ones_the_first(
    tmp_path: Path, capsys: CAPSYS
) -> None:
    ledger = sweep(tmp_path / "one", {(f"batch={size}",): score for size, score in ((8, 0.0), (9, 5.0), (16, 5.0))})
    compared()(ledger.folder)
    assert "best: job 1 with 5.00 % top-1, " in table(capsys)
    ledger.create(replace(ledger.identity(), direction=Direction.minimize))
    compared()(ledger.folder)
    assert "best: job 0 with 0.00 % top-1, " in table(capsys)
    runs(str(tmp_path), sort="score", filters=["score<1"], form="json")
    (row,) = json.loads(table(capsys))
    assert (row["score"], row["state"], row["batch"]) == (0.0, "3 done", "1,2")


def test_filters_read_keys_that_are_no_column_and_texts_as_they_are(tmp_path: Path, capsys: CAPSYS) -> None:
    for name, words in (("a", ["optimizer.lr=0.10"]), ("b", ["optimizer.lr=0.1", "loader.workers=2"])):
        run(tmp_path / name, *words, score=1.0)
    for condition, names in {
        "optimizer.lr=0.1": ["b"],
        "optimizer.lr<0.2": ["a", "b"],
        "loader.workers=auto": ["a"],
        "loader.workers>1": ["b"],
        "model=digitnet": ["a", "b"],
        "overrides=optimizer.lr=0.10": ["a"],
        "name=b": ["b"],
        "tags=None": ["a", "b"],
    }.items():
        assert sorted(row["name"] for row in listed(capsys, tmp_path, filters=[condition])) == names, condition
    run(tmp_path / "c", "optimizer.momentum=0.9", score=2.0)
    for filters in itertools.permutations(["optimizer.momentum>0.5", "score<1.5"]):
        assert listed(capsys, tmp_path, filters=filters) == [], "a key of a run is known, whether or not that fits"
    for filters in itertools.permutations(["optimizer.momentum>0.5", "score>1.5"]):
        assert [row["name"] for row in listed(capsys, tmp_path, filters=filters)] == ["c"]


def test_a_job_that_was_killed_is_counted_as_killed_in_lists_and_pages(swept: Ledger, capsys: CAPSYS) -> None:
    for number, host in ((0, socket.gethostname()), (1, "elsewhere")):
        record = replace(swept.records()[number], state=State.running, host=host, pid=1, born="another")
        swept.write(replace(record, objective=None))
    (row,) = listed(capsys, swept.folder.parent)
    assert row["state"] == "1 killed, 1 running, 6 done, 1 failed"
    assert row["score"] == 91.0, "of the setting that has all of its seeds"
    assert "1 killed, 1 running, 6 done, 1 failed" in sweep_page(swept)
    rows = {row["optimizer.lr"]: row["state"] for row in groups(read_runs(swept.folder))}
    assert rows["0.1"] == "1 killed, 1 running, 1 done"


def test_a_sweep_without_jobs_is_listed_with_what_its_line_says(tmp_path: Path, capsys: CAPSYS) -> None:
    identity = Identity(
        base={"tags": ["paper"], "notes": "why"}, swept=("batch", "seed"), words=("seed=1,2", "name=x")
    )
    Ledger(tmp_path / "a" / "one").create(identity)
    (row,) = listed(capsys, tmp_path)
    assert {key: row[key] for key in ("name", "when", "state", "score", "seed", "tags", "notes", "run_group")} == {
        "name": "a/one",
        "when": "",
        "state": "",
        "score": None,
        "seed": "1,2",
        "tags": ["paper"],
        "notes": "why",
        "run_group": None,
    }
    assert row["overrides"] == ["seed=1,2", "name=x"]
    assert row["size"] == (tmp_path / "a" / "one" / "sweep.json").stat().st_size
    assert "batch" not in {key for key, value in row.items() if value}


def test_the_size_of_a_sweep_is_that_of_all_its_jobs(swept: Ledger, capsys: CAPSYS) -> None:
    (row,) = listed(capsys, swept.folder.parent)
    sizes = [path.stat().st_size for path in swept.folder.rglob("*") if path.is_file()]
    assert row["size"] == sum(sizes)
    jobs = {row["name"]: row["size"] for row in listed(capsys, swept.folder)}
    assert [*jobs] == [record.folder for record in swept.records()]
    for name, size in jobs.items():
        assert size == sum(path.stat().st_size for path in (swept.folder / name).rglob("*") if path.is_file())


def test_runs_are_listed_by_their_time_and_of_one_time_by_name(tmp_path: Path, capsys: CAPSYS) -> None:
    for name, started in (("c", 60.0), ("b", 120.0), ("d", 60.0), ("a", 86400.0 * 400)):
        RunDir(run(tmp_path / name, score=1.0)).write_summary(started=started)
    assert [row["name"] for row in listed(capsys, tmp_path)] == ["c", "d", "b", "a"]
    assert [row["name"] for row in listed(capsys, tmp_path, sort="name")] == ["a", "b", "c", "d"]


def test_a_run_that_was_typed_without_a_file_of_an_own_group_is_the_run_without_it(tmp_path: Path) -> None:
    for name, words in (("a", ("debug=null",)), ("b", ()), ("c", ("experiment=null", "seed=1"))):
        run(tmp_path / name, *words, score=1.0)
    hydra = {"hydra": {"runtime": {"choices": {"model": "digitnet", "optimizer": "adamw", "loader": "auto"}}}}
    (RunDir(tmp_path / "c").hydra / "hydra.yaml").write_text(json.dumps(hydra))
    for name in "abc":
        composed = {**COMPOSED, "seed": int(name == "c")}
        RunDir(tmp_path / name).composed.write_text(components.dump(composed))
    (row,) = groups(read_runs(tmp_path))
    assert (row["done"], row["state"]) == (2, "3 done"), "the first two are one run"
    assert differing(read_runs(tmp_path)) == ["seed"]


def test_of_the_keys_that_differ_those_that_were_typed_in_any_run_come_first(tmp_path: Path) -> None:
    run(tmp_path / "a", score=1.0)
    run(tmp_path / "b", "optimizer.lr=0.2", "seed=3", score=2.0)
    composed = components.read_config(RunDir(tmp_path / "b").composed)
    RunDir(tmp_path / "b").composed.write_text(components.dump({**composed, "batch": 8}))
    both = read_runs(tmp_path)
    assert differing(both) == differing(both[::-1]) == ["optimizer.lr", "seed", "batch"]
