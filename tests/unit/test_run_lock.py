"""The lock on a run folder: at most one process holds it, and a dead process does not."""

import errno
import fcntl
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from lockstep.core.errors import InputError, StorageError
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_write import Lock, locked
from lockstep.job.prepare import lock_run_folder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ".lock"


def test_a_second_holder_is_refused_with_the_first_ones_name_and_changes_nothing(path: Path) -> None:
    with closing(Lock()) as first:
        first.take(path)
        first.take(path)
        before = path.read_bytes(), path.stat()
        since = r"since 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d\); wait for"
        with pytest.raises(InputError, match=rf"in use by another job \(process {os.getpid()} on .+ {since}"):
            Lock().take(path)
        assert (path.read_bytes(), path.stat()) == before
    assert not path.exists()


def test_there_is_never_more_than_one_holder_while_others_come_and_go(path: Path) -> None:
    inside: list[int] = []
    most: list[int] = []

    def come_and_go(number: int) -> None:
        for _ in range(100):
            with closing(Lock()) as lock:
                try:
                    lock.take(path)
                except InputError:
                    continue
                inside.append(number)
                most.append(len(inside))
                inside.remove(number)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(come_and_go, range(8)))
    assert set(most) == {1}
    assert not path.exists()


MAKERS = (os.mkfifo, os.mkdir, lambda path: os.mknod(path, stat.S_IFSOCK), lambda path: path.symlink_to("precious"))


@pytest.mark.parametrize("make", MAKERS)
def test_what_is_no_plain_file_is_refused_and_stays(path: Path, make: Callable[[Path], None]) -> None:
    (path.parent / "precious").write_text("precious")
    make(path)
    before = path.lstat()
    with pytest.raises(InputError, match="cannot be locked"):
        Lock().take(path)
    assert path.lstat().st_mode == before.st_mode
    assert (path.parent / "precious").read_text() == "precious"


HOLDER = """
import os, pathlib, sys, time
from lockstep.core.safe_write import Lock
Lock().take(pathlib.Path(sys.argv[1]))
child = os.fork()
os.write(1, f"{child}\\n".encode())  # both report their start; fork returns 0 in the child
time.sleep(600)
"""


def test_a_holder_that_is_killed_leaves_the_lock_free_although_its_child_lives_on(path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    child = max(int(holder.stdout.readline()) for _ in range(2))
    try:
        with pytest.raises(InputError, match=f"process {holder.pid} on"):
            Lock().take(path)
        holder.kill()
        holder.wait()
        os.kill(child, 0)
        with closing(Lock()) as lock:
            lock.take(path)
    finally:
        os.kill(child, signal.SIGKILL)
        holder.stdout.close()


def test_a_file_that_another_job_removes_while_locked_is_no_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock, removed = fcntl.flock, []

    def remove_once(file: int, operation: int) -> None:
        flock(file, operation)
        if not removed:
            removed.append(file)
            path.unlink()

    monkeypatch.setattr(fcntl, "flock", remove_once)
    with closing(Lock()) as lock:
        lock.take(path)
        assert lock.file is not None
        assert os.path.samestat(os.fstat(lock.file), path.stat()), "else a third job could lock a new file"


def test_the_file_of_a_lock_is_gone_before_another_job_can_have_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unlink(file: Path) -> None:
        with pytest.raises(BlockingIOError), locked(file):
            pass
        remove(file)

    (lock := Lock()).take(path)
    remove = Path.unlink
    monkeypatch.setattr(Path, "unlink", unlink)
    lock.close()
    assert not path.exists()


def test_the_end_of_a_job_leaves_the_lock_of_another_one(path: Path) -> None:
    lock = Lock()
    lock.take(path)
    path.unlink()
    path.write_text("another job's")
    lock.close()
    assert path.read_text() == "another job's"


def test_a_folder_of_the_user_is_no_run_folder(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("precious")
    with closing(Lock()) as lock, pytest.raises(InputError, match="has files in it that are not of a run"):
        lock_run_folder(tmp_path, lock)
    RunDir.at(tmp_path).overrides.write_text("[]")
    with closing(Lock()) as lock:
        lock_run_folder(tmp_path, lock)


@pytest.mark.parametrize("names", [[], ["config.yaml"]], ids=str)
def test_a_folder_in_which_no_run_has_begun_is_for_a_new_one(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).touch()
    with closing(Lock()) as lock:
        lock_run_folder(tmp_path, lock)
        assert lock.path == RunDir(tmp_path).lock


@pytest.mark.parametrize("content", ["precious", "[1]", "{}"])
def test_a_lock_of_another_program_is_refused_and_stays(path: Path, content: str) -> None:
    path.write_text(content)
    with closing(Lock()) as lock, pytest.raises(InputError, match="a file of another program"):
        lock.take(path)
    assert path.read_text() == content


def test_the_lock_of_a_job_that_was_killed_says_who_holds_it_now_and_nothing_else(path: Path) -> None:
    earlier = {"pid": 4_194_303, "host": "h" * 64, "since": "2024-01-01 00:00:00"}
    path.write_text(json.dumps(earlier) + "\n")
    with closing(Lock()) as lock:
        lock.take(path)
        holder = json.loads(path.read_text())
        assert (holder["pid"], holder["host"]) == (os.getpid(), socket.gethostname())
        assert holder.keys() == earlier.keys()
    assert not path.exists()


def test_a_lock_that_may_be_waited_for_is_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operations: list[int] = []
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, operation: operations.append(operation))
    for waits in (False, True):
        with locked(path, waits=waits):
            pass
    assert operations == [fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_EX]


def test_a_lock_names_its_user_its_holder_and_the_remedy(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with locked(path):
        for options, user, remedy in (
            ({}, "job", "hydra.run.dir=FOLDER"),
            ({"user": "sweep", "remedy": "hydra.sweep.dir=FOLDER"}, "sweep", "hydra.sweep.dir=FOLDER"),
        ):
            with pytest.raises(InputError) as caught:
                Lock().take(path, **options)
            holder = "which has just started or ended"  # the file is empty
            says = f"{path.parent} is in use by another {user} ({holder}); wait for its end, or name another folder"
            assert str(caught.value) == f"{says} with {remedy}"

    def refused(descriptor: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = len([*Path("/dev/fd").iterdir()])
    monkeypatch.setattr(os, "write", refused)
    lock = Lock()
    with pytest.raises(StorageError, match=r"\.lock cannot be written \(No space left on device\); free disk space"):
        lock.take(path)
    assert (lock.file, len([*Path("/dev/fd").iterdir()])) == (None, before)


def test_a_lock_is_given_back_once_and_can_be_taken_again(path: Path) -> None:
    lock, before = Lock(), len([*Path("/dev/fd").iterdir()])
    for _ in range(2):
        lock.take(path)
        assert len([*Path("/dev/fd").iterdir()]) == before + 1
        lock.close()
        assert (lock.file, path.exists(), len([*Path("/dev/fd").iterdir()])) == (None, False, before)
        lock.close()


def test_a_lock_is_held_until_its_file_is_gone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, close, there = Lock(), os.close, list[bool]()
    lock.take(path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "close", lambda file: (there.append(path.exists()), close(file))[1])
        lock.close()
    assert there == [False], "else another job could lock the file that is removed then"


@pytest.mark.parametrize("content", ["[1]", "{}", '{"pid": 1}', "\xff", "3"])
def test_a_holder_that_is_not_known_is_not_told(path: Path, content: str) -> None:
    path.write_bytes(content.encode("latin-1"))
    with locked(path), pytest.raises(InputError, match=r"another job \(which has just started or ended\)"):
        Lock().take(path)
