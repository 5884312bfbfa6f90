"""How a composed config differs from the defaults, as `conf/` has them."""

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.config.schema import CONF, GROUPS, MANY
from lockstep.core import safe_read
from lockstep.core.fields import leaves

_read: Any = functools.cache(safe_read.read_yaml)


def differences(composed: Mapping[str, Any], choices: Mapping[str, str]) -> Iterator[tuple[str, Any, Any]]:
    """The keys of a composed config that are not at their defaults: key, value and default."""
    defaults = {**_read(CONF / "config.yaml")}
    options = {
        key: value for item in defaults.pop("defaults") if isinstance(item, dict) for key, value in item.items()
    }
    for group in (*GROUPS, "experiment"):
        own = [*composed.get(group, ())] if group in MANY else choices.get(group)
        if composed and own != options[group]:
            yield group, own, options[group]
        for name in own if isinstance(own, list) else [own]:
            path: Path = CONF / group / f"{name}.yaml"
            if group != "experiment" and re.fullmatch(r"\w+", str(name)) and path.is_file():
                option = _read(path)
                defaults[group] = {**defaults.get(group, {}), **option} if group in MANY else option
    usual = dict(leaves(defaults))
    for key, value in leaves(composed):
        if key in usual and value != usual[key] and "${" not in str(usual[key]) and not key.startswith("hydra."):
            yield key, value, usual[key]


def value_text(value: object) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
