"""`hydra/launcher=pool`: the jobs of a sweep in processes of their own, as many at once as fit, and resumable.

Any Hydra app can use it. Its task function may be an object with a method `needs`, which gets a job's config and what
the machine has before any job starts, may raise an error for a wrong one, and returns what the job needs (both as
`lockstep.sweeps.devices.Needs`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Hashable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.experimental.callback import Callback
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from lockstep.config.commands import command_of_program
from lockstep.config.composition import words_of_job
from lockstep.config.hydra_policy import as_typed, works_for_lockstep
from lockstep.core import log
from lockstep.core.errors import InputError, Interrupted, Stopped, StorageError
from lockstep.core.fields import check_whole
from lockstep.core.native_threads import configure_native_threads
from lockstep.core.run import Run, State
from lockstep.core.run_dir import slug
from lockstep.core.safe_write import Lock, absent, remove_empty
from lockstep.core.table import shortened
from lockstep.core.tags import Monitor
from lockstep.core.terminal import impatient
from lockstep.records.ledger import Identity, Ledger
from lockstep.records.record import SCORE, Record, check_objectives, checked_direction, job_key, swept_keys, varied
from lockstep.runtime.program import JobError, explain
from lockstep.sweeps.devices import Devices, Needs

if TYPE_CHECKING:
    from lockstep.sweeps.pool import Pool, SweepJob
    from lockstep.sweeps.search import Search
    from lockstep.sweeps.view import SweepView


class WrongJob(InputError):
    """A job of a sweep is wrong for the reason that is the cause of this error."""


class PoolLauncher(Callback):
    """What a launcher of Hydra does, by the pool, and the callback with the exit code of a sweep."""

    begun = "started"  # what the lines say of a job that the pool has begun
    search: Search | None = None  # set by a sweeper that searches, before it launches its first jobs

    def __init__(self, jobs: int | None, gpus: int, cores: int, direction: str) -> None:
        self.jobs, self.gpus, self.cores, self.direction = jobs, gpus, cores, direction

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config
        self.lock, self.planned = Lock(), dict[tuple[str, ...], tuple[DictConfig, Needs] | InputError]()
        self.view: SweepView | None = None  # of all jobs that were launched
        self.exit_code, self.handled = 0, sys.exc_info()[1]  # a caller may start a sweep while it handles an error
        hydra_context.callbacks.callbacks.insert(0, self)  # the last one at the end
        # Whether failed jobs run again, the share of jobs that continues, the table's columns; null in other apps.
        self.retry = bool(OmegaConf.select(config, "sweep.retry"))
        self.halving: int | None = OmegaConf.select(config, "sweep.halving")
        self.objectives: Sequence[str] = OmegaConf.select(config, "sweep.objectives") or [SCORE]

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        setup_globals()
        check_whole("hydra.launcher.jobs", 1 if self.jobs is None else self.jobs, 1)
        check_whole("hydra.launcher.gpus", self.gpus, 0)
        check_whole("hydra.launcher.cores", self.cores, 1)
        if not job_overrides and self.search is None:
            raise InputError(
                "this line has no job: a range(...) or glob(...) in it has no value; write values with commas"
            )
        ledger = Ledger(Path(self.config.hydra.sweep.dir).absolute())
        if not ledger.exists:
            ledger.create(Identity(direction=checked_direction(self.direction)))
        with impatient(), closing(self.lock) as lock:  # the ledger and the jobs' logs have what is shown
            lock.take(ledger.folder / ".lock", user="sweep", remedy="sweep.resume=new")
            try:
                records = self._launch(ledger, job_overrides, initial_job_idx)
            except (Stopped, Interrupted, StorageError) as error:
                if works_for_lockstep():
                    raise JobError(error) from error
                explain(error)
                sys.exit(error.exit_code)
            assert self.view is not None
            codes = (record.exit_code for record in ledger.records() if record.number in self.view.records)
            self.exit_code = next(filter(None, codes), 0)
        return [_returned(record) for record in records]

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        if self.exit_code and sys.exc_info()[1] is self.handled:  # another error has its own code
            sys.exit(self.exit_code)

    def _launch(self, ledger: Ledger, job_overrides: Sequence[Sequence[str]], first: int) -> list[Record]:
        """Run the jobs that are not done yet; returns the records of all."""
        configure_native_threads()  # jobs are forked from this process, which imports torch once for all
        from lockstep.sweeps.search import halve
        from lockstep.sweeps.view import SweepView

        self.devices = self._devices()
        view = self.view = self.view or SweepView(ledger, begun=self.begun)
        if self.search is None:
            records, jobs = self._enter(ledger, job_overrides, first)
            view.enter(records, [job.record for job in jobs or ()])
            if len(job_overrides) == 1:
                log.note("this sweep is one job; values with commas make more, such as KEY=1,2")
        else:  # its line is about all its jobs
            view.enter(ledger.records(), [])
            jobs = self._enter_drawn(ledger, view, self.search.follow())
            records = ledger.records()
        if (words := tuple(as_typed(self.config.hydra.overrides.task))) != (identity := ledger.identity()).words:
            ledger.create(replace(identity, words=words))  # not before: a rejected command cannot be resumed
        if jobs is None:
            return records
        try:
            with view:
                pool = self._pool(ledger, self.devices, view)
                if self.halving is not None:
                    halve(pool, records, {job.record.number: job for job in jobs}, self.halving)
                elif self.search is not None:
                    follow = self.search.follow
                    pool.run(
                        jobs,
                        self.search.has_enough,
                        lambda record: self._enter_drawn(ledger, view, follow(record)),
                        State.pruned,
                    )
                else:
                    pool.run(jobs)
        finally:
            view.show_table(self.objectives)
        return [ledger.read(record) for record in records]

    def _enter(
        self, ledger: Ledger, job_overrides: Sequence[Sequence[str]], first: int
    ) -> tuple[list[Record], list[SweepJob] | None]:
        """The records of jobs, and the jobs to run; None if all submit themselves. Raises WrongJob, InputError."""
        from lockstep.sweeps.pool import SweepJob, to_run

        program, planned = command_of_program(), []
        for number, words in enumerate(job_overrides, first):
            try:
                planned.append(self._planned(words))
            except InputError as error:
                shown = " ".join(_varied(ledger, job_overrides)[number - first])
                job = f"job {number}{f' ({shown})' * bool(shown)}"
                lines = str(error).split("\n")
                raise WrongJob(*(f"{job}: {line}" for line in lines)) from error
        needs = [need for _, need in planned]
        self._agree(ledger, {need.monitor for need in needs if need.monitor})
        settings = {self.identify(words): job_key(words, samples=False) for words in job_overrides}
        if self.halving and (number := len({*settings.values()})) < self.halving:
            raise InputError(
                f"sweep.halving={self.halving} keeps the best one of {self.halving} jobs, all seeds and folds of a "
                f"setting being one, and this line has {number}; add values, or remove it"
            )
        if self.search is not None and any(need.submits for need in needs):
            raise InputError(
                "hydra/sweeper=optuna chooses by the scores of jobs, and launcher=slurm only submits them; start the "
                "search inside an allocation, without launcher=slurm, or remove hydra/sweeper=optuna"
            )
        self.devices.check(needs)
        records = [_settled(ledger, record) for record in self._recorded(ledger, job_overrides)]
        chosen = {record.number for record in to_run(records, retry=self.retry)}
        jobs = []
        for record, (config, need) in zip(records, planned, strict=True):
            if record.number not in chosen:
                continue
            chosen.remove(record.number)  # the line may have a job twice
            self._number(config, record.number, record.folder)
            run = functools.partial(self._run, config)
            if need.submits:
                run()
            else:
                jobs.append(SweepJob(record, need, run, (*program, *words_of_job())))
        return records, None if not jobs and any(need.submits for need in needs) else jobs

    def _agree(self, ledger: Ledger, monitors: set[str]) -> None:
        """Take the monitor of jobs as the sweep's. Raises WrongJob if they differ, or it was another one before."""
        identity = ledger.identity()
        if identity.figure != SCORE and (self.search is not None or ledger.records()):
            monitors = {*monitors, str(identity.monitor)}
        if len(monitors) > 1:
            raise WrongJob(
                f"the jobs of a sweep are compared by one score, and the monitors of these are "
                f"{' and '.join(sorted(monitors))}; give all of them one that each has: monitor=loss"
            )
        if monitors and {str(identity.monitor)} != monitors:
            monitor = Monitor.parse(*monitors)
            ledger.create(replace(identity, figure=monitor.name, direction=monitor.direction))

    def _planned(self, words: Sequence[str]) -> tuple[DictConfig, Needs]:
        """The config of a job, and what it needs. Raises InputError if its words are wrong."""
        if (key := tuple(words)) not in self.planned:
            try:
                config = self.hydra_context.config_loader.load_sweep_config(self.config, [*words])
                self._number(config, 0, "")  # what it is does not depend on its number, which follows from what it is
                needs_of = getattr(self.task_function, "needs", None)
                needs = needs_of(config, self.devices.all) if needs_of else Needs(self.gpus, self.cores)
                check_objectives(needs.figures, needs.monitor, self.objectives)
                self.planned[key] = config, needs
            except Exception as error:
                from lockstep.config.messages import translate  # Hydra imports this module for each job

                if not isinstance(known := translate(error), InputError):
                    raise
                self.planned[key] = known
        if isinstance(planned := self.planned[key], InputError):
            raise planned
        return planned

    def identify(self, words: Sequence[str]) -> Hashable:
        """What a job is: its config, if the app says so and it composes, or else its words."""
        with suppress(InputError):
            return self._planned(words)[1].identity or job_key(words)
        return job_key(words)

    def _recorded(self, ledger: Ledger, jobs: Sequence[Sequence[str]]) -> list[Record]:
        """The records of jobs, whose folders are named after what varies."""
        names = [slug(shortened(",".join(words)) or "defaults") for words in _varied(ledger, jobs)]
        return ledger.enter(zip(jobs, names, strict=True), self.identify)

    def _enter_drawn(self, ledger: Ledger, view: SweepView, drawn: Sequence[Sequence[str]]) -> list[SweepJob]:
        """The jobs of the draws of a search. One whose values do not fit together has failed, and others follow."""
        assert self.search is not None
        jobs: list[SweepJob] = []
        waiting = [*drawn]
        while waiting:
            words = waiting.pop(0)
            try:
                records, entered = self._enter(ledger, [words], len(ledger.records()))
                jobs += entered or []
                view.enter(records, [job.record for job in entered or ()], self.search.left)
            except WrongJob as error:
                with suppress(InputError):
                    self._planned(self.search.fixed)
                if str(self.planned[tuple(self.search.fixed)]) in str(error.__cause__):
                    raise
                (record,) = self._recorded(ledger, [words])
                code, sentence = error.exit_code, str(error.__cause__ or error)  # without the number of the job
                refused = ledger.end(ledger.start(record), State.failed, exit_code=code, error=sentence)
                waiting += self.search.follow(refused)
                view.enter([refused], [], self.search.left)
                view.ended(refused)
        return jobs

    def _devices(self) -> Devices:
        return Devices.of_machine()

    def _pool(self, ledger: Ledger, devices: Devices, view: SweepView) -> Pool:
        from lockstep.sweeps.pool import Pool, start_process

        return Pool(ledger, devices, view, most=self.jobs, start=start_process)

    def _number(self, config: DictConfig, number: int, folder: str) -> None:
        """Set the number and the folder of a job in its config, and in Hydra, which `${hydra:job.num}` asks."""
        HydraConfig.instance().cfg = config  # type: ignore[assignment]  # `set_config` copies it, which takes 3 ms
        with read_write(config.hydra), open_dict(config.hydra):
            config.hydra.job.id, config.hydra.job.num = str(number), number
            config.hydra.sweep.dir = self.config.hydra.sweep.dir
            config.hydra.sweep.subdir = folder

    def _run(self, config: DictConfig) -> float | None:
        new = absent(Path(config.hydra.sweep.dir, config.hydra.sweep.subdir).absolute())
        try:
            done = run_job(
                task_function=self.task_function,
                config=config,
                job_dir_key="hydra.sweep.dir",
                job_subdir_key="hydra.sweep.subdir",
                hydra_context=self.hydra_context,
            )
        finally:  # if the job is refused, the folder that Hydra has created for it goes again
            remove_empty(new)
        value = done.return_value
        return float(value) if isinstance(value, int | float) else None


def _returned(record: Record) -> JobReturn:
    """What a sweeper gets for a job: its score, or NaN if it has none, so that the sweep continues."""
    returned = JobReturn(overrides=record.overrides, status=JobStatus.COMPLETED)
    returned.return_value = float("nan") if record.objective is None else record.objective
    return returned


def _varied(ledger: Ledger, jobs: Sequence[Sequence[str]]) -> list[list[str]]:
    """The overrides of each job that others do not have."""
    swept = ledger.identity().swept or swept_keys(jobs)
    return [varied(words, swept) for words in jobs]


def _settled(ledger: Ledger, record: Record) -> Record:
    """The record of a job; one that was killed between the end of its run and the end of its record is done."""
    if record.state is State.done or record.runs_here:
        return record
    run = Run(ledger.folder / record.folder)
    return ledger.end(record, State.done, objective=run.score) if run.state == State.done else record
