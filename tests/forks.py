"""Run commands as forks of an interpreter that has already imported their modules (Linux).

A fresh interpreter needs three to five seconds of a core to import torch. A fork is a real process too, with its own
folder, environment, signals and exit code: it can test everything except the start of an interpreter. Modules that
read the environment when they are imported (PYTHONPATH, OPENBLAS_NUM_THREADS) need a fresh interpreter.

Run as a program, this file is the interpreter that is forked: it reads commands from a socket.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import string
import subprocess
import sys
import tempfile
import threading
import time
import types
import weakref
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parent.parent
LONGEST = 2**20  # bytes of a command and its environment, at most
# Options of most jobs.
COMMON = (
    *("model=digitnet", "model=linear", "dataset=digits", "loader=auto", "loader=resident", "augment=auto"),
    *("augment=shift", "strategy=auto", "strategy=single", "precision=fp32", "launcher=auto", "launcher=inline"),
    *("optimizer=adamw", "schedule=cosine", "loss=cross_entropy"),
)
# Seconds that a fork waits for a reader, a rank, its main thread or one more machine before it goes on without, and
# that `doctor` spends on other settings. No test of a command needs the usual ones.
SHORTER = {
    "lockstep.core.terminal:READER_WAIT_S": 0.5,
    "lockstep.launcher.spawn:RANKS_GRACE_S": 2.0,
    "lockstep.runtime.watchdog:GRACE_S": 1.0,
    "lockstep.runtime.program:GRACE_S": 1.0,
    "lockstep.launcher.elastic:LAST_CALL_S": 1,
    "lockstep.diagnostics.settings:OTHERS_S": 1.0,
}


class Fork:
    """A command that runs in a fork; it has the methods of `subprocess.Popen` that the tests use."""

    def __init__(self, words: tuple[str, ...], pid: int, status: int, out: int, err: int) -> None:
        self.args, self.pid, self.status = words, pid, status
        self.stdout, self.stderr = os.fdopen(out, "rb"), os.fdopen(err, "rb")
        self.returncode: int | None = None
        self.texts = {self.stdout: b"", self.stderr: b""}

    def poll(self) -> int | None:
        """The exit code, or None while the command runs."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            with selectors.DefaultSelector() as ready:
                ready.register(self.status, selectors.EVENT_READ)
                if not ready.select(timeout):
                    raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int(os.read(self.status, 16))
            os.close(self.status)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read both output streams until the command, and every process that inherited them, has closed them."""
        until = time.monotonic() + (10**6 if timeout is None else timeout)
        with selectors.DefaultSelector() as streams:
            for stream in self.texts:
                streams.register(stream, selectors.EVENT_READ, stream)
            while streams.get_map():
                ready = streams.select(max(0, until - time.monotonic()))
                if not ready:
                    raise subprocess.TimeoutExpired(self.args, timeout or 0)
                for key, _ in ready:
                    piece = os.read(key.fd, 2**16)
                    self.texts[key.data] += piece
                    if not piece:
                        streams.unregister(key.fileobj)
        self.wait(max(0, until - time.monotonic()))
        self.close()
        out, err = (text.decode() for text in self.texts.values())
        return out, err

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Kill the command if it still runs, and close its streams."""
        self.kill()
        self.wait()
        for stream in self.texts:
            stream.close()


