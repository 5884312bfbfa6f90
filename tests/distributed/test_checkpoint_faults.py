"""Checkpoints and log files under real faults: kills, full and read-only disks, damaged files."""

from __future__ import annotations

import csv
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from helpers import NARROW, forks, losses, records, run_dir, run_until, train_here
from lockstep.checkpoint import reading
from lockstep.checkpoint.files import MODEL, find_corruption
from lockstep.checkpoint.reading import latest_valid, undamaged_facts
from lockstep.checkpoint.writing import RETRY_S, Checkpointer
from lockstep.core.errors import StorageError
from lockstep.core.run import candidates
from lockstep.core.run_dir import RunDir
from lockstep.core.world import World
from lockstep.training.run_record import RunRecord
from processes import INLINE, LONG, ended, running, wait_for

pytestmark = pytest.mark.slow


@pytest.fixture
def dice() -> random.Random:
    """Random choices whose seed pytest shows where a test fails."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    return random.Random(seed)


def writer(run: RunDir, keep: int = 3) -> Checkpointer:
    return Checkpointer(run_dir=run, fingerprint={"monitor": "top1"}, keep=keep, keep_best=1, writes=True)


def save(target: Checkpointer, step: int) -> None:
    """A checkpoint whose weights are its step."""
    model = nn.Linear(40, 40)
    nn.init.constant_(model.weight, step)
    progress = {"step": step, "score": None, "best": None, "best_step": 0, "window": None}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    target.save(model=model, ema=None, optimizer=optimizer, scaler=scaler, progress=progress)


def loaded_step(path: Path) -> int:
    """The step of a checkpoint, which its name, its facts and each of its weights agree on."""
    loaded = reading.read_checkpoint(path)
    step = int(loaded.facts["progress"]["step"])
    assert path.name == f"step-{step:08}"
    assert (loaded.model["weight"] == step).all()
    return step


def saving(path: str) -> None:
    """Go on from the newest checkpoint, and save without end."""
    run = RunDir(Path(path))
    newest = latest_valid(run.checkpoints)
    target, step = writer(run, keep=2), loaded_step(newest) if newest else 0
    while True:
        step += 1
        save(target, step)


def killed(entry: Callable[[str], None], path: Path, ready: Callable[[], bool], after_s: float) -> bool:
    """Kill `entry(path)`, a process of its own, `after_s` after it is ready; whether it was still running."""
    child = forks().start(f"{entry.__module__}:{entry.__name__}", str(path))
    while child.poll() is None and not ready():
        time.sleep(0.001)
    time.sleep(after_s)
    child.close()
    assert child.returncode in (0, -signal.SIGKILL)
    return child.returncode != 0


def newest(run: RunDir) -> str:
    return max((path.name for path in run.checkpoints.glob("step-*")), default="")


def test_a_kill_while_saving_never_leaves_a_damaged_checkpoint(tmp_path: Path, dice: random.Random) -> None:
    run, last = RunDir.at(tmp_path / "run"), 0
    for _ in range(8):
        before = newest(run)
        assert killed(saving, run.path, lambda: newest(run) != before, dice.uniform(0, 0.03))  # noqa: B023
        checkpoints = candidates(run.checkpoints)
        assert [find_corruption(path) for path in checkpoints] == [""] * len(checkpoints)
        assert loaded_step(checkpoints[0]) > last
        last = loaded_step(checkpoints[0])
    target = writer(run, keep=2)
    save(target, last + 1)
    target.close()
    assert not list(run.checkpoints.glob(".*")), "what the kills left behind is gone"


def spoil(path: Path, dice: random.Random) -> None:
    """Damage one file of a checkpoint."""
    file = dice.choice(sorted(path.iterdir()))
    data = bytearray(file.read_bytes())
    match dice.choice(["cut", "flip", "delete", "zero", "swap"]):
        case "cut":
            file.write_bytes(data[: dice.randrange(len(data))])
        case "flip":
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
            file.write_bytes(data)
        case "delete":
            file.unlink()
        case "zero":
            file.write_bytes(bytes(len(data)))
        case "swap":  # a whole file, of another checkpoint
            shutil.copyfile(path.with_name("step-00000001") / MODEL, path / MODEL)


def test_the_newest_whole_checkpoint_is_loaded_whatever_happened_to_a_later_one(
    tmp_path: Path, dice: random.Random, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = RunDir.at(tmp_path / "whole")
    target = writer(whole)
    for step in (1, 2, 3):
        save(target, step)
    target.close()
    for number in range(30):
        folder = tmp_path / str(number)
        shutil.copytree(whole.checkpoints, folder)
        capsys.readouterr()
        spoil(folder / "step-00000003", dice)
        newest = latest_valid(folder)
        assert newest is not None
        assert loaded_step(newest) == 2
        assert capsys.readouterr().out.count("is damaged") == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[RunDir]:
    """A run whose checkpoints go to a disk of 128 kB."""
    run = RunDir.at(tmp_path / "run")
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(run.checkpoints)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system cannot be mounted here")
    yield run
    subprocess.run(["umount", str(run.checkpoints)], check=True)


def remount(run: RunDir, mode: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{mode}", str(run.checkpoints)], check=True)


def fill(run: RunDir) -> None:
    filler = run.checkpoints / "filler"
    with pytest.raises(OSError, match="No space left"):
        filler.write_bytes(bytes(2**20))


def fill_but(room: int) -> Callable[[RunDir], None]:
    def fill_to(run: RunDir) -> None:
        fill(run)
        os.truncate(run.checkpoints / "filler", (run.checkpoints / "filler").stat().st_size - room)

    return fill_to


FAULTS: list[tuple[Callable[[RunDir], Any], Callable[[RunDir], Any], str]] = [
    (fill, lambda run: (run.checkpoints / "filler").unlink(), "no space left on device"),
    (fill_but(12288), lambda run: (run.checkpoints / "filler").unlink(), "no space left on device"),
    (lambda run: remount(run, "ro"), lambda run: remount(run, "rw"), "read-only file system"),
]


@pytest.mark.parametrize(("fault", "repair", "reason"), FAULTS, ids=["full", "no room for the state", "read-only"])
def test_saving_goes_on_once_the_disk_is_well_again(
    small_disk: RunDir,
    fault: Callable[[RunDir], Any],
    repair: Callable[[RunDir], Any],
    reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = writer(small_disk)
    save(target, 1)
    target.wait()
    fault(small_disk)
    for step in (2, 3):
        save(target, step)
        target.wait()
    newest = latest_valid(small_disk.checkpoints)
    assert newest is not None
    assert loaded_step(newest) == 1
    assert capsys.readouterr().out.count(f"a checkpoint could not be written ({reason});") == 1
    repair(small_disk)
    target.saved_at -= RETRY_S
    assert target.overdue()
    save(target, 4)
    target.close()
    assert capsys.readouterr().out == "checkpoints are written again\n"
    assert loaded_step(small_disk.checkpoints / (small_disk.checkpoints / "last").read_text()) == 4


def test_a_run_that_can_no_longer_save_trains_to_its_end_and_says_so(
    small_disk: RunDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_and_fill(record: RunRecord, *values: Any, **named: Any) -> None:
        start(record, *values, **named)
        fill(record.run_dir)

    start = RunRecord.write_start
    monkeypatch.setattr(RunRecord, "write_start", start_and_fill)
    with pytest.raises(StorageError, match="the last checkpoint could not be written to"):
        train_here(small_disk.path, "steps=6", "checkpoint.every=1")
    assert len(losses(small_disk)) == 6
    assert capsys.readouterr().out.count("a checkpoint could not be written") == 1


JOB = (NARROW, "batch=300", "steps=36", "logger=[jsonl,tensorboard]", "checkpoint.every=4", "train.eval_every=3")


def training(path: str) -> None:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    run_until(World.solo(), RunDir(Path(path)), None)


def shown_events(run: RunDir) -> Counter[tuple[str, int]]:
    """How often TensorBoard shows each figure of training and of evaluations, by its folder, tag and step."""
    read = {folder: EventAccumulator(str(run.path / folder), {"scalars": 0}).Reload() for folder in ("", "val")}
    return Counter(
        (f"{folder}/{tag}", event.step)
        for folder, of in read.items()
        for tag in of.Tags()["scalars"]
        for event in of.Scalars(tag)
    )


def await_next_second() -> None:
    """TensorBoard orders event files by the second and the process; these runs resume within a second."""
    began = int(time.time())
    wait_for(lambda: int(time.time()) > began)


def of_steps(events: Counter[tuple[str, int]]) -> set[tuple[str, int]]:
    """The tags and steps that do not depend on the clock, as the samples of the hardware do."""
    return {(tag, step) for tag, step in events if not tag.startswith("/system/")}


def test_every_step_is_once_in_every_file_after_any_number_of_kills(tmp_path: Path, dice: random.Random) -> None:
    expected = train_here(tmp_path / "whole", *JOB)
    run, kills = run_dir(tmp_path / "run", *JOB), 0

    def saved(step: int) -> bool:
        return newest(run) >= f"step-{step:08}"

    def logged(step: int) -> bool:
        return run.metrics.exists() and len(run.metrics.read_text().splitlines()) >= step

    for number in range(1, 6):
        # Just after a save, and some time after a line, wherever that falls.
        ready, after_s = (saved, 0.0) if number % 2 else (logged, dice.uniform(0, 0.05))
        kills += killed(training, run.path, lambda: ready(6 * number), after_s)  # noqa: B023
    assert kills >= 3
    await_next_second()
    run_until(World.solo(), run, None)

    def steps(key: str) -> list[int]:
        return [line["step"] for line in records(run) if key in line]

    evaluated = list(range(3, 37, 3))
    assert (steps("loss/train"), steps("acc/val_top1")) == (list(range(1, 37)), evaluated)
    rows = list(csv.DictReader(run.table.read_text().splitlines()))
    assert [int(row["step"]) for row in rows] == evaluated
    events = shown_events(run)
    assert set(events.values()) == {1}
    assert of_steps(events) == of_steps(shown_events(expected))
    assert losses(run) == losses(expected)


def test_an_evaluation_that_a_resume_made_up_and_lost_is_once_in_every_file(tmp_path: Path) -> None:
    job = (*JOB, "steps=6", "train.eval_batch=20")
    expected, run = train_here(tmp_path / "whole", *job), train_here(tmp_path / "run", *job, stop_in=9)
    shutil.copytree(run.checkpoints, tmp_path / "stopped")
    progress = undamaged_facts(candidates(run.checkpoints)[0])["progress"]
    assert progress["step"] == 3 not in dict(progress["scores"])
    await_next_second()
    train_here(run.path, *job)
    # As a kill between the evaluation and its checkpoint leaves it.
    shutil.rmtree(run.checkpoints)
    (tmp_path / "stopped").rename(run.checkpoints)
    await_next_second()
    train_here(run.path, *job)
    assert [line.keys() for line in records(run)] == [line.keys() for line in records(expected)]
    rows = list(csv.DictReader(run.table.read_text().splitlines()))
    assert [int(row["step"]) for row in rows] == [3, 6]
    assert of_steps(shown_events(run)) == of_steps(shown_events(expected))


@pytest.mark.parametrize("removed", ["", "config.yaml", ".hydra", "metrics.jsonl"], ids=lambda name: name or "all")
@pytest.mark.parametrize("stops", [True, False], ids=["stopped", "completed"])
def test_a_run_whose_files_are_removed_ends_with_a_sentence_and_a_code(
    tmp_path: Path, removed: str, stops: bool
) -> None:
    folder, length = tmp_path / "run", LONG if stops else ("steps=300",)
    process = running(folder, *INLINE, *length, "checkpoint.every=1000")
    path = folder / removed
    path.rename(tmp_path / "removed")
    if stops:
        process.send_signal(signal.SIGTERM)
    code, err = ended(process)
    assert (code, "Traceback" in err) == (74, False), err
    assert f"lockstep: {path}" in err
