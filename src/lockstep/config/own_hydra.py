"""A state of Hydra and OmegaConf that is Lockstep's alone, for as long as it composes configs.

Hydra keeps what it knows in singletons, and OmegaConf its resolvers in one dict. Their public functions can replace
both, but not give back what was there before: `Singleton.get_state` copies all of it, so that references to the
`ConfigStore` go stale, and forgets the plugins. So this module, and no other, uses the names of the two dicts
(`Singleton._instances` of Hydra 1.4.0rc3, `BaseContainer._resolvers` of OmegaConf 2.4.1rc1).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobRuntime
from hydra.version import VersionBase
from omegaconf import OmegaConf
from omegaconf.basecontainer import BaseContainer

from lockstep.config import components
from lockstep.config.hydra_policy import CheckedLoader

# What each user of Hydra has alone. The others are the same for all: the plugins, and their sources of configs.
HYDRAS = ("hydra", "_")  # how the names of Hydra's own configs begin
OWN = (ConfigStore, GlobalHydra, HydraConfig, JobRuntime, VersionBase)


class OwnHydra(GlobalHydra):
    """Hydra's place for the object that composes; here it composes with `CheckedLoader`."""

    def initialize(self, hydra: Any) -> None:
        hydra.config_loader = CheckedLoader(hydra.config_loader)
        super().initialize(hydra)


def is_own() -> bool:
    """Whether Hydra works for Lockstep, and not for another program that uses Hydra in the same environment."""
    return isinstance(GlobalHydra.instance(), OwnHydra)


@contextmanager
def own_hydra() -> Iterator[None]:
    """A context in which Hydra composes jobs of Lockstep. It then has the state from before, to the object.

    Of OmegaConf's resolvers, the one for the environment is missing, and so are those of the program: somebody else
    may have written a config, its values are written to files, and environment variables hold secrets.
    """
    Plugins.instance()  # their modules add configs to the store of the program when they are first imported
    stored = ConfigStore.instance().repo
    singletons, resolvers = Singleton._instances, BaseContainer._resolvers
    try:
        Singleton._instances = {kind: one for kind, one in singletons.items() if not issubclass(kind, OWN)}
        GlobalHydra.set_instance(OwnHydra())
        ConfigStore.instance().repo |= {name: node for name, node in stored.items() if name.startswith(HYDRAS)}
        ConfigStore.instance().store(name="job", node=components.schema(), replace=True)
        OmegaConf.clear_resolvers()
        OmegaConf.clear_resolver("oc.env")
        OmegaConf.register_resolver("stamp_hex", lambda: os.urandom(2).hex(), use_cache=True)
        yield
    finally:
        Singleton._instances, BaseContainer._resolvers = singletons, resolvers
