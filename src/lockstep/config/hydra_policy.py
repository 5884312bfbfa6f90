"""What a config may say to Hydra. Somebody else may have written a config file, so it must run no code.

Hydra may make objects (callbacks, launchers, log handlers) only of installed plugins and of the classes in `TRUSTED`.
This is checked here, and again by the execution whitelist of Hydra 1.4. This leaves open which files log handlers
write, which variables are set or copied into the config, in which folders runs are, and which packages are imported
to search them for configs. So each value below `hydra` must be the one that Hydra, its installed plugins or the
command line give, except for a few keys that name folders and texts.

While Lockstep composes, Hydra and OmegaConf have a separate state. Their public functions cannot give back what was
there before. So this module, and no other, uses the names of the two dicts that have it (`Singleton._instances` of
Hydra, `BaseContainer._resolvers` of OmegaConf).
"""

import copy
import functools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobRuntime
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import OmegaConfBaseException

from lockstep.config import components
from lockstep.config.commands import refusal
from lockstep.config.hydra_versions import guard_plugins, register_resolver, set_overrides
from lockstep.config.recipes import EXTENSION, ChosenFiles, Key, read_chosen, words_for_hydra
from lockstep.config.schema import CONF
from lockstep.core.errors import InputError, shown
from lockstep.core.fields import FOLDER, is_inside, nested

TRUSTED = ["lockstep.cli.callbacks.SweepCallbacks"]  # besides installed launchers, sweepers and log handlers
COPIES = (
    "hydra.job.env_copy copies environment variables into the config, and so, with their secrets, into files; "
    "remove it: the job inherits the variables"
)
# The keys that `conf/config.yaml` sets below `hydra`, besides the keys of FREE.
OURS: Mapping[Key, object] = {
    ("callbacks", "report", "_target_"): "lockstep.cli.callbacks.SweepCallbacks",
    ("output_subdir",): None,
    ("job", "chdir"): False,
}
# The folders of runs. A config file may only name one below `output_root` or the current folder.
FOLDER_KEYS: tuple[Key, ...] = (("run", "dir"), ("sweep", "dir"), ("sweep", "subdir"))
# The references in such a name with values that a config file cannot choose.
_REFERENCES = re.compile(r"\$\{(now:[%\w:-]*|stamp_hex:|hydra[.:]job\.num)\}")
# The keys that any config file may set below `hydra`, with everything below them.
FREE: tuple[Key, ...] = (("sweeper", "params"), ("mode",), ("searchpath",), ("help",), ("hydra_help",))
SOURCES: Key = ("runtime", "config_sources")
FOREIGN = ("command-line", "hydra.searchpath")  # providers whose configs somebody else may have written: --config-dir
# The keys that Hydra itself writes while it composes.
WRITTEN: tuple[Key, ...] = (("runtime",), ("job", "name"), ("job", "override_dirname"), ("job", "config_name"))
# The groups whose options name code, with those options that any config file may choose: Hydra's own and our pool.
LOG_CONFIGS = ("job_logging", "hydra_logging")
LOGGING = ("default", "disabled", "hydra_debug", "none", "stdout")
OPTIONS = {"launcher": ("basic", "pool"), "sweeper": ("basic", "grid"), **dict.fromkeys(LOG_CONFIGS, LOGGING)}
# What each user of Hydra has alone. The others are the same for all: the plugins, and their sources of configs.
HYDRAS = ("hydra", "_")  # how the names of Hydra's own configs begin
OWN = (ConfigStore, GlobalHydra, HydraConfig, JobRuntime, VersionBase)


def is_of_hydra(override: str | Override) -> bool:
    """Whether an override changes Hydra's own config, by its key or by the package of its group."""
    parsed = OverridesParser.create().parse_overrides([override])[0] if isinstance(override, str) else override
    return any(str(name or "").lstrip(":").startswith("hydra") for name in (parsed.key_or_group, parsed.package))


