"""Train an image classifier: compose the config, check it, make the run folder, launch the ranks.

`python train.py --help` says what can be chosen."""

from __future__ import annotations

import os

from lockstep import signals

if __name__ == "__main__":
    signals.begin(says=signals.STOPPED_EARLY)  # before the imports, which take a while
import hydra
from omegaconf import DictConfig

from lockstep import config, refusals
from lockstep.claim import claim, claiming
from lockstep.threads import configure_native_threads


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(composed: DictConfig) -> float | None:
    """Run one job; returns its objective, the best validation top-1 in percent, to Hydra's sweeper."""
    from lockstep.sweep import run_sweep_job

    with refusals.bypass_hydra_errors():
        invocation = config.Invocation.current()

    def job() -> float | None:
        with claiming(invocation) as lock:
            if "RANK" not in os.environ:  # a folder that is in use is said before torch is imported
                claim(config.to_dict(composed), invocation, lock)
            configure_native_threads()
            # Imported here, because they need torch, and --help and --cfg job must not wait for it.
            from lockstep import worker
            from lockstep.launcher import once
            from lockstep.resolve import prepare

            with once(lambda: prepare(config.to_dict(composed), invocation, lock), refusals.say) as run_dir:
                launcher = config.build("launcher", config.load(run_dir.config)["launcher"])
                return launcher.launch(worker.main, run_dir)

    return run_sweep_job(job, invocation)


if __name__ == "__main__":
    config.register()
    with refusals.command_line():
        config.showed_help(__file__) or main()
