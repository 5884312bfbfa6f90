"""`lockstep clean`: removes checkpoints that no run needs."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from lockstep.checkpoint.files import Removable, removable, remove
from lockstep.config.commands import shell_command
from lockstep.core import log
from lockstep.core.errors import InputError
from lockstep.core.run_dir import RunDir, check_folder
from lockstep.core.safe_write import Lock, storing
from lockstep.core.table import show_json
from lockstep.records.ledger import Ledger
from lockstep.records.runs import existing, run_folders
from lockstep.runtime.host import format_bytes


def clean(folders: Sequence[str], *, keep: int, everything: bool, yes: bool, form: str = "table") -> None:
    """Show the checkpoints that can be removed from all runs in the folders, and remove them if `yes` is set.

    `keep` counts undamaged checkpoints besides the best. `everything` leaves completed runs their weights alone.
    """
    if keep < 1:
        raise InputError(f"--keep is {keep}, expected 1 or more: --keep 1")
    rows: list[dict[str, Any]] = []
    more = 0
    for run_dir in _runs(folders):
        is_best = Ledger(run_dir.path.parent).best == run_dir.path.name
        done = _clean_run(run_dir, keep, everything=everything and not is_best, yes=yes)
        more += 0 if done is None or is_best else done.more
        if done is not None and done.go:
            go, stay = ([path.name for path in paths] for paths in (done.go, done.stay))
            row = {"run": str(run_dir.path), "checkpoints": go, "stay": stay, "bytes": done.size, "removed": yes}
            rows.append(row)
            if form == "table":
                names = f"{', '.join(go)} ({', '.join(stay) or 'none'} stay{'s' * (len(stay) < 2)})"
                log.show(f"{format_bytes(done.size):>9}  {run_dir.path}: {names}")
    if form == "json":
        show_json(rows)
        return
    checkpoints, runs = sum(len(row["checkpoints"]) for row in rows), len(rows)
    summary = f"{checkpoints:,} checkpoint{'s' * (checkpoints != 1)} of {runs:,} run{'s' * (runs != 1)}, "
    summary += format_bytes(sum(row["bytes"] for row in rows))
    if not checkpoints:
        log.show("there is nothing to remove")
    elif yes:
        log.show(f"removed {summary}")
    else:
        options = [*(["--keep", keep] if keep > 1 else []), *(["--all"] if everything else [])]
        command = shell_command(["lockstep", "clean", *folders, *options, "--yes"])
        log.show(f"{summary} can go; nothing is removed yet: {command}")
    if more:
        log.show(f"--all frees {format_bytes(more)} more: the checkpoints of completed runs; their weights stay")


def _runs(folders: Sequence[str]) -> list[RunDir]:
    """The runs in the folders, each once, sorted by path. Links in a folder are not followed."""
    runs: dict[Path, RunDir] = {}
    for root in map(existing, folders):
        runs |= {path.resolve(): RunDir(path) for path in run_folders(root)}
    return [run for _, run in sorted(runs.items()) if _has_checkpoints(run)]


def _has_checkpoints(run: RunDir) -> bool:
    try:
        return run.checkpoints.is_dir() and not run.checkpoints.is_symlink()
    except PermissionError as error:
        log.show_warning(f"{run.path} cannot be read ({error.strerror}): all of its checkpoints stay")
        return False


def _clean_run(run_dir: RunDir, keep: int, *, everything: bool, yes: bool) -> Removable | None:
    """The removable checkpoints of a run, removed if `yes` is set; None if it is active, or of a later version."""
    with closing(Lock()) as lock:
        try:
            lock.take(run_dir.lock)  # held until the checkpoints are gone, so that no job resumes from one of them
            check_folder(run_dir.path)
            plan = removable(run_dir, keep, everything=everything)
        except InputError as error:
            log.show_warning(f"{error.args[0].partition(';')[0]}: all of its checkpoints stay")
            return None
        if yes:
            with storing(run_dir.checkpoints):
                for path in plan.go:
                    remove(path)
        return plan
