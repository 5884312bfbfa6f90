"""Keys in what earlier versions wrote: their present names, and what a run did before newer ones (`with_history`)."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import lockstep
from lockstep.config import options
from lockstep.config.commands import key_of
from lockstep.config.schema import BLOCKS, GROUPS, MANY, Job
from lockstep.core import log
from lockstep.core.fields import former_names, values_before


def present_key(key: str) -> str:
    """What a dotted key of a config is called now."""
    parts = key.split(".")
    place = 0 if len(parts) == 1 else 2 if parts[0] in MANY else 1  # of the name in the key
    if place >= len(parts) or (place and options.options_with(parts[0], parts[place])):
        return key
    classes = [Job] if place == 0 else [BLOCKS[parts[0]]] if parts[0] in BLOCKS else []
    if place and parts[0] in GROUPS:
        options.import_renamed(parts[0])
        classes = [*options.declared(parts[0]).values()]
    names = {old: new for cls in classes for old, new in former_names(cls).items()}
    return ".".join([*parts[:place], names.get(parts[place], parts[place]), *parts[place + 1 :]])


def present_words(words: Iterable[str], *, say: bool = True) -> list[str]:
    """Overrides with the present names of their keys; if `say` is set, a note names each old one."""
    present = []
    for word in words:
        old, new = key_of(word), present_key(key_of(word))
        if new != old and say:
            major = int(lockstep.__version__.partition(".")[0])
            log.note(f"{old} is now {new}, and goes with Lockstep {major + 1}.0")
        present.append(word.replace(old, new, 1))
    return present


def present_values(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A config that a file keeps, with the present names of its keys."""
    present = {present_key(f"{prefix}{key}"): value for key, value in values.items()}
    return {
        key.removeprefix(prefix): present_values(value, f"{key}.") if isinstance(value, Mapping) else value
        for key, value in present.items()
    }


def as_before(part: Any, node: Any, typed: Collection[str], prefix: str = "") -> Any:
    """A job, or a part of it, with what its run did: for each key that was added later, unless it is `typed`.

    `node` is the config that the run keeps. A part of another class than there is the user's choice.
    """
    if not isinstance(node, Mapping) or node.get("_target_") not in (None, options.class_path(type(part))):
        return part
    if isinstance(part, Mapping):
        return {name: as_before(item, node.get(name), typed, f"{prefix}{name}.") for name, item in part.items()}
    if not dataclasses.is_dataclass(part) or isinstance(part, type):
        return part
    parts = {name: as_before(item, node.get(name), typed, f"{prefix}{name}.") for name, item in vars(part).items()}
    added = {key: node.get(key, value) for key, value in values_before(type(part)).items()}
    added = {key: value for key, value in added.items() if f"{prefix}{key}" not in typed}
    changes = {name: value for name, value in {**parts, **added}.items() if value is not getattr(part, name)}
    return dataclasses.replace(part, **changes) if changes else part
