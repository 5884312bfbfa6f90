"""`lockstep clean`: show or remove the checkpoints that are not needed for a resume or for using a model."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from lockstep.checkpoint import Removable, removable, remove
from lockstep.config.commands import typed
from lockstep.core import log
from lockstep.core.errors import InputError
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_write import storing
from lockstep.job.run_folder import Lock
from lockstep.runtime.host import GB, amount
from lockstep.sweep.ledger import Ledger
from lockstep.sweep.runs import existing, run_folders


def clean(folders: Sequence[str], *, keep: int, everything: bool, yes: bool) -> None:
    """Show the checkpoints that can be removed from all runs in the folders, and remove them if `yes` is set.

    `keep` counts undamaged checkpoints besides the best. `everything` leaves completed runs their weights alone.

    Raises:
        InputError: a folder does not exist, or `keep` is less than 1.
        StorageError: a checkpoint cannot be removed.
    """
    if keep < 1:
        raise InputError(f"--keep is {keep}, expected 1 or more: --keep 1")
    size = checkpoints = runs = more = 0
    for run_dir in _runs(folders):
        is_best = Ledger(run_dir.path.parent).best == run_dir.path.name
        done = _clean_run(run_dir, keep, everything=everything and not is_best, yes=yes)
        if done is not None and not is_best:
            more += done.more
        if done is not None and done.go:
            size, checkpoints, runs = size + done.size, checkpoints + len(done.go), runs + 1
    summary = f"{checkpoints:,} checkpoint{'s' * (checkpoints != 1)} of {runs:,} run{'s' * (runs != 1)}, "
    summary += amount(size / GB)
    if not checkpoints:
        log.console.print("there is nothing to remove", soft_wrap=True)
    elif yes:
        log.console.print(f"removed {summary}", soft_wrap=True)
    else:
        options = [*(["--keep", keep] if keep > 1 else []), *(["--all"] if everything else [])]
        command = typed(["lockstep", "clean", *folders, *options, "--yes"])
        log.show_command(f"{summary} can go; nothing is removed yet:", command)
    if more:
        log.show(f"--all frees {amount(more / GB)} more: the checkpoints of completed runs; their weights stay")


def _runs(folders: Sequence[str]) -> list[RunDir]:
    """The runs in the folders, each once, sorted by path. A link in a folder may lead to a run elsewhere."""
    runs: dict[Path, RunDir] = {}
    for root in map(existing, folders):
        real = {path.resolve(): RunDir(path) for path in run_folders(root)}
        runs |= {path: run for path, run in real.items() if path.is_relative_to(root.resolve())}
    return [run for _, run in sorted(runs.items()) if _has_checkpoints(run)]


def _has_checkpoints(run: RunDir) -> bool:
    try:
        return run.checkpoints.is_dir() and not run.checkpoints.is_symlink()
    except PermissionError as error:
        log.show_warning(f"{run.path} cannot be read ({error.strerror}): all of its checkpoints stay")
        return False


def _clean_run(run_dir: RunDir, keep: int, *, everything: bool, yes: bool) -> Removable | None:
    """Show the removable checkpoints of a run, and remove them if `yes` is set; None if the run is active."""
    with closing(Lock()) as lock:
        try:
            lock.take(run_dir.lock)  # held until the checkpoints are gone, so that no job resumes from one of them
        except InputError as error:
            log.show_warning(f"{error.args[0].partition(';')[0]}: all of its checkpoints stay")
            return None
        plan = removable(run_dir, keep, everything=everything)
        if plan.go:
            names = ", ".join(path.name for path in plan.go)
            stay = ", ".join(path.name for path in plan.stay) or "none"
            log.show(f"{amount(plan.size / GB):>9}  {run_dir.path}: {names} ({stay} stay)")
        if yes:
            with storing(run_dir.checkpoints):
                for path in plan.go:
                    remove(path)
        return plan
