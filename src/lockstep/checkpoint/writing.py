"""Writes checkpoints in a thread of main's process while training continues, and removes old checkpoints."""

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lockstep.checkpoint import files
from lockstep.checkpoint.state import Whole, gathered, host_copies, optimizer_state
from lockstep.core import log
from lockstep.core.errors import StorageError
from lockstep.core.model_card import ModelCard
from lockstep.core.run import candidates, step_of
from lockstep.core.run_dir import MANIFEST, RunDir
from lockstep.core.safe_read import UnreadableFile
from lockstep.core.safe_write import make_folder, replacing, sync, system_error, write_atomic

RETRY_S = 30.0  # seconds between a failed save and the next one
Save = Callable[[Path], object]  # writes weights into a file


def _reason(error: BaseException) -> str:
    """The words of the system for a write that failed. torch raises another error on top of the system's."""
    while not isinstance(error, OSError) and error.__context__ is not None:
        error = error.__context__
    number = system_error(error)
    return str(error) if number is None else os.strerror(number).lower()


@dataclass
class Checkpointer:
    """Writes a run's checkpoints in a thread of main's process; other ranks only take part in collectives.

    The newest `keep` stay, and the best `keep_best`. One is overdue after `every_s` seconds; None if steps decide.
    `whole` is `Strategy.whole_tensors`. `on_saved` is called with the step and the folder of one on the disk. `card`
    is the description in the weights files. `needed` are other files of the run, without which nobody can resume it.
    """

    run_dir: RunDir
    fingerprint: files.Facts
    keep: int
    keep_best: int
    writes: bool
    whole: Whole = list
    every_s: float | None = None
    on_saved: Callable[[int, Path], None] = lambda step, folder: None
    card: ModelCard | None = None
    needed: tuple[Path, ...] = ()
    saved_at: float = field(default_factory=time.monotonic)
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "checkpoint"))
    pending: Future[tuple[int, Path]] | None = None
    failure: str = ""
    removal_failed: bool = False  # an old checkpoint could not be removed, and a warning said so
    # Writes the best weights so far, which are in host memory; None after they are exported to the run folder.
    unexported: Save | None = None

    def repair_export(self, best_step: int) -> None:
        """Export the best weights of a run that was killed between saving and exporting them."""
        exported = self.run_dir.weights
        if not self.writes:
            return
        try:
            best = next(path for path in candidates(self.run_dir.checkpoints) if step_of(path) == best_step)
            digests = files.manifest(best)
        except (StopIteration, ValueError):  # the checkpoint does not exist, or is damaged
            return
        name = files.EMA if files.EMA in digests else files.MODEL
        # Usually the weights are already exported, so that hashing the exported file is enough, instead of the whole
        # checkpoint. Compare the sizes first: a sparse file can be terabytes of zeros.
        same_size = exported.exists() and exported.stat().st_size == (best / name).stat().st_size
        if not (same_size and files.sha256(exported) == digests[name]) and not files.find_corruption(best):
            write_atomic(self.run_dir.best, best.name)
            self._export(partial(shutil.copyfile, best / name))

    def overdue(self) -> bool:
        """Whether the last checkpoint is older than `every_s`, by this rank's clock, or failed `RETRY_S` ago."""
        if self.pending is not None and self.pending.done():
            self.wait()  # report a failure now, not at the next save
        waits = [RETRY_S] if self.failure else []
        waits += [self.every_s] if self.every_s is not None else []
        return self.writes and bool(waits) and time.monotonic() - self.saved_at >= min(waits)

    def save(
        self,
        *,
        model: nn.Module,
        ema: AveragedModel | None,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        progress: Mapping[str, Any],
        callbacks: Mapping[str, Any] | None = None,
    ) -> None:
        """Copy the state, with main's `callbacks`, to host memory, and write it in the background. Collective."""
        tensors = {files.MODEL: model.state_dict()}
        state: dict[str, Any] = {"optimizer": optimizer_state(optimizer, model), "scaler": scaler.state_dict()}
        if ema is not None:
            state["ema_updates"] = int(ema.n_averaged)
            if ema.n_averaged:
                tensors[files.EMA] = ema.module.state_dict()
        tensors, state = gathered(tensors, self.whole), gathered(state, self.whole)
        if not self.writes:
            return
        if callbacks:
            state["callbacks"] = callbacks
        self.wait()
        self.saved_at = time.monotonic()
        tensors, state = host_copies([tensors, state])
        scored = files.EMA if files.EMA in tensors else files.MODEL
        saves: dict[str, Save] = {}
        for file, own in tensors.items():
            metadata = self._metadata(progress, averaged=file == files.EMA, scored=file == scored)
            saves[file] = partial(files.save_weights, own, metadata=metadata)
        if progress["best_step"] == progress["step"]:
            self.unexported = saves[scored]
        facts = {"identity": dict(self.fingerprint), "progress": dict(progress)}
        self.pending = self.pool.submit(self._write, saves, state, facts)

    def _metadata(self, progress: Mapping[str, Any], *, averaged: bool, scored: bool) -> dict[str, str] | None:
        if self.card is None:
            return None
        figures = progress["figures"] if scored and files.score_of(progress) is not None else {}
        return replace(self.card, step=progress["step"], scores=figures, averaged=averaged).metadata()

    def wait(self) -> None:
        """Wait for the pending write. A first failure is a warning. Raises StorageError if the run was removed."""
        if self.pending is None:
            return
        pending, self.pending = self.pending, None
        pending.exception()  # waits
        if removed := [path for path in self.needed if not path.exists()]:
            raise StorageError(
                f"{removed[0]} was removed while the run used it; without it, nobody can resume the run"
            )
        try:
            step, folder = pending.result()
        # A full disk can raise any of the first four, and a file that cannot be read back the last.
        except (OSError, RuntimeError, SafetensorError, StorageError, UnreadableFile) as error:
            reason = _reason(error)
            if not self.failure:
                log.warn(f"a checkpoint could not be written ({reason}); the run continues and tries again")
            self.failure = reason
        else:
            if self.failure:
                log.say("checkpoints are written again")
            self.failure = ""
            self.on_saved(step, folder)

    def close(self) -> None:
        """Finish the last write. Raises StorageError: the last checkpoint of the run could not be written."""
        self.pool.shutdown()
        self.wait()
        if self.failure:
            raise StorageError(f"the last checkpoint could not be written to {self.run_dir.path} ({self.failure})")

    def _write(self, saves: Mapping[str, Save], state: dict[str, Any], facts: files.Facts) -> tuple[int, Path]:
        folder, progress = self.run_dir.checkpoints, facts["progress"]
        make_folder(folder)
        for leftover in folder.glob(".*.tmp"):  # left by a writer that was killed
            with suppress(OSError):
                files.delete(leftover)
        name = f"step-{progress['step']:08d}"
        # One of this step may exist: it is damaged, or a stop interrupted its evaluation. The new one gets another
        # name, with more zeros, so that one of them exists at any moment.
        while os.path.lexists(folder / name):
            name = name.replace("-", "-0")
        temporary, final = folder / f".{name}.tmp", folder / name
        try:
            temporary.mkdir()
            for file, save in saves.items():
                save(temporary / file)
            digests = {file: files.sha256(temporary / file) for file in saves}
            with (temporary / files.STATE).open("wb") as opened:  # given a path, torch would hide the system's error
                torch.save(state, opened)
            (temporary / files.FACTS).write_text(json.dumps(facts, indent=2) + "\n")
            (temporary / MANIFEST).write_text(files.manifest_text(temporary, digests))
            # After a power cut, the log must have all steps of the checkpoint, and each folder all its files.
            logs = (self.run_dir.metrics, self.run_dir.table)
            for path in (*logs, self.run_dir.hydra, self.run_dir.path, *temporary.iterdir(), temporary):
                if path.exists():
                    sync(path)
            temporary.rename(final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)  # free its space: the disk may be full
            raise
        sync(folder)
        try:
            write_atomic(self.run_dir.last, name)
            if progress["best_step"] == progress["step"]:
                write_atomic(self.run_dir.best, name)
        finally:  # even if the disk is full, and before the export, which may need the space
            self._retire(final)
        if self.unexported is not None:  # the weights may be of an earlier step that failed to save
            self._export(self.unexported)
            self.unexported = None
        return progress["step"], final

    def _export(self, save: Save) -> None:
        """Have `save` put the best weights so far (with EMA, the averaged ones) into the run folder."""
        with replacing(self.run_dir.weights) as temporary:
            save(temporary)
        sync(self.run_dir.path)

    def _retire(self, written: Path) -> None:
        """Remove all but the newest `keep` and the best `keep_best` checkpoints, if `written` can be read back.

        One that `written` replaces goes too. Checkpoints of later steps than `written` were skipped by a resume; they
        stay until the run has reached their step again.
        """
        existing = [path for path in candidates(self.run_dir.checkpoints) if step_of(path) <= step_of(written)]
        checkpoints = [path for path in existing if path == written or step_of(path) < step_of(written)]
        stay = {*checkpoints[: self.keep], *files.best_scored(checkpoints, self.keep_best)}
        retired = [path for path in existing if path not in stay]
        if retired and (reason := files.find_corruption(written)):
            log.warn(f"checkpoint {written} cannot be read back ({reason}); no older one is removed")
            return
        try:
            for path in retired:
                files.remove(path)
        except (OSError, StorageError) as error:  # the new checkpoint is complete, whatever becomes of an old one
            if not self.removal_failed:
                log.warn(f"an old checkpoint could not be removed ({_reason(error)}); the run tries again")
            self.removal_failed = True
