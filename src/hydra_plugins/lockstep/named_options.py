"""Options without a file in `conf`: models of timm and torchvision, and the classes and configs of extensions."""

from __future__ import annotations

from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from lockstep.config import extensions, options
from lockstep.config.hydra_policy import works_for_lockstep
from lockstep.config.options import TIMM, TORCHVISION, model_of, models_of
from lockstep.config.recipes import EXTENSION
from lockstep.config.schema import GROUPS, MANY


class NamedOptions(ConfigSource):
    """Configs for `GROUP/NAME`: classes of extensions, with their defaults, and models of timm and torchvision."""

    @staticmethod
    def scheme() -> str:
        return "lockstep"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path.strip("/") in ("", *GROUPS)

    def is_config(self, config_path: str) -> bool:
        return _node(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        group = config_path.strip("/")
        if group == "":
            return [] if results_filter == ObjectType.CONFIG else [*GROUPS]
        if group not in GROUPS or results_filter == ObjectType.GROUP:
            return []
        models = (*models_of(TIMM), *(f"{TORCHVISION}.{name}" for name in models_of(TORCHVISION)))
        return [*extensions.classes_of_user(group), *(models if group == "model" else ())]

    def load_config(self, config_path: str) -> ConfigResult:
        if (node := _node(config_path)) is None:
            raise ConfigLoadError(f"Config not found: {config_path}")
        config = OmegaConf.create(node)
        return ConfigResult(
            provider=self.provider, path=f"{self.scheme()}://", config=config, header={"package": None}
        )


def _node(config_path: str) -> dict[str, Any] | None:
    """The config of an option: for a model of a library, `conf/model/LIBRARY.yaml` with its name."""
    group, _, name = config_path.strip("/").removesuffix(".yaml").rpartition("/")
    classes = extensions.of_objects(group) if name == extensions.OBJECT else extensions.classes_of_user(group)
    if group in GROUPS and (cls := classes.get(name)) is not None:
        default = options.default_node(group, cls)
        return {name: default} if group in MANY else default
    library, model = (model_of(name) if group == "model" else None) or ("", "")
    return {"defaults": [library, "_self_"], "name": model} if library else None


class LockstepSearchPath(SearchPathPlugin):
    """Adds the config files of extensions and these options after our own files, which win; for Lockstep alone."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if not works_for_lockstep():
            return
        for extension in extensions.active():
            if extension.conf is not None:
                search_path.append(provider=f"{EXTENSION} {extension.package}", path=f"file://{extension.conf}")
        search_path.append(provider="lockstep", path="lockstep://")
