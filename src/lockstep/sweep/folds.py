"""The cross-validations of a sweep: which runs are the folds of one setting, and which folds are missing."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.config.commands import shell_command
from lockstep.core import log
from lockstep.core.errors import InputError
from lockstep.core.run import Run, State
from lockstep.sweep.ledger import Ledger
from lockstep.sweep.record import FOLD
from lockstep.sweep.runs import by_values, differing, read_jobs

FOLDS = "dataset.folds"


@dataclass(frozen=True)
class CrossValidation:
    """The runs of a sweep that differ in the fold alone."""

    values: Mapping[str, str]  # of the keys in which the cross-validations of the sweep differ
    folds: int  # into how many the data are cut
    runs: Mapping[int, Run]  # those that are done, by fold
    missing: Mapping[int, str]  # how far each other fold is

    @property
    def name(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.values.items())


def cross_validations(sweep: Path) -> list[CrossValidation]:
    """The cross-validations of a sweep of which a fold is done. Raises InputError if there is none."""
    jobs = read_jobs(Ledger(sweep))
    for job in jobs:
        if job.state == State.damaged:
            log.show_warning(job.error)
    numbers = re.compile("[0-9]{1,4}")
    runs = [run for run in jobs if all(numbers.fullmatch(run.settings.get(key, "")) for key in (FOLD, FOLDS))]
    keys = [key for key in differing(runs) if key != FOLD]
    settings = []
    for values, members in by_values(runs, keys).items():
        by_fold, folds = {int(run.settings[FOLD]): run for run in members}, int(members[0].settings[FOLDS])
        states = {fold: str(by_fold[fold].state) if fold in by_fold else "no job" for fold in range(folds)}
        done = {fold: by_fold[fold] for fold, state in states.items() if state == State.done}
        missing = {fold: state for fold, state in states.items() if fold not in done}
        settings.append(CrossValidation(dict(zip(keys, values, strict=True)), folds, done, missing))
    if not any(setting.runs for setting in settings):
        compare = shell_command(["lockstep", "compare", sweep])
        expected = "it has no folds, expected a sweep such as dataset.folds=5 dataset.fold=0,1,2,3,4 -m"
        raise InputError(f"{sweep}: {'no fold is done' if runs else expected}; `{compare}` compares its jobs")
    for setting in settings:
        if not setting.runs:
            log.show_warning(f"{setting.name} is skipped: none of its folds is done")
    return [setting for setting in settings if setting.runs]
