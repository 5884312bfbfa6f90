"""`hydra/sweeper=optuna`: a search over the values of a sweep, with Optuna's samplers and pruners.

Spaces are written in Hydra's words: `choice(a,b)` or `a,b`, `range(1,5)`, `interval(0.1,1)`, `int(interval(8,64))`,
and `tag(log, interval(1e-5,1e-1))`. Optuna asks for values and is told scores; the jobs run through Hydra's launcher,
a few at a time. The study is a file in the folder of the sweep, so that the same line goes on with it.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from lockstep.core.errors import InputError
from lockstep.sweep.objectives import SCORE, directions, values
from lockstep.sweep.record import Direction

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

    from lockstep.sweep.record import Record

# The keys of `hydra.sweeper`. `storage` is any of Optuna's; null is a journal in the folder of the sweep.
CONFIG = {
    "_target_": "hydra_plugins.lockstep.search.OptunaSweeper",
    "sampler": "tpe",
    "pruner": "none",
    "seed": 0,
    "direction": "maximize",
    "n_trials": 20,
    "n_jobs": 1,
    "study_name": "sweep",
    "storage": None,
    "params": {},
}
ConfigStore.instance().store(group="hydra/sweeper", name="optuna", node=CONFIG, provider="hydra", replace=True)
SAMPLERS = {"tpe": "TPESampler", "random": "RandomSampler", "qmc": "QMCSampler"}
PRUNERS = {"none": "NopPruner", "median": "MedianPruner", "halving": "SuccessiveHalvingPruner"}
ENDED, ERROR = "ended", "error"  # attributes of a trial


class OptunaSweeper(Sweeper):
    """Hydra's interface to a study of Optuna."""

    def __init__(self, params: Mapping[str, Any], n_trials: int, n_jobs: int, **study: Any) -> None:
        self.params, self.n_trials, self.n_jobs, self.study = params, n_trials, n_jobs, study

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.settings = config
        self.launcher: Any = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Run trials until the study has `n_trials`."""
        self._check()
        from lockstep.sweep.ledger import Ledger
        from lockstep.sweep.view import show_table

        words = [*(f"{key}={value}" for key, value in self.params.items()), *arguments]
        parsed = OverridesParser.create().parse_overrides(words)
        space = {word.get_key_element(): distribution(word) for word in parsed if word.is_sweep_override()}
        if not space:
            raise InputError("hydra/sweeper=optuna has nothing to search; add for example optimizer.lr=0.001,0.01")
        fixed = [str(word.input_line) for word in parsed if not word.is_sweep_override()]
        try:
            study, ran = self._open(), False
        except Exception as error:  # Optuna and the storage's libraries raise all kinds of errors
            reason = (str(error).strip() or "no reason given").splitlines()[0]
            raise InputError(
                f"hydra.sweeper.storage: {self.study['storage'] or 'optuna.log of the sweep'} cannot be used "
                f"({type(error).__name__}: {reason}); start anew with sweep.resume=new, or name another storage"
            ) from error
        while (missing := self.n_trials - sum(ENDED in trial.user_attrs for trial in study.trials)) > 0:
            try:
                trials = [study.ask(space) for _ in range(min(self.n_jobs, missing))]
            except ValueError as error:  # Optuna keeps the choices of a study
                raise InputError(
                    f"the study has another space ({error}); start anew with sweep.resume=new"
                ) from error
            jobs = [[*fixed, *(f"{key}={value}" for key, value in trial.params.items())] for trial in trials]
            self._run(study, trials, jobs, is_last=missing <= self.n_jobs)
            ran = True
        if not ran and (ledger := Ledger(Path(self.settings.hydra.sweep.dir))).exists:
            show_table(ledger, ledger.records(), self.objectives)

    def _check(self) -> None:
        """Refuse wrong settings, and those that the launcher cannot keep."""
        if importlib.util.find_spec("optuna") is None:
            raise InputError(
                "hydra/sweeper=optuna needs the package optuna, which is not installed; install it with pip install "
                "'lockstep[optuna]'"
            )
        for key, known in (("sampler", SAMPLERS), ("pruner", PRUNERS), ("direction", [*Direction])):
            if self.study[key] not in known:
                raise InputError(f"hydra.sweeper.{key} is {self.study[key]!r}, expected one of {', '.join(known)}")
        for key, value, least in (
            ("n_trials", self.n_trials, 1),
            ("n_jobs", self.n_jobs, 1),
            ("seed", self.study["seed"], 0),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(f"hydra.sweeper.{key} is {value!r}, expected a whole number from {least}")
        if self.study["pruner"] != "none" and not hasattr(self.launcher, "enough"):
            raise InputError("hydra.sweeper.pruner works with hydra/launcher=pool; use hydra.sweeper.pruner=none")
        if [*self.objectives] != [SCORE] and self.study["pruner"] != "none":
            raise InputError(
                "hydra.sweeper.pruner prunes by the score alone; leave it out, or other sweep.objectives"
            )
        if OmegaConf.select(self.settings, "sweep.halving"):
            raise InputError("sweep.halving is for all combinations; use hydra.sweeper.pruner=halving instead")

    @property
    def objectives(self) -> Sequence[str]:
        """What the jobs are compared by; apps other than ours have a score."""
        return OmegaConf.select(self.settings, "sweep.objectives") or [SCORE]

    def _open(self) -> optuna.Study:
        """The study of the sweep, with the trials of a run that was cut first in its queue."""
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        folder = Path(self.settings.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        study = optuna.create_study(
            storage=self.study["storage"] or JournalStorage(JournalFileBackend(str(folder / "optuna.log"))),
            pruner=getattr(optuna.pruners, PRUNERS[self.study["pruner"]])(),
            study_name=self.study["study_name"],
            directions=[d.value for d in directions(self.objectives, Direction(self.study["direction"]))],
            load_if_exists=True,
        )
        # With the seed alone, a line that goes on would draw once more what it has drawn.
        sampler = getattr(optuna.samplers, SAMPLERS[self.study["sampler"]])
        study.sampler = sampler(seed=self.study["seed"] + len(study.trials))
        for trial in study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            study.enqueue_trial(trial.params)  # the same job, which goes on from its checkpoint
        return study

    def _run(
        self, study: optuna.Study, trials: Sequence[optuna.Trial], jobs: Sequence[Sequence[str]], *, is_last: bool
    ) -> None:
        """Run the jobs of some trials, and tell the study how they ended."""
        from optuna.trial import TrialState

        from lockstep.sweep.ledger import Ledger
        from lockstep.sweep.record import State

        ledger = Ledger(Path(self.settings.hydra.sweep.dir))
        of_job = {frozenset(job): trial for job, trial in zip(jobs, trials, strict=True)}
        reported: set[tuple[int, int]] = set()

        def has_enough(record: Record) -> bool:
            from lockstep.sweep.halving import evaluations

            trial = of_job[frozenset(record.overrides)]
            for share, score in evaluations(ledger, record):
                if (step := (trial.number, round(1000 * share))) not in reported:
                    trial.report(score, step[1])
                    reported.add(step)
            return bool(trial.should_prune())

        self.launcher.more_follow = not is_last
        if self.study["pruner"] != "none":
            self.launcher.enough = has_enough
        # Trials may have the same values: that is one job, and two processes of it would fail each other.
        unique = list(dict.fromkeys(map(tuple, jobs)))
        returns = dict(zip(unique, self.launcher.launch(unique, initial_job_idx=trials[0].number), strict=True))
        records = {frozenset(record.overrides): record for record in ledger.records()} if ledger.exists else {}
        for trial, job in zip(trials, jobs, strict=True):
            record, value = records.get(frozenset(job)), returns[tuple(job)].return_value
            trial.set_user_attr(ENDED, True)
            known = [value] if isinstance(value, int | float) and math.isfinite(value) else []
            if record and [*self.objectives] != [SCORE]:
                known = values(ledger, record, self.objectives)
            if known:
                study.tell(trial, known)
            elif record is not None and record.state is State.pruned:
                study.tell(trial, state=TrialState.PRUNED)
            else:
                reason = f"the job has no {' and '.join(self.objectives)}"
                trial.set_user_attr(ERROR, (record and record.error) or reason)
                study.tell(trial, state=TrialState.FAIL)


def distribution(word: Override) -> BaseDistribution:
    """Optuna's distribution for a sweep of Hydra's.

    Raises:
        InputError: there is none.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value = word.value()
    tags: set[str] = getattr(value, "tags", set())
    try:
        if tags - ({"log"} if isinstance(value, IntervalSweep | RangeSweep) else set()):
            raise ValueError(f"tag {', '.join(sorted(tags))}: only log is known, for interval(...) and range(...)")
        if isinstance(value, IntervalSweep):
            assert value.start is not None
            assert value.end is not None
            is_whole = isinstance(value.start, int) and isinstance(value.end, int)
            kind: Any = IntDistribution if is_whole else FloatDistribution
            return kind(value.start, value.end, log="log" in tags)
        if isinstance(value, RangeSweep):
            numbers: list[Any] = [*value.range()]
            if len(numbers) > 1 and all(isinstance(number, int) for number in numbers):
                return IntDistribution(numbers[0], numbers[-1], step=numbers[1] - numbers[0], log="log" in tags)
            if tags:
                raise ValueError("tag log: a range of whole numbers can have it")
        return CategoricalDistribution([*word.sweep_string_iterator()])
    except (ValueError, HydraException) as error:
        raise InputError(
            f"{word.input_line!r} is no space to search ({error}); write choice(...), range(...) or interval(...)"
        ) from error
