"""The configuration: its schema, its errors, and its way from Hydra into plain typed objects.

Hydra and OmegaConf end here: the rest of the package sees a `Job`, whose groups are built components.
This module imports no torch, so that composing a config stays fast. It chooses nothing: what `auto` becomes
is decided in `lockstep.resolve`.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import shlex
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from lockstep.errors import InputError, LockstepError, RankFailed, did_you_mean

# Where the classes of each config group live. A node's `_target_` has to be a dataclass of exactly that
# module: a config can come from someone else's run folder, and must not be able to name arbitrary code.
GROUPS: Mapping[str, str] = {
    "model": "lockstep.models",
    "dataset": "lockstep.data.sources",
    "loader": "lockstep.data.loader",
    "augment": "lockstep.data.augment",
    "strategy": "lockstep.strategy",
    "precision": "lockstep.precision",
    "launcher": "lockstep.launcher",
    "optimizer": "lockstep.optim",
    "schedule": "lockstep.schedule",
}


@dataclass
class TrainBlock:
    """`train.*`: how a step is made of a global batch."""

    micro_batches: int = 1
    label_smoothing: float = 0.0
    clip_norm: float | None = None
    ema: float | None = None
    eval_every: int | str = "1ep"
    eval_batch: int = 256


@dataclass
class CheckpointBlock:
    """`checkpoint.*`: when a checkpoint is written and how many are kept."""

    every: int | str = "1ep"
    keep: int = 3


@dataclass
class TelemetryBlock:
    """`telemetry.*`: what is measured and written while training."""

    interval: int | str = 50
    tensorboard: bool = True
    gpu: bool = True


@dataclass
class Job:
    """One training run as the user composed it. After `build`, each group holds its built component."""

    epochs: int = 10
    steps: int | None = None
    batch: int = 64
    seed: int = 0
    device: str = "auto"
    name: str = "job"
    data_root: str = "data"
    output_root: str = "outputs"
    resume: str | None = None
    init_from: str | None = None
    train: TrainBlock = field(default_factory=TrainBlock)
    checkpoint: CheckpointBlock = field(default_factory=CheckpointBlock)
    telemetry: TelemetryBlock = field(default_factory=TelemetryBlock)
    model: Any = None
    dataset: Any = None
    loader: Any = None
    augment: Any = None
    strategy: Any = None
    precision: Any = None
    launcher: Any = None
    optimizer: Any = None
    schedule: Any = None


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """How the command line asked for a job: what Hydra knows and a rank must not have to ask for."""

    overrides: tuple[str, ...]
    command: str
    sweep: bool
    number: int
    folder: Path | None
    hydra: str

    @classmethod
    def current(cls) -> Invocation:
        """The invocation of the job that Hydra is running right now."""
        hydra = HydraConfig.get()
        sweep = hydra.mode == RunMode.MULTIRUN
        base, chosen = (hydra.sweep.dir, hydra.sweep.subdir) if sweep else (".", hydra.run.dir)
        folder = Path(base, chosen) if sweep or chosen != "." else None
        overrides = tuple(str(each) for each in hydra.overrides.task)
        return cls(
            overrides=overrides,
            command=shlex.join(["python", "train.py", *overrides]),
            sweep=sweep,
            number=int(hydra.job.num) if sweep else 0,
            folder=folder.absolute() if folder else None,
            hydra=OmegaConf.to_yaml(HydraConfig.instance().cfg),
        )


def register() -> None:
    """Give Hydra the schema of the fixed blocks, so that their errors show while composing."""
    ConfigStore.instance().store(name="job", node=Job)
    if not OmegaConf.has_resolver("stamp_hex"):
        OmegaConf.register_new_resolver("stamp_hex", lambda: os.urandom(2).hex(), use_cache=True)


def to_dict(composed: DictConfig) -> dict[str, Any]:
    """The composed config as plain values, every interpolation resolved.

    Raises:
        InputError: a value is missing (`???`) or an interpolation does not resolve.
    """
    try:
        plain = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise InputError(_sentence(error)) from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def recompose(stored: list[str], overrides: tuple[str, ...]) -> DictConfig:
    """The config of an earlier command with further overrides behind its own (later ones win)."""
    added = [text for text in overrides if not text.startswith(("resume=", "+resume="))]
    return compose("config", overrides=[*stored, *added], return_hydra_config=False)


def defaults() -> list[str]:
    """The dotted path of every key of the default config: what a misspelt key may have meant."""
    return list(_paths(OmegaConf.to_container(compose("config"), resolve=False)))


def _paths(node: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield f"{prefix}{key}"
            yield from _paths(value, f"{prefix}{key}.")


def locate_in(module: str, name: str) -> type[Any] | None:
    """The public dataclass `name` of a module, if it has one."""
    found = None if name.startswith("_") else getattr(importlib.import_module(module), name, None)
    return found if isinstance(found, type) and dataclasses.is_dataclass(found) else None


def locate(group: str, target: object) -> type[Any]:
    """The class that a node of `group` names.

    Raises:
        InputError: the target is not a dataclass of the group's own module.
    """
    module, _, name = str(target).rpartition(".")
    if module == GROUPS[group] and (found := locate_in(module, name)) is not None:
        return found
    raise InputError(
        f"{group}._target_ is {target!r}, expected a class of {GROUPS[group]}; choose one with {group}=NAME"
    )


def build(group: str, node: Any) -> Any:
    """The component that a group's node describes: its class is the schema of its fields.

    Raises:
        InputError: an unknown key, or a value of the wrong type or out of range.
    """
    if not isinstance(node, Mapping) or "_target_" not in node:
        raise InputError(f"{group} is {node!r}, expected one of the group's options: {group}=NAME")
    cls = locate(group, node["_target_"])
    values = {key: value for key, value in node.items() if key != "_target_"}
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(cls), values))
    except ConfigKeyError as error:
        known = [item.name for item in dataclasses.fields(cls)]
        raise InputError(
            f"{group}.{error.key} is not a key of {group}={cls.__name__}; it has {', '.join(known) or 'none'}."
            f"{did_you_mean(str(error.key), known)}"
        ) from error
    except MissingMandatoryValue as error:
        raise InputError(f"{group}.{error.key} has no value; give it one with {group}.{error.key}=...") from error
    except OmegaConfBaseException as error:
        raise InputError(f"{group}.{_sentence(error)}") from error


def build_all(job: Mapping[str, Any]) -> Job:
    """Every group of a plain config built, and all that is wrong with them said at once.

    Raises:
        InputError: one line for each key that does not fit.
    """
    blocks = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Job), dict(job)))
    assert isinstance(blocks, Job)
    problems: list[str] = []
    for group in GROUPS:
        try:
            setattr(blocks, group, build(group, job[group]))
        except InputError as error:
            problems.append(str(error))
    if problems:
        raise InputError("\n".join(problems))
    return blocks


def node(component: Any) -> dict[str, Any]:
    """The node that `build` would make `component` from."""
    cls = type(component)
    module = next(module for module in GROUPS.values() if locate_in(module, cls.__name__) is cls)
    fields = OmegaConf.to_container(OmegaConf.structured(component), enum_to_str=True)
    assert isinstance(fields, dict)
    return {"_target_": f"{module}.{cls.__name__}", **{str(key): value for key, value in fields.items()}}


def dump(job: Mapping[str, Any]) -> str:
    """A plain config as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(dict(job)))


