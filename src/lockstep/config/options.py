"""The options of the groups: our own, timm's models, and classes that declare themselves as options."""

import functools
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, cast, dataclass_transform

from lockstep.config.schema import CONF, GROUPS
from lockstep.core.errors import InputError, did_you_mean

T = TypeVar("T")

# timm's names are read from its sources in 0.05 s. Importing timm takes seconds.
_REGISTERED = re.compile(r"^@register_model\s*\n(?:@.*\n)*def (\w+)\(", re.MULTILINE)
_DECLARED: dict[tuple[str, str], type[Any]] = {}


@dataclass_transform(kw_only_default=True, frozen_default=True)
def option(group: str, name: str | None = None) -> Callable[[type[T]], type[T]]:
    """Declare a class as an option of a config group: `GROUP=NAME` chooses it, and its fields are the keys.

    The class becomes a frozen, keyword-only dataclass. A YAML file `conf/GROUP/NAME.yaml` in the package is not
    needed, but can give it other defaults or a second name.

    Args:
        group: the config group, such as `model`.
        name: the name of the option; by default the name of the class in snake case.

    Raises:
        InputError: the group does not exist, the name is taken, or a field has a type that a config cannot hold.
    """

    def declare(cls: type[T]) -> type[T]:
        where = _place(cls)
        if group not in GROUPS:
            raise InputError(
                f"{where}: {cls.__name__} declares an option of {group!r}, which is not a group."
                f"{known(group, GROUPS)}"
            )
        option = cls if "__dataclass_fields__" in vars(cls) else dataclass(frozen=True, kw_only=True)(cls)
        option_name = name or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()
        _check_fields(option, where)
        existing = _DECLARED.get((group, option_name))
        if is_own(group, option_name):
            raise InputError(
                f"{where}: {group}={option_name} is an option of Lockstep; give {cls.__name__} another name"
            )
        if existing is not None and (existing.__module__, existing.__qualname__) != (
            cls.__module__,
            cls.__qualname__,
        ):
            raise InputError(
                f"{where}: {group}={option_name} is declared at {_place(existing)} too; rename one of them"
            )
        _DECLARED[group, option_name] = option
        return option

    return declare


def _files(group: str) -> list[Path]:
    """The files of Lockstep's options of a group, sorted; none for no group."""
    return sorted(file for file in CONF.glob("*/*.yaml") if file.parent.name == group)


def is_own(group: str, name: str) -> bool:
    """Whether Lockstep itself has an option of this name."""
    return name in {file.stem for file in _files(group)} or (group == "model" and is_timm_model(name))


@functools.cache
def timm_models() -> tuple[str, ...]:
    """Every model that timm registers, sorted; empty if timm is not installed."""
    return tuple(sorted(_in_sources(_REGISTERED)))


def tagged_names(architecture: str) -> list[str]:
    """The names of a timm model with a tag of its weights (`resnet50.a1_in1k`), sorted."""
    return sorted(set(_in_sources(re.compile(rf"""['"]({re.escape(architecture)}\.\w+)['"]\s*:"""))))


def _in_sources(pattern: re.Pattern[str]) -> list[str]:
    """The matches of a pattern's group in the sources of timm's models; empty if timm is not installed."""
    spec = importlib.util.find_spec("timm")
    if spec is None or not spec.submodule_search_locations:
        return []
    sources = Path(spec.submodule_search_locations[0], "models").glob("*.py")
    return [name for source in sources for name in pattern.findall(source.read_text())]


def is_timm_model(name: str) -> bool:
    """Whether `name` is the name of a timm model, with or without a tag of its weights (`resnet50d.ra2_in1k`)."""
    return name.partition(".")[0] in timm_models()


def options_with(group: str, key: str) -> list[str]:
    pattern = re.compile(rf"^{re.escape(key)}:", re.MULTILINE)
    return [file.stem for file in _files(group) if pattern.search(file.read_text())]


def options_of(group: str) -> list[str]:
    """The names of the options of a group, Lockstep's own and declared ones; empty for no group."""
    return sorted({*(file.stem for file in _files(group)), *declared(group)})


def known(group: str, groups: Iterable[str]) -> str:
    """The end of a sentence about a group that does not exist: the group that was probably meant, or all groups."""
    groups = list(groups)
    return did_you_mean(group, groups) or f" The groups are {', '.join(groups)}."


def declared(group: str) -> dict[str, type[Any]]:
    return {name: cls for (of, name), cls in _DECLARED.items() if of == group}


def default_node(cls: type[Any]) -> dict[str, Any]:
    from omegaconf import OmegaConf  # imported late: it is slow, and importing this module must be fast

    values = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.structured(cls), enum_to_str=True))
    return {"_target_": f"{cls.__module__}.{cls.__qualname__}", **values}


def _check_fields(cls: type[Any], where: str) -> None:
    from omegaconf import OmegaConf  # imported late, as above
    from omegaconf.errors import OmegaConfBaseException

    assert is_dataclass(cls)
    typed = {field.name for field in fields(cls)}
    for base in cls.__mro__:
        typed |= set(vars(base).get("__annotations__", {})) | (set(vars(base)) if base is not cls else set())
    for name, value in vars(cls).items():
        is_plain = not callable(value) and not hasattr(value, "__get__")
        if is_plain and not name.startswith("_") and name not in typed:
            raise InputError(
                f"{where}: {cls.__name__}.{name} has no type, so it is no key of the config; write `{name}: "
                f"{type(value).__name__} = {value!r}`, or ClassVar if it is not meant to be one"
            )
    try:
        OmegaConf.structured(cls)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"{where}: a field of {cls.__name__} has a type that a config cannot hold ({reason}); use numbers, "
            "texts, booleans, enums, lists or dictionaries of them"
        ) from error


def _place(cls: type[Any]) -> str:
    """The file and line of a class."""
    try:
        return f"{inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]}"
    except (OSError, TypeError):
        return cls.__module__