def as_typed(overrides: Any) -> list[str]:
    """A list of overrides of Hydra, as typed: a job of a sweep, not the sweep, gives a `${KEY}` in it its value."""
    words: Any = OmegaConf.to_container(overrides, resolve=False)
    return [*words]


class CheckedLoader:
    """A loader that returns another loader's config only if all its values below `hydra` are allowed."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.jobs: dict[tuple[str, ...], DictConfig] = {}  # the configs of a sweep, by the jobs' choices
        for source in loader.get_search_path().get_path():
            _check_source(source.provider, source.path)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a copy asks for these before it has a loader
            raise AttributeError(name)
        return getattr(self.loader, name)

    def get_mode(self, config_name: str | None, overrides: list[str]) -> Any:
        return self.loader.get_mode(config_name, overrides, self.loader.parse_overrides(config_name, overrides))

    def load_configuration(
        self, config_name: str | None, overrides: list[str], *args: Any, **keywords: Any
    ) -> DictConfig:
        parsed = OverridesParser.create().parse_overrides(overrides)
        self._check_search_path(config_name, parsed)
        files = read_chosen(parsed, self.get_sources())
        words = words_for_hydra(parsed, files, self.get_sources())
        composed = self.loader.load_configuration(config_name, words, *args, **keywords)
        if words != overrides:
            of_hydra = [word for word in overrides if is_of_hydra(word)]
            set_overrides(composed, of_hydra, [word for word in overrides if word not in of_hydra])
        self._check(composed, parsed, files)
        guard_plugins(composed)
        return composed

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """Compose a job of a sweep: once for its choices of options, which takes 0.1 s; then set its other values."""
        parsed = OverridesParser.create().parse_overrides(sweep_overrides)
        for override in parsed:
            if override.is_hydra_override():
                raise InputError(
                    f"hydra.sweeper.params has {override.input_line!r}, expected keys of a job, such as seed: 1,2"
                )
        values = [override for override in parsed if _is_value(override, master_config)]
        # The order of these counts: of what is added or removed, and of keys that several words set.
        if any(word.type is not OverrideType.CHANGE or isinstance(word.value(), dict) for word in parsed):
            values = []
        lines = tuple(str(override.input_line) for override in parsed if override not in values)
        if lines not in self.jobs:
            self.jobs[lines] = self._compose_job(master_config, [*lines])
        composed = copy.deepcopy(self.jobs[lines])
        try:
            for override in values:
                OmegaConf.update(composed, override.key_or_group, override.value())
        except OmegaConfBaseException:
            return self._compose_job(master_config, sweep_overrides)  # Hydra has its own sentence for it
        set_overrides(composed, composed.hydra.overrides.hydra, sweep_overrides)
        return composed

    def _compose_job(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        of_hydra, parser = as_typed(master_config.hydra.overrides.hydra), OverridesParser.create()
        parsed = parser.parse_overrides([*of_hydra, *sweep_overrides])
        files = read_chosen(parsed, self.get_sources())
        words = words_for_hydra(parsed, files, self.get_sources())
        composed = self.loader.load_sweep_config(master_config, [word for word in words if word not in of_hydra])
        set_overrides(composed, of_hydra, sweep_overrides)
        self._check(composed, parsed, files)
        guard_plugins(composed)
        return composed

    def _check_search_path(self, config_name: str | None, overrides: Iterable[Override]) -> None:
        """Refuse packages in `hydra.searchpath`, in which only the primary config and the command line have a say."""
        paths = [item.value() for item in overrides if _key(item) == ("searchpath",)]
        primary = next((item for item in self.get_sources() if config_name and item.is_config(config_name)), None)
        if primary and primary.path != str(CONF):
            with suppress(OmegaConfBaseException, yaml.YAMLError):  # Hydra reads it again and says what is wrong
                loaded = primary.load_config(str(config_name)).config
                paths += [OmegaConf.select(loaded, "hydra.searchpath")] if isinstance(loaded, DictConfig) else []
        for path in (path for listed in paths if isinstance(listed, Iterable) for path in listed):
            _check_source("hydra.searchpath", str(path))

    def _check(self, composed: DictConfig, overrides: list[Override], files: ChosenFiles) -> None:
        """Refuse a config with a value below `hydra` that neither Hydra, a plugin nor the command line gives."""
        node = OmegaConf.to_container(composed, resolve=False)
        values = dict(nested(node.get("hydra") if isinstance(node, dict) else None))
        if any(key[:2] == ("job", "env_copy") for key in values):  # first: no sentence may show a variable's value
            raise InputError(COPIES)
        expected = {**_defaults(), **(OURS if values.get(("job", "config_name")) else {})}  # not for --hydra-help
        for group, options in OPTIONS.items():
            choice = values.get(("runtime", "choices", f"hydra/{group}"))
            typed = any(word.key_or_group == f"hydra/{group}" for word in overrides)
            if choice not in options and files.choices.get(f"hydra/{group}") != choice and not typed:
                raise InputError(
                    f"hydra/{group} is {shown(choice)} in a config file, which may choose only {', '.join(options)}; "
                    f"an installed plugin is chosen on the command line: hydra/{group}=NAME"
                )
            expected.update(self._option(group, choice))
        for key, value in values.items():
            if _names_code(key, value) and str(expected.get(key)) != str(value):
                raise InputError(
                    f"{'.'.join(('hydra', *key))} is {shown(value)}, which names code; Hydra makes objects only of "
                    f"its own classes, of installed plugins and of {', '.join(TRUSTED)}: remove it"
                )
        for override in overrides:
            if is_of_hydra(override) and not override.is_delete():
                expected.update(nested(override.value(), _key(override)))
        root = str(OmegaConf.select(composed, "output_root", throw_on_resolution_failure=False))
        named = any(word.key_or_group == "output_root" for word in overrides)
        providers = [str(value) for key, value in values.items() if key[:2] == SOURCES and key[-1] == "provider"]
        is_foreign = any(provider.startswith(FOREIGN) for provider in providers)
        if not named and is_foreign and not is_inside(root):
            raise InputError(refusal(("output_root", FOLDER, root, "outputs")))
        words = {override.input_line for override in overrides}
        for key, value in values.items():
            is_expected = key in expected and str(expected[key]) == str(value)
            is_word = key[0] == "overrides" and value in words
            is_trusted = (key, str(value)) in files.values
            if not (is_expected or is_word or is_trusted or _may_set(key, str(value))):
                raise InputError(_refusal(key, value))

    def _option(self, group: str, choice: object) -> Iterator[tuple[Key, Any]]:
        """The values of an option of a group of Hydra, as Hydra itself or an installed plugin has it."""
        path = f"hydra/{group}/{choice}"
        for source in self.get_sources():
            if not _is_from_user(source.provider) and source.is_config(path):
                yield from nested(OmegaConf.to_container(source.load_config(path).config, resolve=False), (group,))
                return


@functools.cache
def _defaults() -> Mapping[Key, Any]:
    """Hydra's own values, without any option of a group."""
    stored = ConfigStore.instance().load("hydra/config.yaml").node
    return dict(nested(OmegaConf.to_container(stored, resolve=False)))


