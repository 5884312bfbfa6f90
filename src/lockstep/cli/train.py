"""The training command: compose the config of a job, or of each job of a sweep, and have it prepared and launched."""

import gc
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from hydra.main import get_args_parser, main
from omegaconf import DictConfig

from lockstep.config import command_line, composition, extensions, hydra_versions
from lockstep.config.commands import key_of, started_as
from lockstep.config.hydra_policy import TRUSTED, own_hydra
from lockstep.config.schema import CONF
from lockstep.core.launch_env import adopt_srun, check_launched, follows, is_launched, without_local_rank
from lockstep.core.native_threads import configure_native_threads
from lockstep.core.safe_write import Lock
from lockstep.runtime import program


def train_command(packages: Sequence[str] = (), *, objects: Any = None, says: program.Says = program.explain) -> None:
    """Train the job or the sweep of the command line, with extensions; exit with the error's code if it fails."""
    gc.freeze()  # what is imported lives as long as the program: no collection needs to look through it
    started_as(sys.argv[0])
    sys.argv[1:] = without_local_rank(sys.argv[1:])
    with program.command_line(says=says):
        adopt_srun()
        extensions.use(packages)
        sys.argv[1:] = composition.typed_words(sys.argv[1:])
        if "sweep.resume" in map(key_of, sys.argv[1:]):
            from lockstep.records.ledger import words_of_sweep  # few lines name a sweep

            sys.argv[1:] = words_of_sweep(sys.argv[1:])
        if not command_line.answered(sys.argv):
            sys.argv[1:] = command_line.checked_words(sys.argv[1:], get_args_parser())
            check_launched()
            policy = hydra_versions.trusting(TRUSTED)
            with own_hydra():
                main(config_path=str(CONF), config_name="config", **policy)(Training(objects))()


@dataclass
class Training:
    """What Hydra runs for a job, and what the pool asks about a job of a sweep before it starts any."""

    objects: Mapping[str, Any] | None  # of the program that has started the sweep, by group

    def __call__(self, composed: DictConfig) -> Any:
        """Train one job; returns its objective to Hydra's sweeper, or its submission to SLURM to SweepCallbacks."""
        from lockstep.job.resume import decide_resume  # the border: --help and --cfg job have none of these imports
        from lockstep.telemetry.progress import loading

        with program.bypass_hydra_errors(), closing(Lock()) as lock:
            invocation, values = composition.Invocation.current(), composition.of_command(composed)
            # Launched ranks meet first: only their main decides, and an earlier attempt of it may have a folder.
            resume = None if is_launched() else decide_resume(values, invocation)
            if resume is None or resume.has_several_machines:
                os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else torch writes C++ stacks of lost ranks
            with loading():
                configure_native_threads()
                from lockstep.cli import run
            if resume is not None:
                return run.run_job(replace(resume, objects=self.objects) if self.objects else resume, lock)
            return run.follow() if follows() else run.lead(values, invocation, lock)

    def needs(self, composed: DictConfig, machine: Any) -> Any:
        from lockstep.cli.needs import needs_of  # the pool has imported torch

        return needs_of(composed, machine, self.objects)
