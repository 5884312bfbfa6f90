"""The command line of a job, as plain values from Hydra."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from lockstep.config.commands import program_words, shell_command
from lockstep.config.messages import key_of
from lockstep.core.errors import InputError


@dataclass(frozen=True, kw_only=True)
class ConfigFiles:
    """The config files that a command named besides the project's own. A resume needs them to compose again.

    Fields:
        name: the name of the primary config.
        folder: the folder of `--config-dir`; empty without this option.
    """

    name: str = "config"
    folder: str = ""
    searchpath: tuple[str, ...] = ()

    @classmethod
    def current(cls) -> ConfigFiles:
        """The files of the job that Hydra is running."""
        hydra = HydraConfig.get()
        added = [source.path for source in hydra.runtime.config_sources if source.provider == "command-line"]
        return cls(
            name=str(hydra.job.config_name),
            folder=added[0].removeprefix("file://") if added else "",
            searchpath=tuple(
                str(override) for override in hydra.overrides.hydra if key_of(override) == "hydra.searchpath"
            ),
        )

    @property
    def words(self) -> tuple[str, ...]:
        name = (f"--config-name={self.name}",) if self.name != ConfigFiles.name else ()
        folder = (f"--config-dir={self.folder}",) if self.folder else ()
        return (*name, *folder, *self.searchpath)


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """The command line of a job.

    Fields:
        overrides: the overrides of the job's keys.
        command: the whole command, quoted for a shell.
        folder: the run folder, if the sweep or the command names it.
        hydra: Hydra's own config as YAML.
        configs: the config files that the command names.
    """

    overrides: tuple[str, ...]
    command: str
    sweep: bool
    folder: Path | None
    hydra: str
    configs: ConfigFiles = ConfigFiles()

    @classmethod
    def current(cls) -> Invocation:
        """The invocation of the job that Hydra is running.

        Raises:
            InputError: the command line names a folder that a job of this kind does not use.
        """
        hydra = HydraConfig.get()
        sweep = hydra.mode == RunMode.MULTIRUN
        check_hydra_overrides(hydra.overrides.hydra, sweep=sweep)
        configs = ConfigFiles.current()
        folder = Path(hydra.sweep.dir, hydra.sweep.subdir) if sweep else Path(hydra.run.dir)
        typed_here = any(key_of(str(word)) == "hydra.run.dir" for word in hydra.overrides.hydra)  # the current folder
        overrides = tuple(str(override) for override in hydra.overrides.task)
        return cls(
            overrides=overrides,
            command=shell_command([*program_words(), *configs.words, *overrides]),
            sweep=sweep,
            folder=folder.absolute() if sweep or folder != Path() or typed_here else None,
            hydra=OmegaConf.to_yaml(HydraConfig.instance().cfg),
            configs=configs,
        )


def check_hydra_overrides(overrides: Iterable[object], *, sweep: bool) -> None:
    """Refuse an override of Hydra that a command of this kind does not use: for a folder, a sweeper or a launcher."""
    ignored, used = ("run", "sweep") if sweep else ("sweep", "run")
    for text in map(str, overrides):
        key, remedy = key_of(text), f"name a folder with hydra.{used}.dir=FOLDER"
        if not sweep and re.match(r"hydra[./](sweeper|launcher)\b", key):
            remedy = "add -m, or leave it out"
        elif not key.startswith(f"hydra.{ignored}."):
            continue
        raise InputError(f"{text} has no effect {'with' if sweep else 'without'} -m; {remedy}")


def repeated_words(command: str) -> list[str]:
    """The words of a run's command that a resume must repeat: the program, and those that name config files."""
    words = shlex.split(command)
    return words[:2] + [word for word in words if word.startswith(("--config-", "hydra.searchpath="))]
