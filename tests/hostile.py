"""Runs commands one after another in this process, each as its program would: reads them from stdin, a line each.

A fresh interpreter for each of a hundred refusals would take minutes.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
from pathlib import Path
from unittest import mock

from lockstep import cli

ROOT = Path(__file__).parent.parent


def main() -> None:
    """Answer each line, a list of words, by the exit code and what was written to stderr."""
    os.chdir(ROOT)
    for line in sys.stdin:
        program, *words = json.loads(line)
        out, err, code = io.StringIO(), io.StringIO(), 0
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            mock.patch.object(sys, "argv", [program, *words]),
            mock.patch.dict(os.environ),
        ):
            try:
                if program == "lockstep":
                    cli.main()
                else:
                    runpy.run_path(program, run_name="__main__")
            except SystemExit as left:
                code = left.code if isinstance(left.code, int) else 0
        sys.stdout.write(json.dumps([code, out.getvalue(), err.getvalue()]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
