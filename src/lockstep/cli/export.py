"""`lockstep export`: a trained model for other programs: ONNX, a program of torch.export, or a folder of timm's.

A file takes stored uint8 images and processes them like the evaluation: crop, normalise, resize, average over
views. It computes in float32, whatever the training did. It is written only if its logits are the model's.
"""

import copy
import math
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from lockstep.cli.evaluate import check_data, data_of
from lockstep.cli.export_folder import export_folder
from lockstep.core import log
from lockstep.core.errors import InputError, LockstepError, check_installed
from lockstep.core.model_card import ModelCard
from lockstep.core.safe_write import check_out, storing, sync
from lockstep.data.loading.reading import sample
from lockstep.inference.images import files_in
from lockstep.inference.predictor import Predictor, find_weights, load, run_of, say_which
from lockstep.precision import FP32, FP64
from lockstep.telemetry.progress import progress

# The most that a logit may differ, also as a share of the largest logit: a model that has hardly trained can have
# large logits. Such a model can also amplify the roundings of float32. An exporter sums in another order and folds
# batch norm into weights, so a logit may then differ by some times the model's own rounding.
TOLERANCE, SHARE, ROUNDINGS = 1e-4, 1e-5, 10
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
OPSET = 20
OF_SUFFIX = {".onnx": "onnx", ".pt": "torch", ".pt2": "torch", ".pth": "torch"}  # the format of a file
COMPARED = 64  # images on which the exported model is compared with its original
INPUT, OUTPUT, BATCH = "images", "logits", "batch"


def export(path: str, images: Sequence[str], *, kind: str, pixels: str, out: str | None) -> None:
    """Export a model, compare it with its original, and show how much their logits differ.

    They are compared on `images`, files and folders; or on the run's evaluation split; or else on random ones.

    Raises:
        InputError: the weights or images do not exist, or the model cannot be exported.
        LockstepError: the exported model differs from its original.
        StorageError: the file cannot be written.
    """
    for package in ONNX_PACKAGES if kind == "onnx" else ():
        check_installed(package, "--to onnx", extra="export")
    file = find_weights(path)
    if kind == "timm":
        if images or pixels != "uint8":
            raise InputError("--to timm writes the network alone: remove --pixels and images to compare on")
        predictor = load(file, device="cpu", precision=FP32())
        say_which(file, predictor.card)
        export_folder(predictor, run_of(file), Path(out) if out is not None else file.with_name("timm"))
        return
    target = Path(out) if out is not None else file.with_suffix(FORMATS[kind].suffix)
    check_out(target)
    if (usual := OF_SUFFIX.get(target.suffix, kind)) != kind:
        raise InputError(f"--out is {target}, and --to {kind} writes another kind of file: --to {usual}")
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
        f"wrote {target}: {inputs} of shape batch x {shape} to logits of "
        f"{predictor.card.classes:,} {predictor.card.targets}; on "
        f"{len(stored)} images{origin} they differ by at most {difference:.1e} from the model's "
        f"(allowed {TOLERANCE:g}, or {SHARE:g} of the largest)"
    )


def _images(predictor: Predictor, file: Path, named: Sequence[str]) -> tuple[Tensor, str]:
    """The images to compare on, and words about their origin if they are random."""
    if named:
        channels = predictor.card.image_shape[0]
        return predictor.stored([path for name in named for path in files_in(Path(name), channels)][:COMPARED]), ""
    if (run := run_of(file)) is None:
        return _random_images(predictor.card), " of random pixels, because a weights file has no images,"
    try:
        source = data_of(run, ())
        check_data(predictor, source)
        return sample(source.eval(), COMPARED), ""
    except InputError as error:
        return _random_images(predictor.card), f" of random pixels, because the run's are not here ({error}),"


def _random_images(card: ModelCard) -> Tensor:
    """Images of the size, the mean and the standard deviation that a card names."""
    noise = torch.randn((COMPARED, *card.image_shape), generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (card.mean, card.std))
    return ((noise * std + mean) * 255).clamp(0, 255).to(torch.uint8)


class _PixelsToLogits(nn.Module):
    def __init__(self, predictor: Predictor, *, floats: bool) -> None:
        super().__init__()
        self.model, self.predictor, self.floats = predictor.model, predictor, floats

    def forward(self, images: Tensor) -> Tensor:
        return self.predictor.logits(images * 255 if self.floats else images)


@dataclass(frozen=True)
class Format:
    """A file format.

    Fields:
        suffix: the suffix of the file.
        write: writes a module, traced with example images, and the metadata to a path.
        read: reads a file, and returns its function from images to logits.
    """

    suffix: str
    write: Callable[[nn.Module, Tensor, dict[str, str], Path], None]
    read: Callable[[Path], Callable[[Tensor], Tensor]]


