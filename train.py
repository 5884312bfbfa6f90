"""Train an image classifier: `python train.py --help` says what can be chosen."""

from __future__ import annotations

from lockstep.runtime import signals

if __name__ == "__main__":
    signals.begin(says=signals.STOPPED_EARLY)  # before the imports, which take a while
import hydra
from omegaconf import DictConfig

from lockstep.config import components, composition, yaml_io
from lockstep.config.invocation import Invocation
from lockstep.core.launched import is_launched
from lockstep.job.run_folder import job_lock, lock_run_folder
from lockstep.runtime import program
from lockstep.runtime.native_threads import configure_native_threads


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(composed: DictConfig) -> float | None:
    """Run one job; returns its objective, the best validation top-1 in percent, to Hydra's sweeper."""
    from lockstep.sweep.jobs import run_sweep_job

    with program.bypass_hydra_errors():
        invocation = Invocation.current()

    def job() -> float | None:
        with job_lock(invocation) as lock:
            if not is_launched():  # a folder that is in use is said before torch is imported
                lock_run_folder(composition.to_dict(composed), invocation, lock)
            configure_native_threads()
            # Imported here, because they need torch, and --help and --cfg job must not wait for it.
            from lockstep.job import worker
            from lockstep.job.preparation import Preparation
            from lockstep.job.prepare import prepare
            from lockstep.launcher import create_on_main

            def make() -> Preparation:
                return prepare(composition.to_dict(composed), invocation, lock)

            with create_on_main(make, program.say) as run_dir:
                launcher = components.build("launcher", yaml_io.load(run_dir.config)["launcher"])
                return launcher.launch(worker.main, run_dir)

    return run_sweep_job(job, invocation)


if __name__ == "__main__":
    composition.register()
    with program.command_line():
        composition.showed_help(__file__) or main()
