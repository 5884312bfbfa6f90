"""Which quick tests execute which line of the source, measured by coverage.py, and what they find with a bug in it.

As a plugin of coverage.py, this module names the test whose lines are executed, in every process that a test starts.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
from coverage import CoverageData, CoveragePlugin

from fresh_bugs import ROOT

# What the forks that run the tests need not import each.
LIBRARIES = (
    *("torch._dynamo", "torch.utils.tensorboard", "torchvision", "timm", "hydra", "rich.table"),
    *("scipy.stats", "sklearn.metrics", "pytest"),
)
QUICK = ("-q", "-m", "not slow")
# pytest's exit codes: all tests passed, or none was left after `-m`.
PASSED = (0, 5)
WRONG_NAME = 4  # no test has this name, or a module of the tests cannot be imported
# Few tests are quick and find most bugs, so the first portion is small.
PORTIONS = (15, 60, 200, 10**6)
SETTINGS = """
[run]
source_pkgs = lockstep
plugins = covering
parallel = true
patch = subprocess, fork, _exit
disable_warnings = no-data-collected, module-not-imported, module-not-measured, dynamic-conflict
"""


class CurrentTest(CoveragePlugin):
    """The context of a line is the test that pytest runs, of which child processes inherit the name."""

    def dynamic_context(self, frame: FrameType) -> str | None:
        # All threads of a process have one context, which the end of any of them would end.
        if threading.current_thread() is not threading.main_thread():
            return None
        return os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0] or None


def coverage_init(registry: Any, options: dict[str, str]) -> None:
    registry.add_dynamic_context(CurrentTest())


def environment(copy: Path) -> dict[str, str]:
    paths = (copy / "src", Path(__file__).parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONDONTWRITEBYTECODE": "1"}


@cache
def _text(file: str) -> str:
    return (ROOT / file).read_text()


class Covering:
    """The quick tests that execute each line of `src`, and the seconds of each of them."""

    def __init__(self, tests: list[str], seconds: list[float], lines: dict[str, dict[str, list[int]]]) -> None:
        self.tests, self.seconds, self.lines = tests, seconds, lines

    @classmethod
    def measured(cls, copy: Path, folder: Path) -> Covering:
        """Run the quick tests of a copy of the checkout under coverage, with its files in a folder.

        A test that fails without a bug is left out, with a warning: it would find every bug. What a fixture of
        several tests executes counts for the first of them.
        """
        settings = folder / "settings"
        settings.write_text(SETTINGS + f"data_file = {folder}/data\n")
        words = ("-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest", *QUICK)
        durations = ("-vv", "--durations=0", "-n", "3", "--dist", "loadfile", f"--basetemp={folder / 'pytest'}")
        command = (sys.executable, *words, *durations)
        done = subprocess.run(command, cwd=copy, env=environment(copy), capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):
            sys.exit(f"the tests do not run:\n{done.stdout[-4000:]}{done.stderr[-2000:]}")
        failed = set(re.findall(r"^(?:FAILED|ERROR) (tests/.+?)(?: - |$)", done.stdout, re.MULTILINE))
        for test in sorted(failed):
            print(f"left out, because it fails without a bug: {test}", file=sys.stderr)
        seconds: dict[str, float] = defaultdict(float)
        for time_s, test in re.findall(r"^([\d.]+)s (?:setup|call|teardown) +(tests/.+)$", done.stdout, re.MULTILINE):
            if test not in failed:
                seconds[test] += float(time_s)
        lines: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        for file in folder.glob("data.*"):
            data = CoverageData(basename=str(file))
            data.read()
            for source in data.measured_files():
                name = str(Path(source).relative_to(copy))
                for line, contexts in data.contexts_by_lineno(source).items():
                    lines[name][str(line)].update(contexts)
        tests = sorted(seconds)
        number = {test: place for place, test in enumerate(tests)}
        numbered = {
            file: {line: sorted(number[test] for test in of if test in number) for line, of in by_line.items()}
            for file, by_line in lines.items()
        }
        return cls(tests, [round(seconds[test], 3) for test in tests], numbered)

    @classmethod
    def read(cls, path: Path) -> Covering:
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({"tests": self.tests, "seconds": self.seconds, "lines": self.lines}))

    def of(self, file: str, lines: Iterable[int]) -> list[str]:
        """The tests that execute one of the lines: first those whose file names the module, the quickest first."""
        of_line = self.lines.get(file, {})
        numbers = {number for line in lines for number in of_line.get(str(line), ())}
        module = re.compile(rf"\b{Path(file).stem}\b")

        def order(number: int) -> tuple[bool, float, int]:
            return not module.search(_text(self.tests[number].partition("::")[0])), self.seconds[number], number

        return [self.tests[number] for number in sorted(numbers, key=order)]

    def of_file(self, file: str) -> list[str]:
        """The tests that execute any line of a function of the file; what its import does, they see too."""
        return self.of(file, map(int, self.lines.get(file, {})))


def import_libraries() -> None:
    """Import what takes seconds and is not ours: the processes in which the tests run are forks of this one."""
    for name in LIBRARIES:
        importlib.import_module(name)
    assert not any(name.partition(".")[0] == "lockstep" for name in sys.modules)


def _ran(copy: Path, tests: list[str], output: Path, patience_s: float) -> int | None:
    """pytest's exit code for the tests of a copy, run in a fork until one fails; None if it was stopped."""
    if (pid := os.fork()) == 0:
        code = 1
        try:
            os.setsid()
            with output.open("wb") as file, Path(os.devnull).open("rb") as nothing:
                for end, number in ((nothing, 0), (file, 1), (file, 2)):
                    os.dup2(end.fileno(), number)
            os.chdir(copy)
            os.environ.update(environment(copy))
            sys.path[:0] = [str(copy / "src")]
            sys.dont_write_bytecode = True
            options = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts="]
            # A plugin of pytest is among what the libraries import.
            options += ["-W", "ignore::pytest.PytestAssertRewriteWarning", f"--basetemp={output.parent / 'pytest'}"]
            code = importlib.import_module("pytest").main([*options, *tests])
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    until, ended = time.monotonic() + patience_s, 0
    while not ended and time.monotonic() < until:
        time.sleep(0.02)
        ended, status = os.waitpid(pid, os.WNOHANG)
    started = [] if ended else psutil.Process(pid).children(recursive=True)  # some in sessions of their own
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # with a bug, tests leave processes
    for process in started:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    if ended:
        return os.waitstatus_to_exitcode(status)
    os.waitpid(pid, 0)
    return None


