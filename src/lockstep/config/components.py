"""Builds a `Job` with its components from the plain values of a config, which files keep as YAML."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lockstep.config import extensions, options
from lockstep.config.schema import BLOCKS, CONF, GROUPS, MANY, Job
from lockstep.core import fields
from lockstep.core.errors import InputError, collecting, did_you_mean, shown
from lockstep.core.safe_read import read_yaml

if TYPE_CHECKING:  # importing them would import torch
    from lockstep.core.protocols import Metric, Task

_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
# The components and blocks that have been built. They are frozen values, and the jobs of a sweep share most of them.
_BUILT: dict[tuple[type[Any], str], Any] = {}


def build_many(group: str, nodes: Any) -> dict[str, Any]:
    """The components of a group of which a job can have any number, by name. Raises InputError if a node is wrong."""
    if not isinstance(nodes, Mapping | None) or "_target_" in (nodes or {}):
        raise InputError(f"{group} is {shown(nodes)}, expected names of its options: {group}=[NAME,NAME]")
    names = {str(name): node for name, node in (nodes or {}).items()}
    if wrong := [name for name in names if not fields.TEXT.fits(name)]:
        raise InputError(f"{group} has the name {shown(wrong[0])}, expected {fields.TEXT.expected}")
    return {name: build(group, node, f"{group}.{name}") for name, node in names.items()}


def build(group: str, node: Any, key: str = "") -> Any:
    """The component that a group's node describes. Raises InputError for an unknown key or a wrong value."""
    key = key or group
    if not isinstance(node, Mapping) or "_target_" not in node:
        in_recipe = f"; a recipe chooses it with `- override /{group}: {node}`" if isinstance(node, str) else ""
        raise InputError(f"{key} is {shown(node)}, expected one of the group's options: {group}=NAME{in_recipe}")
    cls = extensions.class_of(group, node["_target_"], key)
    former = fields.former_names(cls)
    present = {former.get(str(key), str(key)): value for key, value in node.items() if key != "_target_"}
    values = {key: fields.as_number(cls, key, value) for key, value in present.items()}
    names = [item.name for item in dataclasses.fields(cls)]
    for unknown in (name for name in values if name not in names):
        raise InputError(
            f"{key}.{unknown} is not a key of {group}={options.option_name(cls)}; it has "
            f"{', '.join(names) or 'none'}.{did_you_mean(str(unknown), names)}"
        )
    with _in_sentences(f"{key}."):
        return _checked(cls, lambda: _writable(OmegaConf.structured(cls)), values, f"{key}.")


def build_stored(group: str, node: Any) -> Any:
    """The component of a node in a file of any version: a key that is newer has the value from before it existed."""
    if isinstance(node, Mapping) and "_target_" in node:
        node = {**fields.values_before(extensions.class_of(group, node["_target_"])), **node}
    return build(group, node)


def build_option(group: str, name: str) -> Any:
    """The component of one of our own options, with its defaults."""
    return build(group, read_config(CONF / group / f"{name}.yaml"))


def metrics_of(task: Task | type[Task], chosen: Mapping[str, Metric]) -> dict[str, Metric]:
    """The metrics of a job of this task, by name: the task's own ones, and the `chosen` ones of its config."""
    declared, own = options.declared("metric"), dict[str, Any]()
    for name in task.metrics:
        node = {name: options.default_node("metric", declared[name])} if name in declared else None
        own |= build_many("metric", node or read_config(CONF / "metric" / f"{name}.yaml"))
    return {**own, **chosen}


def all_options(group: str) -> dict[str, Any]:
    """Each option of a group that needs no key, with its defaults, by name: ours, and those of every extension."""
    for extension in extensions.active():
        extension.load()
    components = {}
    for name, cls in sorted(options.classes_of(group).items()):
        with suppress(InputError):
            components[name] = build(group, options.default_node(group, cls))
    return components


def _checked(cls: type[Any], defaults: Callable[[], Any], values: Mapping[str, Any], prefix: str = "") -> Any:
    """An object of `cls`, with `values` for defaults. Raises InputError, or OmegaConfBaseException for a type."""
    cache_key = (cls, repr(values))
    if cache_key not in _BUILT:
        typed = OmegaConf.merge(defaults(), values)
        plain_values = cast(dict[str, Any], OmegaConf.to_container(typed, enum_to_str=True))
        problems = list(fields.problems(cls, plain_values, prefix))
        for key, value in values.items():  # OmegaConf takes any whole number but 0 for true
            if isinstance(plain_values[key], bool) and isinstance(value, int) and value not in (0, 1):
                problems.append(f"{prefix}{key} is {value}, expected true or false: {prefix}{key}=true")
        if problems:
            raise InputError(*problems)
        _BUILT[cache_key] = OmegaConf.to_object(typed)
    return _BUILT[cache_key]


