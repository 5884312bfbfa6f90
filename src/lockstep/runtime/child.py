"""The start of a rank that our launchers fork, or start as a fresh interpreter.

That is `python -m lockstep.runtime.child PARENT MODULE PATH [OBJECTS]`, with a file of `runtime.pickled`. The process
first handles a stop and is set to end with its parent; slow imports come later.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

from lockstep.core.native_threads import configure_native_threads
from lockstep.runtime import signals
from lockstep.runtime.pickled import unpacked


def become_rank(module: str, path: Path, *objects: Any) -> None:
    """Become a rank: call `exit_as_rank` of the entry's module, for the run folder `path`."""
    configure_native_threads()
    importlib.import_module(module).exit_as_rank(path, *objects)


if __name__ == "__main__":
    signals.begin(int(sys.argv[1]))
    objects = [value for file in sys.argv[4:] for value in unpacked(Path(file))]
    become_rank(sys.argv[2], Path(sys.argv[3]), *objects)
