"""The configs and the declared classes of extensions are options of Hydra's config groups."""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from lockstep.config import extensions, options
from lockstep.config.hydra_policy import EXTENSION
from lockstep.config.schema import GROUPS, MANY


class DeclaredOptions(ConfigSource):
    """Answers for `GROUP/NAME` with the defaults of a class that an extension declared under this name."""

    @staticmethod
    def scheme() -> str:
        return "declared"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path.strip("/") in ("", *GROUPS)

    def is_config(self, config_path: str) -> bool:
        group, name = _split(config_path)
        if group not in GROUPS:
            return False
        extensions.load_all()
        return name in options.declared(group)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        group = config_path.strip("/")
        if group == "":
            return [] if results_filter == ObjectType.CONFIG else [*GROUPS]
        if group not in GROUPS or results_filter == ObjectType.GROUP:
            return []
        extensions.load_all()
        return [*options.declared(group)]

    def load_config(self, config_path: str) -> ConfigResult:
        if not self.is_config(config_path):
            raise ConfigLoadError(f"Config not found: {config_path}")
        group, name = _split(config_path)
        default = options.default_node(options.declared(group)[name])
        node = OmegaConf.create({name: default} if group in MANY else default)
        return ConfigResult(provider=self.provider, path="declared://", config=node, header={"package": None})


class ExtensionSearchPath(SearchPathPlugin):
    """Puts the configs and classes of extensions behind our own configs."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for extension in extensions.active():
            if extension.conf is not None:
                search_path.append(provider=f"{EXTENSION} {extension.package}", path=f"file://{extension.conf}")
        if extensions.active():
            search_path.append(provider="declared", path="declared://")


def _split(config_path: str) -> tuple[str, str]:
    group, _, name = config_path.strip("/").removesuffix(".yaml").rpartition("/")
    return group, name
