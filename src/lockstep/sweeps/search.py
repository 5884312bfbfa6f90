"""Which jobs of a sweep run, and how far, by the scores so far: successive halving, and the trials of a search.

Halving: all jobs train for a part of their steps, and the best settings, each with all its seeds and folds, continue
with the rest (Jamieson and Talwalkar 2016, "Non-stochastic Best Arm Identification and Hyperparameter Optimization").
A job continues from its own checkpoint and is, to the bit, the run that it would have been alone. So nothing is
trained twice. The logged scores alone decide what continues, so a sweep that was stopped anywhere finds its place.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from lockstep.core.errors import Stopped, percent
from lockstep.core.run import Run, State
from lockstep.core.safe_write import storing
from lockstep.core.tags import Direction
from lockstep.records.ledger import Ledger
from lockstep.records.record import SCORE, Identify, Record, job_key, objectives_of
from lockstep.runtime.signals import RUNG_END

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

    from lockstep.sweeps.pool import Pool, SweepJob

ENDED, ERROR = "ended", "error"  # attributes of a trial
JOURNAL = "optuna.log"


def shares(jobs: int, factor: int) -> list[float]:
    """The share of its steps that each job of a round has done at the round's end; the last is 1."""
    rounds = int(math.log(jobs, factor) + 1e-9) if jobs else 0
    return [factor ** (number - rounds) for number in range(rounds + 1)]


def evaluations(ledger: Ledger, record: Record) -> list[tuple[float, float]]:
    """The evaluations of a job so far: the share of its steps that was done, and the score."""
    run = Run(ledger.folder / record.folder)
    total = run.summary.get("steps")
    return [(step / total, score) for step, score in run.series(*run.monitor.tags)] if total else []


def score_at(ledger: Ledger, record: Record, share: float, direction: Direction) -> float | None:
    """The best score until the first evaluation that comes at `share` of a job's steps or later; None before it."""
    values = []
    for done, value in evaluations(ledger, record):
        values.append(value)
        if done >= share:
            return max(values, key=direction.gain)
    return record.objective


def halve(pool: Pool, records: Sequence[Record], jobs: Mapping[int, SweepJob], factor: int) -> None:
    """Run the rounds: after each, the best one of `factor` settings continues, with all its seeds and folds.

    Jobs that were done or failed before take part with their scores. Raises Stopped and Interrupted as `Pool.run`;
    Stopped also if a job was stopped alone, and has no score.
    """
    ledger, direction = pool.ledger, pool.ledger.identity().direction
    racing = [*dict.fromkeys(records)]  # a line may have a job twice
    setting = {record.number: job_key(record.overrides, samples=False) for record in racing}
    samples = Counter(setting.values())
    rounds = shares(len(samples), factor)

    def runs(record: Record) -> bool:
        return record.number in jobs and record.state is not State.done

    for number, share in enumerate(rounds, 1):
        pool.view.share, pool.view.portion = share, share - ([0.0, *rounds][number - 1])
        settings = len({setting[record.number] for record in racing})
        later = enumerate(pairwise(rounds[number - 1 :]), 1)
        work = sum(math.ceil(settings / factor**place) * (after - before) for place, (before, after) in later)
        pool.view.later = len(racing) / settings * work
        is_last, rung = share == 1, f"{number} of {len(rounds)}"
        racing = [ledger.write(replace(record, rung=rung)) if runs(record) else record for record in racing]

        def has_enough(record: Record, share: float = share, is_last: bool = is_last) -> bool:
            return not is_last and score_at(ledger, record, share, direction) is not None

        until = {} if is_last else {RUNG_END: repr(share)}
        started = [
            replace(jobs[record.number], record=record, environment=until)
            for record in racing
            if runs(record) and not has_enough(record)
        ]
        pool.run(started, enough=has_enough)
        racing = [ledger.read(record) for record in racing]
        scores = {record.number: score_at(ledger, record, share, direction) for record in racing}
        if stopped := [str(r.number) for r in racing if r.state is State.stopped and scores[r.number] is None]:
            raise Stopped(f"jobs were stopped in round {rung}: {', '.join(stopped)}; rerun the command to continue")
        # A job that failed after this round keeps its place, so rerunning the command has the same rounds.
        racing = [r for r in racing if scores[r.number] is not None or (runs(r) and r.state is not State.failed)]
        if is_last or not racing:
            return
        best_first = _best_first([(setting[r.number], scores[r.number]) for r in racing], samples, direction)
        ahead = math.ceil(len(best_first) / factor)
        for record in racing:
            if runs(record) and setting[record.number] in best_first[ahead:]:
                objective = scores[record.number]
                pruned = replace(record, state=State.pruned, objective=objective, exit_code=0, error="")
                pool.view.ended(ledger.write(pruned))
        logged = [[done for done, _ in evaluations(ledger, record)] for record in racing]
        judged = max(next((done for done in shares if done >= share), 0.0) for shares in logged)
        if judged >= rounds[number]:
            pool.view.show(
                f"warning: round {rung} was to end after {percent(share, '.3g')} of the steps, and a job was first "
                f"evaluated after {percent(judged, '.3g')}; "
                f"train.eval_every={100 * rounds[0]:.3g}% saves the steps in between"
            )
        unit = "jobs" if len(racing) == len(best_first) else "settings"
        pool.view.show(f"{ahead} of {len(best_first)} {unit} continue after {percent(share, '.3g')} of their steps")
        racing = [record for key in best_first[:ahead] for record in racing if setting[record.number] == key]


