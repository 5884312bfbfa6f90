"""How a rank begins as a fresh process of ours: `python -m lockstep.runtime.child PARENT MODULE PATH`, or forked.

It imports nothing that takes long before the process is tied to its parent and hears a stop.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from lockstep.runtime import signals


def begin(
    parent: int, module: str, path: Path, environment: Mapping[str, str] | None = None, inherited: int | None = None
) -> None:
    """Be the rank that `exit_as_rank(path)` of a module is.

    Args:
        parent: the process that started this one.
        module: dotted name of the entry's module.
        path: of the run folder.
        environment: of the rank, where the process does not have it yet.
        inherited: a file descriptor that is of the parent alone.
    """
    signals.begin(parent)
    signal.signal(signal.SIGTSTP, signal.SIG_DFL)  # a forked process has that of its launcher
    if inherited is not None:
        os.close(inherited)
    os.environ.update(environment or {})
    importlib.import_module(module).exit_as_rank(path)


if __name__ == "__main__":
    begin(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
