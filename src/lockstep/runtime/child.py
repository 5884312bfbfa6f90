"""The start of a rank that our launchers fork, or start by `python -m lockstep.runtime.child PARENT MODULE PATH`.

Slow imports come after the process handles a stop and is set to end with its parent.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from lockstep.core.native_threads import configure_native_threads
from lockstep.runtime import signals


def begin(
    parent: int, module: str, path: Path, environment: Mapping[str, str] | None = None, inherited: int | None = None
) -> None:
    """Become a rank: call `exit_as_rank(path)` of a module.

    Args:
        parent: the number of the process that started this one.
        module: the dotted name of the entry's module.
        path: the path of the run folder.
        environment: the variables of the rank that this process does not have yet.
        inherited: an open file descriptor to close, because only the parent needs it.
    """
    signals.begin(parent)
    signal.signal(signal.SIGTSTP, signal.SIG_DFL)  # a forked process has inherited the launcher's handler
    if inherited is not None:
        os.close(inherited)
    os.environ.update(environment or {})
    configure_native_threads()
    importlib.import_module(module).exit_as_rank(path)


if __name__ == "__main__":
    begin(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
