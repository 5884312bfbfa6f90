"""The sweepers `hydra/sweeper=grid`, all combinations of the values of a sweep, and `optuna`, a search over them.

Hydra's own `basic` keeps only the last word of a key, and loses one of `"train={ema: 0.9}" "train={clip_norm: 1}"`.

Spaces are written in Hydra's words: `choice(a,b)` or `a,b`, `range(1,5)`, `interval(0.1,1)`, `int(interval(8,64))`,
and `tag(log, interval(1e-5,1e-1))`. Optuna is asked for values and told scores; Hydra's launcher runs the jobs. The
pool starts the next one as soon as one has ended; another launcher gets a few at a time, and waits for all of them.
The study is a file in the folder of the sweep, so that rerunning the command resumes it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep, Sweep
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from lockstep.config.composition import jobs_of
from lockstep.config.roles import is_sample
from lockstep.core import log
from lockstep.core.errors import InputError, check_installed, reason_of
from lockstep.core.fields import check_whole
from lockstep.core.native_threads import configure_native_threads
from lockstep.core.safe_write import Lock, append
from lockstep.core.tags import Direction
from lockstep.records.ledger import Identity, Ledger
from lockstep.records.record import SCORE, directions, job_key
from lockstep.sweeps.line import params_of
from lockstep.sweeps.search import JOURNAL, Search

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

SAMPLERS = {"tpe": "TPESampler", "random": "RandomSampler", "qmc": "QMCSampler"}
PRUNERS = {"none": "NopPruner", "median": "MedianPruner", "halving": "SuccessiveHalvingPruner"}


class GridSweeper:
    """A job for each combination, with the words of the line in their order. `params` come first."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        """`params` are resolved here, and read from the config for the jobs."""

    def setup(self, launcher: Any, config: DictConfig, loader: ConfigLoader | None = None) -> None:
        """Take the launcher, Hydra's config of the sweep, and what composes the configs of its jobs."""
        self.launcher, self.settings, self.loader = launcher, config, loader

    def words(self, arguments: list[str]) -> list[str]:
        return [*params_of(self.settings), *arguments]

    def sweep(self, arguments: list[str]) -> None:
        for returned in self.launcher.launch(jobs_of(self.words(arguments), self.loader), initial_job_idx=0):
            _ = returned.return_value  # raises the error of a job, with launchers that keep it


