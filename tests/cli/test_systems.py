"""Lockstep on other systems: macOS, here as Linux without all that macOS lacks, and native Windows, which it refuses.

On macOS itself the tests of commands run as they are.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from helpers import QUICK, Done, command, first_on_path, losses, train, train_afresh
from lockstep.records.ledger import Ledger
from processes import PATIENCE, Process, background, ended, steps_done, wait_for

# A `sitecustomize` module, which every interpreter imports when it starts. psutil is let through: it reads /proc for
# what it asks other kernels elsewhere.
WITHOUT_LINUX = """
import ctypes, errno, os, resource, select, signal, socket, sys, sysconfig, time, types

import psutil

sysconfig.get_config_vars()  # from a file that is named after the system

ABSENT = {
    os: "sched_getaffinity sched_setaffinity memfd_create pidfd_open pipe2 eventfd waitid fdatasync copy_file_range "
    "splice posix_fadvise posix_fallocate getxattr setxattr getrandom getresuid O_PATH O_TMPFILE O_DIRECT",
    signal: "SIGRTMIN SIGRTMAX SIGPOLL SIGPWR SIGSTKFLT SIGCLD sigtimedwait sigwaitinfo pidfd_send_signal",
    select: "epoll",
    resource: "prlimit RUSAGE_THREAD",
    socket: "AF_NETLINK AF_PACKET AF_VSOCK SOCK_CLOEXEC SO_BINDTODEVICE SO_PEERCRED",
    time: "CLOCK_BOOTTIME",
    psutil.Process: "io_counters cpu_affinity rlimit",
}
for owner, names in ABSENT.items():
    for name in names.split():
        if hasattr(owner, name):
            delattr(owner, name)
sys.platform = "darwin"  # so multiprocessing spawns
sys.modules["triton"] = None  # has no macOS
sys.modules["_scproxy"] = types.ModuleType("_scproxy")  # has only macOS
sys.modules["_scproxy"]._get_proxies = sys.modules["_scproxy"]._get_proxy_settings = dict


def unsafe():
    raise AssertionError("a fork is not safe on macOS")


def check(path):
    text, frame = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else "", sys._getframe()
    if text.startswith(("/proc", "/sys", "/dev/shm")):
        while frame and "psutil" not in frame.f_code.co_filename:
            frame = frame.f_back
        if not frame:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), text)


def audit(event, arguments):
    if event in ("open", "os.listdir", "os.scandir"):
        check(arguments[0])


def checked(function):
    def call(path, *words, **options):
        check(path)
        return function(path, *words, **options)

    return call


def symbol(library, name):
    if name in ("prctl", "mallopt", "malloc_trim", "memfd_create", "sched_getaffinity", "gettid"):
        raise AttributeError(name)
    return symbols(library, name)


os.fork = os.forkpty = unsafe
sys.addaudithook(audit)
for name in ("stat", "lstat", "readlink", "access"):
    setattr(os, name, checked(getattr(os, name)))
symbols, ctypes.CDLL.__getattr__ = ctypes.CDLL.__getattr__, symbol
"""
# Nothing of them imports torch._dynamo, which takes each process more than a second.
TRAIN = (sys.executable, "train.py", *QUICK, "launcher.threads=1", "batch=8", "telemetry.report=never")
TRAIN = (*TRAIN, "model=linear", "optimizer=sgd")
TWO = ("strategy=allreduce", "launcher.ranks=2", "augment=none")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The variables that make Linux another system, for a fresh interpreter and all that it starts."""
    if sys.platform == "darwin":
        return {}
    (tmp_path / "system").mkdir()
    (tmp_path / "system" / "sitecustomize.py").write_text(WITHOUT_LINUX)
    return {"PYTHONPATH": first_on_path(tmp_path / "system"), "OMP_WAIT_POLICY": "passive"}


def start(root: Path, environment: dict[str, str], *words: str) -> Process:
    return background(root, *TRAIN, f"output_root={root}", *words, afresh=True, **environment)


@pytest.mark.slow
def test_the_default_job_is_the_one_on_linux(tmp_path: Path, environment: dict[str, str]) -> None:
    words = ("steps=3", "launcher.threads=1", "telemetry.interval=1", "device=cpu")
    other = train_afresh(*words, f"hydra.run.dir={tmp_path}/other", f"output_root={tmp_path}", **environment)
    linux = train(*words, f"hydra.run.dir={tmp_path}/linux", f"output_root={tmp_path}")
    assert (other.code, linux.code) == (0, 0), other.err
    assert len(losses(tmp_path / "other")) == 3
    assert losses(tmp_path / "other") == losses(tmp_path / "linux")