class Forks:
    """The interpreter that is forked, by default this one; it imports `modules` when it starts."""

    def __init__(self, *modules: str, python: str = sys.executable) -> None:
        self.socket, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LONGEST)
        with child_end:
            self.process = subprocess.Popen(
                [python, __file__, str(child_end.fileno()), *modules],
                stdin=subprocess.DEVNULL,
                # Ranks and tests share few cores here: a thread that waits must not spin. With huge pages, a fork
                # copies the table of the pages in half the time.
                env={**os.environ, "OMP_WAIT_POLICY": "passive", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
                pass_fds=[child_end.fileno()],
            )

    def start(self, *words: str, cwd: Path | None = None, **environment: str) -> Fork:
        """Start a command in a new session.

        The words are `SCRIPT ...`, `lockstep ...`, `-c CODE ...`, or `MODULE:FUNCTION ...`, which calls the function
        with the words after it.
        """
        pipes = [os.pipe() for _ in range(2)]
        variables = {**os.environ, "OMP_WAIT_POLICY": "passive", **environment}
        pid, status = ask(self.socket, words, str(cwd or ROOT), variables, *(end for _, end in pipes))
        for _, end in pipes:
            os.close(end)
        return Fork(words, pid, status, *(end for end, _ in pipes))

    def close(self) -> None:
        self.socket.close()
        self.process.wait()


def ask(
    server: socket.socket,
    words: tuple[str, ...],
    cwd: str,
    environment: dict[str, str],
    out: int,
    err: int,
    new: str = "setsid",
) -> tuple[int, int]:
    """Have `serve` start a command in a new session or process group.

    Returns its process number, and the pipe in which its exit code will be.
    """
    status, end = os.pipe()
    request = {"words": words, "cwd": cwd, "environment": environment, "path": sys.path, "new": new}
    socket.send_fds(server, [json.dumps(request).encode()], [end, out, err])
    os.close(end)
    return int(server.recv(16)), status


def serve(requests: socket.socket) -> None:
    """Fork a process for each requested command and report its exit code, until the socket is closed."""
    # By the descriptor that is readable when the fork ends: its process number, and the pipe for its exit code.
    followed: dict[int, tuple[int, int]] = {}
    with selectors.DefaultSelector() as events:
        events.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in events.select():
                if key.fd in followed:
                    pid, status = followed.pop(key.fd)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    with suppress(BrokenPipeError):
                        os.write(status, str(code).encode())
                    events.unregister(key.fd)
                    os.close(status)
                    os.close(key.fd)
                    continue
                message, fds, *_ = socket.recv_fds(requests, LONGEST, 3)
                if not message:
                    return
                status, out, err = fds
                if (pid := os.fork()) == 0:
                    events.close()
                    for descriptor in (requests.detach(), status, *followed, *(end for _, end in followed.values())):
                        os.close(descriptor)
                    become(out, err, **json.loads(message))
                os.close(out)
                os.close(err)
                end = os.pidfd_open(pid)
                followed[end] = (pid, status)
                events.register(end, selectors.EVENT_READ)
                requests.send(str(pid).encode())


def become(
    out: int, err: int, words: list[str], cwd: str, environment: dict[str, str], path: list[str], new: str
) -> NoReturn:
    """Become the command, and end as an interpreter does, but without its teardown, which takes a second."""
    getattr(os, new)()
    for end, number in ((out, 1), (err, 2)):
        os.dup2(end, number)
        os.close(end)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir, code = None, 0
    try:
        run(path, *words)
    except SystemExit as left:
        if not isinstance(left.code, int | None):
            print(left.code, file=sys.stderr)
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(path: list[str], program: str, *words: str) -> None:
    sys.argv = [program, *words]
    sys.orig_argv = [sys.executable, *(["-m"] if program == "lockstep" else []), *sys.argv]
    if program == "-c":
        sys.argv[1:2] = []
        sys.path[0] = ""
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[0], "<string>", "exec"), main.__dict__)
    elif program == "lockstep":
        importlib.import_module("lockstep.cli.main").main()
    elif ":" in program:
        sys.path[:] = path
        module, _, name = program.partition(":")
        getattr(importlib.import_module(module), name)(*words)
    else:
        sys.path[0] = str(Path(program).resolve().parent)
        runpy.run_path(str(Path(program).absolute()), run_name="__main__")


def warm_up() -> None:
    """Do here what every command would do at first use, and what depends on nothing: each fork has the results."""
    parser = importlib.import_module("hydra.core.override_parser.overrides_parser")
    # The grammars build their tables, which takes 0.1 s, and more at each character that is new to them.
    name = string.ascii_letters + string.digits
    keys = [f"{letter}=1" for letter in string.ascii_letters]
    words = ["b.c='d e'", "f=[g,h.i]", "~j", "k=${l:m}", "n=1e-3,x/y", "+o=true", "p={q:0.5}"]
    words += [f"{name}=/{name}/{name}-{name}.{name}", f"r=[{','.join(name)}]"]
    parser.OverridesParser.create().parse_overrides([*keys, *words])
    values = importlib.import_module("omegaconf.grammar_parser")
    for text in ("${a}/b", "${a:b.c.d}-${a:b.c.d}", "${a}/b/${c:%Y%m%d-%H%M%S}-${d:}", f"${{{name}}}"):
        values.parse(text)
    # `components` keeps its schema, and what it has built from which values; those of most jobs take 0.04 s.
    components = importlib.import_module("lockstep.config.components")
    components.schema()
    for option in COMMON:
        components.build_option(*option.split("="))


def main() -> None:
    """Import the modules, then serve commands."""
    from lockstep.core.native_threads import configure_native_threads

    os.environ.pop("PYTEST_CURRENT_TEST", None)  # the test that started this is not that of its forks
    for number in (signal.SIGHUP, signal.SIGQUIT):  # ignored where the tests run under nohup or in the background
        signal.signal(number, signal.SIG_DFL)
    configure_native_threads()  # ranks are forked only from a process with one thread
    gc.disable()  # imports leave no garbage worth a tenth of their time
    for name in sys.argv[2:]:
        importlib.import_module(name)
    os.fsync = os.fstat  # as in conftest.py
    for name, seconds in SHORTER.items():
        module, _, constant = name.partition(":")
        setattr(importlib.import_module(module), constant, seconds)
    warm_up()
    # Unregistering torch's operators would copy 30 MB in each fork, which takes 0.03 s.
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False
    gc.freeze()  # the garbage collector of a fork does not search these modules
    gc.enable()
    serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)


if __name__ == "__main__":
    main()
