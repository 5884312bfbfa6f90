"""The settings of Hydra that a config may change, checked before Hydra uses them.

Before a job begins, Hydra creates objects from `hydra.callbacks`, `hydra.launcher`, `hydra.sweeper` and both logging
configs, and sets environment variables. Somebody else may have written a config file, so it must not control this:
each value below `hydra` must be the value that Hydra, its installed plugins and the command line give without the
file. A few keys that only name folders and texts are exempt. The command line chooses among installed plugins, and
cannot name code.

`tests/unit/test_hydra_policy.py` reads Hydra's source and lists everything that Hydra does with a config.
"""

from __future__ import annotations

import copy
import functools
import importlib
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra.conf
from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lockstep.config.hydra_keys import (
    CLOSED,
    FOLDERS,
    FREE,
    LOGGING,
    OBJECTS,
    WRITTEN,
    Key,
    dotted,
    is_below,
    is_free,
    leaves,
    may_set,
    names_code,
)
from lockstep.config.messages import shown_message
from lockstep.core.errors import InputError
from lockstep.core.fields import shown

EXTENSION = "extension"  # the first part of the provider name of an extension's configs

COPIES = (
    "hydra.job.env_copy copies environment variables into the config, and so, with their secrets, into files; "
    "leave it out: the job inherits the variables"
)
# Hydra's own configs in the composition of a job, each with its package, in order.
HYDRA_CONFIGS = [
    ("hydra/output/default", "hydra"),
    ("hydra/launcher/pool", "hydra.launcher"),
    ("hydra/sweeper/basic", "hydra.sweeper"),
    ("hydra/help/default", "hydra.help"),
    ("hydra/hydra_help/default", "hydra.hydra_help"),
    ("hydra/hydra_logging/none", "hydra.hydra_logging"),
    ("hydra/job_logging/none", "hydra.job_logging"),
    ("hydra/env/default", "hydra.env"),
    ("hydra/config", "hydra"),
]


def install() -> None:
    """Have Hydra compose every config with `CheckedLoader`."""
    application: Any = importlib.import_module("hydra._internal.hydra")
    application.ConfigLoaderImpl = CheckedLoader


def is_of_hydra(override: str) -> bool:
    """Whether an override changes Hydra's own config, by its key or by the package of its group.

    Raises:
        OverrideParseException: the text is not an override.
    """
    return _is_of_hydra(OverridesParser.create().parse_override(override))


def _is_of_hydra(parsed: Override) -> bool:
    return any(str(name or "").lstrip(":").startswith("hydra") for name in (parsed.key_or_group, parsed.package))


def _key(parsed: Override) -> Key:
    """The key below `hydra` of an override; empty if it is a group."""
    return tuple(parsed.key_or_group.split("."))[1:]


