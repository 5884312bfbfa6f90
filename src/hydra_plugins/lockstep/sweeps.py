"""Lockstep's launchers and sweepers in Hydra: `hydra/launcher=pool` and `ray`, `hydra/sweeper=grid` and `optuna`.

Hydra imports this module for each command, and makes an object of a class for a sweep that uses it. What the classes
do is in `lockstep.sweeps`, which is imported then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper

from lockstep.config.hydra_versions import REPLACE

# The keys of `hydra.launcher`: the most jobs at once (null: as many as fit), what each takes if nothing says so, and
# which score is better: the sweeper says it for a search.
POOL_CONFIG = {
    "_target_": f"{__name__}.PoolPlugin",
    "jobs": None,
    "gpus": 1,
    "cores": 1,
    "direction": "${oc.select:hydra.sweeper.direction,maximize}",
}
# Besides these, the cluster (null: Ray is started here, for this line alone), and how many lost nodes a job survives.
RAY_CONFIG = {**POOL_CONFIG, "_target_": f"{__name__}.RayPlugin", "address": None, "retries": 3}
GRID_CONFIG = {"_target_": f"{__name__}.GridPlugin", "params": {}}
# The keys of `hydra.sweeper`. `storage` is any of Optuna's; null is a journal in the folder of the sweep. The name of
# the study ends with a hash of what it belongs to.
OPTUNA_CONFIG = {
    "_target_": f"{__name__}.OptunaPlugin",
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
LAUNCHERS: dict[str, Any] = {"pool": POOL_CONFIG, "ray": RAY_CONFIG}
SWEEPERS: dict[str, Any] = {"grid": GRID_CONFIG, "optuna": OPTUNA_CONFIG}
for group, configs in (("hydra/launcher", LAUNCHERS), ("hydra/sweeper", SWEEPERS)):
    for name, node in configs.items():
        ConfigStore.instance().store(group=group, name=name, node=node, provider="hydra", **REPLACE)


class PoolPlugin(Launcher):
    def __init__(self, **settings: Any) -> None:
        from lockstep.sweeps.pool_launcher import PoolLauncher

        self.launcher = PoolLauncher(**settings)

    def setup(self, **context: Any) -> None:
        self.launcher.setup(**context)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        return self.launcher.launch(job_overrides, initial_job_idx)


class RayPlugin(PoolPlugin):
    def __init__(self, **settings: Any) -> None:
        from lockstep.sweeps.ray_launcher import RayLauncher

        self.launcher = RayLauncher(**settings)


class GridPlugin(Sweeper):
    def __init__(self, **settings: Any) -> None:
        from lockstep.sweeps.sweepers import GridSweeper

        self.sweeper = GridSweeper(**settings)

    def setup(self, **context: Any) -> None:
        launcher = Plugins.instance().instantiate_launcher(**context)
        ours = launcher.launcher if isinstance(launcher, PoolPlugin) else launcher
        self.sweeper.setup(ours, context["config"], context["hydra_context"].config_loader)

    def sweep(self, arguments: list[str]) -> None:
        self.sweeper.sweep(arguments)


class OptunaPlugin(GridPlugin):
    def __init__(self, **settings: Any) -> None:
        from lockstep.sweeps.sweepers import OptunaSweeper

        self.sweeper = OptunaSweeper(**settings)
