"""Reads checkpoints and weights, and restores the parts of a run from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lockstep.checkpoint.optimizer import restore_optimizer
from lockstep.checkpoint.validation import (
    EMA,
    MODEL,
    NAMES,
    Facts,
    damaged,
    find_corruption,
    has_state,
    manifest,
    read_facts,
    read_state,
    sha256,
)
from lockstep.config.commands import override, typed
from lockstep.core.errors import InputError
from lockstep.core.model import head_parameters
from lockstep.core.model_card import METADATA_KEY, ModelCard
from lockstep.core.run_dir import MANIFEST
from lockstep.core.safe_read import UnreadableFile, opened
from lockstep.core.sharding import load_whole

SHOWN = 4  # an error lists at most this many differences between two runs


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The content of a checkpoint that passed its hashes, on the CPU; `run` is the run that it names, if any."""

    path: Path
    run: str | None
    facts: dict[str, Any]
    model: dict[str, Tensor]
    ema: dict[str, Tensor] | None
    state: dict[str, Any]


def load(path: Path) -> LoadedCheckpoint:
    """Read a checkpoint to the CPU.

    Raises:
        InputError: the checkpoint is damaged, or has weights only.
    """
    if reason := find_corruption(path):
        raise damaged(path, reason)
    if not has_state(path):
        raise InputError(
            f"resume: {path} has weights only, because newer checkpoints of its run have the state to resume from; "
            f"begin a new run with its weights: {typed([override('init_from', path)])}"
        )
    return read(path)


def read(path: Path) -> LoadedCheckpoint:
    """Read a checkpoint whose hashes have been checked.

    Raises:
        InputError: the checkpoint cannot be loaded.
    """
    facts = read_facts(path)
    names = facts.pop(NAMES, None)
    try:
        state = read_state(path)
        state.pop(NAMES, None)
        return LoadedCheckpoint(
            path=path,
            run=names and names["run"],
            facts=facts,
            model=load_file(path / MODEL),
            ema=load_file(path / EMA) if EMA in manifest(path) else None,
            state=state,
        )
    except Exception as error:  # the hashes match, but the files do not load: safetensors raises all kinds
        raise damaged(path, str(error).partition("\n")[0]) from error


def difference(expected: Facts, saved: Facts) -> str:
    """The differences between the fingerprints of this run and of a checkpoint: `key: here X, there Y`."""
    here, there = _flattened(expected), _flattened({key: saved.get(key) for key in expected})
    different = [
        f"{key}: here {here.get(key, 'nothing')}, there {there.get(key, 'nothing')}"
        for key in here | there
        if key not in here or key not in there or here[key] != there[key]
    ]
    more = len(different) - SHOWN
    return "; ".join(different[:SHOWN]) + (f"; and {more:,} more" if more > 0 else "")


def _flattened(facts: Facts) -> dict[str, Any]:
    """Facts with one level of mappings, such as the files of each class, and lists of texts flattened."""
    flat: dict[str, Any] = {}
    for key, value in facts.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{name}": item for name, item in value.items()}
        elif isinstance(value, list) and any(isinstance(item, str) for item in value):
            flat |= {f"{key}[{number}]": item for number, item in enumerate(value)}
        else:
            flat[key] = value
    return flat


def check_fingerprint(expected: Facts, path: Path) -> None:
    """Raise InputError, with the differences, if the checkpoint at `path` has another fingerprint than `expected`."""
    if different := difference(expected, read_facts(path)["identity"]):
        raise InputError(
            f"resume: {path} is a checkpoint of another run ({different}); resume with the same values, "
            "or take only its weights with init_from=PATH"
        )


def whole_weights(path: Path) -> bool:
    """Whether the weights at `path` are undamaged. Checks the sha256 in a checkpoint, the header in a run folder."""
    file = path / MODEL
    try:
        if (path / MANIFEST).exists():
            # `manifest` checks the sizes first: hashing a huge sparse file would take hours.
            return manifest(path)[MODEL] == sha256(file)
        return bool(_header(file)[0])
    except (UnreadableFile, ValueError, SafetensorError):
        return False