def _key(parsed: Override) -> Key:
    """The key below `hydra` of an override; empty if it is a group."""
    return tuple(parsed.key_or_group.split("."))[1:]


def _names_code(key: Key, value: object) -> bool:
    """Whether Hydra makes an object of what a value below `hydra` names: of a plugin, a callback or a log handler."""
    if key[0] in ("launcher", "sweeper"):
        return key[1:] == ("_target_",)
    names = key[-1] in ("_target_", "()", "class") or re.search(r"_target_|ext://|cfg://|\$\{", str(value))
    return key[0] in ("callbacks", *LOG_CONFIGS) and bool(names)


def _is_value(parsed: Override, config: DictConfig) -> bool:
    """Whether an override sets a value of the config, rather than choose an option of a group."""
    first, _, rest = parsed.key_or_group.partition(".")
    chosen = OmegaConf.select(config, first, throw_on_resolution_failure=False)
    return parsed.package is None and first in config and (rest != "" or not OmegaConf.is_dict(chosen))


def _is_from_user(provider: str) -> bool:
    """Whether a config source is the user's: `--config-path` (or our `conf`), `--config-dir`, `hydra.searchpath`."""
    return provider == "main" or provider.startswith((*FOREIGN, EXTENSION))


def _check_source(provider: str, path: str) -> None:
    """Refuse a source of the user that is not a folder: to read configs from a Python package, Hydra imports it."""
    scheme, named, _ = path.partition("://")
    if _is_from_user(provider) and named and scheme != "file":
        raise InputError(
            f"the search path for configs has {path!r}, which would import code; expected a folder: "
            "hydra.searchpath=[FOLDER] or --config-dir FOLDER"
        )


