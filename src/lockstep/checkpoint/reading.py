"""The checkpoint that a run resumes from: which one it is, what is in it, or why there is none.

A run that has lost its checkpoints, but not its best weights, must not start again: it would overwrite them.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lockstep.checkpoint import files
from lockstep.checkpoint.state import restore_optimizer
from lockstep.config.commands import override, program_words, shell_command
from lockstep.core import log
from lockstep.core.errors import InputError, first_of
from lockstep.core.model import load_whole
from lockstep.core.run import candidates, read_overrides
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_read import UnreadableFile

MOST_DIFFERENCES = 4  # an error lists at most this many differences between two runs
Say = Callable[[str], None]


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The content of a checkpoint that passed its hashes, on the CPU."""

    path: Path
    facts: dict[str, Any]
    model: dict[str, Tensor]
    ema: dict[str, Tensor] | None
    state: dict[str, Any]


def latest_valid(folder: Path, say: Say = log.warn) -> Path | None:
    """The newest undamaged checkpoint in a `checkpoints` folder; `say` reports each damaged one."""
    checkpoints = candidates(folder)
    for number, path in enumerate(checkpoints, start=1):
        if not (reason := files.find_corruption(path)):
            return path
        next_try = "trying the one before it" if number < len(checkpoints) else "there is none before it"
        say(f"checkpoint {path} is damaged ({reason}); {next_try}")
    return None


def newest_of_run(run_dir: RunDir, say: Say = log.warn) -> Path | None:
    """The newest undamaged checkpoint of a run; None for a run that has not saved any yet. Raises InputError."""
    warnings: list[str] = []
    newest = latest_valid(run_dir.checkpoints, warnings.append)
    saved = (run_dir.weights, run_dir.last, run_dir.best, *run_dir.checkpoints.glob("step-*"))
    if newest is None and any(path.exists() for path in saved):
        raise _all_damaged(run_dir)
    for sentence in warnings:
        say(sentence)
    return newest


def load_newest(run_dir: RunDir, named: Path | None = None) -> LoadedCheckpoint | None:
    """The checkpoint that `newest_of_run` finds, with its warnings and its errors; before a run has any, `named`."""
    if (newest := newest_of_run(run_dir)) is not None:
        return _read(newest)
    return None if named is None else read_checkpoint(named)


def _all_damaged(run_dir: RunDir) -> InputError:
    """The error of a run that has lost its checkpoints: what is damaged, what can still be used, and what to type."""
    checkpoints = candidates(run_dir.checkpoints)
    reasons = [f"{path.name}: {files.find_corruption(path)}" for path in checkpoints]
    reasons = reasons or ["there is no checkpoint left"]
    whole = next((path for path in (*checkpoints, run_dir.path) if files.whole_weights(path)), None)
    usable = f"; {shell_command([override('init_from', whole)])} uses the undamaged weights" if whole else ""
    command = "the command of this run and another hydra.run.dir=FOLDER"
    with suppress(InputError):
        command = shell_command([*program_words(), *read_overrides(run_dir.overrides)])
    return InputError(
        f"resume: no checkpoint in {run_dir.checkpoints} is complete ({'; '.join(reasons)}); nothing was changed; "
        f"put one back, or start over elsewhere with `{command}`{usable}; to start over here, remove the folder"
    )


def read_checkpoint(path: Path) -> LoadedCheckpoint:
    """Read a checkpoint to the CPU. Raises InputError if it is damaged."""
    if reason := files.find_corruption(path):
        raise _damaged(path, reason)
    return _read(path)


def _read(path: Path) -> LoadedCheckpoint:
    """Read a checkpoint whose hashes have been checked."""
    try:
        return LoadedCheckpoint(
            path=path,
            facts=files.read_facts(path),
            model=load_file(path / files.MODEL),
            ema=load_file(path / files.EMA) if files.EMA in files.manifest(path) else None,
            state=files.read_state(path),
        )
    except Exception as error:  # the hashes match, but the files do not load: safetensors raises all kinds
        raise _damaged(path, str(error).partition("\n")[0]) from error


