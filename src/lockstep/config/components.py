"""From the plain values of a config to a `Job` whose groups are built components."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from lockstep.config.messages import sentence, unreadable
from lockstep.config.schema import GROUPS, Job
from lockstep.core import fields
from lockstep.core.errors import InputError, did_you_mean

# The components built so far: frozen values, of which the jobs of a sweep have most in common.
_MADE: dict[tuple[type[Any], str], Any] = {}


def locate_in(module: str, name: str) -> type[Any] | None:
    """The public dataclass `name` of a module, if it has one: of its `__all__`, or else its own, not an import."""
    home = importlib.import_module(module)
    found = None if name.startswith("_") else getattr(home, name, None)
    if not isinstance(found, type) or not dataclasses.is_dataclass(found):
        return None
    exported = getattr(home, "__all__", None)
    return found if (found.__module__ == module if exported is None else name in exported) else None


def locate(group: str, target: object) -> type[Any]:
    """The class that a node of `group` names.

    Raises:
        InputError: the target is not a dataclass of the group's own module.
    """
    module, _, name = str(target).rpartition(".")
    if module == GROUPS[group] and (found := locate_in(module, name)) is not None:
        return found
    raise InputError(
        f"{group}._target_ is {target!r}, expected a class of {GROUPS[group]}; choose one with {group}=NAME"
    )


def build(group: str, node: Any) -> Any:
    """The component that a group's node describes: its class is the schema of its fields.

    Raises:
        InputError: an unknown key, or a value of the wrong type or out of range.
    """
    if not isinstance(node, Mapping) or "_target_" not in node:
        raise InputError(f"{group} is {node!r}, expected one of the group's options: {group}=NAME")
    cls = locate(group, node["_target_"])
    values = {key: value for key, value in node.items() if key != "_target_"}
    try:
        key = (cls, repr(values))
        if key not in _MADE:
            typed = OmegaConf.merge(OmegaConf.structured(cls), values)
            _check_fields(cls, typed, f"{group}.")
            _MADE[key] = OmegaConf.to_object(typed)
        return _MADE[key]
    except ConfigKeyError as error:
        known = [item.name for item in dataclasses.fields(cls)]
        raise InputError(
            f"{group}.{error.key} is not a key of {group}={cls.__name__}; it has {', '.join(known) or 'none'}."
            f"{did_you_mean(str(error.key), known)}"
        ) from error
    except MissingMandatoryValue as error:
        raise InputError(f"{group}.{error.key} has no value; give it one with {group}.{error.key}=...") from error
    except OmegaConfBaseException as error:
        raise InputError(sentence(error, f"{group}.")) from error
    except (OverflowError, RecursionError) as error:
        raise unreadable(error) from error


def _check_fields(cls: type[Any], typed: Any, prefix: str = "") -> None:
    """Raise InputError with a line for each value that is out of its field's range."""
    values = OmegaConf.to_container(typed)
    assert isinstance(values, dict)
    if found := list(fields.problems(cls, {str(key): value for key, value in values.items()}, prefix)):
        raise InputError("\n".join(found))


def build_all(job: Mapping[str, Any]) -> Job:
    """Every group of a plain config built, and all that is wrong with them said at once.

    Raises:
        InputError: one line for each key that does not fit.
    """
    try:
        typed = OmegaConf.merge(_schema(), {key: value for key, value in job.items() if key not in GROUPS})
        blocks = OmegaConf.to_object(typed)
    except OmegaConfBaseException as error:
        raise InputError(sentence(error)) from error
    except (OverflowError, RecursionError) as error:
        raise unreadable(error) from error
    assert isinstance(blocks, Job)
    problems: list[str] = []
    try:
        _check_fields(Job, typed)
    except InputError as error:
        problems.append(str(error))
    for group in GROUPS:
        try:
            setattr(blocks, group, build(group, job.get(group)))
        except InputError as error:
            problems.append(str(error))
    problems = problems or list(fields.wide(job))
    if problems:
        raise InputError("\n".join(problems))
    return blocks


@functools.cache
def _schema() -> Any:
    """That of a job, made once: it takes longer than what is checked by it."""
    return OmegaConf.structured(Job)


def node(component: Any) -> dict[str, Any]:
    """The node that `build` would make `component` from."""
    cls = type(component)
    module = next(module for module in GROUPS.values() if locate_in(module, cls.__name__) is cls)
    fields = OmegaConf.to_container(OmegaConf.structured(component), enum_to_str=True)
    assert isinstance(fields, dict)
    return {"_target_": f"{module}.{cls.__name__}", **{str(key): value for key, value in fields.items()}}
