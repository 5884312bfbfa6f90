"""The configuration: its schema, and its way from Hydra into plain typed objects.

Hydra and OmegaConf end here: the rest of the package sees a `Job`, whose groups are built components.
This module imports no torch, so that composing a config stays fast. It chooses nothing: what `auto` becomes
is decided in `lockstep.resolve`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from lockstep import fields, hydra_policy
from lockstep.errors import InputError, did_you_mean
from lockstep.fields import LONGEST, Text, choice, duration, pathname, ranged, ruled
from lockstep.files import read_yaml, with_checksum
from lockstep.refusals import UNEXPECTED, check_word, key_of, sentence, unreadable

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

# The components built so far: frozen values, of which the jobs of a sweep have most in common.
_MADE: dict[tuple[type[Any], str], Any] = {}


@dataclass
class TrainBlock:
    """`train.*`: how a step is made of a global batch."""

    micro_batches: int | str = ranged(1, least=1, most=1_000_000, words=("auto",))
    label_smoothing: float = ranged(0.0, least=0, below=1)
    mixup: float = ranged(0.0, least=0, most=1000)
    cutmix: float = ranged(0.0, least=0, most=1000)
    cutout: int = ranged(0, least=0, most=16_384)
    clip_norm: float | None = ranged(None, above=0.0, most=1e12)
    ema: float | None = ranged(None, above=0.0, below=1)
    eval_every: int | str = duration("1ep")
    eval_batch: int = ranged(256, least=1, most=1_000_000)
    eval_views: int = choice(1, 1, 2, 6)
    cudnn_benchmark: bool = False


@dataclass
class CheckpointBlock:
    """`checkpoint.*`: when a checkpoint is written and how many are kept."""

    every: int | str = duration("1ep", timed=True)
    keep: int = ranged(3, least=1, most=1_000_000)
    keep_best: int = ranged(1, least=1, most=1_000_000)


@dataclass
class TelemetryBlock:
    """`telemetry.*`: what is measured and written while training."""

    interval: int | str = duration(20)
    tensorboard: bool = True
    gpu: bool = True
    samples: bool = False


@dataclass
class Job:
    """One training run as the user composed it. After `build`, each group holds its built component."""

    epochs: int = ranged(20, least=1, most=LONGEST)
    steps: int | None = ranged(None, least=1, most=LONGEST)
    batch: int | str = ranged(64, least=1, most=LONGEST, words=("auto",))
    seed: int = ranged(0, least=0, most=2**63 - 1)
    repro: str = choice("exact", "exact", "strict")
    device: str = choice("auto", "auto", "cpu", "cuda")
    name: str = ruled("job", Text())
    data_root: str = pathname("data")
    output_root: str = pathname("outputs")
    resume: str | None = pathname(None)
    init_from: str | None = pathname(None)
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
class ConfigFiles:
    """Where a command has its config from, if not from the project's own: without it its overrides mean nothing.

    Fields:
        name: of the primary config.
        folder: a further one, of `--config-dir`.
        searchpath: the override of `hydra.searchpath`.
    """

    name: str = "config"
    folder: str = ""
    searchpath: tuple[str, ...] = ()

    @classmethod
    def current(cls) -> ConfigFiles:
        """Those of the job that Hydra is running right now."""
        hydra = HydraConfig.get()
        added = [each.path for each in hydra.runtime.config_sources if each.provider == "command-line"]
        return cls(
            name=str(hydra.job.config_name),
            folder=added[0].removeprefix("file://") if added else "",
            searchpath=tuple(str(each) for each in hydra.overrides.hydra if key_of(each) == "hydra.searchpath"),
        )

    @property
    def words(self) -> tuple[str, ...]:
        """What a command line says to have them."""
        name = (f"--config-name={self.name}",) if self.name != ConfigFiles.name else ()
        folder = (f"--config-dir={self.folder}",) if self.folder else ()
        return (*name, *folder, *self.searchpath)


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """How the command line asked for a job: what Hydra knows and a rank must not have to ask for."""

    overrides: tuple[str, ...]
    command: str
    sweep: bool
    number: int
    folder: Path | None
    hydra: str
    configs: ConfigFiles = ConfigFiles()

    @classmethod
    def current(cls) -> Invocation:
        """The invocation of the job that Hydra is running right now.

        Raises:
            InputError: a folder is named that such a job does not use.
        """
        hydra = HydraConfig.get()
        sweep = hydra.mode == RunMode.MULTIRUN
        ignored, used = ("run", "sweep") if sweep else ("sweep", "run")
        for text in map(str, hydra.overrides.hydra):
            if key_of(text).startswith(f"hydra.{ignored}."):
                raise InputError(
                    f"{text} has no effect {'with' if sweep else 'without'} -m; name a folder with "
                    f"hydra.{used}.dir=FOLDER"
                )
        configs = ConfigFiles.current()
        folder = Path(hydra.sweep.dir, hydra.sweep.subdir) if sweep else Path(hydra.run.dir)
        overrides = tuple(str(each) for each in hydra.overrides.task)
        return cls(
            overrides=overrides,
            command=shlex.join(["python", "train.py", *configs.words, *overrides]),
            sweep=sweep,
            number=int(hydra.job.num) if sweep else 0,
            folder=folder.absolute() if sweep or folder != Path() else None,
            hydra=OmegaConf.to_yaml(HydraConfig.instance().cfg),
            configs=configs,
        )


def register() -> None:
    """Give Hydra the schema of the fixed blocks, so that their errors show while composing.

    A config cannot read the environment, where secrets are: it may be someone else's, and its values are kept.
    """
    hydra_policy.install()
    OmegaConf.clear_resolver("oc.env")
    ConfigStore.instance().store(name="job", node=Job)
    if not OmegaConf.has_resolver("stamp_hex"):
        OmegaConf.register_new_resolver("stamp_hex", lambda: os.urandom(2).hex(), use_cache=True)


def showed_help(program: str) -> bool:
    """Show the help if the command line asks for it; Hydra would look into every config group first (0.3 s).

    Args:
        program: the file beside whose `conf` folder has the text, in `hydra.help.template` of `config.yaml`.
    """
    asked = not {"-h", "--help"}.isdisjoint(sys.argv)
    if asked:
        text = Path(program).with_name("conf").joinpath("config.yaml").read_text()
        sys.stdout.write(yaml.safe_load(text)["hydra"]["help"]["template"] + "\n")
    return asked


def to_dict(composed: DictConfig) -> dict[str, Any]:
    """The composed config as plain values, every interpolation resolved.

    Raises:
        InputError: a value is missing (`???`) or an interpolation does not resolve.
    """
    try:
        plain = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise InputError(sentence(error)) from error
    except UNEXPECTED as error:
        raise unreadable(error) from error
    assert isinstance(plain, dict)
    for key in (each.name for each in dataclasses.fields(Job)):
        if key not in plain:
            raise InputError(f"{key}: a job cannot do without this key; leave out ~{key}")
        if "${" in repr(plain[key]):  # escaped: the ranks, who read the config from a file, would resolve it
            raise InputError(f"{key} has ${{ in its value, which a config takes for a reference; write it without")
    return {str(key): value for key, value in plain.items()}


def recompose(stored: list[str], overrides: tuple[str, ...], configs: ConfigFiles) -> DictConfig:
    """The config of an earlier command with further overrides behind its own (later ones win), from `configs`.

    Raises:
        InputError: an override of the earlier command is of Hydra itself, which no run keeps.
    """
    for text in stored:
        check_word(text)
        if hydra_policy.is_of_hydra(text):
            raise InputError(f"resume: the run keeps the override {text!r}, expected keys of a job; take it out")
    added = [text for text in overrides if key_of(text) != "resume"]
    try:
        return compose(configs.name, overrides=[*configs.searchpath, *stored, *added], return_hydra_config=False)
    except UNEXPECTED as error:
        raise unreadable(error) from error


def config_words(command: str) -> list[str]:
    """The words of a run's command that say where its config is from, which a resume has to repeat."""
    return [each for each in shlex.split(command) if each.startswith(("--config-", "hydra.searchpath="))]


