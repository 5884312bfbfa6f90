"""The training command: compose the config of a job, or of each job of a sweep, and have it prepared and launched.

`train.py` of a checkout, `lockstep train` and a project's own `train.py` all call `main`.
"""

import functools
import gc
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import hydra
from omegaconf import DictConfig

from lockstep.config import command_line, composition, extensions
from lockstep.config.commands import started_as
from lockstep.config.composition import Invocation
from lockstep.config.hydra_policy import TRUSTED, own_hydra
from lockstep.config.schema import CONF
from lockstep.core.launch_env import adopt_srun, check_launched, is_launched, without_local_rank
from lockstep.core.locks import Lock
from lockstep.core.native_threads import configure_native_threads
from lockstep.job.resume import decide_resume
from lockstep.runtime import program
from lockstep.telemetry.progress import loading


def main(packages: Sequence[str] = ()) -> None:
    """Train the job or the sweep of the command line, with extensions; exit with the error's code if it fails."""
    gc.freeze()  # what is imported lives as long as the program: no collection needs to look through it
    started_as(sys.argv[0])
    # Hydra's argument parser refuses overrides on both sides of a flag: `model=resnet18 -m seed=1,2`.
    sys.argv[1:] = sorted(without_local_rank(sys.argv[1:]), key=lambda word: word not in ("-m", "--multirun"))
    with program.command_line():
        adopt_srun()
        extensions.use(packages)
        sys.argv[1:] = composition.typed_words(sys.argv[1:])
        if not (command_line.answered(sys.argv) or composition.showed_help()):
            command_line.check_flags(sys.argv[1:])
            check_launched()
            with own_hydra():
                train()


def train_job(composed: DictConfig) -> float | None:
    """Train one job; returns its objective, the best validation top-1 in percent, to Hydra's sweeper."""
    with program.bypass_hydra_errors(), closing(Lock()) as lock:
        invocation = Invocation.current()
        decide = functools.cache(functools.partial(decide_resume, composition.to_dict(composed), invocation))
        if is_launched() or decide().has_several_machines:
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else torch writes C++ stacks when a rank is gone
        with loading():
            configure_native_threads()
            from lockstep.cli.run import run_job  # the border: what is above imports no torch, for --help, --cfg job

        return run_job(decide, invocation, lock)


def needs_of_job(composed: DictConfig, machine: Any) -> Any:
    """What the pool asks about a job of a sweep before it starts any."""
    from lockstep.cli.run import needs_of  # the pool has imported torch

    return needs_of(composed, machine)


train_job.needs = needs_of_job  # type: ignore[attr-defined]
train = hydra.main(config_path=str(CONF), config_name="config", execution_whitelist=TRUSTED)(train_job)
