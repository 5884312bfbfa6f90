"""The start of a rank that our launchers fork, or start by `python -m lockstep.runtime.child PARENT MODULE PATH`.

Slow imports come after the process handles a stop and is set to end with its parent.
"""

import importlib
import sys
from pathlib import Path

from lockstep.core.native_threads import configure_native_threads
from lockstep.runtime import signals


def become_rank(module: str, path: Path) -> None:
    """Become a rank: call `exit_as_rank(path)` of the entry's module, for the run folder `path`."""
    configure_native_threads()
    importlib.import_module(module).exit_as_rank(path)


if __name__ == "__main__":
    signals.begin(int(sys.argv[1]))
    become_rank(sys.argv[2], Path(sys.argv[3]))