def _header(file: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """The shapes of the tensors in a file of weights, and its metadata; raises UnreadableFile or SafetensorError."""
    with opened(file, links=True), safe_open(file, framework="pt") as tensors:
        shapes = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        return shapes, tensors.metadata() or {}


def read_card(file: Path, key: str = "weights") -> ModelCard:
    """The description in a file of weights. `key` begins the errors.

    Raises:
        InputError: it cannot be read, has no card, or has a wrong one.
    """
    _, metadata = _read_header(file, key)
    try:
        return ModelCard.parse(metadata)
    except ValueError as error:
        raise InputError(f"{key}: {file} cannot be used: {error}") from error


def find_card(file: Path) -> ModelCard | None:
    """The card of a file of weights; None if it has none, like weights of other programs, or cannot be read."""
    try:
        _, metadata = _header(file)
    except (UnreadableFile, SafetensorError):  # loading the weights will raise the error
        return None
    return read_card(file) if METADATA_KEY in metadata else None


def weights_file(path: Path, key: str = "init_from") -> Path:
    """The file of weights at `path`: a safetensors file, a checkpoint or a run folder. `key` begins the errors.

    Raises:
        InputError: there are no weights at `path`.
    """
    places = [path, path / MODEL] if path.suffix == ".safetensors" else [path / MODEL]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise InputError(f"{key}: there are no weights at {path}, expected a .safetensors file or a run folder")
    return file


def load_weights(model: nn.Module, path: Path, key: str = "init_from") -> None:
    """Fill `model` with the weights at `path` (as for `weights_file`).

    Raises:
        InputError: the file does not exist, or its tensors do not fit the model.
    """
    file = weights_file(path, key)
    check_tensors(model, file, key)
    model.load_state_dict(load_file(file))


def load_start(model: nn.Module, path: Path) -> tuple[str, ...]:
    """Fill `model` with the weights at `path` (as for `weights_file`) to train it further.

    If the weights have no head, or a head for another number of classes, the model keeps its new head. Returns the
    names of the tensors that keep their new values.

    Raises:
        InputError: the file does not exist, or tensors outside the head do not fit.
    """
    file = weights_file(path)
    head = head_parameters(model)
    own, saved = model.state_dict(), _read_header(file, "init_from")[0]
    new_head = head if any(tuple(own[name].shape) != saved.get(name) for name in head) else ()
    check_tensors(model, file, leave_out=new_head)
    tensors = {name: tensor for name, tensor in load_file(file).items() if name not in new_head}
    model.load_state_dict(tensors, strict=not new_head)
    return new_head


def check_tensors(model: nn.Module, file: Path, key: str = "init_from", leave_out: tuple[str, ...] = ()) -> None:
    """Compare the names and shapes of the tensors in a file with those of `model`, which can be on the meta device.

    Done before tensors are read, because they may not fit into memory.

    Raises:
        InputError: the names or shapes differ, or the file is not a safetensors file.
    """
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    saved, _ = _read_header(file, key)
    names = sorted((own.keys() | saved.keys()) - set(leave_out))
    if different := [name for name in names if own.get(name) != saved.get(name)]:
        shown = ", ".join(f"{name} (here {own.get(name)}, there {saved.get(name)})" for name in different[:3])
        raise InputError(f"{key}: {file} is of another model: {len(different)} tensors differ, e.g. {shown}")


def _read_header(file: Path, key: str) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    try:
        return _header(file)
    except UnreadableFile as error:
        raise InputError(f"{key}: {error}") from error
    except SafetensorError as error:
        raise InputError(f"{key}: {file} cannot be read as safetensors ({error})") from error


def _restore_scaler(scaler: torch.amp.GradScaler, saved: dict[str, Any]) -> None:
    """Restore the scale of a loss scaler. If the saved run had no scaler, `scaler` keeps its initial scale."""
    own = scaler.state_dict()
    if not own or not saved:
        return
    if own.keys() != saved.keys() or not all(isinstance(value, (int, float)) for value in saved.values()):
        raise ValueError("the saved state is not the state of a loss scaler")
    # The other entries are options of how the scale grows, not state.
    scaler.load_state_dict({**own, "scale": saved["scale"], "_growth_tracker": saved["_growth_tracker"]})


def restore(
    loaded: LoadedCheckpoint,
    *,
    model: nn.Module,
    ema: AveragedModel | None,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
) -> dict[str, Any]:
    """Load a checkpoint into the parts of a run; returns its progress.

    Raises:
        InputError: the tensors do not fit the model.
    """
    if ema is not None and loaded.ema is None:
        raise InputError(f"resume: {loaded.path} has no averaged weights; use train.ema=null")
    try:
        restore_optimizer(optimizer, model, loaded.state["optimizer"])
        load_whole(model, loaded.model)
        _restore_scaler(scaler, loaded.state["scaler"])
        if ema is not None and loaded.ema is not None:
            load_whole(ema.module, loaded.ema)
            ema.n_averaged.fill_(loaded.state["ema_updates"])
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"resume: {loaded.path} does not fit this model ({error})") from error
    return dict(loaded.facts["progress"])
