"""`hydra/sweeper=optuna`: a search over the values of a sweep, with Optuna's samplers and pruners.

Spaces are written in Hydra's words: `choice(a,b)` or `a,b`, `range(1,5)`, `interval(0.1,1)`, `int(interval(8,64))`,
and `tag(log, interval(1e-5,1e-1))`. Optuna is asked for values and told scores; Hydra's launcher runs the jobs. The
pool starts the next one as soon as one has ended; another launcher gets a few at a time, and waits for all of them.
The study is a file in the folder of the sweep, so that the same line goes on with it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
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

from lockstep.core import safe_read
from lockstep.core.errors import InputError, check_installed
from lockstep.core.fields import check_whole
from lockstep.job.run_folder import Lock
from lockstep.sweep.ledger import Ledger
from lockstep.sweep.objectives import SCORE, directions
from lockstep.sweep.record import Direction
from lockstep.sweep.search import JOURNAL, Search

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

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
        words = [*(f"{key}={value}" for key, value in self.params.items()), *arguments]
        parsed = OverridesParser.create().parse_overrides(words)
        space = {word.get_key_element(): distribution(word) for word in parsed if word.is_sweep_override()}
        if not space:
            raise InputError("hydra/sweeper=optuna has nothing to search; add for example optimizer.lr=0.001,0.01")
        fixed = [str(word.input_line) for word in parsed if not word.is_sweep_override()]
        folder = Path(self.settings.hydra.sweep.dir).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        with closing(getattr(self.launcher, "lock", None) or Lock()) as lock:
            lock.take(folder / ".lock", user="sweep", remedy="sweep.resume=new")
            try:
                study = self._open(folder)
            except Exception as error:  # Optuna and the storage's libraries raise all kinds of errors
                reason = (str(error).strip() or "no reason given").splitlines()[0]
                raise InputError(
                    f"hydra.sweeper.storage: {self.study['storage'] or f'{JOURNAL} of the sweep'} cannot be used "
                    f"({type(error).__name__}: {reason}); start anew with sweep.resume=new, or name another storage"
                ) from error
            self._run(
                Search(
                    study=study,
                    space=space,
                    fixed=fixed,
                    ledger=Ledger(folder),
                    objectives=self.objectives,
                    trials=self.n_trials,
                    at_once=self.n_jobs,
                    sampler=self._sampler,
                    retries=bool(OmegaConf.select(self.settings, "sweep.retry")),
                    prunes=self.study["pruner"] != "none",
                )
            )

    def _run(self, search: Search) -> None:
        """Run the jobs of a search."""
        jobs = search.follow()
        if hasattr(self.launcher, "search"):
            self.launcher.search = search
            self.launcher.launch(jobs, initial_job_idx=search.ended)
            return
        while jobs:
            returns = self.launcher.launch(jobs, initial_job_idx=search.ended)
            for job, returned in zip(jobs, returns, strict=True):
                search.tell(job, returned.return_value)
            jobs = search.ask()

    def _check(self) -> None:
        """Refuse wrong settings, and those that the launcher cannot keep."""
        check_installed("optuna", "hydra/sweeper=optuna")
        for key, known in (("sampler", SAMPLERS), ("pruner", PRUNERS), ("direction", [*Direction])):
            if self.study[key] not in known:
                raise InputError(f"hydra.sweeper.{key} is {self.study[key]!r}, expected one of {', '.join(known)}")
        for key, value, least in (
            ("n_trials", self.n_trials, 1),
            ("n_jobs", self.n_jobs, 1),
            ("seed", self.study["seed"], 0),
        ):
            check_whole(f"hydra.sweeper.{key}", value, least)
        if self.study["pruner"] != "none" and not hasattr(self.launcher, "search"):
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

    def _open(self, folder: Path) -> optuna.Study:
        """The study of the sweep, with the trials of a run that was cut first in its queue."""
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        journal = folder / JOURNAL
        # What a call has left that was killed, or ended by a full disk. Optuna would wait half a minute for its lock,
        # and write the next line behind half a line.
        journal.with_name(f"{JOURNAL}.lock").unlink(missing_ok=True)
        if journal.exists():
            with safe_read.opened(journal) as file:
                whole_lines = file.read().rfind(b"\n") + 1
            os.truncate(journal, whole_lines)
        study = optuna.create_study(
            storage=self.study["storage"] or JournalStorage(JournalFileBackend(str(journal))),
            pruner=getattr(optuna.pruners, PRUNERS[self.study["pruner"]])(),
            study_name=self.study["study_name"],
            directions=[d.value for d in directions(self.objectives, Direction(self.study["direction"]))],
            load_if_exists=True,
        )
        for trial in study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            study.enqueue_trial(trial.params)  # the same job, which goes on from its checkpoint
        return study

    def _sampler(self, ended: int) -> optuna.samplers.BaseSampler:
        """The sampler after some trials, new for each, so that a line that was cut draws what it would have drawn."""
        import numpy as np
        import optuna

        (seed,) = np.random.SeedSequence((self.study["seed"], ended)).generate_state(1)
        sampler: optuna.samplers.BaseSampler = getattr(optuna.samplers, SAMPLERS[self.study["sampler"]])(
            seed=int(seed)
        )
        return sampler


def distribution(word: Override) -> BaseDistribution:
    """Optuna's distribution for a sweep of Hydra's."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value = word.value()
    tags: set[str] = getattr(value, "tags", set())
    try:
        if tags - ({"log"} if isinstance(value, IntervalSweep | RangeSweep) else set()):
            raise ValueError(f"tag {', '.join(sorted(tags))}: only log is known, for interval(...) and range(...)")
        if isinstance(value, IntervalSweep):
            assert value.start is not None
            assert value.end is not None
            if not (math.isfinite(value.start) and math.isfinite(value.end)):
                raise ValueError("an end is not finite")
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
