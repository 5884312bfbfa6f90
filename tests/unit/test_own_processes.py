"""What Lockstep starts and borrows: commands in new processes, forks, and the settings of a program that calls it."""

from __future__ import annotations

import importlib
import itertools
import json
import logging
import os
import random
import runpy
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from lockstep.config import extensions
from lockstep.runtime import child, environment, forking, guest, signals
from lockstep.runtime.commands import KEPT, running
from lockstep.runtime.forking import Fork, import_for_ranks
from lockstep.runtime.signals import PARENT
from processes import wait_for

PYTHON = (sys.executable, "-I", "-S")


def ended(code: str, *, capture: bool) -> tuple[int, str, str]:
    """The code and the ends of the streams of a program."""
    with running([*PYTHON, "-c", code], capture=capture) as process:
        out, err = process.communicate()
        assert process.returncode is not None
        return process.returncode, out, err


TELL = "import json, os, sys; print(json.dumps([dict(os.environ), sys.stdin.read(), os.getsid(0) == os.getpid()]))"


@pytest.mark.parametrize("capture", [True, False])
def test_a_command_is_in_a_session_of_its_own_without_input_and_a_script_imports_what_lies_beside_it(
    capture: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"HYDRA_FULL_ERROR": "1", "PYTHONSAFEPATH": "1", "OF_THE_USER": "x"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(PARENT, raising=False)
    code, out, err = ended(f"{TELL}; print('an error', file=sys.stderr); sys.exit(3)", capture=capture)
    assert (code, err) == (3, "an error\n")
    if not capture:
        assert out == "", "nobody reads it"
        code, _, err = ended(TELL.replace("print(", "sys.exit("), capture=False)
        out = err
    variables, read, leads = json.loads(out)
    assert (read, leads, variables["OF_THE_USER"]) == ("", True, "x")
    assert variables["HYDRA_FULL_ERROR"] == "0", "a run fails with its sentence alone"
    assert variables.get("PYTHONSAFEPATH") == (None if capture else "1")
    assert variables.get(PARENT) == (None if capture else str(os.getpid())), "a script does not know of it"


def test_of_a_long_output_the_end_is_kept_also_where_it_is_no_text() -> None:
    write = f"import os; [os.write(n, b'\\xff' * {KEPT} + b'ab') for n in (1, 2)]"
    code, out, err = ended(write, capture=True)
    assert code == 0
    assert out == err == "\ufffd" * (KEPT - 2) + "ab"
    assert ended("print('short')", capture=True)[1] == "short\n"


LEAVE = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-I', '-S', '-c', {!r}]).pid, flush=True)"
WAIT = "import time; time.sleep(1000)"


def is_gone(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    return True


def test_what_a_command_leaves_is_ended_with_it_and_with_its_context() -> None:
    _, out, _ = ended(LEAVE.format(WAIT), capture=True)
    wait_for(lambda: is_gone(int(out)))
    for last, state, code in ((WAIT, psutil.STATUS_SLEEPING, -signal.SIGKILL), ("", psutil.STATUS_ZOMBIE, 0)):
        with running([*PYTHON, "-c", f"{LEAVE.format(WAIT)}; {last}"], capture=True) as process:
            stream = process.streams[0]
            wait_for(lambda stream=stream: os.pread(stream.fileno(), 99, 0).endswith(b"\n"))
            own = psutil.Process(process.pid)
            wait_for(lambda own=own, state=state: own.status() == state)
            left = int(os.pread(stream.fileno(), 99, 0))
        assert process.returncode == code
        wait_for(lambda left=left: is_gone(left))


def test_a_fork_forgets_what_its_parent_does_at_its_end_and_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    done = list[Any]()
    monkeypatch.setattr(forking.gc, "freeze", lambda: done.append("freeze"))
    monkeypatch.setattr(signals, "begin", lambda parent: done.append(("begin", parent)))
    monkeypatch.setattr(signal, "signal", lambda number, handler: done.append((number, handler)))
    monkeypatch.setattr(forking.atexit, "_clear", lambda: done.append("clear"))
    monkeypatch.setattr(ForkProcess, "run", lambda fork: done.append("run"))
    fork, parent = Fork(lambda: None), os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: -1)  # in the fork
    fork.run()
    assert done == ["freeze", ("begin", parent), (signal.SIGTSTP, signal.SIG_DFL), "clear", "run"]


@pytest.mark.parametrize(
    ("pid", "exitcode", "sent"), [(None, None, []), (7, None, [(7, signal.SIGTERM)]), (7, 0, []), (7, -9, [])]
)
def test_a_fork_gets_signals_while_it_runs(
    pid: int | None, exitcode: int | None, sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[Any]()

    def kill(*call: int) -> None:
        calls.append(call)
        raise ProcessLookupError  # it has ended just now

    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr(Fork, "pid", pid, raising=False)
    monkeypatch.setattr(Fork, "exitcode", exitcode, raising=False)
    Fork(lambda: None).send_signal(signal.SIGTERM)
    assert calls == sent


def test_a_process_that_will_be_forked_computes_in_one_thread() -> None:
    torch.set_num_threads(2)
    forking.keep_one_thread()
    assert torch.get_num_threads() == 1


def option(*modules: str, **fields: Any) -> Any:
    return SimpleNamespace(imports=modules, **fields)


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize(("active", "of_program"), [(False, False), (True, False), (False, True)])
def test_before_a_fork_all_is_imported_and_asked_that_each_rank_would(
    compiles: bool, scores: bool, active: bool, of_program: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions, imported = list[str](), list[str]()
    for owner, name in ((environment, "own_source"), (forking, "listeners")):
        monkeypatch.setattr(owner, name, lambda name=name: questions.append(name))
    monkeypatch.setattr(environment, "version_of", questions.append)
    monkeypatch.setattr("lockstep.runtime.user_code.code_of", lambda config: questions.append(config))
    monkeypatch.setattr(forking.components, "plain", lambda job: "the code of the user")
    monkeypatch.setattr(extensions, "active", lambda: ["own"] * active)
    monkeypatch.setattr(extensions, "of_program", lambda: {"own": object} if of_program else {})
    monkeypatch.setattr(forking.importlib, "import_module", imported.append)
    own: dict[str, Any] = {"model": option("a.model", compile=compiles), "strategy": option("a.strategy")}
    own |= {"callback": {"x": option("a.callback")}, "logger": {"x": option("a.logger"), "y": option()}}
    import_for_ranks(SimpleNamespace(**own, metric={"f1": option()} if scores else {}))  # type: ignore[arg-type]
    modules = {"a.model", "a.strategy", "a.callback", "a.logger"}
    modules |= {"torch._dynamo"} if compiles else set()
    modules |= {"sklearn.metrics"} if scores else set()
    assert imported == sorted(modules)
    code = ["the code of the user"] * (active or of_program)
    assert questions == ["own_source", *environment.PACKAGES, *code, "listeners"]


def test_a_fresh_rank_calls_its_entry_with_its_folder_and_its_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[Any]()
    monkeypatch.setattr(child, "configure_native_threads", lambda: calls.append("threads"))
    entry = SimpleNamespace(exit_as_rank=lambda *words: calls.append(words))
    monkeypatch.setattr(importlib, "import_module", lambda module: calls.append(module) or entry)
    child.become_rank("a.worker", Path("run"), "first", "second")
    assert calls == ["threads", "a.worker", (Path("run"), "first", "second")]


LOGGER = logging.getLogger("mlflow")


def filled_memory() -> bool:
    return torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]


CHANGES: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "a new variable": (lambda: os.environ.get("A_NEW_ONE"), lambda: os.environ.update(A_NEW_ONE="1")),
    "a changed variable": (lambda: os.environ.get("PATH"), lambda: os.environ.update(PATH="/elsewhere")),
    "a variable that is gone": (lambda: os.environ.get("PATH"), lambda: os.environ.pop("PATH")),
    "a folder of modules": (lambda: [*sys.path], lambda: sys.path.append("/more")),
    "a folder of modules that is gone": (lambda: [*sys.path], lambda: sys.path.pop()),
    "signals that are held": (
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1]),
    ),
    "random": (random.getstate, random.random),
    "numpy": (lambda: repr(np.random.get_state()), lambda: np.random.rand(3)),
    "torch": (lambda: torch.get_rng_state().tolist(), lambda: torch.rand(3)),
    "threads": (torch.get_num_threads, lambda: torch.set_num_threads(3)),
    "deterministic": (
        torch.get_deterministic_debug_mode,
        lambda: torch.set_deterministic_debug_mode("warn"),
    ),
    "filled memory": (
        filled_memory,
        lambda: setattr(torch.utils.deterministic, "fill_uninitialized_memory", not filled_memory()),
    ),
    "products": (torch.get_float32_matmul_precision, lambda: torch.set_float32_matmul_precision("high")),
    "convolutions": (
        lambda: torch.backends.cudnn.allow_tf32,
        lambda: setattr(torch.backends.cudnn, "allow_tf32", not torch.backends.cudnn.allow_tf32),
    ),
    "trials of kernels": (
        lambda: torch.backends.cudnn.benchmark,
        lambda: setattr(torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark),
    ),
    "large images": (lambda: Image.MAX_IMAGE_PIXELS, lambda: setattr(Image, "MAX_IMAGE_PIXELS", 7)),
    "a logger": (lambda: LOGGER.propagate, lambda: setattr(LOGGER, "propagate", not LOGGER.propagate)),
    "its level": (lambda: LOGGER.level, lambda: LOGGER.setLevel(logging.CRITICAL)),
    "warnings": (lambda: [*warnings.filters], lambda: warnings.simplefilter("ignore")),
}


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_program_has_its_settings_back_after_a_call(change: str, raises: bool) -> None:
    look, act = CHANGES[change]
    before = look()
    with suppress(ZeroDivisionError), guest.guest():
        act()
        assert look() != before
        if raises:
            raise ZeroDivisionError
    assert look() == before


