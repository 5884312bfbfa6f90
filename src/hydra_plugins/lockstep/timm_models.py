"""Any model of timm answers to `model=NAME` without a file of its own."""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from lockstep.config.timm_names import is_timm_model, timm_models


class TimmConfigSource(ConfigSource):
    """Answers for `model/NAME` with `conf/model/timm.yaml` and the name in it."""

    @staticmethod
    def scheme() -> str:
        return "timm"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path.strip("/") in ("", "model")

    def is_config(self, config_path: str) -> bool:
        group, _, name = config_path.strip("/").removesuffix(".yaml").rpartition("/")
        return group == "model" and is_timm_model(name)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if config_path.strip("/") == "":
            return [] if results_filter == ObjectType.CONFIG else ["model"]
        wanted = config_path.strip("/") == "model" and results_filter != ObjectType.GROUP
        return [*timm_models()] if wanted else []

    def load_config(self, config_path: str) -> ConfigResult:
        if not self.is_config(config_path):
            raise ConfigLoadError(f"Config not found: {config_path}")
        name = config_path.strip("/").removesuffix(".yaml").rpartition("/")[2]
        node = {"defaults": ["timm", "_self_"], "name": name}
        return ConfigResult(
            provider=self.provider, path="timm://", config=OmegaConf.create(node), header={"package": None}
        )


class LockstepSearchPath(SearchPathPlugin):
    """Puts timm's names behind the files of `conf/model`, which win."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="timm", path="timm://")
