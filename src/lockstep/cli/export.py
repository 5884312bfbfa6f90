"""`lockstep export`: a trained model as one file for other programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from lockstep.cli.run_data import data_of
from lockstep.core import log
from lockstep.core.errors import InputError
from lockstep.data.loading.prefetch import sample
from lockstep.inference.evaluation import check_data
from lockstep.inference.export import FORMATS, TOLERANCE, check_packages, export
from lockstep.inference.images import files_in
from lockstep.inference.load import find_weights, load, run_of
from lockstep.inference.predictor import Predictor
from lockstep.precision import FP32
from lockstep.telemetry.progress import progress

COMPARED = 64  # images on which the exported model is compared with its original


def export_model(path: str, images: Sequence[str], *, kind: str, pixels: str, out: str | None) -> None:
    """Export a model, compare it with its original, and show how much their logits differ.

    Args:
        path: a run folder, `latest`, a checkpoint or a file of weights.
        images: files and folders of images for the comparison; if empty, images of the run's evaluation split.
        kind: `onnx` or `torch`.
        pixels: the input of the exported model, `uint8` or `float`.
        out: the file to write; None is `model.onnx` or `model.pt2` next to the weights.

    Raises:
        InputError: the weights or images do not exist, or the model cannot be exported.
        LockstepError: the exported model differs from its original.
        StorageError: the file cannot be written.
    """
    check_packages(kind)
    file = find_weights(path)
    target = Path(out) if out is not None else file.with_suffix(FORMATS[kind].suffix)
    if not target.parent.is_dir():
        raise InputError(f"--out is {target}, expected a file in a folder that exists")
    predictor = load(file, device="cpu", precision=FP32())
    stored = _images(predictor, file, images)
    with progress("exporting"):
        difference = export(predictor, stored, target, kind=kind, floats=pixels == "float")
    shape = "x".join(map(str, predictor.card.image_shape))
    inputs = "float32 pixels from 0 to 1" if pixels == "float" else "uint8 pixels"
    log.show(
        f"wrote {target}: {inputs} of shape batch x {shape} to logits of {predictor.card.classes:,} classes; on "
        f"{len(stored)} images they differ by at most {difference:.1e} from the model's (allowed {TOLERANCE:g})"
    )


def _images(predictor: Predictor, file: Path, named: Sequence[str]) -> Tensor:
    if named:
        return predictor.stored([path for name in named for path in files_in(Path(name))][:COMPARED])
    run = run_of(file)
    if run is None:
        raise InputError(
            "an exported model is compared with its original on real images, and a file of weights has none; name "
            "some after it: a file or a folder"
        )
    source = data_of(run, ())
    check_data(predictor, source)
    return sample(source.eval(), COMPARED)