def photos(root: Path) -> Path:
    for number in range(32):
        folder = root / ("train" if number < 24 else "val") / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return root


@pytest.mark.slow
def test_two_ranks_end_with_their_launcher_stop_and_resume(tmp_path: Path, environment: dict[str, str]) -> None:
    folder = tmp_path / "run"
    words = (f"hydra.run.dir={folder}", "dataset=folder", f"dataset.path={photos(tmp_path / 'photos')}")
    words += ("dataset.input_size=8", "epochs=100000", *TWO)
    launcher = start(tmp_path, environment, *words)
    wait_for(lambda: launcher.poll() is not None or steps_done(folder) >= 3)
    started = psutil.Process(launcher.pid).children()
    assert len([process for process in started if "lockstep.runtime.child" in process.cmdline()]) == 2
    launcher.kill()
    assert psutil.wait_procs(started, PATIENCE)[1] == [], "no rank outlives its launcher"
    launcher = start(tmp_path, environment, *words)
    before = steps_done(folder)
    wait_for(lambda: launcher.poll() is not None or steps_done(folder) > before)
    os.killpg(launcher.pid, signal.SIGINT)  # as Ctrl-C in a terminal does: the ranks get it too
    code, err = ended(launcher)
    assert (code, "and saved" in err, "Traceback" in err) == (75, True, False), err
    assert steps_done(folder) == len(losses(folder)) > before


def finished(process: Process) -> Done:
    out, err = process.communicate(timeout=PATIENCE)
    return Done(process.wait(), out, err)


@pytest.mark.slow
def test_a_sweep_stops_at_ctrl_c_and_the_same_line_resumes_it(tmp_path: Path, environment: dict[str, str]) -> None:
    words = ("-m", "seed=1,2", "steps=300", "telemetry.interval=100", "checkpoint.every=20")
    process = start(tmp_path, environment, *words, "hydra.launcher.jobs=1")
    wait_for(lambda: process.poll() is not None or [*tmp_path.glob("sweeps/*/000-*/checkpoints/last")])
    jobs = psutil.Process(process.pid).children()
    for job in jobs:
        job.suspend()
    refused = finished(start(tmp_path, environment, *words, "hydra.launcher.jobs=1"))
    assert (refused.code, "in use by another sweep" in refused.err) == (2, True), refused.err
    os.kill(process.pid, signal.SIGINT)
    for job in jobs:
        job.resume()
    code, err = ended(process)
    (folder,) = (tmp_path / "sweeps").iterdir()
    assert (code, [record.state for record in Ledger(folder).records()]) == (75, ["stopped", "waiting"]), err
    done = finished(start(tmp_path, environment, *words, "hydra.launcher.jobs=1"))
    assert (done.code, [record.state for record in Ledger(folder).records()]) == (0, ["done", "done"]), done.err


WINDOWS = """
import runpy, sys
sys.platform = "win32"
sys.modules["fcntl"] = sys.modules["resource"] = sys.modules["termios"] = None
"""
COMMANDS = {
    "python train.py": "runpy.run_path('train.py', run_name='__main__')",
    "lockstep": "from lockstep.cli.main import main; main()",
    "python -m lockstep": "runpy.run_module('lockstep', run_name='__main__')",
    "import lockstep": "import lockstep",
}


@pytest.mark.parametrize("line", COMMANDS.values(), ids=COMMANDS)
def test_on_windows_a_command_says_in_one_sentence_where_lockstep_runs(line: str) -> None:
    done = command(sys.executable, "-c", WINDOWS + line)
    sentence = "lockstep: Lockstep does not run on native Windows; run it in WSL2 (wsl --install)\n"
    assert (done.code, done.out, done.err) == (2, "", sentence)


def test_on_windows_another_hydra_app_leaves_the_plugins_out(tmp_path: Path) -> None:
    app = "import hydra\n@hydra.main(config_path=None)\ndef app(config): print(config)\n"
    words = (f"hydra.run.dir={tmp_path}", "+x=1")
    done = command(sys.executable, "-c", f"{WINDOWS.replace('import ', 'import hydra, ', 1)}\n{app}\napp()", *words)
    assert (done.code, done.out) == (0, "{'x': 1}\n"), done.err


def test_on_windows_a_program_that_goes_on_without_lockstep_has_its_own_errors() -> None:
    goes_on = "try: import lockstep\nexcept ImportError: pass\nraise ImportError('odd')"
    done = command(sys.executable, "-c", WINDOWS + goes_on)
    assert (done.code, done.out, done.err.splitlines()[-1]) == (1, "", "ImportError: odd")