def locate_in(module: str, name: str) -> type[Any] | None:
    """The public dataclass `name` of a module, if it has one: of its `__all__`, or else its own, not an import."""
    home = importlib.import_module(module)
    found = None if name.startswith("_") else getattr(home, name, None)
    if not isinstance(found, type) or not dataclasses.is_dataclass(found):
        return None
    exported = getattr(home, "__all__", None)
    return found if (found.__module__ == module if exported is None else name in exported) else None


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
        key = (cls, repr(values))
        if key not in _MADE:
            typed = OmegaConf.merge(OmegaConf.structured(cls), values)
            _check_fields(cls, typed, f"{group}.")
            _MADE[key] = OmegaConf.to_object(typed)
        return _MADE[key]
    except ConfigKeyError as error:
        known = [item.name for item in dataclasses.fields(cls)]
        raise InputError(
            f"{group}.{error.key} is not a key of {group}={cls.__name__}; it has {', '.join(known) or 'none'}."
            f"{did_you_mean(str(error.key), known)}"
        ) from error
    except MissingMandatoryValue as error:
        raise InputError(f"{group}.{error.key} has no value; give it one with {group}.{error.key}=...") from error
    except OmegaConfBaseException as error:
        raise InputError(sentence(error, f"{group}.")) from error
    except (OverflowError, RecursionError) as error:
        raise unreadable(error) from error


