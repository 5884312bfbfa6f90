"""In a folder that somebody else wrote, nothing is written or removed elsewhere: no link and no name leads out."""

import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.cli.clean import clean
from lockstep.core.errors import InputError, LockstepError
from lockstep.core.log import LogFile
from lockstep.core.run import Run, State
from lockstep.core.run_dir import RunDir, pointed
from lockstep.core.safe_read import UnreadableFile, read_name
from lockstep.core.safe_write import append, make_folder, replacing, write_atomic
from lockstep.records.ledger import JOBS, Identity, Ledger, output_of
from lockstep.records.record import Record
from lockstep.report.run_page import write_report
from lockstep.runtime.watchdog import dump_stacks_on_crash
from lockstep.telemetry.sinks import truncate_after

IDENTITY = Identity(base={}, swept=("seed",), words=())
RECORD = Record(number=0, overrides=("seed=1",), folder="000-seed=1")
STEP_LINE = '{"step": 1, "loss/train": 1.0}\n'


def replaced(path: Path) -> None:
    with replacing(path) as temporary:
        temporary.write_text("ours")


def appended(path: Path) -> None:
    with append(path) as file:
        file.write("ours")


def logged(path: Path) -> None:
    handler = LogFile(path)
    handler.emit(logging.makeLogRecord({"msg": "ours"}))
    handler.close()


def stacks(path: Path) -> None:
    with dump_stacks_on_crash(path) as file:
        file.write("ours")


# What writes into a folder that may be somebody else's, and the file that it writes.
WRITERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "write_atomic": ("file", lambda path: write_atomic(path, "ours")),
    "replacing": ("file", replaced),
    "append": ("file", appended),
    "log": ("train.log", logged),
    "stacks": ("stacks.log", stacks),
    "figures": ("metrics.jsonl", lambda path: truncate_after(path, 9, lambda line: 1.0).close()),
    "summary": ("summary.json", lambda path: RunDir(path.parent).write_summary(status="ours")),
    "report": ("report.html", lambda path: write_report(Run(path.parent))),
    "latest": ("latest", lambda path: RunDir(path.parent / "run").mark_latest(path.parent)),
    "sweep": ("sweep.json", lambda path: Ledger(path.parent).create(IDENTITY)),
    "record": ("jobs/000.json", lambda path: Ledger(path.parent.parent).write(RECORD)),
    "job's output": ("jobs/000.log", lambda path: appended(output_of(Ledger(path.parent.parent), RECORD))),
    "best": ("best", lambda path: write_best(path.parent)),
}


def write_best(folder: Path) -> None:
    ledger = Ledger(folder)
    ledger.create(IDENTITY)
    ledger.write(replace(RECORD, state=State.done, objective=1.0))
    ledger.mark_best()


TRAPS: dict[str, Callable[[Path, Path], object]] = {
    "a link to a file": lambda path, secret: path.symlink_to(secret),
    "a link to a link": lambda path, secret: chain(path, secret),
    "a hard link": lambda path, secret: path.hardlink_to(secret),
    "a link to nothing": lambda path, secret: path.symlink_to(secret.parent / "new"),
    "a link to itself": lambda path, secret: path.symlink_to(path),
    "a link to a folder": lambda path, secret: path.symlink_to(secret.parent),
    "a pipe": lambda path, secret: os.mkfifo(path),
    "a folder": lambda path, secret: path.mkdir(),
}


def chain(path: Path, secret: Path) -> None:
    (path.parent / "link").symlink_to(secret)
    path.symlink_to(path.parent / "link")


@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.parametrize("writer", WRITERS)
def test_no_writer_writes_elsewhere_or_waits(tmp_path: Path, writer: str, trap: str) -> None:
    name, write = WRITERS[writer]
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "folder"
    elsewhere.mkdir()
    (secret := elsewhere / "secret").write_text(STEP_LINE)
    path = folder / name
    path.parent.mkdir(parents=True)
    TRAPS[trap](path, secret)
    try:
        write(path)
    except (LockstepError, OSError):
        assert not path.is_file() or path.is_symlink() or path.samefile(secret), "a refusal leaves the trap as it is"
    assert secret.read_text() == STEP_LINE
    assert [*elsewhere.iterdir()] == [secret]
    assert not [*folder.rglob("*.tmp")]


