"""What another value of a key makes of a run: the role of each key, for everything that asks what two runs share.

The roles stand at the fields of the schema, and of options that users declare. Only questions about such options, and
`identity_of`, import torch.
"""

import dataclasses
import functools
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from lockstep.config import extensions, options
from lockstep.config.schema import BLOCKS, FIELDS, GROUPS, MANY, Job
from lockstep.core.errors import InputError
from lockstep.core.fields import Component, Role, declared_role, leaves

TARGET = "_target_"
_OF_JOB = {field.name: field for field in dataclasses.fields(Job)}
_NONE: Mapping[str, Any] = {}


def role_of(key: str, values: Mapping[str, Any] = _NONE) -> Role:
    """The role of a dotted key of a config, or of a group.

    `values` is the config, whose nodes name users' classes. A key that the schema does not have makes another run.
    """
    first, *names = key.removesuffix(f".{TARGET}").split(".")
    node = values.get(first)
    if first in MANY:
        node = node.get(names[0]) if names and isinstance(node, Mapping) else None
        names = names[1:]
    return _role(first, names[0] if names else "", str(node.get(TARGET, "")) if isinstance(node, Mapping) else "")


@functools.cache
def _role(first: str, name: str, target: str) -> Role:
    """The role of a key `first`, or of `first.name`, whose group has the option `target`."""
    if first.partition("/")[0] == "hydra":
        return Role.identity if first == "hydra/sweeper" else Role.shared
    if name and first in GROUPS:
        return _role_of_field(first, name, _class_of(first, target))
    own = declared_role(BLOCKS[first], name) if first in BLOCKS else None
    return own or declared_role(Job, first) or Role.identity


def _role_of_field(group: str, name: str, cls: type[Any] | None) -> Role:
    """The role of a field of an option; `cls` is the class of an option of the user's, if it is here."""
    if cls is not None and (own := declared_role(cls, name)) is not None:
        return own
    role: Role = _OF_JOB[group].metadata[FIELDS].get(name, declared_role(Job, group))
    # What a key of a user's strategy changes is not known.
    return Role.identity if role is Role.rounding and not options.options_with(group, name) else role


def _class_of(group: str, target: str) -> type[Any] | None:
    """The class of an option of a user's; None for Lockstep's own, or if its extension is not here."""
    if target.rpartition(".")[0] not in ("", GROUPS[group]):
        with suppress(InputError):
            return extensions.class_of(group, target)
    return None


def identity_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a config, by their dotted keys, that make it another run than other configs.

    A group that makes none, such as `strategy`, may have a key that does (`strategy.sync_batchnorm`). The default of
    such a key is left out: it is what the options without the key do.
    """
    deciding = {key: value for key, value in leaves(values) if role_of(key, values).makes_another_run}
    if isinstance(node := values.get("strategy"), Mapping):
        with suppress(InputError):  # the strategy is of another version, or its extension is not here
            if extensions.class_of("strategy", node.get(TARGET)).fixed_order:
                deciding["repro"] = "strict"  # as the start of a job decides
    return {
        key: value
        for key, value in deciding.items()
        for group, _, name in [key.partition(".")]
        if group not in GROUPS or role_of(group).makes_another_run or value != options.usual(group, name)
    }


def is_sample(key: str) -> bool:
    """Whether runs that differ in this key alone are samples of one setting."""
    return role_of(key) is Role.sample


def fields_with(group: str, component: Component, *roles: Role) -> frozenset[str]:
    """The names of the fields of a group's component that have one of some roles."""
    names = (field.name for field in dataclasses.fields(component))
    return frozenset(name for name in names if _role_of_field(group, name, type(component)) in roles)


def values_with(values: Mapping[str, Any], *roles: Role) -> dict[str, Any]:
    """The values of a config by their dotted keys that have one of some roles."""
    return {key: value for key, value in leaves(values) if role_of(key, values) in roles}
