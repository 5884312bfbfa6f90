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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml
from hydra import compose
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, Node, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

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

    interval: int | str = 20
    tensorboard: bool = True
    gpu: bool = True


@dataclass
class Job:
    """One training run as the user composed it. After `build`, each group holds its built component."""

    epochs: int = 20
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
        folder = Path(hydra.sweep.dir, hydra.sweep.subdir) if sweep else Path(hydra.run.dir)
        overrides = tuple(str(each) for each in hydra.overrides.task)
        return cls(
            overrides=overrides,
            command=shlex.join(["python", "train.py", *overrides]),
            sweep=sweep,
            number=int(hydra.job.num) if sweep else 0,
            folder=folder.absolute() if sweep or folder != Path() else None,
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
    for key in (each.name for each in dataclasses.fields(Job)):
        if key not in plain:
            raise InputError(f"{key}: a job cannot do without this key; leave out ~{key}")
    return {str(key): value for key, value in plain.items()}


def recompose(stored: list[str], overrides: tuple[str, ...]) -> DictConfig:
    """The config of an earlier command with further overrides behind its own (later ones win)."""
    added = [text for text in overrides if not text.startswith(("resume=", "+resume="))]
    return compose("config", overrides=[*stored, *added], return_hydra_config=False)


def locate_in(module: str, name: str) -> type[Any] | None:
    """The public dataclass `name` of a module, if it has one: of its own, not one that it merely imports."""
    home = importlib.import_module(module)
    found = None if name.startswith("_") else getattr(home, name, None)
    if not isinstance(found, type) or not dataclasses.is_dataclass(found):
        return None
    return found if found.__module__ == module or name in getattr(home, "__all__", ()) else None


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
        raise InputError(_sentence(error, f"{group}.")) from error


def build_all(job: Mapping[str, Any]) -> Job:
    """Every group of a plain config built, and all that is wrong with them said at once.

    Raises:
        InputError: one line for each key that does not fit.
    """
    try:
        blocks = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Job), dict(job)))
    except OmegaConfBaseException as error:
        raise InputError(_sentence(error)) from error
    assert isinstance(blocks, Job)
    problems: list[str] = []
    for group in GROUPS:
        try:
            setattr(blocks, group, build(group, job.get(group)))
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
    loaded = _read(path)
    if not isinstance(loaded, dict):
        raise InputError(f"{path} is not a config of a run: expected keys and values")
    return {str(key): value for key, value in loaded.items()}


