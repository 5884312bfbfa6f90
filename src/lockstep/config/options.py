"""The options of the groups: our own, models of timm and torchvision, and classes that declare themselves."""

import copy
import functools
import importlib
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, cast, dataclass_transform

from lockstep.config.schema import ANNOTATIONS, CONF, GROUPS, MANY, RECIPES, Job
from lockstep.core import safe_read
from lockstep.core.errors import InputError, did_you_mean, reason_of
from lockstep.core.fields import config_defaults, leaves

T = TypeVar("T")

# The names of models are read from the sources of their library in 0.05 s. Importing timm takes seconds.
_REGISTERED = re.compile(r"^@register_model(?:\(\))?\s*\n(?:@.*\n)*def (\w+)\(", re.MULTILINE)
OBJECTS = "lockstep.training.objects"  # has the classes that stand for objects of a user's program
TIMM, TORCHVISION = "timm", "torchvision"
_DECLARED: dict[tuple[str, str], type[Any]] = {}
PRESETS: dict[tuple[str, str], tuple[Any, str]] = {}  # see `preset`
_read: Any = functools.cache(safe_read.read_yaml)


@dataclass_transform(kw_only_default=True, frozen_default=True)
def option(group: str, name: str | None = None) -> Callable[[type[T]], type[T]]:
    """Declare a class as an option of a config group: `GROUP=NAME` chooses it, and its fields are the keys.

    The class becomes a keyword-only dataclass, frozen but for a callback, and gets what its group's protocol has a
    default for. A YAML file `conf/GROUP/NAME.yaml` in the package can give it other defaults or a second name.
    docs/reference.py writes one for each of Lockstep's own classes, so that listing them imports no torch.

    Args:
        group: the config group, such as `model`.
        name: the name of the option; by default the name of the class in snake case.

    Raises:
        InputError: the group does not exist, the name is taken, a field has a type that a config cannot hold, or
            the class lacks a method that its protocol has no default for.
    """

    def declare(cls: type[T]) -> type[T]:
        if "__dataclass_fields__" not in vars(cls):
            _give_each_its_own(cls)
        frozen = group != "callback"  # a callback counts and collects; each run has its own copy
        option = cls if "__dataclass_fields__" in vars(cls) else dataclass(frozen=frozen, kw_only=True)(cls)
        option_name = name or name_from(cls.__name__)
        if not is_ours(cls):  # tests check ours
            _check(option, group, option_name)
            _complete(option, group)
        _DECLARED[group, option_name] = option
        return option

    return declare


def _give_each_its_own(cls: type[Any]) -> None:
    """Let a list or a dictionary be the default of a field, which a dataclass refuses: each object gets a copy."""
    for name, hint in vars(cls).get("__annotations__", {}).items():
        default = vars(cls).get(name)
        if isinstance(default, list | dict) and "ClassVar" not in str(hint):
            setattr(cls, name, field(default_factory=functools.partial(copy.deepcopy, default)))


def name_from(class_name: str) -> str:
    """The usual name of an option: the name of its class in snake case."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", class_name).lower()


@functools.cache
def modules_of(group: str) -> dict[str, str]:
    """The module of each of our classes of a group, read from the sources: importing them all takes seconds."""
    declared_here = re.compile(rf'^@option\("{group}".*\)\nclass (\w+)', re.MULTILINE)
    return {name: module for module, text in _sources(group).items() for name in declared_here.findall(text)}


def _sources(group: str) -> dict[str, str]:
    """The sources of a group's modules, by the names of the modules."""
    place = Path(__file__).parents[1].joinpath(*GROUPS[group].split(".")[1:])
    files = {GROUPS[group]: place.with_suffix(".py")} if not place.is_dir() else {}
    files |= {f"{GROUPS[group]}.{file.stem}": file for file in sorted(place.glob("*.py"))}
    return {module: file.read_text() for module, file in files.items()}


