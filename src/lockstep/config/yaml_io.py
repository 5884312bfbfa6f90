"""The config and the overrides of a run as YAML files in its folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lockstep.core.errors import InputError
from lockstep.core.safe_read import read_yaml, with_checksum


def dump(job: Mapping[str, Any]) -> str:
    """A plain config as YAML, with its sha256."""
    return with_checksum(OmegaConf.to_yaml(OmegaConf.create(dict(job))))


def load(path: Path) -> dict[str, Any]:
    """A run folder's `config.yaml` as plain values.

    Raises:
        InputError: the file is missing or is not a config.
    """
    loaded = read_yaml(path)
    if not isinstance(loaded, dict) or not loaded or "${" in str(loaded):
        raise InputError(f"{path} is not a config of a run: expected keys and their resolved values")
    return loaded


def dump_list(items: list[str]) -> str:
    """A list of strings as YAML, with its sha256."""
    return with_checksum(OmegaConf.to_yaml(OmegaConf.create(items)))


def load_list(path: Path) -> list[str]:
    """The overrides that a run folder keeps in `.hydra/overrides.yaml`.

    Raises:
        InputError: the file is missing or is not a list of texts.
    """
    loaded = read_yaml(path)
    if not isinstance(loaded, list) or not all(isinstance(item, str) for item in loaded):
        raise InputError(f"{path} is not a list of overrides: expected KEY=VALUE in each line")
    return loaded