def dump_list(items: list[str]) -> str:
    """A list of strings as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(items))


def load_list(path: Path) -> list[str]:
    """The overrides that a run folder keeps in `.hydra/overrides.yaml`."""
    return [str(item) for item in _read(path)]


def _read(path: Path) -> Any:
    try:
        return OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise InputError(f"{path} cannot be read as a config: {' '.join(str(error).split())}") from error


class PastHydra(BaseException):
    """What a job raised, on its way past Hydra, which adds a line of its own to an `Exception`."""

    def __init__(self, error: Exception) -> None:
        self.error = error


@contextmanager
def past_hydra() -> Iterator[None]:
    """Wrap what a job raises for `command_line` to unwrap: all else that arrives there is of the command line."""
    try:
        yield
    except Exception as error:
        raise PastHydra(error) from error


@contextmanager
def command_line() -> Iterator[None]:
    """End the program as a user expects: one sentence and the right exit code, no traceback for a mistake.

    Hydra formats its own errors and leaves with 1 for all of them; asked for a full error it passes them on,
    which is what is done here, so that they can be translated. HYDRA_FULL_ERROR=1 still shows everything.
    """
    full = os.environ.get("HYDRA_FULL_ERROR", "0") not in ("", "0")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    # Hydra's argparse refuses overrides on both sides of a flag: `model=resnet18 -m seed=1,2`.
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda each: each not in ("-m", "--multirun"))
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    except PastHydra as passed:
        _end(passed.error, translate(passed.error), full)
    except Exception as error:
        _end(error, translate(error) or translate_before_job(error), full)


def _end(error: Exception, shown: LockstepError | None, full: bool) -> NoReturn:
    if full or shown is None:
        traceback.print_exception(error)
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
    if isinstance(error, OverrideParseException):
        return InputError(
            f"{error.override!r} cannot be read, expected KEY=VALUE; a value with spaces, commas or brackets of "
            f"its own needs quotes that reach the program: \"KEY='a, b'\""
        )
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return InputError(_no_such_file(error.missing_cfg_file, list(error.options or [])))
    where, cause = "", error.__cause__ or error.__context__
    if found := re.match(r"In '([^']+)': \w+ raised while composing", str(error)):
        where = f"{found[1]}.yaml: "
    for each in (cause, error):
        if isinstance(each, OmegaConfBaseException):
            return InputError(where + _sentence(each))
    if found := re.match(r"Ambiguous value for argument '(([^=]+)=(.*))'", str(error)):
        return InputError(
            f"{found[1]} names several values; `python train.py -m {found[1]}` runs a sweep over them, and a list "
            f"is written {found[2]}=[{found[3]}]"
        )
    if isinstance(error, HydraException):
        return InputError(" ".join(str(error).partition("To append to your")[0].split()))
    return None


def translate_before_job(error: Exception) -> LockstepError | None:
    """What Hydra raises as it comes, before there is a job: a group without a name, a folder it cannot make."""
    if isinstance(error, OSError) and error.filename:
        return InputError(
            f"{error.filename} cannot be written ({error.strerror}); choose another folder with output_root=FOLDER"
        )
    if isinstance(error, yaml.YAMLError):
        return InputError(f"a config file is not YAML: {' '.join(str(error).split())}")
    if isinstance(error, ValueError) and "Config group override" in str(error):
        return InputError("a config group takes the name of one of its options: GROUP=NAME, such as model=resnet18")
    return None


def _no_such_file(path: str, options: list[str]) -> str:
    """Which option of which group there is none of, and which was meant."""
    group, _, name = path.removesuffix(".yaml").rpartition("/")
    if not group:
        return f"there is no config named {name!r}; leave out --config-name for the default one"
    few = f" It is one of {', '.join(options)}." if 0 < len(options) <= 20 else ""
    meant = did_you_mean(name, options) or few or " `python train.py --help` shows the groups."
    return f"{group}={name}: there is no {group} of that name.{meant}"


# OmegaConf's messages, and what is said instead: what was found, what was expected, an override that would do.
_MESSAGES = (
    (r"Value '(.*)' of type .* could not be converted to Integer", "is '{0}', expected a whole number: {key}=10"),
    (r"Value '(.*)' of type .* could not be converted to Float", "is '{0}', expected a number: {key}=0.1"),
    (r"Value '(.*)' is not a valid bool", "is '{0}', expected true or false: {key}=true"),
    (r"Value '(.*)' of type .* 'Union\[int, str\]'", "is '{0}', expected a number or a word: {key}=1"),
    (r"Cannot convert '\w+' to string: '(.*)'", "is '{0}', expected a text: {key}=TEXT"),
    (r"Invalid value '(.*)', expected one of \[((\w+).*)\]", "is '{0}', expected one of {1}: {key}={2}"),
    (r"field '.*' is not Optional|Incompatible value 'None'", "is null, expected a value: {key}=VALUE"),
    (r"Invalid value assigned: \w+ is not a ListConfig", "is not a list, expected {key}=[VALUE,VALUE]"),
    (r"Invalid type assigned: .* value: (.*)", "is {0}, expected keys below it: {key}.KEY=VALUE"),
)


def _sentence(error: OmegaConfBaseException, prefix: str = "") -> str:
    """OmegaConf's message as one line: the key (behind `prefix`), what was found, what was expected, a remedy."""
    key = f"{prefix}{error.full_key or error.key or ''}"
    message = (error.msg or str(error)).splitlines()[0]
    if isinstance(error, MissingMandatoryValue):
        return f"{key} has no value; give it one with {key}=VALUE"
    if isinstance(error, (ConfigKeyError, ConfigAttributeError)) and error.parent_node is not None:
        return _no_such_key(key, _keys(error.parent_node))
    for pattern, words in _MESSAGES:
        if found := re.match(pattern, message):
            return f"{key} {words.format(*found.groups(), key=key)}"
    return f"{key}: {message}" if key and not message.startswith(f"{key}:") else message


def _keys(inside: Node) -> list[str]:
    """The dotted path of every key of the config that `inside` is part of."""
    plain = OmegaConf.to_container(inside._get_root(), resolve=False)
    return list(_paths(plain))


def _paths(node: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield f"{prefix}{key}"
            yield from _paths(value, f"{prefix}{key}.")


def _no_such_key(key: str, known: Iterable[str]) -> str:
    """That there is no `key`, and which of the `known` ones was meant."""
    block, _, last = key.rpartition(".")
    ours = [each for each in known if each.startswith("hydra.") == key.startswith("hydra.")]
    inside = [each for each in ours if each.rpartition(".")[0] == block and not each.endswith("._target_")]
    # A key without its block (`lr`), or in a misspelt one: the same last part is what was meant.
    same = [each for each in ours if each.rpartition(".")[2] == last][:3]
    if block and inside:
        names = [each.rpartition(".")[2] for each in inside]
        hint = did_you_mean(last, names, prefix=f"{block}.") or f" {block} has {', '.join(names)}."
    elif same:
        hint = f" Did you mean {', '.join(map(repr, same))}?"
    else:
        hint = did_you_mean(key, ours)
    return f"{key}: there is no such key in the config.{hint or ' `python train.py --cfg job` shows them all.'}"
