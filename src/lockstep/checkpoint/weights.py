"""Reads weights files, of a run or of another program, as tensors only, never as code. They need no run."""

import argparse
import re
import zipfile
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lockstep.checkpoint.files import MODEL, check_archive, header, load_weights
from lockstep.checkpoint.reading import check_shapes, read_header
from lockstep.config.suggest import WEIGHTS
from lockstep.core.errors import InputError, reason_of, shown
from lockstep.core.model import head_parameters, named_layers
from lockstep.core.model_card import METADATA_KEY, ModelCard, class_name
from lockstep.core.run_dir import BEST, LATEST, check_folder, near_path
from lockstep.core.safe_read import UnreadableFile, open_plain

# What data parallelism, torch.compile and Lightning put before the names of a model's tensors.
WRAPPER = re.compile("(module|_orig_mod|model|net)[.]")
# Where programs keep a model's tensors in a file with other things.
NESTED = ("state_dict", "model_state_dict", "model")
# Objects that files of timm and others contain next to the tensors; they hold only values.
HARMLESS: list[Any] = [argparse.Namespace]
COUNTERS = ("n_averaged",)  # of torch's AveragedModel
SAFETENSORS, START = ".safetensors", "init_from"
T = TypeVar("T")


def read_card(file: Path, key: str = "weights") -> ModelCard:
    """The description in a weights file. `key` begins the errors, which are InputErrors."""
    _, metadata = read_header(file, key)
    try:
        return ModelCard.parse(metadata, file)
    except ValueError as error:
        raise InputError(f"{key}: {file} cannot be used: {error}") from error


def find_card(file: Path) -> ModelCard | None:
    """The card of a weights file; None if it has none, like weights of other programs, or cannot be read."""
    try:
        _, metadata = header(file)
    except UnreadableFile:  # loading the weights will raise the error
        return None
    return read_card(file) if METADATA_KEY in metadata else None


def weights_file(path: Path, key: str = START) -> Path:
    """The weights file at `path`: safetensors, of a checkpoint or a run folder; torch's for `init_from`."""
    check_folder(path)
    foreign = not set(WEIGHTS).isdisjoint(path.suffixes)
    places = [path, path / MODEL] if path.suffix == SAFETENSORS or (foreign and key == START) else [path / MODEL]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        fix = "; init_from= takes weights of other programs" * (foreign and path.is_file())
        names = (name for name in (BEST, LATEST) if (path / name).is_file())
        near = near_path(path)
        fix += next((f", such as {path / name}" for name in names), f".{near}" * bool(near))
        raise InputError(f"{key}: there are no weights at {path}, expected a .safetensors file or a run folder{fix}")
    return file


def _saved(file: Path) -> tuple[dict[str, tuple[int, ...]], Callable[[], Mapping[str, Tensor]]]:
    """The shapes of the tensors in a weights file, and a function that reads the tensors, on the CPU."""
    if file.suffix == SAFETENSORS:
        return read_header(file, START)[0], partial(load_weights, file)
    tensors = _unpickled(file)
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}, lambda: tensors


def _unpickled(file: Path) -> Mapping[str, Tensor]:
    """The tensors that `torch.save` has written. Raises InputError: damaged, or with objects that run code."""
    try:
        check_archive(file)
        with torch.serialization.safe_globals(HARMLESS):
            saved = torch.load(file, "cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
        saved = next((saved[name] for name in NESTED if name in saved), saved)
        return {name: value for name, value in saved.items() if isinstance(value, Tensor)}
    except Exception as error:  # torch raises all kinds of errors for a damaged file
        raise InputError(
            f"init_from: {file} has no weights that can be read safely ({_reason(file, error)}); save the tensors "
            "alone, with torch.save(model.state_dict(), FILE)"
        ) from error


def _reason(file: Path, error: Exception) -> str:
    """Why a file is not read; not in the words of torch, which advise to run whatever the file says."""
    if isinstance(error, ValueError | OSError):  # of `check_archive`
        return reason_of(error)
    if classes := re.findall(r"(?:GLOBAL|class) ([\w.]+\.\w+)", str(error)):
        return f"it has objects of {classes[0]}"
    with open_plain(file, links=True) as content:
        start = content.read(16)  # tells a web page or a pointer of Git LFS
    return f"it begins with {start!r}, and is damaged, cut short, a program, or without tensors by name"


def _by_own_names(saved: Mapping[str, T], own: Container[str]) -> dict[str, T]:
    """What a file has, by the names that the tensors have in the model: without what wrappers put before them."""

    def own_name(name: str) -> str:
        bare = name
        while bare not in own and (wrapper := WRAPPER.match(bare)):
            bare = bare[wrapper.end() :]
        return bare if bare in own else name

    return {own_name(name): value for name, value in saved.items() if name not in COUNTERS or name in own}


def load_start(model: nn.Module, path: Path, classes: Sequence[str] = ()) -> str:
    """Fill `model` with the weights at `path` (as for `weights_file`) to train it further.

    If `classes`, the names by label, differ from the weights' classes, the head gets the weights' rows by name; a
    class without one keeps its new row. A head without such rows stays new. The first convolution of a timm model is
    adapted from RGB to other channels, as timm does it. Returns a sentence about what is not taken as it is, or an
    empty text. Raises InputError: the file does not exist, or tensors outside the head do not fit.
    """
    file, head = weights_file(path), head_parameters(model)
    from timm.models import adapt_input_conv

    own, card = model.state_dict(), find_card(file)
    shapes, read = _saved(file)
    saved = _by_own_names(shapes, own)
    here = [*map(class_name, classes)]
    there = [*card.names] if card and here else here
    rows, moved = {name: row for row, name in enumerate(there)}, here != there
    labels = [label for label, name in enumerate(here) if name in rows]
    fits = all(saved.get(name) == (len(there) if moved else len(own[name]), *own[name].shape[1:]) for name in head)
    new_head = head if not fits or (moved and not labels) else ()
    stems = [f"{name}.weight" for name in named_layers(model, "first_conv")]
    stems = [name for name in stems if _is_rgb_of(saved.get(name, ()), own[name].shape)]
    check_shapes(model, saved, file, START, leave_out=[*(head if moved else new_head), *stems])
    tensors = {name: tensor for name, tensor in _by_own_names(read(), own).items() if name not in new_head}
    for name in head if moved and not new_head else ():
        old, tensors[name] = tensors[name], own[name].clone()
        tensors[name][labels] = old[[rows[here[label]] for label in labels]].to(tensors[name])
    for name in stems:
        tensors[name] = adapt_input_conv(own[name].shape[1], tensors[name])
    model.load_state_dict(tensors, strict=not new_head)
    words = [f"{name} of {path} is adapted from 3 to {own[name].shape[1]} channels" for name in stems]
    if new_head:
        words.append(f"the head of {path} does not fit these classes: {', '.join(head)} start from random weights")
    elif moved:
        new, gone = sorted({*here} - {*there}), sorted({*there} - {*here})
        words.append(f"the head of {path} is matched by class name; new: {shown(new)}, dropped: {shown(gone)}")
    elif here and not card:
        words.append(f"{path} does not name its classes; their order is taken to be {shown(here)}")
    return "; ".join(words)


def _is_rgb_of(saved: tuple[int, ...], own: torch.Size) -> bool:
    """Whether `saved` is the shape of an RGB convolution's weights, and `own` its shape for other channels."""
    return len(saved) == 4 and saved == (own[0], 3, *own[2:]) != own
