"""A sweep that a program starts with `lockstep.sweep`: the command `lockstep train -m` in a process of its own.

There, as in a terminal, jobs are forked from a process with one thread, and the program keeps its Hydra, its
handlers of signals and its exit. It is `python -m lockstep.cli.sweep PARENT FILE WORD...`, with a
file of `runtime.pickled`. Beside this file it writes the sweep's folder, and the error that ended it.
"""

import functools
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.cli.train import train_command
from lockstep.config import extensions, options
from lockstep.core.errors import BY_EXIT_CODE, InputError, LockstepError, Stopped
from lockstep.core.launch_env import SWEEP_FOLDER
from lockstep.core.native_threads import configure_native_threads
from lockstep.core.safe_write import write_atomic
from lockstep.launcher.processes import Fresh, forwarding
from lockstep.records.ledger import Ledger
from lockstep.records.tables import errors_of
from lockstep.runtime import signals
from lockstep.runtime.pickled import packed, unpacked

ERROR_FILE = "error.pickle"


def run_sweep(words: Sequence[str], objects: Mapping[str, Any], *, verbose: bool) -> Path:
    """Run the sweep of a command's words; returns its folder. Raises its refusal, its stop or its failures."""
    from lockstep.launcher.spawn import Children  # imports torch, which the process of the sweep does only later

    children = Children()
    with (
        packed((objects, extensions.of_program(), vars(sys.modules[extensions.MAIN]).get("__file__"))) as (file,),
        children,
        forwarding(children.send) as request,
    ):
        folder, error = Path(file).with_name("folder"), Path(file).with_name(ERROR_FILE)
        children.ranks.append(
            Fresh(
                [sys.executable, "-m", __name__, str(os.getpid()), file, *words],
                {**os.environ, "PYTHONSAFEPATH": "1", SWEEP_FOLDER: str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=None if verbose else subprocess.DEVNULL,
            )
        )
        request.repeat()
        if code := children.join().get(0):
            if error.exists():
                raise pickle.loads(error.read_bytes())
            raise failure_of(code, Path(folder.read_text()) if folder.exists() else None)
        return Path(folder.read_text())


def failure_of(code: int, folder: Path | None) -> LockstepError:
    """The error of a sweep whose process wrote none and ended with this code: jobs have failed, or it was killed."""
    failed = [record for record in Ledger(folder).records() if record.exit_code] if folder else []
    if code in (-signal.SIGTERM, Stopped.exit_code) and code not in [record.exit_code for record in failed]:
        return Stopped(signals.STOPPED_EARLY)
    if not failed or code < 0:
        return LockstepError(f"the process of the sweep ended with exit code {code}, and nothing says why")
    lines = [line for _, of_jobs in errors_of(failed) for line in of_jobs]
    error = BY_EXIT_CODE.get(code, LockstepError)(lines[0])
    error.args = (*lines, f'all jobs are rows of lockstep.runs("{folder}")')
    return error


def _write(file: Path, error: LockstepError) -> None:
    public = InputError(*str(error).split("\n")) if isinstance(error, InputError) else error
    write_atomic(file, pickle.dumps(public))


if __name__ == "__main__":
    signals.begin(int(sys.argv[1]))
    configure_native_threads()
    file = Path(sys.argv[2])
    objects, declared, sys.modules[extensions.MAIN].__file__ = unpacked(file)  # the program's, whose code is recorded
    options.declare(declared)
    sys.argv[:] = ["lockstep", "-m", *sys.argv[3:]]
    train_command(objects=objects, says=functools.partial(_write, file.with_name(ERROR_FILE)))
