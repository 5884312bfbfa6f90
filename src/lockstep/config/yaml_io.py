"""The config and the overrides of a run as YAML files in its folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lockstep.core.errors import InputError
from lockstep.core.safe_read import read_yaml, with_checksum

_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Dumper(_DUMPER):
    """Writes a value that is there twice out twice: `read_yaml` takes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def dump(plain: Mapping[str, Any] | Sequence[str]) -> str:
    """A plain config, or overrides, as YAML with its sha256."""
    plain = dict(plain) if isinstance(plain, Mapping) else list(plain)
    return with_checksum(yaml.dump(plain, Dumper=_Dumper, allow_unicode=True, sort_keys=False))


def load(path: Path) -> dict[str, Any]:
    """A config as plain values: of a run folder, or one of our own options.

    Raises:
        InputError: the file is missing or is not a config, or has references.
    """
    loaded = read_yaml(path)
    if not isinstance(loaded, dict) or not loaded or "${" in str(loaded):
        raise InputError(f"{path} is not a config of a run: expected keys and their resolved values")
    return loaded
