"""Make Hydra compose the config of a job once instead of twice.

Hydra first composes the config to see whether it asks for a sweep (`hydra.mode`), and then again to run the job.
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

RUN = "hydra.mode=RUN"  # Hydra adds it to the overrides of a job that is not a sweep


def install() -> None:
    """Have Hydra compose with `LoaderOfOneConfig`."""
    application: Any = importlib.import_module("hydra._internal.hydra")
    application.ConfigLoaderImpl = LoaderOfOneConfig


class LoaderOfOneConfig(CheckedLoader):
    """Keeps the config that Hydra composes to find the mode, and returns it when Hydra asks for the run's config."""

    first: tuple[str | None, list[str], DictConfig] | None = None  # config name, overrides of the run, config

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        if run_mode == RunMode.MULTIRUN and not validate_sweep_overrides:  # Hydra composes to find the mode
            # Composing a sweep as one job fails if only the sweep sets a group. Hydra's own request follows below.
            with suppress(HydraException, OmegaConfBaseException, InputError):
                composed = super().load_configuration(config_name, overrides, RunMode.RUN, from_shell, False)
                self.first = (config_name, [*overrides, RUN], composed)
                return composed
        elif run_mode == RunMode.RUN and self.first is not None and self.first[:2] == (config_name, overrides):
            composed = self.first[2]
            self.first = None  # the job may change its config, so nobody may get it again
            self.validate_sweep_overrides_legal(self._parsed, run_mode, from_shell)
            composed.hydra.mode = run_mode
            composed.hydra.overrides.hydra.append(RUN)
            return composed
        return super().load_configuration(config_name, overrides, run_mode, from_shell, validate_sweep_overrides)
