"""What is left of a run that met a fault is used, or refused and left alone; a full disk has an end of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import forked, losses, train, train_here, tree
from lockstep.checkpoint.files import find_corruption
from lockstep.core.run import candidates
from lockstep.core.run_dir import RunDir


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run of four steps that is done, with two checkpoints."""
    return train_here(
        tmp_path_factory.mktemp("runs") / "done", "steps=4", "name=test", "checkpoint.every=2", "model=linear"
    )


@pytest.fixture
def run(finished: RunDir, tmp_path: Path) -> RunDir:
    return RunDir(Path(shutil.copytree(finished.path, tmp_path / "run")))


def damage_all(run: RunDir) -> None:
    for path in candidates(run.checkpoints):
        (path / "facts.json").write_text((path / "facts.json").read_text().replace('"batch": 64', '"batch": 65'))


@pytest.mark.parametrize(("fault", "word"), [("damaged", "resume"), ("removed", "hydra.run.dir")])
def test_a_run_that_lost_its_checkpoints_is_refused_and_as_it_was(run: RunDir, fault: str, word: str) -> None:
    damage_all(run) if fault == "damaged" else shutil.rmtree(run.checkpoints)
    before = tree(run.path)
    steps = ("steps=8", "model=linear", "checkpoint.every=2") if word == "hydra.run.dir" else ("steps=8",)
    done = train(f"{word}={run.path}", *steps, "device=cpu", f"output_root={run.path.parent}")
    assert (done.code, len(done.err.splitlines())) == (2, 1)
    assert done.err.startswith(f"lockstep: resume: no checkpoint in {run.checkpoints} is complete")
    command = done.err.partition("python train.py ")[2]
    assert "steps=4 name=test checkpoint.every=2 model=linear" in command
    assert tree(run.path) == before


@pytest.mark.parametrize("fault", ["holes", "a pipe"])
def test_a_kept_config_that_cannot_be_put_back_is_refused_in_one_sentence(run: RunDir, fault: str) -> None:
    if fault == "holes":
        os.truncate(run.composed, 2**40)
    else:
        run.composed.unlink()
        os.mkfifo(run.composed)
    done = train(f"resume={run.path}", "steps=8", "device=cpu", f"output_root={run.path.parent}")
    assert (done.code, len(done.err.splitlines())) == (2, 1), done.err
    assert "will be replaced" not in done.out
    assert f"{run.composed} {'has 1,099,511,627,776 bytes' if fault == 'holes' else 'is a pipe'}" in done.err


def test_a_run_goes_on_from_what_is_whole_and_says_what_is_not(run: RunDir) -> None:
    newest, _ = candidates(run.checkpoints)
    (newest / "state.pt").write_bytes(b"")
    run.summary.write_text("[1]")
    run.table.unlink()
    run.metrics.write_text('{"step": 1}\n\0\n' + run.metrics.read_text().partition("\n")[2])
    done = train(f"resume={run.path}", "steps=4", "device=cpu", f"output_root={run.path.parent}")
    assert done.code == 0, done.err
    (changed,) = (line for line in done.out.splitlines() if line.startswith(" overrides  "))
    assert changed.count("steps=4") == 1, "a key that the resume names again"
    assert "is damaged (state.pt has 0 bytes, expected" in done.out
    assert f"{run.summary} is not the summary of a run; it will be replaced" in done.out
    assert f"{run.metrics} is damaged: line 2 cannot be read, and is skipped" in done.out
    assert json.loads(run.summary.read_text())["status"] == "completed"
    (again,) = (path for path in candidates(run.checkpoints) if int(path.name[5:]) == int(newest.name[5:]))
    assert find_corruption(again) == "", "its step was done again"


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    run = train_here(tmp_path / "run", "steps=4", "model=linear")
    expected = losses(run)
    shutil.rmtree(run.checkpoints)
    run.weights.unlink()
    run.checkpoints.mkdir()
    train_here(run.path, "steps=4", "model=linear")
    assert losses(run) == expected


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk without room; `sized` gives it some."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system cannot be mounted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def sized(disk: Path, kilobytes: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={kilobytes}k", str(disk)], check=True)


TINY = ("steps=4", "model=linear", "batch=300", "checkpoint.every=2", "logger=jsonl", "device=cpu")