MAKERS: dict[str, Callable[[Path], object]] = {
    "plots": make_folder,
    **dict.fromkeys(("logs", "checkpoints", ".hydra"), lambda path: RunDir.at(path.parent)),
    JOBS: lambda path: Ledger(path.parent).create(IDENTITY),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("leads", [True, False])
def test_no_subfolder_is_a_link(tmp_path: Path, name: str, leads: bool) -> None:
    if leads:
        (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=f"{name} is a symbolic link, expected a folder"):
        MAKERS[name](tmp_path / "run" / name)
    assert [*tmp_path.rglob("elsewhere/*")] == []
    assert (tmp_path / "elsewhere").exists() is leads


def test_the_name_of_a_temporary_file_cannot_be_foreseen(tmp_path: Path) -> None:
    names = set()
    for _ in range(100):
        with replacing(tmp_path / "file") as temporary:
            names.add(temporary.name)
    assert len(names) == 100
    assert not any(str(os.getpid()) == name.strip(".").partition(".")[0] for name in names)


NAMES = ["..", ".", "", "../mine", "/etc", "a/b", "a/..", "./a", "a\0b", "a\nb", "../../mine/run\n"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_in_a_file_is_one_component(tmp_path: Path, name: str) -> None:
    (tmp_path / "best").write_text(name)
    with pytest.raises(UnreadableFile, match="expected the name of a folder next to it"):
        read_name(tmp_path / "best")
    with pytest.raises(InputError, match="expected the name of a folder next to it"):
        pointed(tmp_path / "best", tmp_path, "resume")
    assert Ledger(tmp_path).best == ""


def checkpoint_of(run: Path) -> Path:
    """A folder that looks like a run with checkpoints that can go."""
    (run / ".hydra").mkdir(parents=True)
    (run / ".hydra" / "overrides.yaml").write_text("[]\n")
    leftover = run / "checkpoints" / ".step-00000001.tmp"
    leftover.mkdir(parents=True)
    return leftover


@pytest.mark.parametrize("pointer", ["best", "latest"])
@pytest.mark.parametrize("name", ["..", "../mine", "../mine/run", "../sent/..", "link"])
def test_clean_removes_nothing_outside_of_the_folder_that_was_named(tmp_path: Path, name: str, pointer: str) -> None:
    mine = checkpoint_of(tmp_path / "mine" / "run")
    sent = tmp_path / "sent"
    checkpoint_of(sent / "run")
    (sent / "link").symlink_to(tmp_path / "mine")
    (sent / pointer).write_text(name)
    for folder in (sent / pointer, sent):
        with suppress(InputError):
            clean([str(folder)], keep=1, everything=True, yes=True)
    assert mine.is_dir()
    assert not [*(sent / "run" / "checkpoints").iterdir()], "the runs below it are cleaned"


def test_clean_follows_a_link_that_the_user_names(tmp_path: Path) -> None:
    leftover = checkpoint_of(tmp_path / "disk" / "run")
    (tmp_path / "outputs").symlink_to(tmp_path / "disk")
    clean([str(tmp_path / "outputs")], keep=1, everything=False, yes=True)
    assert not leftover.exists()


@pytest.mark.parametrize("pid", ["1", "../../../etc", "a\0b", "\n", None, 1.5, [1], {"a": 1}, True, -1, 2**62])
def test_a_lock_may_say_anything(tmp_path: Path, pid: object) -> None:
    run = RunDir.at(tmp_path / "run")
    run.overrides.write_text("[]\n")
    run.write_summary(status="running")
    run.lock.write_text(json.dumps({"pid": pid, "host": os.uname().nodename, "since": "\x1b[2J"}))
    assert Run(run.path).state
    write_report(Run(run.path))


def test_a_report_has_as_many_curves_as_a_reader_can_see(tmp_path: Path) -> None:
    run = RunDir.at(tmp_path / "run")
    scalars = {f"metric/{number:05}": 1.0 for number in range(5_000)}
    run.metrics.write_text("".join(json.dumps({"step": step, **scalars}) + "\n" for step in (1, 2)))
    page = write_report(Run(run.path)).read_text()
    assert page.count(", validation</figcaption>") == 20
    assert page.count("<tr>") < 200
