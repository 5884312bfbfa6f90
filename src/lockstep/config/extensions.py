"""Extensions: packages of users that add classes and configs as options.

An installed package is an extension if it has an entry point in the group `lockstep.extensions`. A program can name
more extensions with `lockstep.main(extensions=[...])`. A config, a run folder or a file in the current folder cannot.
Finding an extension does not import it. It is imported when a config chooses an option that it may have.
"""

import functools
import importlib
import importlib.util
import json
import os
import re
import sys
import tomllib
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config import options
from lockstep.config.options import OBJECTS
from lockstep.config.schema import GLOBAL, GROUPS, RECIPES
from lockstep.core.errors import InputError
from lockstep.core.native_threads import configure_native_threads, is_own_process

_NAME = r"""["']([\w.]+)["']"""
_DECLARED = re.compile(
    rf"^@(?:\w+\.)?option\(\s*{_NAME}(?:,\s*(?:name=)?{_NAME})?,?\s*\)\s*\n(?:@.*\n)*class (\w+)", re.MULTILINE
)
ENTRY_POINTS = "lockstep.extensions"
# The variable that tells the ranks which extensions the program named, and in which folders they are.
VARIABLE = "LOCKSTEP_EXTENSIONS"
MAIN = "__main__"  # the module of a script, or of the cells of a notebook
OBJECT = "object"  # `model=object` stands for an object that a program gives to `lockstep.train`
OBJECT_CLASSES = {"model": "ModelObject", "dataset": "DatasetObject", "loss": "LossObject"}
# What a program types to give an object of a group.
_ARGUMENTS = {"model": "model={}(...)", "dataset": "dataset=lockstep.dataset(...)", "loss": "loss={}"}


@dataclass(frozen=True)
class Extension:
    """A package with options. `origin` says why it is an extension: who installed it, or which program named it."""

    package: str
    origin: str
    folder: Path

    @property
    def conf(self) -> Path | None:
        folder = self.folder / "conf"
        return folder if folder.is_dir() else None

    def has(self, module: str) -> bool:
        return module == self.package or module.startswith(f"{self.package}.")

    def load(self, module: str = "") -> None:
        """Import the package, or one of its modules. Raises InputError if that fails, or an option is invalid."""
        name = module or self.package
        if is_own_process():
            configure_native_threads()  # before the extension imports NumPy: its threads would prevent forking ranks
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
        """The file and line of the extension where an error occurred; its folder if the error is in other code."""
        if isinstance(error, SyntaxError):
            return f"{error.filename}:{error.lineno}"
        frames = traceback.extract_tb(error.__traceback__)
        own_frames = [frame for frame in frames if Path(frame.filename).is_relative_to(self.folder)]
        return f"{own_frames[-1].filename}:{own_frames[-1].lineno}" if own_frames else str(self.folder)

    def option_names(self) -> list[tuple[str, str]]:
        """The group and the name of each option, read from the files, as importing the package takes seconds."""
        in_files = [(group, name) for group, _, name in (option.partition("=") for option, _ in _configs(self))]
        return [*dict.fromkeys([*self.declaring_files(), *in_files])]

    def declaring_files(self) -> dict[tuple[str, str], Path]:
        """The file that declares a class as an option, by its group and name."""
        files = sorted(self.folder.rglob("*.py"))
        matches = [(*match, file) for file in files for match in _DECLARED.findall(file.read_text())]
        return {(group, name or options.name_from(cls)): at for group, name, cls, at in matches if group in GROUPS}


def use(packages: Sequence[str]) -> None:
    """Register packages as extensions of this program and of the ranks that it starts."""
    _of_program()
    named = [_locate(package, f"named by {Path(sys.argv[0]).name}") for package in packages]
    if named:
        os.environ[VARIABLE] = json.dumps({extension.package: str(extension.folder.parent) for extension in named})
    active.cache_clear()


def _of_program() -> list[str]:
    """The extensions that the program named. Its ranks and jobs lack its import path, and get it."""
    folders: dict[str, str] = json.loads(os.environ.get(VARIABLE, "{}"))
    sys.path += [parent for package, parent in folders.items() if importlib.util.find_spec(package) is None]
    return [*folders]


@functools.cache
def active() -> tuple[Extension, ...]:
    """All extensions. Raises InputError if one is not found, or has a config in no group or with a taken name.

    An installed one that shares a name with an extension of the program is left out: in an environment with several
    projects, each project's `train.py` has its own `experiment=first`.
    """
    named = [_locate(package, "named by the program") for package in _of_program()]
    installed = _installed()
    taken = {option for extension in named for option in extension.option_names() if installed}
    others = [other for other in installed if not taken or taken.isdisjoint(other.option_names())]
    extensions = {extension.package: extension for extension in (*others, *named)}
    owner: dict[str, Extension] = {}
    for extension in extensions.values():
        for option, file in _configs(extension):
            if option in owner:
                raise InputError(
                    f"{file}: {option} is an option of {owner[option].package} too; rename one of them, or use the "
                    "train.py of one project, whose own options win"
                )
            owner[option] = extension
    return tuple(extensions.values())