# Room for some of what describes the run, and for no checkpoint, nor for the word of it.
@pytest.mark.slow
@pytest.mark.parametrize("kilobytes", [48])
def test_a_full_disk_is_one_sentence_and_74_whenever_it_fills_up(small_disk: Path, kilobytes: int) -> None:
    sized(small_disk, kilobytes)
    done = train(*TINY, f"output_root={small_disk / 'runs'}")
    assert (done.code, len(done.err.splitlines())) == (74, 1), done.err
    assert done.err.startswith("lockstep: ")
    assert "Traceback" not in done.out + done.err


@pytest.mark.slow
def test_a_run_on_a_disk_that_fills_up_goes_on_when_there_is_room(small_disk: Path, tmp_path: Path) -> None:
    sized(small_disk, 512)
    run = RunDir(small_disk / "run")
    command_line = (*TINY, f"output_root={small_disk}", f"hydra.run.dir={run.path}")
    assert train(*command_line, "train.eval_every=2").code == 0
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "filler").write_bytes(bytes(2**20))
    two_ranks = ("strategy=ddp", "launcher.ranks=2", "launcher.threads=1")
    full = train(f"resume={run.path}", "steps=8", *two_ranks)
    assert (full.code, len(full.err.splitlines())) == (74, 1), full.err
    (small_disk / "filler").unlink()
    done = train(f"resume={run.path}", "steps=8", *two_ranks)
    assert done.code == 0, done.err
    assert f"{run.path}/checkpoints/step-00000004, step 4" in done.out


@pytest.mark.slow
def test_mutated_run_folders_are_the_same_run_or_refused_and_untouched(tmp_path: Path) -> None:
    """A short one; `benchmarks/reliability/mutate_run_folder.py` does thousands."""
    mutate = ("benchmarks/reliability/mutate_run_folder.py", "--mutations", "6", "--seed", "7")
    done = forked(*mutate, TMPDIR=str(tmp_path), timeout=500)
    assert done.code == 0, done.out + done.err


# A command without what lets root read everything: CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, bits 1 and 2.
WITHOUT_RIGHTS = """
import ctypes, sys
header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this process
sets = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, twice
libc = ctypes.CDLL(None)
assert libc.capget(header, sets) == 0
sets[0] &= ~0b110
assert libc.capset(header, sets) == 0
from lockstep.cli.main import main
sys.argv[0] = "lockstep"
main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no capabilities")
def test_a_folder_that_a_user_may_not_read_is_named_and_the_other_runs_are_listed(run: RunDir) -> None:
    folder, locked = run.path.parent, run.path.parent / "locked"
    shutil.copytree(run.path, locked)
    locked.chmod(0)
    try:
        listed, cleaned, used = (
            forked("-c", WITHOUT_RIGHTS, *words)
            for words in (["runs", str(folder)], ["clean", str(folder), "--yes"], ["evaluate", str(locked)])
        )
    finally:
        locked.chmod(0o755)
    assert (listed.code, listed.err) == (2, f"lockstep: {locked} cannot be read (Permission denied)\n")
    assert listed.out.splitlines()[1].startswith("run ")
    assert cleaned.code == 0
    assert f"warning: {locked} cannot be read (Permission denied): all of its checkpoints stay\n" in cleaned.out
    assert (used.code, len(used.err.splitlines())) == (2, 1)
    assert "(Permission denied)" in used.err


@pytest.mark.parametrize("command_name", ["runs", "evaluate"])
def test_a_name_that_no_system_takes_is_refused_in_one_sentence(command_name: str) -> None:
    done = forked("lockstep", command_name, "x" * 300)
    assert (done.code, len(done.err.splitlines())) == (2, 1)
    assert done.err.startswith(f"lockstep: {'x' * 300}")
    assert done.err.endswith(" cannot be used (File name too long)\n")


@pytest.mark.parametrize("started", [-1e300, 2**62])
def test_a_time_that_no_calendar_has_is_left_out(run: RunDir, started: float) -> None:
    summary = json.loads(run.summary.read_text())
    run.summary.write_text(json.dumps({**summary, "started": started}))
    (row,) = json.loads(forked("lockstep", "runs", str(run.path), "--json").out)
    assert (row["when"], row["state"]) == ("", "done")