def build_job(values: Mapping[str, Any], objects: Mapping[str, Any] | None = None) -> Job:
    """The job of a config, with a program's `objects` by group. Raises InputError with a line for each problem."""
    problems: list[str] = []
    parts: dict[str, Any] = {}
    blocks = [key for key in BLOCKS if isinstance(values.get(key), Mapping)]
    own = {key: value for key, value in values.items() if key not in GROUPS and key not in blocks}
    with collecting(problems), _in_sentences():
        job: Job = _checked(Job, schema, own)
    for name in blocks:
        with collecting(problems), _in_sentences():
            defaults = functools.partial(OmegaConf.select, schema(), name)
            parts[name] = _checked(BLOCKS[name], defaults, values[name], f"{name}.")
    for group in GROUPS:
        with collecting(problems):
            parts[group] = (build_many if group in MANY else build)(group, values.get(group))
    if problems:
        raise InputError(*problems)
    parts |= {group: dataclasses.replace(parts[group], original=item) for group, item in (objects or {}).items()}
    return dataclasses.replace(job, **parts)


@contextmanager
def _in_sentences(prefix: str = "") -> Iterator[None]:
    """Turn the errors of OmegaConf into an InputError; `prefix` is put before the key."""
    try:
        yield
    except (OmegaConfBaseException, OverflowError, RecursionError) as error:
        from lockstep.config import messages  # a job without a mistake needs none

        if isinstance(error, OmegaConfBaseException):
            raise InputError(messages.sentence(error, prefix)) from error
        raise messages.unreadable(error) from error


@functools.cache
def schema() -> DictConfig:
    """The keys of a job for OmegaConf. Cached, because creating them takes longer than checking values with them."""
    return _writable(OmegaConf.structured(Job))


def _writable(nodes: DictConfig) -> DictConfig:
    """The keys of a frozen class and of those in it, which can be set: a config is changed while it is composed."""
    OmegaConf.set_readonly(nodes, None)
    for key in nodes:
        block = OmegaConf.select(nodes, str(key), throw_on_resolution_failure=False)
        if isinstance(block, DictConfig) and dataclasses.is_dataclass(OmegaConf.get_type(block)):
            _writable(block)
    return nodes


def node(component: fields.Component) -> dict[str, Any]:
    """The config node of `component`: `build` turns it into `component` again."""
    return {"_target_": options.class_path(type(component)), **_values(component)}


def plain(job: Job) -> dict[str, Any]:
    """The plain values of `job`: `build_job` turns them into `job` again."""
    values: dict[str, Any] = {}
    for key in (field.name for field in dataclasses.fields(job)):
        value = getattr(job, key)
        if key in MANY:
            values[key] = {name: node(component) for name, component in value.items()}
        else:
            values[key] = node(value) if key in GROUPS else _values(value) if key in BLOCKS else value
    return values


def _values(component: fields.Component) -> dict[str, Any]:
    """The fields of a frozen dataclass as plain values. OmegaConf would take a hundred times as long."""
    return dataclasses.asdict(component, dict_factory=_with_names)


def _with_names(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value.name if isinstance(value, enum.Enum) else value for key, value in items}


class _Dumper(_DUMPER):
    """Writes a value that is there twice out twice: `read_yaml` takes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def dump(plain: Mapping[str, Any] | Sequence[str]) -> str:
    """A plain config, or overrides, as YAML."""
    plain = dict(plain) if isinstance(plain, Mapping) else list(plain)
    return yaml.dump(plain, Dumper=_Dumper, allow_unicode=True, sort_keys=False)


def read_config(path: Path) -> dict[str, Any]:
    """The plain values of a config of a run folder or an option of ours. Raises InputError if the file is not one."""
    loaded = read_yaml(path)
    if not isinstance(loaded, dict) or not loaded or "${" in str(loaded):
        raise InputError(f"{path} is not a config of a run: expected keys and their resolved values")
    return loaded
