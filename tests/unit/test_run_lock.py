"""The lock on a run folder: at most one process holds it, and a dead process does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from lockstep.core.errors import InputError
from lockstep.job.run_folder import Lock


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ".lock"


def test_a_second_holder_is_refused_with_the_first_ones_name_and_changes_nothing(path: Path) -> None:
    with closing(Lock()) as first:
        first.take(path)
        first.take(path)
        before = path.read_bytes(), path.stat()
        with pytest.raises(InputError, match=rf"in use by another job \(process {os.getpid()} on .+ since 20"):
            Lock().take(path)
        assert (path.read_bytes(), path.stat()) == before
    assert not path.exists()


def test_a_lock_that_was_let_go_of_is_free(path: Path) -> None:
    for _ in range(3):
        with closing(Lock()) as lock:
            lock.take(path)


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


@pytest.mark.parametrize("content", ["", "{}", "3", '{"pid": 1, "host": "gone", "since": "1970"}', "\0" * 9])
def test_a_file_that_nobody_holds_is_taken_over(path: Path, content: str) -> None:
    path.write_text(content)
    with closing(Lock()) as lock:
        lock.take(path)
        assert f'"pid": {os.getpid()}' in path.read_text()


def test_a_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    path.symlink_to(tmp_path / "precious")
    with pytest.raises(InputError, match="cannot be locked"):
        Lock().take(path)
    assert (tmp_path / "precious").read_text() == "precious"


HOLDER = """
import os, pathlib, sys, time
from lockstep.job.run_folder import Lock
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