def _write_torch(module: nn.Module, example: Tensor, metadata: dict[str, str], path: Path) -> None:
    dynamic = {INPUT: {0: torch.export.Dim(BATCH)}}
    program = torch.export.export(module, (example,), dynamic_shapes=dynamic)
    torch.export.save(program, path, extra_files={f"{key}.json": text for key, text in metadata.items()})


def _read_torch(path: Path) -> Callable[[Tensor], Tensor]:
    return torch.export.load(path).module()


def _write_onnx(module: nn.Module, example: Tensor, metadata: dict[str, str], path: Path) -> None:
    program = torch.onnx.export(
        module,
        (example,),
        dynamo=True,
        dynamic_shapes={INPUT: {0: BATCH}},
        input_names=[INPUT],
        output_names=[OUTPUT],
        opset_version=OPSET,
        verbose=False,
    )
    assert program is not None
    program.model.metadata_props.update(metadata)
    program.save(path, external_data=False)


def _read_onnx(path: Path) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run([OUTPUT], {INPUT: images.numpy()})[0])


FORMATS = {"onnx": Format(".onnx", _write_onnx, _read_onnx), "torch": Format(".pt2", _write_torch, _read_torch)}


def write_export(predictor: Predictor, stored: Tensor, path: Path, *, kind: str, floats: bool) -> float:
    """Write a model to `path` and return the largest difference of a logit from the model's own.

    Args:
        predictor: the model, on the CPU, in float32.
        stored: the images to compare the logits on, uint8 (B, C, H, W).
        path: the file, which is replaced if it exists.
        kind: a key of `FORMATS`, whose packages are installed.
        floats: whether the input is float32 pixels from 0 to 1 instead of uint8 pixels from 0 to 255.

    Raises:
        InputError: the model cannot be exported.
        LockstepError: the logits differ by more than `TOLERANCE`, by more than `SHARE` of the largest, and by more
            than `ROUNDINGS` times the model's own rounding.
        StorageError: the file cannot be written.
    """
    form, module = FORMATS[kind], _PixelsToLogits(predictor, floats=floats).eval()
    images = stored.float() / 255 if floats else stored
    expected = _compared(predictor.logits, stored)
    with storing(path), tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        temporary = Path(folder, path.name)
        # The warnings of the exporters are about their own code.
        with warnings.catch_warnings(action="ignore"), torch.no_grad():
            try:
                form.write(module, images[:1].repeat(2, 1, 1, 1), predictor.card.metadata(), temporary)
                exported = form.read(temporary)
                results = _compared(exported, images)
            except OSError:
                raise
            except Exception as error:  # the exporters raise all kinds of errors
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise InputError(f"--to {kind}: this model cannot be exported ({reason})") from error
        difference = float((results - expected).abs().max())
        allowed = max(TOLERANCE, SHARE * float(expected.abs().max()))
        if not difference <= allowed and (rounding := _rounding(predictor, stored)) * ROUNDINGS > allowed:
            allowed = rounding * ROUNDINGS
            log.show_warning(
                f"this model amplifies roundings: its own logits in float32 differ by up to {rounding:.1e} from "
                "those in float64; a model that has trained longer usually does not"
            )
        if not difference <= allowed < math.inf:
            raise LockstepError(
                f"--to {kind}: the logits of the exported model differ by {difference:.1e} from the model's own, "
                f"expected at most {allowed:.1g}; nothing was written"
            )
        sync(temporary)
        temporary.replace(path)
    return difference


def _compared(logits: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """The logits of the first image alone and of all: other numbers of images than the two that are traced.

    Both models get the same batches, because a model may round an image in another batch differently.
    """
    return torch.cat([logits(images[:1]), logits(images)])


def _rounding(predictor: Predictor, stored: Tensor) -> float:
    """The most that float32 changes a logit of a model: the difference from the same weights in float64.

    It is 0 if a layer of the model takes only float32.
    """
    transforms = predictor.transforms
    exact = replace(
        predictor,
        model=copy.deepcopy(predictor.model).double(),
        precision=FP64(),
        transforms=replace(
            transforms, scale=transforms.scale.double(), shift=transforms.shift.double(), dtype=torch.float64
        ),
    )
    try:
        difference = _compared(exact.logits, stored) - _compared(predictor.logits, stored)
    except RuntimeError:  # number types do not match
        return 0.0
    return float(difference.abs().max())
