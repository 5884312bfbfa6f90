"""What Hydra 1.3 (with OmegaConf 2.3) and Hydra 1.4 (with OmegaConf 2.4) do differently."""

import re
from collections.abc import Sequence
from typing import Any

import hydra
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict

from lockstep.config.commands import key_of

IS_13 = hydra.__version__.startswith("1.3.")
BASE: dict[str, Any] = {"version_base": "1.3"} if IS_13 else {}  # which defaults apply; 1.4 has no others
REPLACE: dict[str, Any] = {} if IS_13 else {"replace": True}  # 1.3 always replaces what a store has
OUR_PLUGINS = "hydra_plugins.lockstep."
register_resolver = OmegaConf.register_new_resolver if IS_13 else OmegaConf.register_resolver


def initialize_config_dir(folder: str) -> Any:
    """Hydra's context in which configs of a folder can be composed."""
    return hydra.initialize_config_dir(folder, **BASE)


def trusting(targets: Sequence[str]) -> dict[str, Any]:
    """The arguments of `hydra.main`: 1.4 makes objects only of `targets`; 1.3 has our policy alone."""
    return BASE if IS_13 else {"execution_whitelist": targets}


def is_list_extend(override: Override) -> bool:
    return not IS_13 and override.is_list_extend()


def set_overrides(composed: DictConfig, of_hydra: Sequence[str], task: Sequence[str]) -> None:
    """Set the words of a config; 1.3 keeps the name of a folder that 1.4 computes of them."""
    composed.hydra.overrides.hydra, composed.hydra.overrides.task = [*of_hydra], [*task]
    if IS_13:
        options = composed.hydra.job.config.override_dirname
        words = sorted(word for word in task if key_of(word) not in options.exclude_keys)
        composed.hydra.job.override_dirname = options.item_sep.join(words).replace("=", options.kv_sep)


def guard_plugins(composed: DictConfig) -> None:
    """Have 1.3 make a launcher and a sweeper as 1.4 does: it makes no objects of their settings.

    1.3 also resolves all settings first. Ours read `hydra.sweeper.params` from the config, for each job.
    """
    if not IS_13:
        return
    for name in ("launcher", "sweeper"):
        block: Any = OmegaConf.select(composed.hydra, name)
        if not OmegaConf.is_dict(block):
            continue
        with open_dict(block):
            block["_recursive_"] = False
        settings: Any = OmegaConf.to_container(block, resolve=False)
        if str(settings.get("_target_")).startswith(OUR_PLUGINS):
            for key, value in (settings.get("params") or {}).items():
                if isinstance(value, str):
                    block.params[key] = re.sub(r"(?<!\\)\$\{", r"\\${", value)
