"""Options of config groups without a file in `conf`: timm's models, and the classes and configs of extensions."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from lockstep.config import extensions, options
from lockstep.config.hydra_policy import EXTENSION, is_own
from lockstep.config.options import is_timm_model, timm_models
from lockstep.config.schema import GROUPS, MANY


class NamedOptions(ConfigSource):
    """A source of configs for `GROUP/NAME` in some groups."""

    groups: tuple[str, ...]

    @abstractmethod
    def names(self, group: str) -> tuple[str, ...]:
        """The names of a group's options."""

    @abstractmethod
    def node(self, group: str, name: str) -> dict[str, Any]:
        """The config of an option."""

    def has(self, group: str, name: str) -> bool:
        return name in self.names(group)

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path.strip("/") in ("", *self.groups)

    def is_config(self, config_path: str) -> bool:
        group, name = _split(config_path)
        return group in self.groups and self.has(group, name)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        group = config_path.strip("/")
        if group == "":
            return [] if results_filter == ObjectType.CONFIG else [*self.groups]
        return [*self.names(group)] if group in self.groups and results_filter != ObjectType.GROUP else []

    def load_config(self, config_path: str) -> ConfigResult:
        if not self.is_config(config_path):
            raise ConfigLoadError(f"Config not found: {config_path}")
        node = OmegaConf.create(self.node(*_split(config_path)))
        return ConfigResult(provider=self.provider, path=f"{self.scheme()}://", config=node, header={"package": None})


class TimmModels(NamedOptions):
    """All timm models: `conf/model/timm.yaml` with the model's name in it."""

    groups = ("model",)

    @staticmethod
    def scheme() -> str:
        return "timm"

    def names(self, group: str) -> tuple[str, ...]:
        return timm_models()

    def has(self, group: str, name: str) -> bool:
        return is_timm_model(name)

    def node(self, group: str, name: str) -> dict[str, Any]:
        return {"defaults": ["timm", "_self_"], "name": name}


class DeclaredOptions(NamedOptions):
    """The classes that extensions declare, each with its defaults."""

    groups = tuple(GROUPS)

    @staticmethod
    def scheme() -> str:
        return "declared"

    def names(self, group: str) -> tuple[str, ...]:
        for extension in extensions.active():
            extension.load()
        return tuple(name for name in options.declared(group) if not options.is_own(group, name))

    def node(self, group: str, name: str) -> dict[str, Any]:
        default = options.default_node(options.declared(group)[name])
        return {name: default} if group in MANY else default


class LockstepSearchPath(SearchPathPlugin):
    """Adds these options and the config files of extensions after our own files, which win; for Lockstep alone."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if not is_own():
            return
        search_path.append(provider="timm", path="timm://")
        for extension in extensions.active():
            if extension.conf is not None:
                search_path.append(provider=f"{EXTENSION} {extension.package}", path=f"file://{extension.conf}")
        if extensions.active():
            search_path.append(provider="declared", path="declared://")


def _split(config_path: str) -> tuple[str, str]:
    group, _, name = config_path.strip("/").removesuffix(".yaml").rpartition("/")
    return group, name
