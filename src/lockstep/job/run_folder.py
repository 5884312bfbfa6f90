"""The folder that a command names for its job, and the lock on this folder.

Imports no torch, which takes seconds, so that a folder in use by another job is refused at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from lockstep.config.invocation import Invocation
from lockstep.core.errors import InputError
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_read import kind
from lockstep.job.run_lock import Lock

# The names of RunDir's paths that can only be files.
FILES = (
    *("config", "command", "environment", "metrics", "table", "gpu", "weights", "log", "summary", "lock"),
    *("validation", "report"),
    *("last", "best", "none_yet"),
)


@contextmanager
def job_lock(invocation: Invocation) -> Iterator[Lock]:
    """The lock of a job, released at the end of the context.

    Hydra creates the folder that the command names before the job is checked. If the job is refused, the folder is
    removed.
    """
    with closing(Lock()) as lock:
        try:
            yield lock
        except (InputError, SystemExit):
            lock.close()
            if invocation.folder is not None:
                with suppress(OSError):  # the folder is not empty: it existed before
                    invocation.folder.rmdir()
            raise


def lock_run_folder(folder: Path, lock: Lock) -> None:
    """Lock the folder of a job.

    Raises:
        InputError: the job cannot run in the folder, or another job does; nothing was changed.
    """
    run_dir = RunDir(folder)
    lock.take(run_dir.lock)
    if not run_dir.overrides.is_file() and not run_dir.only_prepared:
        raise InputError(
            f"hydra.run.dir: {folder} has files in it that are not of a run; name a new folder with "
            "hydra.run.dir=FOLDER"
        )
    _check_kinds(run_dir)


def _check_kinds(run_dir: RunDir) -> None:
    """Check that a run folder has only plain files and folders, each where it belongs.

    Somebody else may have written the folder: writing to a link would write elsewhere, and opening a pipe would
    block.
    """
    checkpoints = run_dir.checkpoints.glob("step-*")
    folders = {run_dir.hydra, run_dir.logs, run_dir.checkpoints, run_dir.incident, *checkpoints}
    texts = {getattr(run_dir, name) for name in FILES}
    texts |= {
        *run_dir.hydra.glob("*.yaml"),
        *run_dir.logs.glob("rank*.*"),
        *run_dir.path.glob("events.out.tfevents.*"),
    }
    for path in sorted(run_dir.path.rglob("*")):
        file_kind = kind(path.lstat().st_mode)
        if file_kind == "a symbolic link":
            raise InputError(f"{path} is a symbolic link, which a run folder must not have; replace it by its target")
        if file_kind not in ("", "a folder"):
            raise InputError(f"{path} is {file_kind}, which a run folder must not have; remove it")
        if file_kind == "" and path in folders:
            raise InputError(f"{path} is a file, expected a folder; put it elsewhere")
        if file_kind and path in texts:
            raise InputError(f"{path} is a folder, expected a file; put it elsewhere")
