"""The run folder of a job: locked, created once the job is checked, and undone if a rank refuses the job."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from lockstep.config import components, yaml_io
from lockstep.config.invocation import Invocation
from lockstep.config.schema import Job
from lockstep.core.errors import InputError, StorageError
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_read import UnreadableFile, read_if_exists
from lockstep.core.safe_write import write_atomic
from lockstep.job.prepare import prepare
from lockstep.job.resume import Resume
from lockstep.job.run_folder import Lock, lock_run_folder
from lockstep.runtime import environment


def create_run(resume: Resume, invocation: Invocation, lock: Lock, earlier: str = "") -> Preparation:
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
    return Preparation.write(
        run_dir,
        {
            run_dir.config: yaml_io.dump(components.plain(job)),
            run_dir.command: invocation.command + "\n",
            run_dir.hydra / "hydra.yaml": resume.hydra,
            run_dir.overrides: yaml_io.dump(resume.overrides),
            run_dir.composed: yaml_io.dump(resume.composed),
        },
    )


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


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The files that were written into a run folder for a job. As a context, it calls `close` with a raised error.

    Fields:
        run_dir: the run folder.
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
