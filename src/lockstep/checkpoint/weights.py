"""Reads files of weights: what a model is used with, or starts from. They need no run and no checkpoint."""

import re
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file
from torch import nn

from lockstep.checkpoint.files import MODEL, header
from lockstep.config.commands import shell_command
from lockstep.config.suggest import WEIGHTS
from lockstep.core.errors import InputError, shown
from lockstep.core.model import head_parameters
from lockstep.core.model_card import METADATA_KEY, ModelCard, class_name
from lockstep.core.named_paths import near_path
from lockstep.core.run_dir import BEST, LATEST
from lockstep.core.safe_read import UnreadableFile

# What data parallelism, torch.compile and Lightning put before the names of a model's tensors.
WRAPPERS = "(module|_orig_mod|model|net)[.]"
CONVERT = (
    "import argparse, re, sys, torch, safetensors.torch as st; _, old, new = sys.argv; "
    "torch.serialization.add_safe_globals([argparse.Namespace]); "
    'w = st.load_file(old) if old.endswith(".safetensors") else torch.load(old, "cpu", weights_only=True); '
    'w = next((w[key] for key in ("state_dict", "model_state_dict", "model") if key in w), w); '
    f'w = {{re.sub("^({WRAPPERS})+", "", name): w[name] for name in w if name != "n_averaged"}}; '
    "st.save_file({name: w[name].clone(memory_format=torch.contiguous_format) for name in w}, new)"
)


def read_card(file: Path, key: str = "weights") -> ModelCard:
    """The description in a file of weights. `key` begins the errors, which are InputErrors."""
    _, metadata = _read_header(file, key)
    try:
        return ModelCard.parse(metadata)
    except ValueError as error:
        raise InputError(f"{key}: {file} cannot be used: {error}") from error


def find_card(file: Path) -> ModelCard | None:
    """The card of a file of weights; None if it has none, like weights of other programs, or cannot be read."""
    try:
        _, metadata = header(file)
    except UnreadableFile:  # loading the weights will raise the error
        return None
    return read_card(file) if METADATA_KEY in metadata else None


def weights_file(path: Path, key: str = "init_from") -> Path:
    """The file of weights at `path`: a safetensors file, a checkpoint or a run folder. `key` begins errors."""
    places = [path, path / MODEL] if path.suffix == ".safetensors" else [path / MODEL]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        fix = _conversion(path) if key == "init_from" else "; init_from= takes weights of other programs"
        fix *= path.is_file() and not set(WEIGHTS).isdisjoint(path.suffixes)
        names = (name for name in (BEST, LATEST) if (path / name).is_file())
        near = near_path(path)
        fix += next((f", such as {path / name}" for name in names), f".{near}" * bool(near))
        raise InputError(f"{key}: there are no weights at {path}, expected a .safetensors file or a run folder{fix}")
    return file


def _conversion(file: Path) -> str:
    """The end of an error: the command that writes a file of another program in our format."""
    new = file.with_name(f"converted-{file.stem}.safetensors")
    return f"; convert it, and name {new}: {shell_command(['python', '-c', CONVERT, file, new])}"


def load_start(model: nn.Module, path: Path, classes: Sequence[str] = ()) -> str:
    """Fill `model` with the weights at `path` (as for `weights_file`) to train it further.

    Where `classes`, the names by label, are not those of the weights, the head gets the rows of the weights by name;
    a class without one keeps its new row. A head without such rows stays new. Returns a sentence about a head that is
    not taken as it is, or an empty text.

    Raises:
        InputError: the file does not exist, or tensors outside the head do not fit.
    """
    file, head = weights_file(path), head_parameters(model)
    own, saved, card = model.state_dict(), _read_header(file, "init_from")[0], find_card(file)
    here = [*map(class_name, classes)]
    there = [*card.names] if card and here else here
    rows, moved = {name: row for row, name in enumerate(there)}, here != there
    labels = [label for label, name in enumerate(here) if name in rows]
    fits = all(saved.get(name) == (len(there) if moved else len(own[name]), *own[name].shape[1:]) for name in head)
    new_head = head if not fits or (moved and not labels) else ()
    check_tensors(model, file, leave_out=head if moved else new_head)
    tensors = {name: tensor for name, tensor in load_file(file).items() if name not in new_head}
    for name in head if moved and not new_head else ():
        old, tensors[name] = tensors[name], own[name].clone()
        tensors[name][labels] = old[[rows[here[label]] for label in labels]].to(tensors[name])
    model.load_state_dict(tensors, strict=not new_head)
    if new_head:
        return f"the head of {path} does not fit these classes: {', '.join(head)} start from random weights"
    if moved:
        new, gone = sorted({*here} - {*there}), sorted({*there} - {*here})
        return f"the head of {path} is taken by the names of its classes; new: {shown(new)}, left out: {shown(gone)}"
    return f"{path} does not name its classes; their order is taken to be {shown(here)}" if here and not card else ""


def check_tensors(model: nn.Module, file: Path, key: str = "init_from", leave_out: tuple[str, ...] = ()) -> None:
    """Raise InputError if the names or shapes of a file's tensors are not those of `model`, which can be on meta.

    Done before tensors are read, because they may not fit into memory.
    """
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    saved, _ = _read_header(file, key)
    names = sorted((own.keys() | saved.keys()) - set(leave_out))
    if different := [name for name in names if own.get(name) != saved.get(name)]:
        examples = ", ".join(f"{name} (here {own.get(name)}, there {saved.get(name)})" for name in different[:3])
        fix = _conversion(file) if any(re.match(WRAPPERS, name) for name in saved.keys() - own.keys()) else ""
        raise InputError(f"{key}: {file} is of another model: {len(different)} tensors differ, e.g. {examples}{fix}")


def _read_header(file: Path, key: str) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    try:
        return header(file)
    except UnreadableFile as error:
        raise InputError(f"{key}: {error}") from error