def _may_set(key: Key, value: str) -> bool:
    """Whether any config file may set this key to this value."""
    if key in FOLDER_KEYS:  # inside the current folder, `output_root` or the sweep's folder
        root = "" if key == ("sweep", "subdir") else r"^\$\{output_root\}(?=/|$)"
        below = _REFERENCES.sub("x", re.sub(root, "x", value) if root else value)
        return "${" not in below and not below.startswith("/") and ".." not in below
    return any(key[: len(prefix)] == prefix for prefix in (*FREE, *WRITTEN))


def _refusal(key: Key, value: object) -> str:
    name = ".".join(("hydra", *key))
    if key in FOLDER_KEYS:
        inside = "its sweep's folder" if key[-1] == "subdir" else "${output_root} or the current one"
        expected = f"expected a folder below {inside}; name others on the command line: {name}=FOLDER"
        return f"{name} is {shown(value)} in a config file, {expected}"
    free = ", ".join(".".join(("hydra", *prefix)) for prefix in (*FOLDER_KEYS, *FREE))
    return (
        f"{name} is {shown(value)} in a config file, which may set only {free}, so that it runs no code; an "
        "installed plugin is chosen on the command line: hydra/launcher=NAME"
    )


class OwnHydra(GlobalHydra):
    """Hydra's place for the object that composes; here it composes with `CheckedLoader`."""

    def initialize(self, hydra: Any) -> None:
        hydra.config_loader = CheckedLoader(hydra.config_loader)
        super().initialize(hydra)


def works_for_lockstep() -> bool:
    """Whether Hydra works for Lockstep, and not for another program that uses Hydra in the same environment."""
    return isinstance(GlobalHydra.instance(), OwnHydra)


@contextmanager
def own_hydra() -> Iterator[GlobalHydra]:
    """A context in which the Hydra that it gives composes jobs of Lockstep. Hydra then has its state from before.

    OmegaConf's resolver for the environment is missing, and so are the program's own resolvers: somebody else may
    have written a config, its values are written to files, and environment variables hold secrets.
    """
    Plugins.instance()  # their modules add configs to the store of the program when they are first imported
    stored = ConfigStore.instance().repo
    singletons, resolvers = Singleton._instances, BaseContainer._resolvers
    try:
        Singleton._instances = {kind: one for kind, one in singletons.items() if not issubclass(kind, OWN)}
        GlobalHydra.set_instance(OwnHydra())
        ConfigStore.instance().repo |= {name: node for name, node in stored.items() if name.startswith(HYDRAS)}
        ConfigStore.instance().store(name="job", node=components.schema())
        OmegaConf.clear_resolvers()
        OmegaConf.clear_resolver("oc.env")
        register_resolver("stamp_hex", lambda: os.urandom(2).hex(), use_cache=True)
        yield GlobalHydra.instance()
    finally:
        Singleton._instances, BaseContainer._resolvers = singletons, resolvers
