"""Removes checkpoints, or the parts of them that are no longer needed, and says how much the rest can take."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from lockstep.checkpoint.validation import STATE, find_corruption, has_state, manifest, manifest_text, read_facts
from lockstep.checkpoint.weights import whole_weights
from lockstep.core.run import Run
from lockstep.core.run_dir import MANIFEST, RunDir
from lockstep.core.safe_read import UnreadableFile, read_text
from lockstep.core.safe_write import sync, write_atomic

LEAST_RESUMABLE = 2  # a best checkpoint among this many of the newest keeps its state, even with checkpoint.keep=1


def most_bytes(*, weights: float, whole: float, exported: float, keep: int, keep_best: int) -> float:
    """The most bytes that the checkpoints of a run take at any time, with the one that is being written.

    Args:
        weights, whole: the bytes of a checkpoint that keeps only its weights, and of one with its state.
        exported: the bytes of the weights in the run folder.
        keep, keep_best: see `Checkpointer`.
    """
    with_state = max(keep, min(LEAST_RESUMABLE, keep + keep_best))
    return (with_state + 1) * whole + (keep + keep_best - with_state) * weights + exported


@dataclass(frozen=True)
class Removable:
    """The checkpoints of a run.

    Fields:
        stay: the checkpoints that stay.
        go: the paths that can be removed.
        size: the total size of `go` in bytes.
        more: the total size of `stay`, if the run is completed and its best weights are exported; else 0.
    """

    stay: tuple[Path, ...]
    go: tuple[Path, ...]
    size: int
    more: int


def removable(run_dir: RunDir, keep: int, *, everything: bool = False) -> Removable:
    """The checkpoints that can be removed from a run that is not active.

    The newest `keep` undamaged checkpoints stay, for a resume, and so does the best one. If all are damaged, all
    stay. With `everything`, none stays if the run is completed and its best weights are exported.
    """
    run = Run(run_dir.path)
    checkpoints = run.checkpoints
    stay: list[Path] = []
    is_finished = run.summary.get("status") == "completed" and whole_weights(run_dir.path)
    if not (everything and is_finished):
        whole = (path for path in checkpoints if has_state(path) and not find_corruption(path, run.id))
        stay = [path for path, _ in zip(whole, range(keep), strict=False)]
        stay = [*dict.fromkeys([*stay, *_best(run_dir, checkpoints)])] if stay else checkpoints
    go = [path for path in checkpoints if path not in stay]
    go += run_dir.checkpoints.glob(".step-*.tmp")  # left by a writer that was killed
    return Removable(tuple(stay), tuple(go), sum(map(_size, go)), sum(map(_size, stay)) if is_finished else 0)


def _best(run_dir: RunDir, checkpoints: list[Path]) -> list[Path]:
    """The checkpoint that the file `best` names, and the existing checkpoint with the best score."""
    try:
        named = read_text(run_dir.best).strip()
    except UnreadableFile:
        named = ""
    return [*(path for path in checkpoints if path.name == named), *best_scored(checkpoints, 1)]


def best_scored(checkpoints: list[Path], number: int) -> list[Path]:
    """The `number` checkpoints with the highest validation top-1; the earlier one if two have the same score.

    `checkpoints` are newest first.
    """
    scores = {path: score for path in reversed(checkpoints) if (score := _score(path)) is not None}
    return sorted(scores, key=lambda path: -scores[path])[:number]


def _score(path: Path) -> float | None:
    """The validation top-1 of a checkpoint; None if it was not evaluated or cannot be read."""
    try:
        score: float | None = read_facts(path)["progress"]["score"]
    except ValueError:
        return None
    return score


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() and not path.is_symlink() else (path,)
    return sum(file.lstat().st_size for file in files if not file.is_dir() or file.is_symlink())


def remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a kill never leaves half a checkpoint."""
    delete(path if path.name.startswith(".") else path.rename(path.with_name(f".{path.name}.old.tmp")))


def delete(path: Path) -> None:
    """Remove a folder, a file or a link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def drop_state(path: Path) -> None:
    """Remove the optimizer's state, which takes most of the space, from an undamaged checkpoint.

    The manifest is replaced first: a kill before the removal leaves a file that the manifest does not list, and that
    nobody reads.
    """
    if STATE in (digests := manifest(path)):
        write_atomic(path / MANIFEST, manifest_text(path, digests, digests.keys() - {STATE}))
        sync(path)
    (path / STATE).unlink(missing_ok=True)