def undamaged_facts(path: Path) -> dict[str, Any]:
    """The facts of a checkpoint. Raises InputError if the checkpoint is damaged."""
    try:
        return files.read_facts(path)
    except ValueError as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, reason: str) -> InputError:
    return InputError(f"resume: checkpoint {path} is damaged ({reason}); name another one")


def check_fingerprint(expected: files.Facts, path: Path) -> files.Facts:
    """The facts of a checkpoint. Raises InputError, with the differences, for another fingerprint than `expected`."""
    facts = undamaged_facts(path)
    if different := describe_differences(expected, facts["identity"]):
        raise InputError(
            f"resume: {path} is a checkpoint of another run ({different}); resume with the same values, "
            "or take only its weights with init_from=PATH"
        )
    return facts


def describe_differences(expected: files.Facts, saved: files.Facts) -> str:
    """The differences between the fingerprints of this run and of a checkpoint: `key: here X, there Y`."""
    here, there = _flattened(expected), _flattened({key: saved.get(key) for key in expected})
    different = [
        f"{key}: here {here.get(key, 'nothing')}, there {there.get(key, 'nothing')}"
        for key in here | there
        if key not in here or key not in there or here[key] != there[key]
    ]
    return "; ".join(first_of(different, MOST_DIFFERENCES))


def _flattened(facts: files.Facts) -> dict[str, Any]:
    """Facts that are not None, with one level of mappings (the files of each class) and lists of texts flattened."""
    flat: dict[str, Any] = {}
    for key, value in facts.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{name}": item for name, item in value.items()}
        elif isinstance(value, list) and any(isinstance(item, str) for item in value):
            flat |= {f"{key}[{number}]": item for number, item in enumerate(value)}
        elif value is not None:
            flat[key] = value
    return flat


def restore_from(
    loaded: LoadedCheckpoint,
    *,
    model: nn.Module,
    ema: AveragedModel | None,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
) -> dict[str, Any]:
    """Load a checkpoint into the parts of a run; returns its progress. Raises InputError if it does not fit."""
    try:
        if ema is not None and "ema_updates" not in loaded.state:
            raise ValueError("it has no averaged weights; use train.ema=null")
        restore_optimizer(optimizer, model, loaded.state["optimizer"])
        load_whole(model, loaded.model)
        if (saved := loaded.state["scaler"]) and (own := scaler.state_dict()):
            # The other entries are options of how the scale grows, not state.
            scaler.load_state_dict({**own, "scale": saved["scale"], "_growth_tracker": saved["_growth_tracker"]})
        if ema is not None:
            ema.n_averaged.fill_(loaded.state["ema_updates"])
            if loaded.ema is not None:
                load_whole(ema.module, loaded.ema)
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(
            f"resume: {loaded.path} does not fit this model ({error}); resume with the values that the run had, or "
            "take only its weights with init_from=PATH"
        ) from error
    return dict(loaded.facts["progress"])


def load_exported(model: nn.Module, file: Path) -> None:
    """Fill `model`, or this rank's parts of it, with the exported weights of its own run. Raises InputError."""
    check_tensors(model, file, "weights")
    load_whole(model, files.load_weights(file))


def check_tensors(model: nn.Module, file: Path, key: str) -> None:
    """Raise InputError if the names or shapes of a file's tensors do not match `model`, before it is read."""
    check_shapes(model, read_header(file, key)[0], file, key)


def check_shapes(
    model: nn.Module, saved: Mapping[str, tuple[int, ...]], file: Path, key: str, leave_out: Sequence[str] = ()
) -> None:
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    names = sorted((own.keys() | saved.keys()) - set(leave_out))
    if different := [name for name in names if own.get(name) != saved.get(name)]:
        examples = ", ".join(f"{name} (here {own.get(name)}, there {saved.get(name)})" for name in different[:3])
        raise InputError(f"{key}: {file} is of another model: {len(different)} tensors differ, e.g. {examples}")


def read_header(file: Path, key: str) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    try:
        return files.header(file)
    except UnreadableFile as error:
        raise InputError(f"{key}: {error}") from error
