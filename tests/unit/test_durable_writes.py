"""A spy on a whole run: what is on the disk before it gets its name, and which files are written in place."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from helpers import FAKE, train_here
from lockstep.core.errors import StorageError
from lockstep.core.safe_write import replacing, write_atomic

JOB = (*FAKE, "augment=none", "dataset.examples=40", "batch=8", "model=linear", "device=cpu", "steps=4")
OFTEN = ("train.eval_every=2", "checkpoint.every=1", "checkpoint.keep=1", "train.ema=0.5")
# What grows line by line, or is no file of the run's state.
GROWING = {"metrics.jsonl", "metrics.csv", "train.log", "rank0.log", "gpu.jsonl", ".lock", "rank0.samples.jsonl"}


class Spy:
    """Keeps the inodes that were flushed since they were last written, and each name that a file or folder got."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.flushed: set[int] = set()
        self.names: list[tuple[str, bool]] = []
        rename, replace = os.rename, os.replace
        monkeypatch.setattr(os, "fsync", lambda descriptor: self.flushed.add(os.fstat(descriptor).st_ino))
        monkeypatch.setattr(os, "rename", lambda source, target: self.named(rename, source, target))
        monkeypatch.setattr(os, "replace", lambda source, target: self.named(replace, source, target))

    def named(self, change: Any, source: Any, target: Any) -> None:
        parts = {path.stat().st_ino for path in (Path(source), *Path(source).rglob("*"))}
        self.names.append((Path(target).name, parts <= self.flushed))
        self.flushed -= parts  # a later file may have the same number
        change(source, target)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


def test_all_that_a_run_names_was_flushed_before(tmp_path: Path, spy: Spy) -> None:
    run = train_here(tmp_path / "run", *JOB, *OFTEN)
    named = {name for name, _ in spy.names}
    steps = {f"step-{step:08d}" for step in range(1, 5)}
    assert named >= steps | {"last", "best", "model.safetensors", "summary.json", "config.yaml", "latest", "env.json"}
    gone = {f".{step}.old.tmp" for step in steps}  # one that is removed needs no flush
    assert {name for name, was_flushed in spy.names if not was_flushed} <= gone
    written = {path.name for path in run.path.rglob("*") if path.is_file() and run.hydra not in path.parents}
    of_checkpoints = {path.name for path in run.checkpoints.glob("step-*/*")}
    assert {name for name in written - named - of_checkpoints - GROWING if "events" not in name} == set()


def atomic(path: Path) -> None:
    write_atomic(path, "new")


def replaced(path: Path) -> None:
    with replacing(path) as temporary:
        temporary.write_text("new")


@pytest.mark.parametrize("write", [atomic, replaced])
def test_a_file_that_could_not_be_flushed_keeps_its_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any
) -> None:
    (file := tmp_path / "file").write_text("old")

    def broken(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises((OSError, StorageError), match="nput/output error"):
        write(file)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]
