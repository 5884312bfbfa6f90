"""Runs commands, each in a copy of this process: reads them from stdin, a line each, and answers on stdout.

A fresh interpreter for each of some hundred refusals, which imports everything anew, would take minutes.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NoReturn

from lockstep.cli import main as command_line
from lockstep.sweep import jobs  # noqa: F401, imported once, here

ROOT = Path(__file__).parent.parent


def main() -> None:
    """Answer each line, a list of words, by the exit code and what was written to stdout and stderr.

    The words of this command itself are modules to import first, for commands that would import them.
    """
    os.chdir(ROOT)
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            pid = os.fork()
            if pid == 0:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                become(json.loads(line))
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            texts = [each.read() for each in (out, err) if each.seek(0) == 0]
        sys.stdout.write(json.dumps([code, *texts]) + "\n")
        sys.stdout.flush()


def become(words: list[str]) -> NoReturn:
    """Run a program in this process, which ends with it."""
    sys.argv, code = words, 0
    try:
        if words[0] == "lockstep":
            command_line.main()
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