def load(path: Path) -> dict[str, Any]:
    """A run folder's `config.yaml` as plain values.

    Raises:
        InputError: the file is missing or is not a config.
    """
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, ValueError, OmegaConfBaseException) as error:
        raise InputError(f"{path} cannot be read as a config: {error}") from error
    if not isinstance(loaded, dict):
        raise InputError(f"{path} is not a config of a run: expected keys and values")
    return {str(key): value for key, value in loaded.items()}


def dump_list(items: list[str]) -> str:
    """A list of strings as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(items))


def load_list(path: Path) -> list[str]:
    """The overrides that a run folder keeps in `.hydra/overrides.yaml`."""
    return [str(item) for item in OmegaConf.to_container(OmegaConf.load(path)) or []]


@contextmanager
def command_line() -> Iterator[None]:
    """End the program as a user expects: one sentence and the right exit code, no traceback for a mistake.

    Hydra formats its own errors and leaves with 1 for all of them; asked for a full error it passes them on,
    which is what is done here, so that they can be translated. HYDRA_FULL_ERROR=1 still shows everything.
    """
    full = os.environ.get("HYDRA_FULL_ERROR", "0") not in ("", "0")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        shown = translate(error)
        if full or shown is None:
            traceback.print_exc()
        if shown is None:
            sys.exit(LockstepError.exit_code)
        say(shown)
        sys.exit(shown.exit_code)


def say(error: LockstepError) -> None:
    """Show an error to the user: its sentence, and the traceback of a rank that failed for another reason."""
    if isinstance(error, RankFailed) and error.details:
        sys.stderr.write(error.details.rstrip() + "\n")
    sys.stderr.write("".join(f"lockstep: {line}\n" for line in str(error).splitlines()))


def translate(error: Exception) -> LockstepError | None:
    """A user's mistake as one of our exceptions; None for what is not one."""
    if isinstance(error, LockstepError):
        return error
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.removesuffix(".yaml").rpartition("/")
        options = list(error.options or [])
        few = f" It is one of {', '.join(options)}." if len(options) <= 20 else ""
        return InputError(
            f"{group}={name}: there is no {group} of that name.{did_you_mean(name, options) or few}"
            + (" `python train.py --help` shows the groups." if not options else "")
        )
    if isinstance(error, (ConfigCompositionException, OmegaConfBaseException, HydraException)):
        text = str(error)
        if found := re.search(r"Could not override '([^']+)'", text):
            key = found[1].split("@")[0]
            return InputError(
                f"{key}: there is no such key in the config.{did_you_mean(key, defaults())}"
                " `python train.py --cfg job` shows them all."
            )
        cause = error.__cause__
        if isinstance(cause, OmegaConfBaseException):
            return InputError(_sentence(cause))
        if isinstance(error, OmegaConfBaseException):
            return InputError(_sentence(error))
        return InputError(" ".join(text.split()))
    return None


def _sentence(error: OmegaConfBaseException) -> str:
    """OmegaConf's message as one line that starts with the key."""
    message = (error.msg or str(error)).splitlines()[0]
    key = error.full_key or error.key
    return f"{key}: {message}" if key and not message.startswith(f"{key}:") else message