class CheckedLoader(ConfigLoaderImpl):
    """Hydra's loader, which returns a config only if all its values below `hydra` are allowed."""

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        _check_folders(config_search_path)
        super().__init__(config_search_path)
        self._composed: dict[tuple[str, ...], DictConfig] = {}  # the configs of a sweep, by the jobs' choices

    def _load_configuration_impl(self, *args: Any, **keywords: Any) -> DictConfig:
        """Compose and check. Every way through Hydra leads here."""
        self._hydra_configs: list[tuple[str | None, str | None]] = []
        self._file_leaves: list[tuple[Key, Any]] = []
        with _composing():
            composed = super()._load_configuration_impl(*args, **keywords)
        self._check(composed)
        return composed

    def _load_single_config(self, default: ResultDefault, repo: Any) -> ConfigResult:
        """Record the values that each config has below `hydra`."""
        with warnings.catch_warnings():
            if str(default.config_path).startswith("hydra/"):  # Hydra warns at length of a file in place of its own
                warnings.simplefilter("ignore")
            loaded = super()._load_single_config(default, repo)
        if loaded.provider == "hydra":
            self._hydra_configs.append((default.config_path, default.package))
        else:
            plain = OmegaConf.to_container(loaded.config, resolve=False)
            if isinstance(plain, dict) and "hydra" in plain:
                self._file_leaves.extend(leaves(plain["hydra"]))
        return loaded

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """Compose a job of a sweep: once for its choices of options, to whose config its other values are added.

        A sweep composes each job twice, and Hydra takes 0.1 s each time.
        """
        parsed = OverridesParser.create().parse_overrides(sweep_overrides)
        for override in parsed:
            if override.is_hydra_override():
                raise InputError(
                    f"hydra.sweeper.params has {override.input_line!r}, expected keys of a job, such as seed: 1,2"
                )
        groups = [
            word for word in parsed if word.package is not None or self.repository.group_exists(word.key_or_group)
        ]
        values = [override for override in parsed if override not in groups]
        if any(override.type is not OverrideType.CHANGE for override in values):  # their order counts
            values, groups = [], parsed
        lines = tuple(str(override.input_line) for override in groups)
        if lines not in self._composed:
            self._composed[lines] = super().load_sweep_config(master_config, [*lines])
        composed = copy.deepcopy(self._composed[lines])
        with _composing():
            self._apply_overrides_to_config(values, composed)
        job = composed.hydra.job
        job.override_dirname = get_overrides_dirname(parsed, **job.config.override_dirname)
        composed.hydra.overrides.task = sweep_overrides
        return composed

    def _process_config_searchpath(
        self, config_name: str | None, parsed_overrides: list[Override], repo: Any
    ) -> None:
        self._parsed = parsed_overrides
        initialize = repo.initialize_sources

        def initialize_folders(search_path: ConfigSearchPath) -> None:
            _check_folders(search_path)
            initialize(search_path)

        repo.initialize_sources = initialize_folders
        super()._process_config_searchpath(config_name, parsed_overrides, repo)

    def _check(self, composed: DictConfig) -> None:
        """Compare the values below `hydra` with the values that Hydra has without the user's files.

        Returns early if the files and the command line only set keys that every config file may set.

        Raises:
            InputError: a config file sets a value that it may not set.
        """
        parsed = self._parsed
        command_leaves = (
            leaf for override in parsed if _is_of_hydra(override) for leaf in leaves(override.value(), _key(override))
        )
        if (
            self._hydra_configs == HYDRA_CONFIGS
            and all(may_set(*leaf) for leaf in self._file_leaves)
            and all(is_free(key) and not names_code(key, value) for key, value in command_leaves)
        ):
            return
        hydra_overrides = [override for override in parsed if override.is_hydra_override()]
        node = OmegaConf.to_container(composed, resolve=False)
        values = list(leaves(node.get("hydra") if isinstance(node, dict) else None))
        if any(is_below(key, [("job", "env_copy")]) for key, _ in values):
            raise InputError(COPIES)
        choices = (*_chosen(dict(values), hydra_overrides), *_without_code(hydra_overrides))
        sources = ((source.provider, source.path) for source in self.config_search_path.get_path())
        expected = _without_files(tuple(source for source in sources if not _is_from_user(source[0])), choices)
        lines: dict[str, list[str | None]] = {"hydra": [], "task": []}
        for override in parsed:
            lines["hydra" if override.is_hydra_override() else "task"].append(override.input_line)
        expected = {**expected, **dict(leaves({"overrides": lines}))}  # where a sweep reads the command line
        for key, value in values:
            unchanged = key in expected and expected[key] == value
            if not (unchanged or may_set(key, value) or (is_below(key, WRITTEN) and not names_code(key, value))):
                if key in FOLDERS:
                    inside = "its sweep's folder" if key[-1] == "subdir" else "${output_root} or the current one"
                    raise InputError(
                        f"{dotted(key)} is {shown(value)} in a config file, expected a folder below {inside}; "
                        f"name others on the command line: {dotted(key)}=FOLDER"
                    )
                raise InputError(
                    f"{dotted(key)} is {shown(value)} in a config file, which may set only "
                    f"{', '.join(map(dotted, FREE))}, so that it runs no code; an installed plugin is chosen on the "
                    "command line: hydra/launcher=NAME"
                )


