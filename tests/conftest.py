"""Fixtures that all tests share."""

from __future__ import annotations

import atexit
import gc
import getpass
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

# The compiler of torch believes the kernel about the CPU's vector instructions. Else it would compile and load a
# program for each kind of them, which takes 8 s, for each new cache. Before the import of torch, which reads this.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# Bytecode is written, also where the environment says otherwise: else every worker compiles all test files each time,
# for 7 s, and every fresh interpreter all modules of `lockstep`.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Under nohup or in the background of a shell they are ignored, and the processes of the tests would ignore them too.
# Before the import of `lockstep`, which asks.
for number in (signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)

# No test loses power, and a run of a few steps would wait for the disk as long as it computes. The order of the calls
# has tests of its own (test_safe_write.py). The other function needs a valid descriptor too.
os.fsync = os.fstat

# What torchrun, the compiler, Ray, TensorBoard, W&B, Chromium and a test of tests leave among the temporary files.
THEIRS = re.compile(
    r"torchelastic_.*|torchinductor_.*|ray|\.tensorboard-info|.*wandb-(media|artifacts)|wandb_symon-.*|wandb-[\d-]+"
    r"|\.ses|pytest-of-.*|org\.chromium\..*"
)

# The functions below import what they need: the process that hands the files to the workers of `-n` needs no torch.


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Have no collection of garbage look through what lives until the end: torch, the test files, the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # else some libraries report leaks when the interpreter ends


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse an address in a test's name, which the workers of xdist would each have another of."""
    if named := [item.nodeid for item in items if re.search(r"\bat 0x[0-9a-f]{6}", item.nodeid)]:
        raise pytest.UsageError(f"a test is named after an object's address, give it `ids`: {named[0]}")


@pytest.fixture(autouse=True, scope="session")
def _temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for the temporary files of this process and all that it starts, which no other program uses."""
    tmp_path_factory.getbasetemp()  # not there: it stays, to be looked at
    # Kept from run to run: to compile the same again takes seconds.
    cache = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    with tempfile.TemporaryDirectory(prefix="ls-", ignore_cleanup_errors=True) as folder:
        os.environ["TMPDIR"], tempfile.tempdir = folder, None
        yield Path(folder)
        tempfile.tempdir = None


@pytest.fixture(autouse=True, scope="module")
def _leaves_nothing_behind(_temporary_files: Path) -> Iterator[None]:
    """Fail after a file of tests that has left temporary files or processes."""
    import processes

    before, running = {*_temporary_files.iterdir()}, processes.left_of(_temporary_files)
    yield
    files = [path.name for path in {*_temporary_files.iterdir()} - before if not THEIRS.fullmatch(path.name)]
    assert files == [], "temporary files are left"
    with suppress(AssertionError):
        processes.wait_for(lambda: processes.left_of(_temporary_files).keys() <= running.keys(), patience=20)
    left = {pid: words for pid, words in processes.left_of(_temporary_files).items() if pid not in running}
    assert left == {}, "processes are left"


@pytest.fixture(autouse=True, scope="module")
def _settings_restored() -> Iterator[None]:
    """Give the process its settings back after a file of tests: which file comes next depends on the workers."""
    from lockstep.runtime.guest import guest

    with guest():
        yield


@pytest.fixture(autouse=True, scope="session")
def _own_hydra() -> Iterator[None]:
    """Compose configs as `train.py` does."""
    from lockstep.config.hydra_policy import own_hydra

    with own_hydra():
        yield


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Compute with one thread: test files run in parallel, and torch's waiting threads would spin on their cores."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _copies() -> Iterator[None]:
    """End the interpreter that commands are forked from when the tests end."""
    yield
    import helpers

    if helpers.forks.cache_info().currsize:
        helpers.forks().close()


@pytest.fixture(autouse=True)
def _clean_process() -> Iterator[None]:
    """Start each test with the same random numbers, whatever ran before it, restore threads and environment after it,
    and end the processes that it left."""
    import numpy as np
    import torch

    import processes

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    before, threads, started = dict(os.environ), torch.get_num_threads(), len(processes.STARTED)
    yield
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(before)
    processes.close(processes.STARTED[started:])
    del processes.STARTED[started:]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets seconds pass on a clock that stands still otherwise."""
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)

    def let_pass(seconds: float) -> None:
        nonlocal now
        now += seconds

    return let_pass
