"""From what a command resumes to a run folder: the job is resolved and checked, and only then the folder is made.

Data and published weights that are missing are downloaded by the checks. A later refusal, by a rank that builds the
parts, undoes what was written here (`Preparation`).
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from lockstep import checkpoint
from lockstep.config import components, composition, messages, yaml_io
from lockstep.config.invocation import Invocation
from lockstep.config.schema import Job
from lockstep.core.data_protocols import Source
from lockstep.core.errors import InputError, StorageError
from lockstep.core.plan import Plan
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_read import UnreadableFile, read_if_exists
from lockstep.core.safe_write import write_atomic
from lockstep.job.resolve import resolve
from lockstep.job.resume import Resume, check_resumable, decide_resume
from lockstep.job.run_folder import Lock, lock_run_folder
from lockstep.job.validate import check_job, check_memory
from lockstep.runtime import environment
from lockstep.training.fingerprint import plan_of
from lockstep.training.freezing import freeze_until
from lockstep.training.resolved_job import ResolvedJob


def prepare(resume: Resume, invocation: Invocation, lock: Lock) -> Preparation:
    """Resolve and check the job of a command, make its run folder, and take `lock` on the folder.

    Raises:
        InputError: the job does not fit, or another job uses the folder; nothing was written.
    """
    torch.set_num_threads(1)  # ranks can only be forked from a single thread; each rank sets its own number
    if (folder := resume.folder) is not None:
        lock_run_folder(folder, lock)
    # A job of the pool has a process of its own; Hydra's basic launcher runs the jobs of a sweep in one.
    shares_process = invocation.sweep and multiprocessing.parent_process() is None
    job = checked_job(resume, sweep=shares_process)
    plan = check_run(job, starts=resume.checkpoint is None, fetch=resume.may_fetch)
    if resume.checkpoint is not None:
        check_resumable(job, plan, folder, resume.checkpoint)
    run_dir = RunDir.at(folder) if folder is not None else RunDir.create(Path(job.output_root), job.name)
    lock.take(run_dir.lock)
    if job.launcher.can_fork():
        import_for_ranks(job)
    return Preparation.write(
        run_dir,
        {
            run_dir.config: yaml_io.dump(components.plain(job)),
            run_dir.command: invocation.command + "\n",
            run_dir.hydra / "hydra.yaml": invocation.hydra,
            run_dir.overrides: yaml_io.dump(resume.overrides),
            run_dir.composed: yaml_io.dump(resume.values),
        },
    )


def job_of(overrides: Sequence[str]) -> ResolvedJob:
    """The job of the words of a command, resolved and checked without its data. Nothing is written.

    Raises:
        InputError: the job does not fit.
    """
    values = composition.composed(list(overrides))
    with composition.composing():
        return checked_job(decide_resume(values, Invocation.current()))


def checked_job(resume: Resume, *, sweep: bool = False) -> ResolvedJob:
    """The job of a command, resolved, and checked as far as that is possible without its data.

    `sweep` is whether other jobs run in this process.

    Raises:
        InputError: the job does not fit.
    """
    values = _without_auto_batch(resume)
    job = resolve(components.build_job(values), sweep=sweep, resumed=resume.checkpoint)
    if values["repro"] == "exact" and "repro=exact" in resume.overrides and job.strategy.fixed_order:
        raise InputError("strategy=strict belongs to repro=strict, but repro=exact is given; leave out one of them")
    check_job(job)
    return job


def check_run(job: ResolvedJob, *, starts: bool, fetch: bool) -> Plan:
    """The plan of a job whose data exists and fits it. `starts` is whether the job starts from its initial weights.

    Missing data is downloaded if `fetch` is set. It must not be set if only the run folder names the data's folder,
    because somebody else may have written the run folder.

    Raises:
        InputError: it does not fit.
    """
    if job.init_from is not None and starts:
        checkpoint.weights_file(Path(job.init_from))
    if fetch:
        job.dataset.prepare()
    else:
        _check_data(job.dataset)
    plan = check_plan(job)
    if starts:
        job.model.prepare()
    return plan


def check_plan(job: ResolvedJob) -> Plan:
    """The plan of a job whose data is there, and which fits it and the memory.

    Raises:
        InputError: it does not fit.
    """
    plan = plan_of(job, len(job.dataset.train()))
    check_memory(job, plan)
    freeze_until(job, plan)  # raises if the duration does not fit
    for step in (1, plan.total_steps):
        job.schedule.factor(step, plan)  # raises if one of its durations does not fit
    return plan


def _check_data(dataset: Source) -> None:
    """Check that both splits can be read."""
    try:
        dataset.train()
        dataset.eval()
    except InputError as error:
        raise InputError(
            f"{error}; a resume downloads nothing to a folder that only the run names: name it with data_root=FOLDER"
        ) from error


def import_for_ranks(job: Job) -> None:
    """Import what each rank would import, and ask what it would ask, before ranks are forked from this process."""
    from lockstep.job import launch  # noqa: F401  # late, because only a rank needs all of it

    environment.own_source()
    parts = (job.model, job.strategy, *job.logger.values())
    modules = {name for part in parts for name in getattr(part, "imports", ())}
    modules |= {"torch._dynamo"} if job.model.compile else set()
    modules |= {"torchmetrics.classification"} if job.metric else set()
    for name in sorted(modules):
        importlib.import_module(name)


def _without_auto_batch(resume: Resume) -> Mapping[str, Any]:
    """Replace `batch=auto` by the batch that the job has without this override, and `train.micro_batches=auto`.

    The batch identifies a run, so it must not depend on the memory of a machine.
    """
    values, overrides = resume.values, resume.overrides
    remaining = [word for word in overrides if messages.key_of(word) != "batch" or "auto" not in word]
    if values["batch"] != "auto" or len(remaining) == len(overrides):  # a recipe cannot say it: `resolve` refuses it
        return values
    if values["train"]["micro_batches"] not in (1, "auto"):
        raise InputError(
            f"batch=auto chooses train.micro_batches, which is {values['train']['micro_batches']}; leave out one of "
            "them"
        )
    batch = composition.to_dict(composition.recompose(remaining, (), resume.configs))["batch"]
    return {**values, "batch": batch, "train": {**values["train"], "micro_batches": "auto"}}


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The files that were written into a run folder for a job. As a context, it calls `close` with a raised error.

    Fields:
        run_dir: the run folder.
        before: the old content of each file; None for a file that did not exist.
        logs_before: the size of each log, to which a job that was refused by a rank has added lines.
        errors_before: the content of each rank's error file.
        summary_before: the identity of the summary's file (`_file_id`).
    """

    run_dir: RunDir
    before: Mapping[Path, bytes | None]
    logs_before: Mapping[Path, int]
    errors_before: Mapping[Path, bytes]
    summary_before: tuple[int, int] | None

    @classmethod
    def write(cls, run_dir: RunDir, texts: Mapping[Path, str]) -> Preparation:
        """Write the files that describe a job.

        Raises:
            StorageError: a file cannot be written; all files are as they were.
        """
        before = {path: read_if_exists(path) for path in texts}
        preparation = cls(
            run_dir=run_dir,
            before=before,
            logs_before={path: path.stat().st_size for path in run_dir.log_files()},
            errors_before={path: read_if_exists(path) or b"" for path in run_dir.logs.glob("rank*.error.json")},
            summary_before=_file_id(run_dir.summary),
        )
        try:
            # A resume compares the overrides with this file. Remove it first, so that a kill between the writes does
            # not leave it next to the overrides of another command.
            run_dir.composed.unlink(missing_ok=True)
            for path, text in texts.items():
                write_atomic(path, text)
        except StorageError:
            preparation.undo()
            raise
        return preparation

    def undo(self) -> None:
        """Undo `write` and what ranks have logged: remove the files of a new job, and restore those of an older one.

        Raises:
            StorageError: a file cannot be written back.
        """
        if not self.run_dir.began and not any(self.before.values()):
            self._remove()
            return
        for path, content in self.before.items():
            if content is None:
                path.unlink(missing_ok=True)
            elif content != read_if_exists(path):
                write_atomic(path, content)
        for path in self.run_dir.log_files():
            if path not in self.logs_before:
                path.unlink()
            else:
                os.truncate(path, self.logs_before[path])
        for path, content in self.errors_before.items():  # launchers remove these
            write_atomic(path, content)
        self._remove_empty_folders()

    def close(self, error: BaseException) -> None:
        """Write into the summary how the job ended. Undo `write` if the job was refused before training started."""
        same_summary = self.before and _file_id(self.run_dir.summary) == self.summary_before
        if isinstance(error, InputError) and (same_summary or not self.run_dir.began):
            with suppress(OSError, StorageError, UnreadableFile):
                self.undo()
        else:
            self.run_dir.write_ending(error)

    def _remove(self) -> None:
        """Remove the files of a job that never began, and the folders that are empty afterwards."""
        for file in self.run_dir.prepared_files():
            file.unlink(missing_ok=True)
        self._remove_empty_folders()

    def _remove_empty_folders(self) -> None:
        for folder in (self.run_dir.hydra, self.run_dir.logs, self.run_dir.checkpoints, self.run_dir.path):
            with suppress(OSError):  # not empty
                folder.rmdir()

    def __enter__(self) -> RunDir:
        return self.run_dir

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.close(error)


def _file_id(path: Path) -> tuple[int, int] | None:
    """The identity of a file, which changes when the file is replaced; None if the file does not exist."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns
