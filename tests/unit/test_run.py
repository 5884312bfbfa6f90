"""What a run folder says, whatever became of its files: whole, missing, damaged, or of other types."""

import itertools
import json
import math
import os
import socket
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from helpers import train_here
from lockstep.core.figures import Predictions, digits, finite, place_of, read_figures, read_samples
from lockstep.core.model_card import TARGETS
from lockstep.core.run import Run, State, born, candidates, step_of
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_read import UnreadableFile
from lockstep.core.tags import FIGURES

NO_PROCESS = 2**22 + 1  # more than any system numbers
# What can be asked of a run, and the file that has it.
CONTENTS: dict[str, Callable[[RunDir], Path]] = {
    "summary": lambda run: run.summary,
    "environment": lambda run: run.environment,
    "composed": lambda run: run.composed,
    "choices": lambda run: run.hydra / "hydra.yaml",
    "overrides": lambda run: run.overrides,
    "figures": lambda run: run.metrics,
    "gpu": lambda run: run.gpu,
    "predictions": lambda run: run.validation,
    "identity": lambda run: run.checkpoints / "step-00000002" / "facts.json",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return train_here(tmp_path_factory.mktemp("runs") / "run", "steps=2", "model=linear")


def test_a_whole_file_is_read(trained: RunDir) -> None:
    files = Run(trained.path)
    assert all(getattr(files, name) for name in {*CONTENTS} - {"choices", "gpu"})  # without Hydra, on a CPU
    assert files.damage == []


def test_a_missing_file_is_empty_and_no_damage(tmp_path: Path) -> None:
    files = Run(tmp_path)
    assert not any(getattr(files, name) for name in CONTENTS)
    assert files.damage == []


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "not text": lambda path: path.write_bytes(b"\xff\n"),
    "a number": lambda path: path.write_text("3\n"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", CONTENTS)
def test_a_damaged_file_is_empty_with_one_sentence_that_names_it(tmp_path: Path, name: str, damage: str) -> None:
    files = Run(tmp_path / "run")
    path = CONTENTS[name](files.run_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    DAMAGE[damage](path)
    assert not getattr(files, name)
    # A line of figures that cannot be read is left out, as a kill leaves one. A link to nothing is a missing file.
    skips = name in ("figures", "gpu") and damage in ("not text", "a number", "a link to nothing")
    skips |= name == "identity" and damage == "a link to nothing"
    assert [str(path) in sentence and "\n" not in sentence for sentence in files.damage] == [True] * (not skips)
    assert Run(tmp_path / "other").damage == []


TEXTS = ("status", "run", "error", "monitor", "stopped_early")
NUMBERS = ("started", "seconds", "step", "steps", "steps_per_epoch", "objective", "best", "best_step", "skipped")
NUMBERS += ("img_per_s", "data_wait_pct", "gpu_memory", "cpu_mem_gb")
TABLES, FINDINGS = ("spent", "time", "scores", "test", "directions"), ("verdict", "learning")


@pytest.mark.parametrize("value", ["x", [1], {"a": "x"}, True, math.nan, math.inf, None], ids=repr)
@pytest.mark.parametrize("key", [*TEXTS, *NUMBERS, *TABLES, *FINDINGS])
def test_a_summary_of_other_types_is_damaged_as_a_whole(tmp_path: Path, key: str, value: object) -> None:
    run = RunDir.at(tmp_path)
    run.summary.write_text(json.dumps({"status": "completed", "steps": 3, key: value}))
    if value == "x" if key in TEXTS else value is None or (key in FINDINGS and isinstance(value, dict)):
        assert run.read_summary()[key] == value
        return
    with pytest.raises(UnreadableFile, match="is not the summary of a run"):
        run.read_summary()
    assert Run(tmp_path).summary == Run(tmp_path).spent == {}
    assert Run(tmp_path).id is None


@pytest.mark.parametrize(
    ("lock", "state"),
    [
        (None, State.killed),
        ({"host": socket.gethostname(), "pid": os.getpid()}, State.running),
        ({"host": socket.gethostname(), "pid": NO_PROCESS}, State.killed),
        ({"host": "another", "pid": os.getpid()}, State.running),
        ({"host": "another", "pid": NO_PROCESS}, State.running),
        ({"pid": os.getpid()}, State.killed),
        ([1], State.killed),
        ({"host": socket.gethostname(), "pid": str(os.getpid())}, State.killed),
    ],
)
def test_a_run_runs_while_its_process_lives_and_on_another_machine_nobody_knows(
    tmp_path: Path, lock: dict[str, object] | list[int] | None, state: State
) -> None:
    run = RunDir.at(tmp_path)
    run.start_summary()
    if lock is not None:
        run.lock.write_text(json.dumps(lock))
    assert Run(tmp_path).state == state


def test_a_process_that_nobody_has_waited_for_is_gone() -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert (born(process.pid), bool(born(os.getpid()))) == ("", True)
    process.wait()
    assert [born(pid) for pid in (None, str(os.getpid()), -1, NO_PROCESS)] == [""] * 4


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="psutil's time depends on the clock elsewhere")
def test_a_process_is_told_from_a_later_one_by_the_time_since_the_boot_at_which_it_began() -> None:
    began = int(born(os.getpid())) / os.sysconf("SC_CLK_TCK")
    assert psutil.boot_time() + began == pytest.approx(psutil.Process().create_time(), abs=2)


def test_the_newest_checkpoint_is_the_one_of_the_last_step_however_many_digits_it_has(tmp_path: Path) -> None:
    steps = [1, 99_999_999, 100_000_000, 10**17]
    for name in [*(f"step-{step:08}" for step in steps), "step-7", "step-0000000x", ".step-00000009"]:
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000010").touch()
    assert [*map(step_of, candidates(tmp_path))] == sorted(steps, reverse=True)


@pytest.mark.parametrize(
    ("monitor", "tag", "values", "best"),
    [
        ("-loss", "loss/val", (0.9, 0.5, 0.7), "0.5"),
        ("top1", "acc/val_top1", (50.0, 90.0, 70.0), "90.00"),
        ("top1", "acc/val_ema_top1", (50.0, 90.0, 70.0), "90.00"),
        ("-error", "metric/error", (3.0, 1.0, 2.0), "1"),
    ],
)
def test_a_pruned_run_says_how_far_it_came_and_its_best_value(
    tmp_path: Path, monitor: str, tag: str, values: tuple[float, ...], best: str
) -> None:
    run = RunDir.at(tmp_path)
    run.write_summary(status="pruned", monitor=monitor)
    lines = [{"step": step, tag: value} for step, value in enumerate(values, 1)]
    run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert Run(tmp_path).status == f"pruned at step 3 with {best}"


def test_the_typed_values_are_those_of_the_keys_without_their_signs(tmp_path: Path) -> None:
    run = RunDir.at(tmp_path)
    run.overrides.write_text(json.dumps(["seed=1", "+debug=fast", "++name=a=b", "batch="]))
    assert Run(tmp_path).typed_values == {"seed": "1", "debug": "fast", "name": "a=b", "batch": ""}
    assert Run(tmp_path).overrides == ["seed=1", "+debug=fast", "++name=a=b", "batch="], "in the order of the line"
    run.overrides.write_text(json.dumps(["seed=1", "~callback", "~model.width=3"]))
    assert not {"callback", "model.width"} & Run(tmp_path).typed_values.keys(), "what is taken away has no value"


@pytest.mark.parametrize("key", [*NUMBERS, *TABLES, *FINDINGS])
def test_a_number_or_a_table_may_be_null(tmp_path: Path, key: str) -> None:
    RunDir.at(tmp_path).write_summary(**{key: None})
    run = Run(tmp_path)
    assert run.summary[key] is None
    assert (run.spent, run.started, run.score, run.columns) == ({}, 0.0, None, {})
    assert run.directions == {"loss/val": "minimize", "acc/val_top1": "maximize"}


def test_a_series_has_the_first_finite_figure_of_each_step(tmp_path: Path) -> None:
    lines = [{"step": 1, "a": 1.0}, {"step": 2, "a": None, "b": 2.0}, {"step": 3, "c": 3.0}, {"step": 4, "b": 4.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert Run(tmp_path).series("a", "b") == [(1, 1.0), (2, 2.0), (4, 4.0)]
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "b": 2.0, "a": 1.0}\n')
    assert (Run(tmp_path).series("a", "b"), Run(tmp_path).series("b", "a")) == ([(1, 1.0)], [(1, 2.0)])


def test_only_a_line_of_figures_is_read_and_the_time_of_a_line_is_none(tmp_path: Path) -> None:
    whole = [{"step": 1, "time": 5.0, "a": 1.5}, {"step": 2, "a": 2, "b": None}, {"step": 3, "c": 0.0}]
    broken = [{"step": True, "a": 1}, {"step": 1.0, "a": 1}, {"step": "1"}, {"a": 1}, {"step": 4, "a": "x"}]
    broken += [{"step": 4, "a": True}, {"step": 4, "a": [1]}, {"step": 4, "a": math.nan}, [1], "step", 1, None]
    broken += [{"step": 10**400}, {"step": 4, "a": -(10**400)}]
    lines = [json.dumps(line) for pair in itertools.zip_longest(broken, whole) for line in pair if line is not None]
    (file := tmp_path / "metrics.jsonl").write_text(
        "\n".join([*lines, "{", "", "[" * 100_000, '{"step": 9, "a": 1}'])
    )
    assert [*read_figures(file)] == [(1, {"a": 1.5}), (2, {"a": 2}), (3, {"c": 0.0})], "the last line was cut"
    (_, with_null, _) = read_figures(file, nulls=True)
    assert (with_null[1]["a"], math.isnan(with_null[1]["b"])) == (2, True)
    assert [*read_figures(tmp_path / "none")] == [*read_samples(tmp_path / "none")] == []


def test_a_line_of_a_gpu_has_its_numbers_by_rank(tmp_path: Path) -> None:
    line = {
        "time": 1.0,
        "step": 3,
        "local_rank": 1,
        "uuid": "GPU-1",
        "util": 50,
        "idle": 0,
        "watts": 0.0,
        "name": "H200",
        "on": True,
        "w": None,
        "huge": 10**400,
    }
    lines = [line, *({key: value for key, value in line.items() if key != gone} for gone in [*line][:4]), [1], "x", 3]
    (file := tmp_path / "gpu.jsonl").write_text("".join(f"{json.dumps(text)}\n" for text in lines) + "{\n")
    assert [*read_samples(file)] == [(3, {"gpu/util/1": 50, "gpu/idle/1": 0, "gpu/watts/1": 0.0})]


def test_every_figure_is_read_up_to_the_place_where_a_run_logs_it(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    for figure in FIGURES:
        file.write_text(json.dumps({"step": 3, figure.tag + "x" * figure.tag.endswith("/"): 1.0}) + "\n")
        places = (2.75, 3, 3.5, 3.75, 4)
        steps = {place: [step for step, _ in read_figures(file, place)] for place in places}
        assert steps == {place: [3] * (place >= 3 + figure.delay) for place in places}, figure.tag


def test_a_step_is_before_its_evaluation_which_is_before_the_test_and_a_line_is_where_its_latest_figure_is() -> None:
    in_order = (("optim/lr", "perf/step_ms"), ("loss/val", "perf/time/data", "loss/train_epoch"), ("test/loss",))
    places = [{place_of(3, [tag, *in_order[0]]) for tag in tags} for tags in in_order]
    assert [len(same) for same in places] == [1, 1, 1]
    assert 3 == min(places[0]) < min(places[1]) < min(places[2]) < 4
    for before, tags in itertools.pairwise(in_order):
        assert place_of(3, [*before, *tags]) == place_of(3, [*tags, *before]) == place_of(3, tags[:1])


@pytest.mark.parametrize("objective", [0.0, None])
def test_a_table_shows_the_chosen_metrics_without_the_monitor_and_the_test_of_a_run_with_a_score(
    tmp_path: Path, objective: float | None
) -> None:
    run = RunDir.at(tmp_path)
    metrics = {"metric": {name: {} for name in ("auroc", "f1", "kappa", "map")}}
    run.composed.write_text(json.dumps(metrics))
    scores = {"auroc": 0.9, "f1": 0.0, "kappa": None, "top1": 80.0}
    run.write_summary(monitor="auroc", objective=objective, scores=scores, test={"auroc": 0.0, "f1": 0.5})
    assert Run(tmp_path).columns == ({} if objective is None else {"f1": 0.0, "test": 0.0})


def test_the_choices_of_a_run_are_those_of_its_groups_and_its_swept_values_those_of_its_line(tmp_path: Path) -> None:
    sweep, run = tmp_path, RunDir.at(tmp_path / "000-x")
    chosen = {"model": "linear", "experiment": None, "hydra/sweeper": "grid", "fold": 3}
    (run.hydra / "hydra.yaml").write_text(json.dumps({"hydra": {"runtime": {"choices": chosen}}}))
    run.overrides.write_text(json.dumps(["seed=1", "model.width=3", "optimizer.lr=0.1"]))
    assert Run(run.path).choices == {"model": "linear", "fold": "3"}
    both = ('{"swept": ["optimizer.lr", "seed", "batch"]}', {"optimizer.lr": "0.1", "seed": "1"})
    for content, expected in (both, ('{"swept": ["seed"]}', {"seed": "1"}), ("{}", {}), ("[", {}), ("[]", {})):
        (sweep / "sweep.json").write_text(content)
        assert [*Run(run.path).swept.items()] == [*expected.items()], "in the order of the sweep"


def test_a_folder_that_nobody_may_look_at_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> bool:
        raise PermissionError(13, "Permission denied")  # here, because root, who may run the tests, may look at any

    monkeypatch.setattr(Path, "is_symlink", refused)
    run = Run(tmp_path)
    assert (run.environment, run.damage) == ({}, [f"{tmp_path} cannot be read (Permission denied)"])


@pytest.mark.parametrize("name", ["summary", "composed", "choices", "overrides", "environment", "predictions"])
def test_a_run_is_damaged_by_the_files_that_say_what_it_is_and_then_has_no_score(tmp_path: Path, name: str) -> None:
    run_dir = RunDir.at(tmp_path)
    run_dir.write_summary(status="failed", objective=90.0, error="the loss is nan")
    CONTENTS[name](run_dir).write_text("[")
    is_part = name in ("environment", "predictions")
    assert Run(tmp_path).state == (State.failed if is_part else State.damaged), "whatever was read before"
    run = Run(tmp_path)
    if is_part:
        assert (run.problem, run.state, run.score, run.error) == ("", State.failed, 90.0, "the loss is nan")
    else:
        assert str(CONTENTS[name](run_dir)) in run.problem
        assert (run.state, run.score, run.error) == (State.damaged, None, run.problem)
    for _ in range(3):
        getattr(run, name)
    assert len(run.damage) == 1, "named once"
    if name not in ("summary", "predictions", "environment"):
        run_dir.write_summary(status="running")
        assert Run(tmp_path).state == State.damaged, "no process has its lock"


def test_the_first_damage_is_the_problem(tmp_path: Path) -> None:
    run_dir = RunDir.at(tmp_path)
    for file in (run_dir.composed, run_dir.overrides):
        file.write_text("[")
    assert Run(tmp_path).problem.startswith(f"{run_dir.composed} ")


def test_the_state_of_a_run_is_what_its_summary_says_also_one_of_another_version(tmp_path: Path) -> None:
    run_dir = RunDir.at(tmp_path)
    assert (Run(tmp_path).state, Run(tmp_path).status) == (State.waiting, "waiting")
    states = {"completed": "done", "failed": "failed", "stopped": "stopped", "pruned": "pruned", "paused": "paused"}
    for written, state in states.items():
        run_dir.write_summary(status=written)
        assert (Run(tmp_path).state, Run(tmp_path).status) == (state, state), "nothing was evaluated"


def test_how_far_a_run_is_saved_is_known_from_its_last_checkpoint_and_its_plan(tmp_path: Path) -> None:
    run_dir = RunDir.at(tmp_path)
    assert Run(tmp_path).saved == ""
    for text, says in (("step-00000312\n", "step 312 of an unknown number"), ("other\n", ""), ("", "")):
        run_dir.last.write_text(text)
        assert Run(tmp_path).saved == says
    run_dir.last.write_text("step-00000312")
    run_dir.write_summary(steps=345)
    assert Run(tmp_path).saved == "step 312 of 345"


def test_a_run_of_an_earlier_version_has_the_usual_monitor_and_the_directions_of_its_scores(tmp_path: Path) -> None:
    run_dir = RunDir.at(tmp_path)
    for monitor in ({}, {"monitor": ""}):
        run_dir.write_summary(**monitor)
        assert str(Run(tmp_path).monitor) == "top1"
    run_dir.write_summary(monitor="-error", scores={"top1": 1.0, "f1": 2.0, "loss": 3.0, "error": 4.0})
    expected = {"acc/val_top1": "maximize", "metric/f1": "maximize", "loss/val": "minimize"}
    assert Run(tmp_path).directions == expected | {"metric/error": "minimize"}
    run_dir.write_summary(directions={"loss/val": "maximize"})
    assert Run(tmp_path).directions == {"loss/val": "maximize"}


def test_the_code_of_a_run_is_that_of_packages_whose_record_has_the_form_of_ours(tmp_path: Path) -> None:
    file = RunDir.at(tmp_path).environment
    whole = {"version": "1.0", "files": {"a.py": "ab"}}
    earlier = [{"mine": whole, "until": 3}]
    recorded = {
        "code": {"mine": whole, "text": "x", "empty": {}, "listed": {"files": ["a"]}},
        "earlier_code": earlier,
    }
    for content, code, before in (
        (recorded, {"mine": whole}, earlier),
        ({"code": {}, "earlier_code": ["x", *earlier, None]}, {}, earlier),
        ({"code": ["mine"], "earlier_code": {"mine": whole}}, None, []),
        ({"code": None, "earlier_code": None}, None, []),
        ({}, None, []),
    ):
        file.write_text(json.dumps(content))
        assert (Run(tmp_path).code, Run(tmp_path).earlier_code) == (code, before)


def test_the_number_of_classes_is_that_of_their_names(tmp_path: Path) -> None:
    lists: dict[str, Any] = dict.fromkeys(("examples", "predicted", "hits", "confusion", "curves", "worst"), ())
    assert Run(tmp_path).classes is None
    Predictions(step=1, names=["a", "b", "c"], **lists, targets="values").write(RunDir(tmp_path).validation)
    assert Run(tmp_path).classes == 3


def test_the_checkpoints_of_a_run_are_the_folders_of_a_step_and_the_newest_step_is_the_first(tmp_path: Path) -> None:
    folder = RunDir.at(tmp_path).checkpoints
    for name in ("step-00000009", "step-100000000", "step-99999999", "step-7", "step-00000008.tmp"):
        (folder / name).mkdir()
    (folder / "step-00000010").write_text("a file")
    assert [path.name for path in Run(tmp_path).checkpoints] == ["step-100000000", "step-99999999", "step-00000009"]


def test_what_a_run_is_stands_in_its_newest_checkpoint_with_facts_however_long_they_are(tmp_path: Path) -> None:
    run_dir = RunDir.at(tmp_path)
    for step in (1, 2, 3):
        (run_dir.checkpoints / f"step-{step:08}").mkdir()
    for step in (1, 2):
        facts = {"identity": {"step": step, "names": ["x" * 50] * 10_000}}
        (run_dir.checkpoints / f"step-{step:08}" / "facts.json").write_text(json.dumps(facts))
    assert Run(tmp_path).identity["step"] == 2, "the third was cut short"
    (run_dir.checkpoints / "step-00000002" / "facts.json").write_text('{"identity": [2]}')
    assert Run(tmp_path).identity == {}


def test_predictions_of_many_classes_are_read_and_those_of_another_form_are_told(tmp_path: Path) -> None:
    lists: dict[str, Any] = {key: [] for key in ("predicted", "hits", "confusion", "curves", "worst")}
    names = [f"class {number}" for number in range(40_000)]
    own = Predictions(step=1, names=names, examples=[1] * len(names), **lists)
    own.write(file := tmp_path / "validation.json")
    assert Predictions.read(file) == own
    assert json.loads(file.read_text()).keys() == {"step", "names", "examples", *lists}, "without the defaults"
    file.write_text(json.dumps({**json.loads(file.read_text()), "targets": "values", "of_a_later_version": 1}))
    assert Predictions.read(file) == replace(own, targets="values")
    for text in ('{"step": 1}', "[]", "3"):
        file.write_text(text)
        with pytest.raises(UnreadableFile, match=r"validation\.json is not a file of predictions"):
            Predictions.read(file)
    os.truncate(file, 64 * 2**20 + 1)
    with pytest.raises(UnreadableFile, match="has 67,108,865 bytes, expected at most 67,108,864"):
        Predictions.read(file)
    with pytest.raises(ValueError, match="not JSON compliant"):
        replace(own, average_precision=[math.nan]).write(file)


def test_answers_are_in_words_with_their_own_names_or_others() -> None:
    lists: dict[str, Any] = dict.fromkeys(("examples", "predicted", "hits", "confusion", "curves", "worst"), ())
    names, own = (
        ("a", "b", "c"),
        {kind: Predictions(step=1, names=("a", "b", "c"), **lists, targets=kind) for kind in TARGETS},
    )
    assert own["classes"].in_words(2) == "c"
    assert own["classes"].in_words(2, ("x", "y", "z")) == "z"
    assert [own["labels"].in_words(labels, names) for labels in ([], [2, 0])] == ["none", "c, a"]
    assert [own["values"].in_words([value]) for value in (0.1, 0.10000000149011612)] == ["0.1"] * 2, "of float32"
    assert own["values"].in_words([None]) == "not a number"
    assert own["values"].in_words([0.1, 2.0], ("", "width")) == "0.1, width 2"
    assert finite({"a": 1.0, "b": math.nan, "c": math.inf, "d": -math.inf, "e": 0.0}) == {"a": 1.0, "e": 0.0}
    assert [digits(number) for number in (2.0, 0.5, 1e22, 10)] == ["2", "0.5", "1e+22", "10"]


@pytest.mark.parametrize(
    ("status", "time"),
    [
        *((psutil.STATUS_RUNNING, "7.5"), (psutil.STATUS_SLEEPING, "7.5"), (psutil.STATUS_ZOMBIE, "")),
        *((psutil.NoSuchProcess(7), ""), (psutil.AccessDenied(7), ""), (ValueError("negative"), "")),
    ],
    ids=repr,
)
def test_where_there_is_no_proc_a_process_is_known_by_its_time_unless_it_is_gone(
    status: str | Exception, time: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def process(pid: int) -> Any:
        if isinstance(status, Exception):
            raise status
        return SimpleNamespace(status=lambda: status, create_time=lambda: pid + 0.5)

    def absent(path: Path) -> str:
        raise FileNotFoundError(2, "no such file", str(path))

    monkeypatch.setattr(Path, "read_text", absent)
    monkeypatch.setattr(psutil, "Process", process)
    assert born(7) == time


@pytest.mark.parametrize(
    ("state", "time"),
    [("S", "123"), ("R", "123"), ("D", "123"), ("T", "123"), ("t", "123"), ("I", "123"), ("Z", ""), ("X", "")],
)
def test_the_time_of_a_process_is_behind_its_name_whatever_is_in_that(
    state: str, time: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = [state, *map(str, range(100, 118)), "123", "124"]
    monkeypatch.setattr(Path, "read_text", lambda path: f"7 (a ) b) Z 1) {' '.join(fields)}\n")
    assert born(7) == time


def test_the_facts_of_a_checkpoint_have_a_limit(tmp_path: Path) -> None:
    run_dir = RunDir.at(tmp_path)
    (folder := run_dir.checkpoints / "step-00000001").mkdir()
    (folder / "facts.json").touch()
    os.truncate(folder / "facts.json", 64 * 2**20 + 1)
    run = Run(tmp_path)
    assert (run.identity, run.checkpoints) == ({}, [folder])
    assert run.damage == [f"{folder / 'facts.json'} has 67,108,865 bytes, expected at most 67,108,864"]


@pytest.mark.parametrize("overrides", ["seed: 1", "[seed=1, 2]"])
def test_a_file_with_another_kind_of_content_is_told_as_such(tmp_path: Path, overrides: str) -> None:
    run_dir = RunDir.at(tmp_path)
    run_dir.environment.write_text("[]")
    run_dir.overrides.write_text(overrides)
    run = Run(tmp_path)
    assert (run.environment, run.overrides) == ({}, [])
    assert run.damage == [
        f"{run_dir.environment} is not a file of a run: expected keys",
        f"{run_dir.overrides} is not a list of overrides: expected KEY=VALUE in each line",
    ]


def test_a_run_has_what_its_summary_says_of_it_and_a_change_of_it_changes_no_summary(tmp_path: Path) -> None:
    RunDir.at(tmp_path).write_summary(run="a1", spent={"gpu_hours": 1.5}, started=3.5, objective=90.0, error="no")
    run = Run(tmp_path)
    assert (run.id, run.spent, run.started, run.path) == ("a1", {"gpu_hours": 1.5}, 3.5, tmp_path)
    assert (run.score, run.error, run.state) == (90.0, "no", State.waiting)
    run.spent["gpu_hours"] = 2.0
    assert run.spent == run.summary["spent"] == {"gpu_hours": 1.5}


@pytest.mark.parametrize(
    ("metrics", "columns"),
    [
        ({"f1": {}, "auroc": None}, {"f1": 0.5, "auroc": 0.9, "test": 80.0}),
        ({"auroc": {}, "f1": {}, "top1": {}, "none": {}}, {"auroc": 0.9, "f1": 0.5, "test": 80.0}),
        *((other, {"test": 80.0}) for other in (["f1"], None, "f1", {})),
    ],
)
def test_the_columns_of_a_run_are_the_metrics_of_its_config_in_their_order(
    tmp_path: Path, metrics: object, columns: dict[str, float]
) -> None:
    run_dir = RunDir.at(tmp_path)
    run_dir.composed.write_text(json.dumps({"metric": metrics}))
    run_dir.write_summary(objective=70.0, scores={"top1": 70.0, "f1": 0.5, "auroc": 0.9}, test={"top1": 80.0})
    assert [*Run(tmp_path).columns.items()] == [*columns.items()]


@pytest.mark.parametrize("name", CONTENTS)
def test_each_file_of_a_run_is_read_once_and_its_damage_is_told_once(tmp_path: Path, name: str) -> None:
    run = Run(tmp_path / "run")
    path = CONTENTS[name](run.run_dir)
    path.parent.mkdir(parents=True)
    path.mkdir()
    content = getattr(run, name)
    assert (run.problem, run.state, run.error) == (run.problem, run.state, run.error)
    path.rmdir()
    assert getattr(run, name) is content
    assert len(run.damage) == 1
    assert Run(tmp_path / "run").damage == [], "each run has its own"
