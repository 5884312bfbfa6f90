"""The data and the number of threads of a run, for commands that use its trained model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lockstep.config import components, composition, yaml_io
from lockstep.config.invocation import ConfigFiles
from lockstep.config.messages import key_of
from lockstep.core.data_protocols import Source
from lockstep.core.errors import InputError
from lockstep.core.run_dir import RunDir
from lockstep.runtime.host import cores

KEYS = ("dataset", "data_root")  # what an override may change


def data_of(run: RunDir | None, overrides: Sequence[str]) -> Source:
    """The data of a run, changed by the overrides; without a run, the data of the overrides.

    A data set that only the run folder names is not downloaded, because somebody else may have written the folder.

    Raises:
        InputError: an override changes another key, or is wrong; or there is neither a run nor `dataset=`.
    """
    for override in overrides:
        if key_of(override).partition(".")[0] not in KEYS:
            raise InputError(
                f"{override}: an evaluation takes other data only, such as dataset.path=FOLDER; leave it out"
            )
    if run is not None and not overrides:
        run_data: Source = components.build("dataset", yaml_io.load(run.config).get("dataset"))
        return run_data
    has_dataset = any(key_of(override) == "dataset" for override in overrides)
    if run is None and not has_dataset:
        raise InputError("a file of weights does not say where data is; name it: dataset=folder dataset.path=FOLDER")
    keys = ("data_root",) if has_dataset else (*KEYS, "experiment")
    stored = yaml_io.load_list(run.overrides) if run is not None else []
    stored_data = [override for override in stored if key_of(override).partition(".")[0] in keys]
    with composition.composing():
        config = composition.recompose([*stored_data, "name=evaluate"], tuple(overrides), ConfigFiles())
        values = composition.to_dict(config)
    source: Source = components.build("dataset", values["dataset"])
    source.prepare()
    return source


def take_threads(run: RunDir) -> None:
    """Compute with the number of threads of the run: the last bits of a sum depend on it."""
    threads = components.build("launcher", yaml_io.load(run.config).get("launcher")).threads
    if isinstance(threads, int):
        torch.set_num_threads(min(threads, cores()))
