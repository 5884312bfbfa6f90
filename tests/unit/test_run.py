"""What a run folder says, whatever became of its files: whole, missing, damaged, or of other types."""

import json
import math
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers import train_here
from lockstep.core.run import Run, State, born, candidates, step_of
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_read import UnreadableFile

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


@pytest.mark.parametrize("value", ["x", [1], {"a": "x"}, True, math.nan, math.inf], ids=repr)
@pytest.mark.parametrize("key", ["status", "started", "steps", "objective", "img_per_s", "spent", "time", "verdict"])
def test_a_summary_of_other_types_is_damaged_as_a_whole(tmp_path: Path, key: str, value: object) -> None:
    run = RunDir.at(tmp_path)
    run.summary.write_text(json.dumps({"status": "completed", "steps": 3, key: value}))
    if (key == "status" and value == "x") or (key == "verdict" and isinstance(value, dict)):
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
    ],
)
def test_a_run_runs_while_its_process_lives_and_on_another_machine_nobody_knows(
    tmp_path: Path, lock: dict[str, object] | None, state: State
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


@pytest.mark.parametrize("key", ["started", "objective", "img_per_s", "spent", "time"])
def test_a_number_or_a_table_may_be_null(tmp_path: Path, key: str) -> None:
    RunDir.at(tmp_path).write_summary(**{key: None})
    assert Run(tmp_path).summary[key] is None


def test_a_series_has_the_first_finite_figure_of_each_step(tmp_path: Path) -> None:
    lines = [{"step": 1, "a": 1.0}, {"step": 2, "a": None, "b": 2.0}, {"step": 3, "c": 3.0}, {"step": 4, "b": 4.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert Run(tmp_path).series("a", "b") == [(1, 1.0), (2, 2.0), (4, 4.0)]
