"""Has Hydra compose the config of a job once.

Hydra composes it first to see whether the config itself asks for a sweep (`hydra.mode`), and once more to run it.
A composition takes longer than any other part of a short job's start.
"""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import Any

from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from lockstep.config.hydra_policy import CheckedLoader
from lockstep.core.errors import InputError

RUN = "hydra.mode=RUN"  # what Hydra adds to the overrides of a job that is no sweep


def install() -> None:
    """Have Hydra compose with `LoaderOfOneConfig`."""
    application: Any = importlib.import_module("hydra._internal.hydra")
    application.ConfigLoaderImpl = LoaderOfOneConfig


class LoaderOfOneConfig(CheckedLoader):
    """Returns the config in which Hydra looked for the mode again when Hydra asks for that of the run."""

    first: tuple[str | None, list[str], DictConfig] | None = None  # with the overrides of the run

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        if run_mode == RunMode.MULTIRUN and not validate_sweep_overrides:  # Hydra looks for the mode
            # A sweep may leave a group to its jobs; then this fails, and what Hydra asks for is composed below.
            with suppress(HydraException, OmegaConfBaseException, InputError):
                composed = super().load_configuration(config_name, overrides, RunMode.RUN, from_shell, False)
                self.first = (config_name, [*overrides, RUN], composed)
                return composed
        elif run_mode == RunMode.RUN and self.first is not None and self.first[:2] == (config_name, overrides):
            composed = self.first[2]
            self.first = None  # its job may change it
            self.validate_sweep_overrides_legal(self._parsed, run_mode, from_shell)
            composed.hydra.mode = run_mode
            composed.hydra.overrides.hydra.append(RUN)
            return composed
        return super().load_configuration(config_name, overrides, run_mode, from_shell, validate_sweep_overrides)