class OptunaSweeper(GridSweeper):
    def __init__(self, params: Mapping[str, Any], n_trials: int, n_jobs: int, **study: Any) -> None:
        super().__init__(params)
        self.n_trials, self.n_jobs, self.study = n_trials, n_jobs, study

    def sweep(self, arguments: list[str]) -> None:
        """Run trials until the study has `n_trials`."""
        configure_native_threads()  # with the threads that Optuna's libraries would start, no job could be forked
        self._check()
        parsed = OverridesParser.create(config_loader=self.loader).parse_overrides(self.words(arguments))
        space = {word.get_key_element(): distribution(word) for word in parsed if word.is_sweep_override()}
        if not space:
            raise InputError("hydra/sweeper=optuna has nothing to search; add for example optimizer.lr=0.001,0.01")
        if samples := [*filter(is_sample, space)]:
            raise InputError(
                f"hydra/sweeper=optuna compares job by job, so the luckiest {samples[0]} would win; give "
                f"{samples[0]} one value, or sweep all combinations, with sweep.halving=3"
            )
        alone = (word for word in parsed if not word.is_sweep_override())
        fixed = [
            str(word.input_line)
            for word in alone
            if word.get_key_element() not in space or isinstance(word.value(), dict)
        ]
        folder = Path(self.settings.hydra.sweep.dir).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        with closing(getattr(self.launcher, "lock", None) or Lock()) as lock:
            lock.take(folder / ".lock", user="sweep", remedy="sweep.resume=new")
            ledger, score = Ledger(folder), Direction(self.study["direction"])
            identity = ledger.identity() if ledger.exists else Identity(swept=tuple(sorted(space)), direction=score)
            try:
                study = self._open(folder, self._name(identity, space), identity.direction)
            except Exception as error:  # Optuna and the storage's libraries raise all kinds of errors
                storage = self.study["storage"] or f"{JOURNAL} of the sweep"
                raise InputError(
                    f"hydra.sweeper.storage: {storage} cannot be used ({type(error).__name__}: {reason_of(error)}); "
                    "start anew with sweep.resume=new, or name another storage"
                ) from error
            if not ledger.exists:
                ledger.create(identity)
            if ledger.records() and not study.trials:
                log.show("the search has another space or other objectives than before: a new study begins")
            self._run(
                Search(
                    study=study,
                    space=space,
                    fixed=fixed,
                    ledger=ledger,
                    objectives=self.objectives,
                    trials=self.n_trials,
                    at_once=self.n_jobs,
                    sampler=self._sampler,
                    retries=bool(OmegaConf.select(self.settings, "sweep.retry")),
                    prunes=self.study["pruner"] != "none",
                    identify=getattr(self.launcher, "identify", job_key),
                )
            )

    def _run(self, search: Search) -> None:
        if hasattr(self.launcher, "search"):
            self.launcher.search = search
            self.launcher.launch([], initial_job_idx=search.ended)
            return
        jobs = search.follow()
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
        check_whole("hydra.sweeper.n_trials", self.n_trials, 1)
        check_whole("hydra.sweeper.n_jobs", self.n_jobs, 1)
        check_whole("hydra.sweeper.seed", self.study["seed"], 0)
        if self.study["pruner"] != "none" and not hasattr(self.launcher, "search"):
            raise InputError("hydra.sweeper.pruner works with hydra/launcher=pool; use hydra.sweeper.pruner=none")
        if [*self.objectives] != [SCORE] and self.study["pruner"] != "none":
            raise InputError("hydra.sweeper.pruner prunes by the score alone; remove it, or other sweep.objectives")
        if OmegaConf.select(self.settings, "sweep.halving"):
            raise InputError("sweep.halving is for all combinations; use hydra.sweeper.pruner=halving instead")

    @property
    def objectives(self) -> Sequence[str]:
        """What the jobs are compared by; apps other than ours have a score."""
        return OmegaConf.select(self.settings, "sweep.objectives") or [SCORE]

    def _name(self, identity: Identity, space: Mapping[str, BaseDistribution]) -> str:
        """The name of the study, which no other sweep has, nor the same one with another space."""
        facts = str([identity.id, identity.direction, [*self.objectives], sorted(space.items())])
        return f"{self.study['study_name']}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"

    def _open(self, folder: Path, name: str, score: Direction) -> optuna.Study:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        journal = folder / JOURNAL
        # What a call has left that was killed, or ended by a full disk. Optuna would wait half a minute for its lock,
        # and write the next line behind half a line.
        journal.with_name(f"{JOURNAL}.lock").unlink(missing_ok=True)
        if not (storage := self.study["storage"]):
            with append(journal, "a+b") as file:  # Optuna would follow a link
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
            # Its usual lock is a link, which the folder must not have.
            storage = JournalStorage(JournalFileBackend(str(journal), JournalFileOpenLock(str(journal))))
        return optuna.create_study(
            storage=storage,
            pruner=getattr(optuna.pruners, PRUNERS[self.study["pruner"]])(),
            study_name=name,
            directions=[d.value for d in directions(self.objectives, score)],
            load_if_exists=True,
        )

    def _sampler(self, ended: int) -> optuna.samplers.BaseSampler:
        """The sampler after some trials, new for each, so that a line that was cut draws what it would have drawn."""
        import numpy as np
        import optuna

        (seed,) = np.random.SeedSequence((self.study["seed"], ended)).generate_state(1)
        return getattr(optuna.samplers, SAMPLERS[self.study["sampler"]])(seed=int(seed))


def distribution(word: Override) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value = word.value()
    tags = value.tags if isinstance(value, Sweep) else set[str]()
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
            f"{word.input_line!r} is not a search space ({error}); write choice(...), range(...) or interval(...)"
        ) from error
