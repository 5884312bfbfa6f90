"""A trained network from its weights file alone: for its use, and as a teacher."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from lockstep.checkpoint.files import MODEL, load_weights
from lockstep.checkpoint.reading import check_tensors
from lockstep.checkpoint.weights import read_card, weights_file
from lockstep.config import components, extensions
from lockstep.config.extensions import MAIN
from lockstep.core import log
from lockstep.core.errors import InputError
from lockstep.core.model import infinite_buffers, is_sound
from lockstep.core.model_card import ModelCard
from lockstep.core.protocols import Model, Precision
from lockstep.core.run_dir import LATEST, pointed
from lockstep.core.safe_read import UnreadableFile
from lockstep.models.nets import check_model_size, sketch, without_weights
from lockstep.precision import FP32

KEY = "weights"  # the first word of the errors


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A trained network on its device, in evaluation mode, with its card and the precision to compute in."""

    card: ModelCard
    model: nn.Module
    precision: Precision
    device: torch.device
    memory_format: torch.memory_format


def load_trained(
    path: str | Path, *, device: str | None, precision: Precision | None = None, module: nn.Module | None = None
) -> Trained:
    """The network at `path`, ready to be used.

    Args:
        path: a run folder (its best weights), `latest`, a checkpoint, or a safetensors file of Lockstep.
        device: `cpu` or `cuda`; None is the GPU if there is one.
        precision: the precision to compute in; None for the evaluation's.
        module: what a program gave as the model of the training; a copy of it is used.

    Raises:
        InputError: there are no weights, they do not describe their model, or it cannot be built here; or the device
            is a GPU, and there is none.
    """
    file = find_weights(path)
    card = read_card(file)
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if target.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"{KEY}: device is {target}, but PyTorch finds no GPU here; remove it, or use cpu")
    try:
        option = without_weights(components.build_stored("model", card.model))
        if module is not None:
            from lockstep.training.objects import with_module  # few models are objects of a program

            option = with_module(option, module)
        precision = precision or _precision(card, target)
        model = _model_with_weights(option, card, precision, file)
    except InputError as error:
        if isinstance(error, UnreadableFile) or str(error).startswith(f"{KEY}: "):
            raise
        package = str(card.model["_target_"]).partition(".")[0]
        known = {MAIN, *(extension.package for extension in extensions.active())}
        if package in card.packages and package not in known:
            raise InputError(
                f"{KEY}: {file} needs the package {package}, which is not an extension here; install it with pip, or "
                f"name it with lockstep.load(PATH, extensions=['{package}'])"
            ) from None
        raise InputError(f"{KEY}: the model of {file} cannot be built: {error}") from error
    return Trained(
        card=card,
        model=model.to(target).to(memory_format=option.memory_format).eval(),
        precision=precision,
        device=torch.empty(0, device=target).device,  # with its number
        memory_format=option.memory_format,
    )


def find_weights(path: str | Path, key: str = KEY) -> Path:
    """The weights file for a path: the path itself, or a file in a run folder or a checkpoint.

    For `latest` it is the newest run's file, or, if this run has none, the newest file of a run or a sweep's job.
    Raises InputError if there are no weights; its sentence begins with `key`.
    """
    path = Path(path)
    folder = pointed(path, Path("outputs"), key)
    if path.name == LATEST and not path.is_dir() and not (folder / MODEL).is_file():
        root = Path("outputs") if path == Path(LATEST) else path.parent
        files = (file for depth in ("*", "sweeps/*/*") for file in root.glob(f"{depth}/{MODEL}"))
        folder = max(files, key=lambda file: file.stat().st_mtime, default=folder / MODEL).parent
    return weights_file(folder, key)


def _precision(card: ModelCard, device: torch.device) -> Precision:
    """The precision of the card, or float32 if the device lacks it and the weights are float32."""
    precision: Precision = components.build_stored("precision", card.precision)
    try:
        precision.check(device.type)
    except InputError as error:
        if precision.storage != FP32.storage:
            raise
        log.show_warning(f"{error}; the model is used in float32 here")
        return FP32()
    return precision


def _model_with_weights(option: Model, card: ModelCard, precision: Precision, file: Path) -> nn.Module:
    try:
        shapes = sketch(option, card.classes, card.input_shape)
    except InputError:
        raise
    except Exception:  # the model of an extension may read numbers, which tensors on the meta device do not have
        shapes = None
    if shapes is not None:
        check_tensors(shapes, file, KEY)
        check_model_size(shapes)
    with torch.random.fork_rng(devices=[]):
        model = precision.convert(option.build(card.classes, card.input_shape))
    infinite = infinite_buffers(model)
    check_tensors(model, file, KEY)
    model.load_state_dict(load_weights(file))
    tensors = model.state_dict()
    if broken := [name for name, tensor in tensors.items() if not is_sound(tensor, infinite=name in infinite)]:
        raise InputError(f"{KEY}: {file} has numbers that are not finite in {len(broken)} tensors, e.g. {broken[0]}")
    return model