def _check_fields(cls: type[Any], typed: Any, prefix: str = "") -> None:
    """Raise InputError with a line for each value that is out of its field's range."""
    values = OmegaConf.to_container(typed)
    assert isinstance(values, dict)
    if found := list(fields.problems(cls, {str(key): value for key, value in values.items()}, prefix)):
        raise InputError("\n".join(found))


def build_all(job: Mapping[str, Any]) -> Job:
    """Every group of a plain config built, and all that is wrong with them said at once.

    Raises:
        InputError: one line for each key that does not fit.
    """
    try:
        typed = OmegaConf.merge(_schema(), {key: value for key, value in job.items() if key not in GROUPS})
        blocks = OmegaConf.to_object(typed)
    except OmegaConfBaseException as error:
        raise InputError(sentence(error)) from error
    except (OverflowError, RecursionError) as error:
        raise unreadable(error) from error
    assert isinstance(blocks, Job)
    problems: list[str] = []
    try:
        _check_fields(Job, typed)
    except InputError as error:
        problems.append(str(error))
    for group in GROUPS:
        try:
            setattr(blocks, group, build(group, job.get(group)))
        except InputError as error:
            problems.append(str(error))
    problems = problems or list(fields.wide(job))
    if problems:
        raise InputError("\n".join(problems))
    return blocks


@functools.cache
def _schema() -> Any:
    """That of a job, made once: it takes longer than what is checked by it."""
    return OmegaConf.structured(Job)


def composed(folder: Path, overrides: list[str]) -> dict[str, Any]:
    """The config that `train.py` would compose from the groups in `folder`, as plain values, outside of Hydra.

    Raises:
        InputError: an override does not fit.
    """
    register()
    with initialize_config_dir(str(folder), version_base="1.3"):
        return to_dict(compose("config", overrides=overrides))


def node(component: Any) -> dict[str, Any]:
    """The node that `build` would make `component` from."""
    cls = type(component)
    module = next(module for module in GROUPS.values() if locate_in(module, cls.__name__) is cls)
    fields = OmegaConf.to_container(OmegaConf.structured(component), enum_to_str=True)
    assert isinstance(fields, dict)
    return {"_target_": f"{module}.{cls.__name__}", **{str(key): value for key, value in fields.items()}}


def dump(job: Mapping[str, Any]) -> str:
    """A plain config as YAML, with its sha256."""
    return with_checksum(OmegaConf.to_yaml(OmegaConf.create(dict(job))))


def load(path: Path) -> dict[str, Any]:
    """A run folder's `config.yaml` as plain values.

    Raises:
        InputError: the file is missing or is not a config.
    """
    loaded = read_yaml(path)
    if not isinstance(loaded, dict) or not loaded or "${" in str(loaded):
        raise InputError(f"{path} is not a config of a run: expected keys and their resolved values")
    return loaded


def dump_list(items: list[str]) -> str:
    """A list of strings as YAML, with its sha256."""
    return with_checksum(OmegaConf.to_yaml(OmegaConf.create(items)))


def load_list(path: Path) -> list[str]:
    """The overrides that a run folder keeps in `.hydra/overrides.yaml`.

    Raises:
        InputError: the file is missing or is not a list of texts.
    """
    loaded = read_yaml(path)
    if not isinstance(loaded, list) or not all(isinstance(item, str) for item in loaded):
        raise InputError(f"{path} is not a list of overrides: expected KEY=VALUE in each line")
    return loaded
