"""The keys below `hydra`: which of them a config file may set, and which name code."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Key = tuple[str, ...]

# The keys that `conf/config.yaml` sets below `hydra`, besides the keys of FREE.
OURS: Mapping[Key, object] = {
    ("callbacks", "report", "_target_"): "lockstep.sweep.Report",
    ("output_subdir",): None,
    ("job", "chdir"): False,
}
# The folders of runs. A config file may only name one below `output_root` or the current folder.
FOLDERS: tuple[Key, ...] = (("run", "dir"), ("sweep", "dir"), ("sweep", "subdir"))
# The references in such a name whose values a config file cannot choose.
_REFERENCES = re.compile(r"\$\{(now:[%\w:-]*|stamp_hex:|hydra[.:]job\.num)\}")
# The keys that any config file may set below `hydra`, with everything below them.
FREE: tuple[Key, ...] = (
    *FOLDERS,
    ("sweeper", "params"),
    ("mode",),
    ("searchpath",),
    ("help",),
    ("hydra_help",),
)
# The keys that Hydra itself writes while it composes.
WRITTEN: tuple[Key, ...] = (("runtime",), ("job", "override_dirname"), ("job", "config_name"))
# The keys from which Hydra creates objects. Those in CLOSED only serve to name code, so not even the command line may
# set them.
LOGGING = ("job_logging", "hydra_logging")
CLOSED = ("callbacks", *LOGGING)
OBJECTS = (*CLOSED, "launcher", "sweeper")


def dotted(key: Key) -> str:
    """A key below `hydra` as an override writes it."""
    return ".".join(("hydra", *key))


def leaves(node: Any, key: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Every value of a plain config with its key. The key of a list item ends with its index."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield from leaves(value, (*key, str(name)))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from leaves(value, (*key, str(index)))
    else:
        yield key, node


def names_code(key: Key, value: object) -> bool:
    """Whether a key is one that creates objects (`_target_`, `_args_`), or `value` is an interpolation in OBJECTS."""
    return any(re.fullmatch("_.*_", part) for part in key) or (set(key[:1]) <= set(OBJECTS) and "${" in str(value))


def may_set(key: Key, value: object) -> bool:
    """Whether any config file may set this key to this value."""
    if key in FOLDERS:
        return _is_inside(key, str(value))
    return (key in OURS and OURS[key] == value) or (is_free(key) and not names_code(key, value))


def _is_inside(key: Key, folder: str) -> bool:
    """Whether a folder in a config file is relative to the current one or `output_root`, or to its sweep."""
    root = "" if key == ("sweep", "subdir") else "${output_root}"
    below = _REFERENCES.sub("x", folder if not root else re.sub(rf"^{re.escape(root)}(?=/|$)", "x", folder))
    return "${" not in below and not below.startswith("/") and ".." not in below


def is_free(key: Key) -> bool:
    """Whether a config file may set this key."""
    return is_below(key, FREE)


def is_below(key: Key, prefixes: Iterable[Key]) -> bool:
    return any(key[: len(prefix)] == prefix for prefix in prefixes)
