"""Reads files of weights: what a model is used with, or starts from. They need no run and no checkpoint."""

from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from lockstep.checkpoint.validation import MODEL, manifest, sha256
from lockstep.core.errors import InputError
from lockstep.core.model import head_parameters
from lockstep.core.model_card import METADATA_KEY, ModelCard
from lockstep.core.run_dir import MANIFEST
from lockstep.core.safe_read import UnreadableFile, opened


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