def first_failing(copy: Path, tests: list[str], patience_s: float) -> str | None:
    """Run tests of a copy, the first ones first, until one fails.

    Returns that test, the end of what pytest shows if it stops without one, "" if all pass, and None if not all of
    them ran in the time.
    """
    until, begin = time.monotonic() + patience_s, 0
    with tempfile.TemporaryDirectory(prefix="lockstep-bug-") as folder:
        for size in PORTIONS:
            portion = sorted(tests[begin : begin + size], key=lambda test: test.partition("::")[0])
            begin += size
            if not portion:
                return ""
            shutil.rmtree(Path(folder) / "pytest", ignore_errors=True)
            output = Path(folder) / "output"
            code = _ran(copy, portion, output, max(1.0, until - time.monotonic()))
            if code == WRONG_NAME:  # with the bug, the cases of a test have other names
                portion = sorted({test.partition("[")[0] for test in portion})
                code = _ran(copy, portion, output, max(1.0, until - time.monotonic()))
            if code is None:
                return None
            if code not in PASSED:
                shown = output.read_text(errors="replace")
                failed = re.search(r"^(?:FAILED|ERROR) (\S+?::.+?)(?: - |$)", shown, re.MULTILINE)
                return failed[1] if failed else f"exit {code}: {' '.join(shown.split())[-120:]}"
    return ""
