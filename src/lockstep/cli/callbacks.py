"""Hydra's callbacks around the jobs of a sweep: the choice of its folder, its SLURM array, and its report."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from lockstep.config.commands import program_name, program_words, shell_command
from lockstep.core import log
from lockstep.core.errors import InputError
from lockstep.core.launch_env import SWEEP_FOLDER, follows, is_launched, started_by
from lockstep.core.native_threads import configure_native_threads
from lockstep.core.run_dir import relative
from lockstep.core.safe_write import absent, check_names, remove_empty, write_atomic
from lockstep.core.terminal import impatient
from lockstep.runtime import program

if TYPE_CHECKING:
    from lockstep.job.slurm import Submission

CHECKED_PATTERNS = ("*", "*/*")  # what Hydra and Optuna may open in a folder, and in the folders of jobs


def submit_all(submissions: Sequence[Submission], folder: Path | None = None) -> None:
    """Submit jobs, of the sweep in `folder` if there is one; consecutive ones with the same launcher are an array."""
    if not submissions:
        return
    from lockstep.core import console
    from lockstep.job.slurm import preview, submit  # few jobs are for a cluster
    from lockstep.records.ledger import record_of

    for launcher, same in groupby(submissions, key=lambda submission: submission.launcher):
        if launcher.dry_run:
            for line in preview([*same], folder).splitlines():
                console.terminal.print(line, soft_wrap=True)
            continue
        for number, path in submit([*same], folder):
            if entry := record_of(path):
                entry[0].write(replace(entry[1], submitted=number))
            log.show(f"submitted job {number} of SLURM: {path}")


class SweepCallbacks(Callback):
    def __init__(self) -> None:
        self.submissions: list[Submission] = []  # of the jobs that have ended so far

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        if job_return.status is JobStatus.COMPLETED:
            returned = job_return.return_value  # its objective, or what it submits to SLURM
            self.submissions += [] if isinstance(returned, int | float | None) else [returned]

    @program.bypass_hydra_errors()  # Hydra would only warn of an error in a callback
    def on_run_end(self, config: DictConfig, **kwargs: Any) -> None:
        submit_all(self.submissions)

    @program.bypass_hydra_errors()
    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        sweeper = config.hydra.runtime.choices["hydra/sweeper"]
        if sweeper != "grid" and not follows():  # a file chooses another than conf/config.yaml
            command = shell_command([*program_words(), "-m", *sys.argv[1:]])
            log.show_warning(f"hydra/sweeper={sweeper} has no effect on one job; add -m for the search: {command}")
        folder = Path(config.hydra.run.dir).absolute()
        atexit.register(remove_empty, absent(folder))  # Hydra creates it, also for a job that will be refused
        if folder != Path.cwd():
            check_names(folder, *CHECKED_PATTERNS)  # before Hydra opens a log there (hydra/job_logging)

    @program.bypass_hydra_errors()
    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        self.began, self.handled = time.monotonic(), sys.exc_info()[1]  # of a program that starts a sweep
        if is_launched():  # each rank would run the whole sweep
            from lockstep.launcher.attach import following, leading  # needs torch, and --help must be fast

            by, line = started_by().label, f"{program_name()} -m ..."
            with following() if follows() else leading():
                raise InputError(f"{by} would run the whole sweep in each rank; type {line} instead")
        from lockstep.records.ledger import JOBS  # imported late: most commands are one job
        from lockstep.sweeps.line import FILES, choose_folder, remove_refused
        from lockstep.telemetry.progress import loading

        folder = Path(config.hydra.sweep.dir).absolute()
        new = absent(*(folder / name for name in (*FILES, JOBS)))
        check_names(folder, *CHECKED_PATTERNS)
        with loading():
            configure_native_threads()  # before the classes that say which score decides import torch
        ledger = choose_folder(config)
        if SWEEP_FOLDER in os.environ:
            write_atomic(Path(os.environ[SWEEP_FOLDER]), str(ledger.folder))
        atexit.register(remove_refused, ledger, new)
        check_names(ledger.folder, *CHECKED_PATTERNS)

    @program.bypass_hydra_errors()
    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        if sys.exc_info()[1] is not self.handled:  # the sweep ends with an error, which decides the exit code
            return
        folder = Path(config.hydra.sweep.dir)
        submit_all(self.submissions, folder)
        from lockstep.records.ledger import Ledger
        from lockstep.report.listener import is_due
        from lockstep.report.sweep_page import write_sweep_report  # needs numpy, and --help must be fast

        if Ledger(folder).records() and is_due(config.telemetry.report, time.monotonic() - self.began):
            with impatient():
                log.show(f"report: {relative(write_sweep_report(Ledger(folder)))}")
