"""Our launchers and sweepers in Hydra: what each passes on to the class that does the work."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins

from hydra_plugins.lockstep.sweeps import GridPlugin, OptunaPlugin, PoolPlugin, RayPlugin


class Worker:
    """Keeps what it was made with and is called with."""

    def __init__(self, **settings: Any) -> None:
        self.settings, self.calls = settings, list[Any]()

    def setup(self, *words: Any, **context: Any) -> None:
        self.calls.append((*words, context))

    def launch(self, *words: Any) -> list[str]:
        self.calls.append(words)
        return ["returns"]

    def sweep(self, arguments: list[str]) -> None:
        self.calls.append(arguments)


@pytest.fixture(autouse=True)
def workers(monkeypatch: pytest.MonkeyPatch) -> dict[str, type[Worker]]:
    """Stand-ins for the classes that do the work, by name."""
    modules = {"PoolLauncher": "pool_launcher", "RayLauncher": "ray_launcher"}
    modules |= dict.fromkeys(("GridSweeper", "OptunaSweeper"), "sweepers")
    classes = {name: type(name, (Worker,), {}) for name in modules}
    for name, module in modules.items():
        monkeypatch.setattr(f"lockstep.sweeps.{module}.{name}", classes[name])
    return classes


@pytest.mark.parametrize(("plugin", "name"), [(PoolPlugin, "PoolLauncher"), (RayPlugin, "RayLauncher")])
def test_a_launcher_gets_its_settings_its_context_and_its_jobs(
    plugin: type[PoolPlugin], name: str, workers: dict[str, type[Worker]]
) -> None:
    launcher: Any = plugin(jobs=3, gpus=0.5)
    worker = launcher.launcher
    assert (type(worker), worker.settings) == (workers[name], {"jobs": 3, "gpus": 0.5})
    launcher.setup(config=1, task_function=2, hydra_context=3)
    assert launcher.launch([["seed=1"], ["seed=2"]], 7) == ["returns"]
    assert worker.calls == [({"config": 1, "task_function": 2, "hydra_context": 3},), ([["seed=1"], ["seed=2"]], 7)]


@pytest.mark.parametrize(("plugin", "name"), [(GridPlugin, "GridSweeper"), (OptunaPlugin, "OptunaSweeper")])
@pytest.mark.parametrize("launcher", [PoolPlugin, RayPlugin, SimpleNamespace])
def test_a_sweeper_starts_jobs_by_our_launcher_itself_or_by_a_plugin_of_others(
    plugin: type[GridPlugin],
    name: str,
    launcher: Any,
    workers: dict[str, type[Worker]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, contexts = launcher(), list[Any]()

    def instantiate_launcher(**context: Any) -> Any:
        contexts.append(context)
        return own

    plugins = SimpleNamespace(instantiate_launcher=instantiate_launcher)
    monkeypatch.setattr(Plugins, "instance", lambda: plugins)
    sweeper = plugin(params={"seed": "1,2"})
    worker: Any = sweeper.sweeper
    assert (type(worker), worker.settings) == (workers[name], {"params": {"seed": "1,2"}})
    context = {"config": "config", "hydra_context": SimpleNamespace(config_loader="loader"), "task_function": "run"}
    sweeper.setup(**context)
    sweeper.sweep(["seed=1,2"])
    assert contexts == [context]
    starts = own if launcher is SimpleNamespace else own.launcher
    assert worker.calls == [(starts, "config", "loader", {}), ["seed=1,2"]]


def test_hydra_has_the_settings_of_our_plugins_with_what_they_are_when_nobody_sets_them() -> None:
    name = "hydra_plugins.lockstep.sweeps"
    of_search = "${oc.select:hydra.sweeper.direction,maximize}"
    pool = {"jobs": None, "gpus": 1, "cores": 1, "direction": of_search}
    search: dict[str, Any] = {
        "sampler": "tpe",
        "pruner": "none",
        "seed": 0,
        "direction": "maximize",
        "n_trials": 20,
        "n_jobs": 1,
    }
    search |= {"study_name": "sweep", "storage": None, "params": {}}
    nodes: dict[tuple[str, str], dict[str, Any]] = {
        ("launcher", "pool"): {"_target_": f"{name}.PoolPlugin", **pool},
        ("launcher", "ray"): {"_target_": f"{name}.RayPlugin", **pool, "address": None, "retries": 3},
        ("sweeper", "grid"): {"_target_": f"{name}.GridPlugin", "params": {}},
        ("sweeper", "optuna"): {"_target_": f"{name}.OptunaPlugin", **search},
    }
    store = ConfigStore.instance()
    assert {of: store.load(f"hydra/{of[0]}/{of[1]}.yaml").node for of in nodes} == nodes
    assert {store.load(f"hydra/{of[0]}/{of[1]}.yaml").provider for of in nodes} == {"hydra"}
