"""From what a command resumes to a run folder: the values of its config become a `Job`, and the `Job` a
`ResolvedJob`, which is checked whole. Until then nothing is written but data and published weights that are missing.
The folder is locked, created once the job is checked, and undone if a rank refuses the job.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import torch

from lockstep.config import components, composition, yaml_io
from lockstep.config.invocation import Invocation
from lockstep.config.messages import RUN_FOLDERS, key_of, without_keys
from lockstep.config.schema import Job
from lockstep.core import log
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
from lockstep.training.resolved_job import ResolvedJob


def create_run(
    resume: Resume, invocation: Invocation, lock: Lock, earlier: str = ""
) -> tuple[Preparation, ResolvedJob]:
    """Prepare the job of a command, make its run folder, and take `lock` on the folder.

    `earlier` is the folder of the ranks that torchrun has restarted: without another one, it is continued.

    Raises:
        InputError: the job does not fit, or another job uses the folder; nothing was written.
    """
    resume = replace(resume, folder=resume.folder or (Path(earlier) if earlier else None))
    if resume.folder is not None:
        lock_run_folder(resume.folder, lock)
    job = prepare(resume, invocation)
    if job.launcher.can_fork():
        import_for_ranks(job)
    root, folder = Path(job.output_root), resume.folder
    run_dir = RunDir.at(folder) if folder is not None else RunDir.create(root, job.name)
    lock.take(run_dir.lock)
    preparation = Preparation.write(
        run_dir,
        {
            run_dir.config: yaml_io.dump(components.plain(job)),
            run_dir.command: invocation.command + "\n",
            run_dir.hydra / "hydra.yaml": resume.hydra,
            run_dir.overrides: yaml_io.dump(resume.overrides),
            run_dir.composed: yaml_io.dump(resume.composed),
        },
    )
    return preparation, job


def prepare(resume: Resume, invocation: Invocation) -> ResolvedJob:
    """The job of a command, resolved, and checked with its data.

    Raises:
        InputError: the job does not fit.
    """
    torch.set_num_threads(1)  # ranks can only be forked from a single thread; each rank sets its own number
    # A job of the pool has a process of its own; Hydra's basic launcher runs the jobs of a sweep in one.
    sweep = invocation.sweep and multiprocessing.parent_process() is None
    job = checked_job(resume, sweep=sweep)
    resume.fetch_data(job.dataset)
    job = with_fitting_batch(job, resume, sweep=sweep)
    plan = check_plan(job)
    if resume.checkpoint is None:
        job.model.prepare()
    check_resumable(resume, job, plan)
    return job


def job_of(overrides: Sequence[str]) -> ResolvedJob:
    """The job of the words of a command that makes no run folder, resolved and checked; its data is there."""
    words = without_keys(overrides, RUN_FOLDERS, "no run folder is made")
    with composition.invoked(words) as (values, invocation):
        job = checked_job(resume := decide_resume(values, invocation))
        resume.fetch_data(job.dataset)
        return with_fitting_batch(job, resume)


def checked_job(resume: Resume, *, sweep: bool = False) -> ResolvedJob:
    """The job of a command, resolved, and checked as far as that is possible without its data.

    `sweep` is whether other jobs run in this process.
    """
    job = components.build_job(resume.values)
    resolved = resolve(job, sweep=sweep, resumed=resume.checkpoint)
    if job.repro == "exact" and "repro=exact" in resume.overrides and resolved.strategy.fixed_order:
        raise InputError("strategy=strict belongs to repro=strict, but repro=exact is given; leave out one of them")
    check_job(resolved)
    return resolved


def with_fitting_batch(job: ResolvedJob, resume: Resume, *, sweep: bool = False) -> ResolvedJob:
    """The job with its training split as its batch, if its batch is larger and nobody has typed it."""
    examples = len(job.dataset.train())
    has_typed = any(key_of(word) == "batch" and "auto" not in word for word in resume.overrides)
    if has_typed or not 0 < examples < job.batch:
        return job
    log.note(f"batch is {examples}, all images of the training split; it would be {job.batch} with more images")
    return checked_job(replace(resume, values={**resume.values, "batch": examples}), sweep=sweep)


def check_plan(job: ResolvedJob) -> Plan:
    """The plan of a job whose data is there, and which fits it and the memory."""
    if job.dataset.classes < 2:
        named = "".join(f", {name}," for name in job.dataset.class_names)
        raise InputError(f"dataset: it has one class{named} so there is nothing to tell apart, expected two or more")
    plan = plan_of(job, len(job.dataset.train()))
    check_memory(job, plan)
    for step in (1, plan.total_steps):
        job.schedule.factor(step, plan)  # that of an extension may refuse a duration
    return plan


def import_for_ranks(job: Job) -> None:
    """Import what each rank would import, and ask what it would ask, before ranks are forked from this process."""
    from lockstep.job import worker  # noqa: F401  # late, because only a rank needs all of it

    environment.own_source()
    parts = (job.model, job.strategy, *job.logger.values())
    modules = {name for part in parts for name in getattr(part, "imports", ())}
    modules |= {"torch._dynamo"} if job.model.compile else set()
    modules |= {"torchmetrics.classification"} if job.metric else set()
    for name in sorted(modules):
        importlib.import_module(name)


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The files that were written into a run folder for a job. As a context, it calls `close` with a raised error.

    Fields:
        described: whether the folder had any of these files before.
        before: the old content of these files, the summary and the ranks' error files; None without such a file. The
            size of each log, to which a job that was refused by a rank has added lines.
    """

    run_dir: RunDir
    described: bool
    before: Mapping[Path, bytes | int | None]

    @classmethod
    def write(cls, run_dir: RunDir, texts: Mapping[Path, str]) -> Preparation:
        """Write the files that describe a job.

        Raises:
            StorageError: a file cannot be written; all files are as they were.
        """
        sizes = {path: path.stat().st_size for path in run_dir.log_files()}
        before = {path: read_if_exists(path) for path in (*texts, run_dir.summary, *run_dir.rank_errors())}
        described = any(before[path] for path in texts)
        preparation = cls(run_dir=run_dir, described=described, before={**sizes, **before})
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
        before = {**dict.fromkeys(self.run_dir.log_files()), **self.before}
        if not self.run_dir.began and not self.described:  # the folder is this job's own
            before = dict.fromkeys(self.run_dir.prepared_files())
        for path, content in before.items():
            if content is None:
                path.unlink(missing_ok=True)
            elif isinstance(content, int):
                os.truncate(path, content)
            elif content != read_if_exists(path):  # launchers remove error files
                write_atomic(path, content)
        for folder in (self.run_dir.hydra, self.run_dir.logs, self.run_dir.checkpoints, self.run_dir.path):
            with suppress(OSError):  # not empty
                folder.rmdir()

    def close(self, error: BaseException) -> None:
        """Write into the summary how the job ended. Undo `write` if the job was refused before training started."""
        has_started = self.run_dir.began
        with suppress(UnreadableFile):
            has_started &= read_if_exists(self.run_dir.summary) != self.before[self.run_dir.summary]
        if has_started or not isinstance(error, InputError):
            self.run_dir.write_ending(error)
            return
        with suppress(OSError, StorageError, UnreadableFile):
            self.undo()

    def __enter__(self) -> RunDir:
        return self.run_dir

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.close(error)