def import_extension(module: str) -> bool:
    """Import a module of an extension, which declares its options; returns whether there is such a module."""
    extension = next((extension for extension in active() if extension.has(module)), None)
    if extension is None:
        return False
    extension.load()
    with suppress(ImportError):
        if importlib.util.find_spec(module) is not None:
            extension.load(module)
            return True
    return False


def not_installed() -> str:
    """A sentence about the project of the current folder, if it is no extension of this command; empty without one.

    Nobody may name code by a file of the current folder: it can be somebody else's.
    """
    try:
        entries = tomllib.loads(Path("pyproject.toml").read_text())["project"]["entry-points"][ENTRY_POINTS]
        packages = {*map(str, entries.values())} - {extension.package for extension in active()}
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return ""
    named = ", ".join(sorted(packages))
    way = "use python train.py, or pip install -e ."
    return f" The package {named} of this folder is not installed: {way}" if packages else ""


def classes_of_user(group: str) -> dict[str, type[Any]]:
    """The user's classes of a group by the names of their options: of extensions, and those of this program."""
    for extension in active():
        extension.load()
    return {name: cls for name, cls in options.declared(group).items() if not options.is_ours(cls)}


def of_objects(group: str) -> dict[str, type[Any]]:
    """The class that stands for an object of a group, by its name; none for a group whose parts are options alone."""
    return {OBJECT: vars(importlib.import_module(OBJECTS))[OBJECT_CLASSES[group]]} if group in OBJECT_CLASSES else {}


def is_object(option: Any) -> bool:
    """Whether an option stands for an object that a program gives to `lockstep.train`."""
    return type(option).__module__ == OBJECTS


def arguments_of(parts: Mapping[str, Any]) -> list[str]:
    """What a program types to give the objects of options, by group."""
    return [text.format(parts[group].type) for group, text in _ARGUMENTS.items() if is_object(parts.get(group))]


def is_importable(cls: type[Any]) -> bool:
    """Whether another process can import the class of an option: it is ours, or an extension's."""
    return options.is_ours(cls) or any(extension.has(cls.__module__) for extension in active())


def of_program() -> dict[tuple[str, str], type[Any]]:
    """The classes of options that this program itself declares, outside of extensions, by group and name."""
    classes = {(group, name): cls for group in GROUPS for name, cls in options.declared(group).items()}
    return {key: cls for key, cls in classes.items() if not is_importable(cls)}


def files(option: str) -> list[Path]:
    """The config file of an option `GROUP=NAME` of an extension; empty if none has it."""
    return [file for extension in active() for name, file in _configs(extension) if name == option]


def own_groups() -> dict[str, list[str]]:
    """The groups that extensions have beside Lockstep's own, with the names of their options."""
    groups = dict[str, list[str]]()
    for option, _ in (entry for extension in active() for entry in _configs(extension)):
        group, _, name = option.partition("=")
        if group not in (*GROUPS, RECIPES):
            groups.setdefault(group, []).append(name)
    return groups


def named_extensions() -> str:
    return ", ".join(f"{extension.package} ({extension.origin})" for extension in active()) or "none"


def _installed() -> list[Extension]:
    """The installed packages with our entry point. Reads the files first: `importlib.metadata` takes 30 ms."""
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
            "remove it"
        )
    return Extension(package, origin, Path(spec.submodule_search_locations[0]))


def _configs(extension: Extension) -> list[tuple[str, Path]]:
    configs = []
    groups = [*GROUPS, RECIPES]
    files = sorted(extension.conf.rglob("*.yaml")) if extension.conf else []
    own = {file.parent for file in files if GLOBAL.encode() in file.read_bytes()}  # one of its files says what it is
    for file in files:
        group, name = file.parent.relative_to(extension.folder / "conf").as_posix(), file.stem
        if group not in groups and not (options.can_be_group(group) and file.parent in own):
            known = options.known(group, groups)
            raise InputError(
                f"{file}: {group!r} is not a config group; put it into conf/GROUP/NAME.yaml, or begin it with "
                f"the line `{GLOBAL}` if it sets keys of the job.{known}"
            )
        if options.is_builtin(group, name):
            raise InputError(f"{file}: {group}={name} is an option of Lockstep; rename the file")
        configs.append((f"{group}={name}", file))
    return configs


def class_of(group: str, target: object, key: str = "") -> type[Any]:
    """The class that a node of `group` names. Raises InputError if it is not an option of the group."""
    module, _, name = str(target).rpartition(".")
    if module == GROUPS[group]:
        importlib.import_module(options.modules_of(group).get(name, module))
    else:
        import_extension(module)
    for cls in {**options.declared(group), **(of_objects(group) if module == OBJECTS else {})}.values():
        if options.class_path(cls) == target:
            return cls
    raise InputError(
        f"{key or group}._target_ is {target!r}, expected a class of {GROUPS[group]}; choose one with "
        f"{group}=NAME, or install the extension that has it (extensions here: {named_extensions()})"
    )