def test_settings_that_are_as_before_are_not_written_and_lists_stay_the_programs_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values, writes = {"same": [1], "changed": [2]}, list[Any]()
    own = tuple(
        (lambda name=name: [*values[name]], lambda value, name=name: writes.append((name, value))) for name in values
    )
    monkeypatch.setattr(guest, "SETTINGS", (*own, *guest.SETTINGS))
    path, variables = sys.path, os.environ
    with guest.guest():
        values["changed"].append(3)
        sys.path.append("/more")
        os.environ["A_NEW_ONE"] = "1"
    assert writes == [("changed", [2])]
    assert sys.path is path
    assert os.environ is variables
    assert [logger.name for logger in guest.LOGGERS] == ["matplotlib", "mlflow", "torch.distributed.elastic"]


def test_every_number_format_of_torch_is_among_the_settings() -> None:
    backends: Any = torch.backends
    kinds = (backends.cudnn, backends.mkldnn)
    formats = [backends, *kinds, *(part for kind in kinds for part in (kind.conv, kind.rnn))]
    formats += [backends.cuda.matmul, backends.mkldnn.matmul]
    assert {*map(id, guest.NUMBER_FORMATS)} == {*map(id, formats)}


def test_the_older_number_formats_are_left_alone_where_a_program_uses_the_newer_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: str) -> None:
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuse)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", refuse)
    assert guest.older_formats() is None
    guest.set_older_formats(None)
    monkeypatch.undo()
    before = torch.get_float32_matmul_precision()
    try:
        for own, other in itertools.permutations(("highest", "high"), 2):
            torch.set_float32_matmul_precision(own)
            with guest.guest():
                torch.set_float32_matmul_precision(other)
            assert torch.get_float32_matmul_precision() == own
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("variable", [None, "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_a_thread_keeps_more_threads_than_cores_unless_a_variable_says_when_they_sleep(
    variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    teams, cores = list[int](), len(os.sched_getaffinity(0))
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(torch, "set_num_threads", teams.append)

    def holders() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "sleeping soon"]

    with guest.sleeping_soon():
        assert teams == ([cores + 1] if variable is None else [])
        assert len(holders()) == (variable is None)
    assert holders() == []
    with pytest.raises(ZeroDivisionError), guest.sleeping_soon():
        raise ZeroDivisionError
    assert holders() == []
    teams.clear()
    monkeypatch.setattr(sys, "platform", "darwin")
    with guest.sleeping_soon():
        assert (teams, holders()) == ([], []), "another library has the threads"
    with suppress(ZeroDivisionError), guest.sleeping_soon():
        raise ZeroDivisionError
    assert holders() == []


@pytest.mark.parametrize(("threads", "can"), [(0, False), (1, True), (2, False)])
def test_a_process_of_one_thread_can_be_forked(
    threads: int, can: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(threads):
        (tmp_path / str(number)).mkdir()
    monkeypatch.setattr(forking, "Path", {"/proc/self/task": tmp_path}.__getitem__)
    assert forking.can_fork() == can


def test_a_fresh_rank_hears_of_its_launcher_before_it_reads_the_objects_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = list[Any]()
    monkeypatch.setattr(signals, "begin", lambda parent: done.append(parent))
    monkeypatch.setattr("lockstep.runtime.pickled.unpacked", lambda file: done.append(file) or (file.name, "more"))
    monkeypatch.setattr("lockstep.core.native_threads.configure_native_threads", lambda: done.append("threads"))
    entry = SimpleNamespace(exit_as_rank=lambda *words: done.append(words))
    monkeypatch.setattr(importlib, "import_module", {"a.worker": entry}.__getitem__)
    for files in ((), (tmp_path / "a", tmp_path / "b")):
        done.clear()
        monkeypatch.setattr(sys, "argv", ["child", "17", "a.worker", "runs/1", *map(str, files)])
        runpy.run_path(child.__file__, run_name="__main__")
        objects = [word for file in files for word in (file.name, "more")]
        assert done == [17, *files, "threads", (Path("runs/1"), *objects)]
