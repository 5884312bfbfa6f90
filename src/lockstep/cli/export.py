"""`lockstep export`: a trained model as one file for other programs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lockstep.cli.arguments import EXPORTED
from lockstep.cli.evaluate import data_of
from lockstep.core import log
from lockstep.core.errors import InputError
from lockstep.core.model_card import ModelCard
from lockstep.core.safe_write import check_out
from lockstep.data.loading.prefetch import sample
from lockstep.inference.evaluation import check_data
from lockstep.inference.export import FORMATS, SHARE, TOLERANCE, check_packages
from lockstep.inference.export import export as write_export
from lockstep.inference.images import files_in
from lockstep.inference.load import find_weights, load, run_of, say_which
from lockstep.inference.predictor import Predictor
from lockstep.precision import FP32
from lockstep.telemetry.progress import progress

COMPARED = 64  # images on which the exported model is compared with its original


def export(path: str, images: Sequence[str], *, kind: str, pixels: str, out: str | None) -> None:
    """Export a model, compare it with its original, and show how much their logits differ.

    They are compared on `images`, files and folders; or on the run's evaluation split; or else on random ones.

    Raises:
        InputError: the weights or images do not exist, or the model cannot be exported.
        LockstepError: the exported model differs from its original.
        StorageError: the file cannot be written.
    """
    check_packages(kind)
    file = find_weights(path)
    target = Path(out) if out is not None else file.with_suffix(FORMATS[kind].suffix)
    check_out(target)
    if (usual := EXPORTED.get(target.suffix, kind)) != kind:
        raise InputError(f"--out is {target}, and --format {kind} writes another kind of file: --format {usual}")
    predictor = load(file, device="cpu", precision=FP32())
    say_which(file, predictor.card)
    stored, origin = _images(predictor, file, images)
    if max(predictor.card.input_shape[1:]) < max(stored.shape[2:]):  # else the exported model enlarges the images
        stored = predictor.cropped(stored)
        predictor = replace(predictor, transforms=replace(predictor.transforms, eval_crop=1.0))
    with progress("exporting"):
        difference = write_export(predictor, stored, target, kind=kind, floats=pixels == "float")
    shape = "x".join(map(str, stored.shape[1:]))
    inputs = "float32 pixels from 0 to 1" if pixels == "float" else "uint8 pixels"
    log.show(
        f"wrote {target}: {inputs} of shape batch x {shape} to logits of {predictor.card.classes:,} classes; on "
        f"{len(stored)} images{origin} they differ by at most {difference:.1e} from the model's "
        f"(allowed {TOLERANCE:g}, or {SHARE:g} of the largest)"
    )


def _images(predictor: Predictor, file: Path, named: Sequence[str]) -> tuple[Tensor, str]:
    """The images to compare on, and words about their origin if they are random."""
    if named:
        return predictor.stored([path for name in named for path in files_in(Path(name))][:COMPARED]), ""
    if (run := run_of(file)) is None:
        return _random_images(predictor.card), " of random pixels, because a file of weights has no images,"
    try:
        source = data_of(run, ())
        check_data(predictor, source)
        return sample(source.eval(), COMPARED), ""
    except InputError as error:
        return _random_images(predictor.card), f" of random pixels, because those of the run are not here ({error}),"


def _random_images(card: ModelCard) -> Tensor:
    """Images of the size, the mean and the standard deviation that a card names."""
    noise = torch.randn((COMPARED, *card.image_shape), generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (card.mean, card.std))
    return ((noise * std + mean) * 255).clamp(0, 255).to(torch.uint8)