def _best_first(
    scores: Sequence[tuple[frozenset[str], float | None]], jobs: Mapping[frozenset[str], int], direction: Direction
) -> list[frozenset[str]]:
    """The settings by the mean score of their `jobs`; one without a score of each job comes after all others."""
    gains: dict[frozenset[str], list[float]] = {}
    for setting, score in scores:
        gains.setdefault(setting, []).extend([] if score is None else [direction.gain(score)])
    place = {key: (len(of) - jobs[key], statistics.mean(of or [-math.inf])) for key, of in gains.items()}
    return sorted(place, key=place.__getitem__, reverse=True)


@dataclass(kw_only=True)
class Search:
    """The trials of a study as jobs. Trials with the same values are one job, which runs once in a sweep."""

    study: optuna.Study
    space: dict[str, BaseDistribution]
    fixed: Sequence[str]  # the overrides of every job
    ledger: Ledger
    objectives: Sequence[str]
    trials: int  # over all calls
    at_once: int
    sampler: Callable[[int], optuna.samplers.BaseSampler]  # gives the one after a number of trials
    retries: bool  # whether jobs that failed in earlier calls run again
    prunes: bool
    identify: Identify = job_key
    open: dict[Hashable, list[optuna.Trial]] = field(default_factory=dict)
    of_this_call: set[Hashable] = field(default_factory=set)

    @property
    def ended(self) -> int:
        """The trials that have ended, over all calls, except one that was killed while it reported its end."""
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
        """The jobs of the trials that an earlier call has begun; they resume from their checkpoints."""
        from optuna.samplers import RandomSampler
        from optuna.trial import Trial, TrialState

        jobs = []
        self.study.sampler = RandomSampler()  # draws nothing for a trial that has its values
        for trial in self.study.get_trials(states=(TrialState.RUNNING,)):
            if not self.space.keys() <= trial.params.keys():  # cut while it was drawn, which is done again
                self.study.tell(trial.number, state=TrialState.FAIL)
            elif self.left > 0:
                # Private: a study gives a trial that accepts reports only when it creates one.
                jobs += self._jobs_of(Trial(self.study, trial._trial_id))
        return jobs

    def _jobs_of(self, trial: optuna.Trial) -> list[list[str]]:
        """Open a trial, and end it if the ledger knows the end of its job; returns a job that has to run."""
        job = [*self.fixed, *(f"{key}={value}" for key, value in trial.params.items())]
        key = self.identify(job)
        self.open.setdefault(key, []).append(trial)
        record, is_new = self._record(key), key not in self.of_this_call
        if record is not None and record.has_ended and not (record.state is State.failed and self.retries and is_new):
            self.tell(job)  # the ledger knows how the job ends
            is_new = False
        self.of_this_call.add(key)
        return [job] if is_new else []

    def _record(self, key: Hashable) -> Record | None:
        return next((record for record in self.ledger.records() if self.identify(record.overrides) == key), None)

    def follow(self, record: Record | None = None) -> list[list[str]]:
        """The jobs that follow one that has ended, or the first ones."""
        with storing(self.ledger.folder / JOURNAL):
            # Trials in other states resume with the next run of the command.
            if record is not None and record.has_ended:
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