@contextmanager
def _composing() -> Iterator[None]:
    """Turn what composing raises without a word of its own into a sentence."""
    try:
        yield
    except (OmegaConfBaseException, HydraException):  # some of them are also KeyErrors
        raise
    except KeyError as error:  # from os.environ: Hydra copies variables while it composes
        raise InputError(COPIES) from error
    except (AssertionError, AttributeError, TypeError, RecursionError) as error:
        raise InputError(
            f"the config cannot be composed ({type(error).__name__}: {shown_message(str(error))}); "
            "an override or a config file has a value below a key that takes none"
        ) from error


def _is_from_user(provider: str) -> bool:
    """Whether a config source is the user's: `--config-path` (or our `conf`), `--config-dir`, `hydra.searchpath`."""
    return provider in ("main", "command-line") or provider.startswith(("hydra.searchpath", EXTENSION))


def _check_folders(search_path: ConfigSearchPath) -> None:
    """Refuse a source of the user that is not a folder: to read configs from a Python package, Hydra imports it."""
    for source in search_path.get_path():
        scheme, named, _ = source.path.partition("://")
        if _is_from_user(source.provider) and named and scheme != "file":
            raise InputError(
                f"the search path for configs has {source.path!r}, which would import code; expected a folder: "
                "hydra.searchpath=[FOLDER] or --config-dir FOLDER"
            )


def _chosen(values: Mapping[Key, Any], overrides: Iterable[Override]) -> Iterator[str]:
    """Overrides that repeat a file's choice of a logging config or of our pool, unless the command line chooses."""
    for group in (*LOGGING, "launcher"):
        folder = Path(hydra.conf.__file__).with_name("hydra").joinpath(group)
        options = {"pool"} if group == "launcher" else {file.stem for file in folder.glob("*.yaml")}
        choice = values.get(("runtime", "choices", f"hydra/{group}"))
        if choice in options and not any(override.key_or_group == f"hydra/{group}" for override in overrides):
            yield f"hydra/{group}={choice}"


def _without_code(overrides: Iterable[Override]) -> Iterator[str]:
    """The overrides of the command line that a config file may not make.

    Raises:
        InputError: an override names code.
    """
    for override in overrides:
        key = _key(override)
        if override.is_delete() or (is_free(key) and key not in FOLDERS):
            continue
        if not key:  # a group: the name of an option, not the path of a file
            fits = re.fullmatch(r"[\w\s.,\[\]-]*", override.get_value_element_as_str()) is not None
        elif key[0] in OBJECTS:
            fits = key[0] not in CLOSED and not any(names_code(*leaf) for leaf in leaves(override.value(), key))
        else:
            fits = True
        if not fits:
            raise InputError(
                f"{override.input_line!r} names code for Hydra to run; leave it out, or choose an installed plugin "
                "by its name: hydra/launcher=NAME"
            )
        yield str(override.input_line)


@functools.lru_cache(maxsize=16)
def _without_files(sources: tuple[tuple[str, str], ...], overrides: tuple[str, ...]) -> Mapping[Key, Any]:
    """The values below `hydra` that Hydra composes from `sources`, none of which is the user's."""
    search_path = ConfigSearchPathImpl()
    for provider, path in sources:
        search_path.append(provider, path)
    try:
        composed = ConfigLoaderImpl(search_path).load_configuration(None, list(overrides), RunMode.RUN)
    except MissingConfigException as error:
        raise InputError(
            f"{error.missing_cfg_file} is no option of Hydra or of an installed plugin, and a file is not enough; "
            f"it is one of {', '.join(error.options or [])}"
        ) from error
    return dict(leaves(OmegaConf.to_container(composed.hydra, resolve=False)))