def lazy_classes(group: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of the group's package: it has each class, and imports the module of one alone."""

    def attribute(name: str) -> Any:
        if name == "__all__":
            return [*modules_of(group)]
        if name not in modules_of(group):
            raise AttributeError(f"module {GROUPS[group]!r} has no attribute {name!r}")
        return vars(importlib.import_module(modules_of(group)[name]))[name]

    return attribute, lambda: sorted({*vars(sys.modules[GROUPS[group]]), *modules_of(group)})


def preset(group: str, name: str, component: Any, meaning: str) -> None:
    """Declare a second option of one of our classes: `component` has its defaults, `meaning` says what it is."""
    PRESETS[group, name] = component, meaning


def is_ours(cls: type[Any]) -> bool:
    """Whether a class is Lockstep's own, and not a user's."""
    return cls.__module__.startswith("lockstep.") and cls.__module__ != OBJECTS


def _files(group: str) -> list[Path]:
    """The files of Lockstep's options of a group, sorted; none for no group."""
    return sorted(file for file in CONF.glob("*/*.yaml") if file.parent.name == group)


def is_builtin(group: str, name: str) -> bool:
    """Whether Lockstep itself has an option of this name."""
    return name in {file.stem for file in _files(group)} or (group == "model" and model_of(name) is not None)


@functools.cache
def models_of(library: str) -> tuple[str, ...]:
    """Every model that timm registers, or classifier that torchvision does, sorted; empty if it is not installed."""
    return tuple(sorted(_in_sources(_REGISTERED, library)))


def tagged_names(name: str) -> list[str]:
    """The names of a model with a tag of its weights (`resnet50.a1_in1k`), sorted."""
    library, architecture = _library(name)
    if library == TORCHVISION:
        members = rf"^class {architecture}_weights\(WeightsEnum\):\n((?:    .*\n|\n)*)"
        bodies = _in_sources(re.compile(members, re.MULTILINE | re.IGNORECASE), library)
        return sorted(f"{name}.{tag}" for body in bodies for tag in re.findall(r"^    (\w+) = Weights\(", body, re.M))
    return sorted(set(_in_sources(re.compile(rf"""['"]({re.escape(architecture)}\.\w+)['"]\s*:"""), library)))


def _library(name: str) -> tuple[str, str]:
    """The library of a model, and its name there without a tag."""
    first, _, rest = name.partition(".")
    return (TORCHVISION, rest.partition(".")[0]) if first == TORCHVISION else (TIMM, first)


def _in_sources(pattern: re.Pattern[str], library: str) -> list[str]:
    """The matches of a pattern's group in the sources of a library's models; empty if it is not installed."""
    spec = importlib.util.find_spec(library)
    if spec is None or not spec.submodule_search_locations:
        return []
    sources = Path(spec.submodule_search_locations[0], "models").glob("*.py")
    return [name for source in sources for name in pattern.findall(source.read_text())]


def model_of(name: str) -> tuple[str, str] | None:
    """The option and the key `name` of a model of a library, with or without a tag of its weights; None for no model.

    `resnet50d.ra2_in1k` is timm's, `torchvision.resnet50` and `torchvision.resnet50.IMAGENET1K_V2` are torchvision's.
    """
    library, architecture = _library(name)
    return (library, name.removeprefix(f"{TORCHVISION}.")) if architecture in models_of(library) else None


def options_with(group: str, key: str) -> list[str]:
    """The names of Lockstep's options of a group that have this key."""
    return [file.stem for file in _files(group) if key in _read(file)]


def usual(group: str, key: str) -> Any:
    """The default of a key of a group's options, of the first of them that has it; None if none has it."""
    return next((node[key] for node in map(_read, _files(group)) if key in node), None)


def default_of_key(key: str) -> Any:
    """The default of a dotted key of a config; None for a key that has none."""
    group, _, name = key.partition(".")
    return usual(group, name) if group in GROUPS else dict(leaves(_read(CONF / "config.yaml"))).get(key)


def options_of(group: str) -> list[str]:
    """The names of the options of a group, Lockstep's own and declared ones; empty for no group."""
    return sorted({*(file.stem for file in _files(group)), *declared(group)})


def can_be_group(name: str) -> bool:
    """Whether a folder of a user's `conf` can be a group of the user's own: no key of a job has its name."""
    return re.fullmatch(r"\w+", name) is not None and name not in {*vars(Job()), *GROUPS, RECIPES, "hydra"}


def known(group: str, groups: Collection[str]) -> str:
    """The end of a sentence about a group that does not exist: the group that was probably meant, or all groups."""
    return did_you_mean(group, groups) or f" The groups are {', '.join(groups)}."


def declared(group: str) -> dict[str, type[Any]]:
    """The classes of a group that have been imported, by the names of their options."""
    return {name: cls for (of, name), cls in _DECLARED.items() if of == group}


def declare(classes: Mapping[tuple[str, str], type[Any]]) -> None:
    """Declare classes by group and name, as another process has declared them."""
    _DECLARED.update(classes)


def classes_of(group: str) -> dict[str, type[Any]]:
    """All classes of a group by the names of their options: ours, and those of extensions that have been imported."""
    for module in dict.fromkeys(modules_of(group).values()):  # in an order that no hash decides
        importlib.import_module(module)
    return declared(group)


@functools.cache
def import_renamed(group: str) -> None:
    """Import the modules of a group that give keys other names: `declared` then has all such classes."""
    for module, text in _sources(group).items():
        if re.search(r"with_history\(.*names=", text):
            importlib.import_module(module)


def option_name(cls: type[Any]) -> str:
    """The name of an option by its class; the class's own name for no option."""
    return next((name for (_, name), other in _DECLARED.items() if other is cls), cls.__name__)


def class_path(cls: type[Any]) -> str:
    """The `_target_` of an option's class: for ours, it begins with the module of the group."""
    groups = [group for (group, _), other in _DECLARED.items() if other is cls and is_ours(cls)]
    return f"{GROUPS[groups[0]] if groups else cls.__module__}.{cls.__qualname__}"


def default_node(group: str, cls: type[Any]) -> dict[str, Any]:
    """The config of an option, with its defaults."""
    from omegaconf import OmegaConf  # imported late: it is slow, and importing this module must be fast

    values = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.structured(cls), enum_to_str=True))
    chosen = [{"override /loss@_global_.loss": cls.usual_loss}] if group == "task" and cls.usual_loss else []
    return {**({"defaults": chosen} if chosen else {}), "_target_": class_path(cls), **values, **config_defaults(cls)}


