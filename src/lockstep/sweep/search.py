"""The trials of a search as jobs of a sweep: which to run next, and what the study is told of those that ended."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lockstep.core.run import State
from lockstep.core.safe_write import storing
from lockstep.sweep.halving import evaluations
from lockstep.sweep.ledger import Ledger
from lockstep.sweep.record import SCORE, Identify, Record, job_key, objectives_of

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

ENDED, ERROR = "ended", "error"  # attributes of a trial
JOURNAL = "optuna.log"


@dataclass(kw_only=True)
class Search:
    """The trials of a study as jobs. Those with the same values are one job, which runs once in a sweep.

    Fields:
        space: what it may choose, by key.
        fixed: the overrides of every job.
        ledger: that of the sweep, which the study shares its folder with.
        objectives: what the study is told of a job.
        trials: how many there will be, over all calls.
        at_once: how many are open at a time.
        sampler: gives the sampler after a number of trials.
        retries: whether jobs that failed in earlier calls run again.
        prunes: whether the study ends jobs before their end.
        identify: what a job is, by its overrides.
    """

    study: optuna.Study
    space: dict[str, BaseDistribution]
    fixed: Sequence[str]
    ledger: Ledger
    objectives: Sequence[str]
    trials: int
    at_once: int
    sampler: Callable[[int], optuna.samplers.BaseSampler]
    retries: bool
    prunes: bool
    identify: Identify = job_key
    open: dict[Hashable, list[optuna.Trial]] = field(default_factory=dict)
    of_this_call: set[Hashable] = field(default_factory=set)

    @property
    def ended(self) -> int:
        """The trials that have ended, over all calls. One that a kill cut while it was told of its end has not."""
        return sum(ENDED in trial.user_attrs and trial.state.is_finished() for trial in self.study.trials)

    @property
    def left(self) -> int:
        """The trials that nobody has asked for yet."""
        return self.trials - self.ended - sum(map(len, self.open.values()))

    def ask(self) -> list[list[str]]:
        """The jobs for the free places."""
        jobs = []
        while self.left > 0 and sum(map(len, self.open.values())) < self.at_once:
            self.study.sampler = self.sampler(self.trials - self.left)
            jobs += self._jobs_of(self.study.ask(self.space))
        return jobs

    def _reopen(self) -> list[list[str]]:
        """The jobs of the trials that an earlier call has begun, which go on from their checkpoints."""
        from optuna.samplers import RandomSampler
        from optuna.trial import Trial, TrialState

        jobs = []
        self.study.sampler = RandomSampler()  # draws nothing for a trial that has its values
        for trial in self.study.get_trials(states=(TrialState.RUNNING,)):
            if not self.space.keys() <= trial.params.keys():  # cut while it was drawn, which is done again
                self.study.tell(trial.number, state=TrialState.FAIL)
            elif self.left > 0:
                # Private: a study gives a trial that can be reported to only when it is asked for a new one.
                jobs += self._jobs_of(Trial(self.study, trial._trial_id))
        return jobs

    def _jobs_of(self, trial: optuna.Trial) -> list[list[str]]:
        """Open a trial, and end it if the ledger knows the end of its job; returns a job that has to run."""
        job = [*self.fixed, *(f"{key}={value}" for key, value in trial.params.items())]
        key = self.identify(job)
        self.open.setdefault(key, []).append(trial)
        record, is_new = self._record(key), key not in self.of_this_call
        if is_known := record is not None and self._is_known(key, record):
            self.tell(job)
        self.of_this_call.add(key)
        return [job] if is_new and not is_known else []

    def _record(self, key: Hashable) -> Record | None:
        return next((record for record in self.ledger.records() if self.identify(record.overrides) == key), None)

    def _is_known(self, key: Hashable, record: Record) -> bool:
        """Whether the ledger knows how a job ends: it has run before, and is not to be tried again."""
        is_tried_again = self.retries and key not in self.of_this_call
        return record.state in (State.done, State.pruned) or (record.state is State.failed and not is_tried_again)

    def follow(self, record: Record | None = None) -> list[list[str]]:
        """The jobs that follow one that has ended, or the first ones."""
        with storing(self.ledger.folder / JOURNAL):
            # The trials of others go on with the next line.
            if record is not None and record.state in (State.done, State.failed, State.pruned):
                self.tell(record.overrides, record.objective)
            return self.ask() if record is not None else [*self._reopen(), *self.ask()]

    def tell(self, job: Sequence[str], value: Any = None) -> None:
        """Tell the study how a job ended: as its record says, or with this value."""
        from optuna.trial import TrialState

        key = self.identify(job)
        record = self._record(key)
        known = [value] if isinstance(value, int | float) and math.isfinite(value) else []
        if record is not None and (record.score is not None or [*self.objectives] != [SCORE]):
            known = objectives_of(self.ledger.folder, record, self.objectives)
        for trial in self.open.pop(key, []):  # none are left if one with these values was asked for as it ended
            trial.set_user_attr(ENDED, True)
            if record is not None and record.state is State.pruned:
                self.study.tell(trial, state=TrialState.PRUNED)
            elif known:
                self.study.tell(trial, known)
            else:
                reason = f"the job has no {' and '.join(self.objectives)}"
                trial.set_user_attr(ERROR, (record and record.error) or reason)
                self.study.tell(trial, state=TrialState.FAIL)

    def has_enough(self, record: Record) -> bool:
        """Whether a running job should be ended, because others are better."""
        if not self.prunes or not (trials := self.open.get(self.identify(record.overrides))):
            return False
        trial = trials[0]
        scores = {round(1000 * share): score for share, score in evaluations(self.ledger, record)}
        known = self.study.get_trials(deepcopy=False)[trial.number].intermediate_values
        for step in sorted(scores.keys() - known.keys()):
            trial.report(scores[step], step)
        return bool(trial.should_prune())
