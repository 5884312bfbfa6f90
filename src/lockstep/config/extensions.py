"""Extensions: packages of users, whose classes and configs are options too.

An installed package is one if it has an entry point in the group `lockstep.extensions`; a program can name further
ones by `lockstep.main(extensions=[...])`. Nothing else can: no config, no run folder, no file in the current folder.
Finding an extension does not import it; it is imported when a config chooses an option that only it can have.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.config import options
from lockstep.config.schema import GROUPS
from lockstep.core.errors import InputError
from lockstep.core.native_threads import configure_native_threads

ENTRY_POINTS = "lockstep.extensions"
# In the environment of the ranks: the extensions that the program named, with the folders they are in.
VARIABLE = "LOCKSTEP_EXTENSIONS"


@dataclass(frozen=True)
class Extension:
    """A package with options.

    Fields:
        package: its name, as it is imported.
        origin: how it became one: installed by a package, or named by a program.
        folder: of the package.
    """

    package: str
    origin: str
    folder: Path

    @property
    def conf(self) -> Path | None:
        """Its folder of configs, if it has one."""
        folder = self.folder / "conf"
        return folder if folder.is_dir() else None

    def has(self, module: str) -> bool:
        """Whether a module belongs to it."""
        return module == self.package or module.startswith(f"{self.package}.")

    def load(self, module: str = "") -> None:
        """Import it, or one of its modules.

        Raises:
            InputError: it cannot be imported, or declares an option that cannot be one.
        """
        name = module or self.package
        configure_native_threads()  # before the extension imports NumPy, whose threads keep ranks from being forked
        try:
            importlib.import_module(name)
        except InputError:
            raise
        except Exception as error:
            raise InputError(
                f"{self._place(error)}: the extension {name} ({self.origin}) cannot be imported: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _place(self, error: Exception) -> str:
        """The file and line of the extension that an error comes from; its folder if none does."""
        if isinstance(error, SyntaxError):
            return f"{error.filename}:{error.lineno}"
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if Path(frame.filename).is_relative_to(self.folder)]
        return f"{own[-1].filename}:{own[-1].lineno}" if own else str(self.folder)


def use(packages: Sequence[str]) -> None:
    """Make packages extensions of this program and of the ranks that it starts.

    Raises:
        InputError: there is no such package.
    """
    named = [_locate(package, f"named by {Path(sys.argv[0]).name}") for package in packages]
    if named:
        os.environ[VARIABLE] = json.dumps({extension.package: str(extension.folder.parent) for extension in named})
    active.cache_clear()


@functools.cache
def active() -> tuple[Extension, ...]:
    """All extensions, each with its folder of configs checked.

    Raises:
        InputError: one cannot be found, or has a config that is no option of a group or has the name of another one.
    """
    named = []
    for package, parent in _named_by_program().items():
        if importlib.util.find_spec(package) is None:  # a rank does not have the program's import path
            sys.path.append(parent)
        named.append(_locate(package, "named by the program"))
    extensions = {extension.package: extension for extension in (*named, *_installed())}
    owner: dict[str, Extension] = {}
    for extension in extensions.values():
        for option, file in _configs(extension):
            if option in owner:
                raise InputError(f"{file}: {option} is an option of {owner[option].package} too; rename one of them")
            owner[option] = extension
    return tuple(extensions.values())


def owner_of(module: str) -> Extension | None:
    """The extension that a module belongs to, if it is active."""
    return next((extension for extension in active() if extension.has(module)), None)


def load_all() -> None:
    """Import every extension, so that its options are known.

    Raises:
        InputError: one cannot be imported, or declares an option that cannot be one.
    """
    for extension in active():
        extension.load()


def locate(group: str, module: str, name: str) -> type | None:
    """The class `name` in a module of an extension, if it was declared as an option of `group`; else None.

    Raises:
        InputError: the module cannot be imported.
    """
    extension = owner_of(module)
    if extension is None:
        return None
    extension.load()
    try:
        exists = importlib.util.find_spec(module) is not None
    except ImportError:
        exists = False
    if not exists:
        return None
    extension.load(module)
    return options.declared_class(group, module, name)


def shown() -> str:
    """The active extensions for use in a sentence."""
    return ", ".join(f"{extension.package} ({extension.origin})" for extension in active()) or "none"


def _named_by_program() -> dict[str, str]:
    """The packages that the program has named for its ranks, with the folders they are in."""
    text = os.environ.get(VARIABLE, "{}")
    try:
        named = json.loads(text)
    except ValueError:
        named = None
    if not isinstance(named, dict) or not all(isinstance(folder, str) for folder in named.values()):
        raise InputError(f"the environment has {VARIABLE}={text!r}, which only a program of ours may set; unset it")
    return named


def _installed() -> list[Extension]:
    """The installed packages with our entry point. `importlib.metadata` takes 30 ms; looking at the files takes 5."""
    files = (file for folder in sys.path for file in Path(folder).glob("*-info/entry_points.txt"))
    if not any(ENTRY_POINTS.encode() in file.read_bytes() for file in files if os.access(file, os.R_OK)):
        return []
    from importlib.metadata import entry_points

    return [
        _locate(
            entry_point.value,
            f"installed by {entry_point.dist.name} {entry_point.dist.version}" if entry_point.dist else "installed",
        )
        for entry_point in entry_points(group=ENTRY_POINTS)
    ]


def _locate(package: str, origin: str) -> Extension:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise InputError(
            f"the extension {package} ({origin}) is not a package that can be imported; install it with pip, or "
            "leave it out"
        )
    return Extension(package, origin, Path(spec.submodule_search_locations[0]))


def _configs(extension: Extension) -> list[tuple[str, Path]]:
    """The options in the `conf` folder of an extension, as GROUP=NAME, with their files."""
    configs = []
    groups = [*GROUPS, "experiment"]
    for file in sorted(extension.conf.rglob("*.yaml")) if extension.conf else ():
        group, name = file.parent.relative_to(extension.folder / "conf").as_posix(), file.stem
        if group not in groups:
            known = options.known(group, groups)
            raise InputError(f"{file}: {group!r} is no config group; put it into conf/GROUP/NAME.yaml.{known}")
        if options.is_own(group, name):
            raise InputError(f"{file}: {group}={name} is an option of Lockstep; rename the file")
        configs.append((f"{group}={name}", file))
    return configs