def _check(cls: type[Any], group: str, name: str) -> None:
    from omegaconf import OmegaConf  # imported late, as above
    from omegaconf.errors import OmegaConfBaseException

    where, other = _place(cls), _DECLARED.get((group, name), cls)
    if group not in GROUPS:
        raise InputError(
            f"{where}: {cls.__name__} declares an option of {group!r}, which is not a group.{known(group, GROUPS)}"
        )
    if is_builtin(group, name):
        raise InputError(f"{where}: {group}={name} is an option of Lockstep; give {cls.__name__} another name")
    if class_path(other) != class_path(cls):
        raise InputError(f"{where}: {group}={name} is declared at {_place(other)} too; rename one of them")
    typed = {field.name for field in fields(cls)} | {*dir(protocol_of(group))}
    for base in cls.__mro__:
        typed |= set(vars(base).get("__annotations__", {})) | (set(vars(base)) if base is not cls else set())
    for attribute, value in vars(cls).items():
        is_plain = not callable(value) and not hasattr(value, "__get__")
        if is_plain and not attribute.startswith("_") and attribute not in typed:
            raise InputError(
                f"{where}: {cls.__name__}.{attribute} has no type, so it is no key of the config; write "
                f"`{attribute}: {type(value).__name__} = {value!r}`, or ClassVar if it is not meant to be one"
            )
    try:
        OmegaConf.structured(cls)
    except OmegaConfBaseException as error:
        raise InputError(
            f"{where}: a field of {cls.__name__} has a type that a config cannot hold ({reason_of(error)}); use "
            "numbers, texts, booleans, enums, lists or dictionaries of them"
        ) from error


def _complete(cls: type[Any], group: str) -> None:
    """Give a class the defaults of its group's protocol, so that it need not derive from it."""
    protocol = protocol_of(group)
    own = {field.name for field in fields(cls)} | {*dir(cls)}
    missing = {*cls.__abstractmethods__} if inspect.isabstract(cls) else protocol.__abstractmethods__ - own
    if missing:
        raise InputError(
            f"{_place(cls)}: {cls.__name__} has no {' and no '.join(sorted(missing))}, which an option of {group} "
            f"needs; write what {protocol.__module__}.{protocol.__name__} says"
        )
    for name in (name for name in dir(protocol) if not name.startswith("_") and name not in own):
        setattr(cls, name, inspect.getattr_static(protocol, name))


def protocol_of(group: str) -> Any:
    """The protocol of a group's options: the type of the group in a job."""
    from lockstep.core import data_protocols, observer, protocols  # imported late: they import torch

    name = Job.__annotations__[group].removeprefix("dict[str, ").removesuffix("]")
    return next(vars(module)[name] for module in (protocols, data_protocols, observer) if name in vars(module))


def _place(cls: type[Any]) -> str:
    try:
        return f"{inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]}"
    except (OSError, TypeError):
        return cls.__module__


def differences(composed: Mapping[str, Any], choices: Mapping[str, str]) -> Iterator[tuple[str, Any, Any]]:
    """The keys of a composed config that are not at the defaults of `conf/`: key, value and default."""
    defaults = {**_read(CONF / "config.yaml")}
    options = {
        key: value for item in defaults.pop("defaults") if isinstance(item, dict) for key, value in item.items()
    }
    for group in (*GROUPS, RECIPES):
        own = [*composed.get(group, ())] if group in MANY else choices.get(group)
        if composed and own != options[group]:
            yield group, own, options[group]
        for name in own if isinstance(own, list) else [own]:
            path: Path = CONF / group / f"{name}.yaml"
            if group != RECIPES and re.fullmatch(r"\w+", str(name)) and path.is_file():
                option = _read(path)
                defaults[group] = {**defaults.get(group, {}), **option} if group in MANY else option
    usual = dict(leaves(defaults))
    for key, value in leaves(composed):
        if key in usual and value != usual[key] and "${" not in str(usual[key]) and not key.startswith("hydra."):
            yield key, value, usual[key]


def value_text(value: object) -> str:
    """A value in the words of a config: `null`, `true`. A list has no brackets, and an empty one is `none`."""
    if isinstance(value, list):
        return ", ".join(map(value_text, value)) or "none"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def annotations_of(config: Mapping[str, Any]) -> dict[str, str]:
    """What a config says for people, by key: its tags in one text, its group and its notes, where it has them."""
    return {key: value_text(config[key]) for key in ANNOTATIONS if config.get(key)}
