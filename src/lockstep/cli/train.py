"""Training one job: compose its config, check it, make its run folder, start its ranks.

`train.py` of a checkout, `lockstep train` and a project's own `train.py` all call `main`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import hydra
from omegaconf import DictConfig

from lockstep.config import completion, composition, extensions
from lockstep.config.messages import check_flags
from lockstep.config.program_words import started_as
from lockstep.config.schema import CONF
from lockstep.core.launched import is_launched
from lockstep.runtime import program
from lockstep.runtime.native_threads import configure_native_threads

if TYPE_CHECKING:
    from lockstep.config.invocation import Invocation


def main(packages: Sequence[str] = ()) -> None:
    """Train the job or the sweep of the command line, with extensions; exit with its code if it fails."""
    started_as(sys.argv[0])
    composition.register()
    with program.command_line():
        extensions.use(packages)
        completion.prepare(sys.argv)
        if not composition.showed_help():
            check_flags(sys.argv[1:])
            train()


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def train(composed: DictConfig) -> float | None:
    """Train one job; returns its objective, the best validation top-1 in percent, to Hydra's sweeper."""
    from lockstep.config.invocation import Invocation  # here and below: --cfg job must not wait for these
    from lockstep.sweep.jobs import run_sweep_job

    with program.bypass_hydra_errors():
        invocation = Invocation.current()
    return run_sweep_job(lambda: run_job(composed, invocation), invocation)


def run_job(composed: DictConfig, invocation: Invocation) -> float | None:
    """Lock, check and launch one job; returns its objective.

    Raises:
        LockstepError: the job does not fit, was stopped or failed.
    """
    from lockstep.job.run_folder import job_lock, lock_run_folder

    with job_lock(invocation) as lock:
        if not is_launched():  # refuse a folder in use before torch is imported
            lock_run_folder(composition.to_dict(composed), invocation, lock)
        configure_native_threads()
        from lockstep.job.launch import launch  # these need torch
        from lockstep.job.prepare import prepare
        from lockstep.launcher import create_on_main

        with create_on_main(lambda: prepare(composition.to_dict(composed), invocation, lock), program.say) as run_dir:
            return launch(run_dir)
