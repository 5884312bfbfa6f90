"""`lockstep export`: a trained model for other programs: ONNX, a program of torch.export, or a folder of timm's.

A file takes uint8 images of the size that the model sees, normalises them and averages over views. It computes in
float32, whatever the training did. It is written only if its logits are the model's. `preprocess.py` beside it makes
these images of photos, as the evaluation does.
"""

import json
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.checkpoint.files import MODEL, load_weights, save_weights
from lockstep.config import components
from lockstep.config.commands import shell_command
from lockstep.core import log
from lockstep.core.data_protocols import SPLIT_NAMES
from lockstep.core.errors import InputError, LockstepError, check_installed, percent, reason_of
from lockstep.core.model_card import CROP, PAD, SIGMOID, SOFTMAX, SQUASH, VALUES, ModelCard, stored_side
from lockstep.core.run import read_overrides
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_read import read_bytes, read_json
from lockstep.core.safe_write import check_out, storing, sync, usual_mode, write_atomic
from lockstep.core.table import markdown, markdown_code
from lockstep.core.tags import figure_text, telling
from lockstep.data.datasets import preprocess
from lockstep.data.datasets.decode import GREY, RGB
from lockstep.data.loading.reading import sample
from lockstep.inference.evaluate import split_for
from lockstep.inference.images import files_in
from lockstep.inference.predictor import Predictor, data_shown, load_predictor, run_of, say_which
from lockstep.precision import FP32
from lockstep.telemetry.progress import progress
from lockstep.training.predictions import MATRIX_CLASSES
from lockstep.training.trained import find_weights

# The most that a logit may differ, and as shares of the largest logit: an exporter sums in another order and folds
# batch norm into weights, and a model that has hardly trained can have large logits, or amplify roundings.
TOLERANCE, SHARE_OF_LARGEST, LARGEST_SHARE = 1e-4, 1e-5, 1e-3
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
OPSET = 20
OF_SUFFIX = {".onnx": "onnx", ".pt": "torch", ".pt2": "torch", ".pth": "torch"}  # the format of a file
# What Transformers calls the probabilities: its pipeline computes them.
PROBLEMS = {SOFTMAX: "single_label_classification", SIGMOID: "multi_label_classification", VALUES: "regression"}
PREPROCESS = Path(preprocess.__file__)  # a copy is beside each exported file
COMPARED, OF_TIMM = 64, 8  # images on which an exported model is compared with its original: a file's, a folder's
INPUT, OUTPUT, BATCH = "images", "logits", "batch"


def export(path: str, images: Sequence[str], *, kind: str, pixels: str, out: str | None) -> None:
    """Export a model, compare it with its original, and show how much their logits differ.

    They are compared on `images`, files and folders; or on the run's evaluation split; or else on random ones.
    """
    for package in ONNX_PACKAGES if kind == "onnx" else ():
        check_installed(package, "--to onnx", extra="export")
    file = find_weights(path)
    if kind == "timm":
        if images or pixels != "uint8":
            raise InputError("--to timm writes the network alone: remove --pixels and images to compare on")
        predictor = load_predictor(file, device="cpu", precision=FP32())
        say_which(file, predictor.card)
        export_folder(predictor, run_of(file), Path(out) if out is not None else file.with_name("timm"))
        return
    target = Path(out) if out is not None else file.with_suffix(EXPORT_FORMATS[kind].suffix)
    check_out(target)
    check_out(code := target.with_name(PREPROCESS.name))
    if code.exists() and b"`lockstep export`" not in read_bytes(code).partition(b"\n")[0]:  # of any version
        raise InputError(f"{code} is not of lockstep export; rename it, or name another folder: --out FOLDER/NAME")
    if (usual := OF_SUFFIX.get(target.suffix, kind)) != kind:
        raise InputError(f"--out is {target}, and --to {kind} writes another kind of file: --to {usual}")
    predictor = load_predictor(file, device="cpu", precision=FP32())
    say_which(file, predictor.card)
    stored, origin = _images(predictor, file, images)
    if max(predictor.card.input_shape[1:]) < max(stored.shape[2:]):  # else the exported model enlarges the images
        stored = predictor.cropped(stored)
        whole = replace(predictor.card, eval_crop=1.0)
        predictor = replace(predictor, transforms=replace(predictor.transforms, preprocessing=whole))
    with progress("exporting"):
        difference = write_export(predictor, stored, target, kind=kind, floats=pixels == "float")
    shape = "x".join(map(str, stored.shape[1:]))
    inputs = "float32 pixels from 0 to 1" if pixels == "float" else "uint8 pixels"
    log.show(
        f"wrote {target}: {inputs} of shape batch x {shape} to logits of "
        f"{predictor.card.classes:,} {predictor.card.targets}; on "
        f"{len(stored)} images{origin} they differ by at most {difference:.1e} from the model's"
    )
    if len(stored[0]) in (GREY, RGB):
        write_atomic(code, read_bytes(PREPROCESS, links=True))
        log.show(f"wrote {code}: its input for a photo")


def _images(predictor: Predictor, file: Path, named: Sequence[str]) -> tuple[Tensor, str]:
    """The images to compare on, and words about their origin if they are random."""
    if named:
        channels = predictor.card.image_shape[0]
        return predictor.stored([path for name in named for path in files_in(Path(name), channels)][:COMPARED]), ""
    if (run := run_of(file)) is None:
        return _random_images(predictor.card), " of random pixels, because a weights file has no images,"
    try:
        split, _ = split_for(predictor, run, (), "val")
        return sample(split.examples, COMPARED), ""
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


class Format(NamedTuple):
    suffix: str
    # Writes a module, traced with example images, and the metadata to a path.
    write: Callable[[nn.Module, Tensor, dict[str, str], Path], None]
    # Reads a file, and returns its function from images to logits.
    read: Callable[[Path], Callable[[Tensor], Tensor]]


def _write_torch(module: nn.Module, example: Tensor, metadata: dict[str, str], path: Path) -> None:
    dynamic = {INPUT: {0: torch.export.Dim(BATCH)}}
    program = torch.export.export(module, (example,), dynamic_shapes=dynamic)
    for node in program.graph.nodes:  # where the sources lie on this machine is not for others
        node.meta.pop("stack_trace", None)
    torch.export.save(program, path, extra_files={f"{key}.json": text for key, text in metadata.items()})


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
    for node in program.model.graph.all_nodes():  # as above
        node.metadata_props.clear()
    program.model.metadata_props.update(metadata)
    program.save(path, external_data=False)


def _read_onnx(path: Path) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run([OUTPUT], {INPUT: images.numpy()})[0])


EXPORT_FORMATS = {
    "onnx": Format(".onnx", _write_onnx, _read_onnx),
    "torch": Format(".pt2", _write_torch, lambda path: torch.export.load(path).module()),
}


def write_export(predictor: Predictor, stored: Tensor, path: Path, *, kind: str, floats: bool) -> float:
    """Write a model to `path` and return the largest difference of a logit from the model's own.

    Args:
        predictor: the model, on the CPU, in float32.
        stored: the images to compare the logits on, uint8 (B, C, H, W).
        path: the file, which is replaced if it exists.
        kind: a key of `EXPORT_FORMATS`, whose packages are installed.
        floats: whether the input is float32 pixels from 0 to 1 instead of uint8 pixels from 0 to 255.

    Raises:
        InputError: the model cannot be exported.
        LockstepError: the logits differ by more than `TOLERANCE`, and by more than `LARGEST_SHARE` of the largest.
        StorageError: the file cannot be written.
    """
    form, module = EXPORT_FORMATS[kind], _PixelsToLogits(predictor, floats=floats).eval()
    images = stored.float() / 255 if floats else stored
    expected = _compared(predictor.logits, stored)
    with storing(path), tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        temporary = Path(folder, path.name)
        # The warnings of the exporters are about their own code.
        with warnings.catch_warnings(action="ignore"), torch.no_grad():
            try:
                form.write(module, images[:1].repeat(2, 1, 1, 1), predictor.card.metadata(), temporary)
                results = _compared(form.read(temporary), images)
            except OSError:
                raise
            except Exception as error:  # the exporters raise all kinds of errors
                raise InputError(f"--to {kind}: this model cannot be exported ({reason_of(error)})") from error
        difference, largest = float((results - expected).abs().max()), float(expected.abs().max())
        differs = f"the logits of the exported model differ by {difference:.1e} from the model's own"
        if not difference <= max(TOLERANCE, LARGEST_SHARE * largest) < math.inf:
            raise LockstepError(f"--to {kind}: {differs}, the largest of which is {largest:.2g}; nothing was written")
        if difference > max(TOLERANCE, SHARE_OF_LARGEST * largest):
            log.show_warning(f"{differs}: this model amplifies roundings; a longer training usually ends that")
        sync(temporary)
        temporary.replace(path)
    return difference


def _compared(logits: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """The logits of the first image alone and of all: other numbers of images than the two that are traced.

    Both models get the same batches, because a model may round an image in another batch differently.
    """
    return torch.cat([logits(images[:1]), logits(images)])


def export_folder(predictor: Predictor, run: RunDir | None, target: Path) -> None:
    """Write `target`: config.json, model.safetensors and a model card, README.md."""
    import timm

    model, card = predictor.model, predictor.card
    if os.path.lexists(target) or not target.absolute().parent.is_dir():
        raise InputError(f"--out is {target}, expected a new folder in a folder that exists")
    facts_of_timm: Any = getattr(model, "pretrained_cfg", None)
    if facts_of_timm is None:
        raise InputError(f"--to timm: this model is no model of timm ({card.model['_target_']}); use --to onnx")
    shape, facts = card.input_shape, _facts(card, facts_of_timm)
    arguments = dict(card.model.get("options") or {})
    if shape[0] != RGB:
        arguments["in_chans"] = shape[0]
    if facts["fixed_input_size"]:
        arguments.setdefault("img_size", shape[1:])
    config = {"label_names": list(card.names), "problem_type": PROBLEMS[card.probabilities]}
    trained = None if run is None else components.read_config(run.config).get("model")
    base = facts_of_timm if isinstance(trained, dict) and trained.get("pretrained") else {}
    differences = _differences(card)
    with storing(target), tempfile.TemporaryDirectory(dir=target.absolute().parent, prefix=".export-") as place:
        (folder := Path(place, target.name)).mkdir()
        with usual_mode(folder / MODEL):
            timm.models.save_for_hf(model, str(folder), config, arguments, safe_serialization=True)
        save_weights(load_weights(folder / MODEL), folder / MODEL, {"format": "pt"})  # with a hash
        written = read_json(folder / "config.json")
        # config.json also has it next to model_args, and Transformers accepts it only once.
        written.get("model_args", {}).pop("num_classes", None)
        written["pretrained_cfg"] = facts
        write_atomic(folder / "config.json", json.dumps(written, indent=2) + "\n")
        write_atomic(folder / "README.md", readme(card, run, target.name, differences, base))
        images = torch.randn((OF_TIMM, *shape), generator=torch.Generator().manual_seed(0))
        try:
            loaded = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
            with torch.no_grad():
                equal = torch.equal(loaded(images), model(images))
        except RuntimeError as error:  # tensors do not fit
            raise InputError(
                f"--to timm: timm cannot build this model ({reason_of(error)}); use --to onnx"
            ) from error
        if not equal:
            raise LockstepError("--to timm: the model that timm builds has other logits; nothing was written")
        sync(folder / MODEL)
        sync(folder)
        folder.rename(target)
    for difference in differences:
        log.show_warning(f"--to timm: {difference}: predictions can differ from those of lockstep predict")
    log.show(f'wrote {target}: timm.create_model("local-dir:{target}", pretrained=True) has the logits of the run')


def _facts(card: ModelCard, facts_of_timm: Mapping[str, Any]) -> dict[str, Any]:
    """What timm needs to know about a model and its images.

    Nothing else that timm says about published weights is true of these: test sizes, tag, licence, origin.
    """
    return {
        **{key: facts_of_timm.get(key) for key in ("fixed_input_size", "first_conv", "classifier")},
        "num_classes": card.classes,
        "input_size": card.input_shape,
        "mean": card.mean,
        "std": card.std,
        "interpolation": card.interpolation,
        "crop_pct": timm_share(card) or card.eval_crop,
        "crop_mode": {CROP: "center", PAD: "border", SQUASH: "squash"}[card.fit],
    }


def _differences(card: ModelCard) -> list[str]:
    """What those who load the folder compute otherwise than the run, a sentence for each."""
    stored, seen = ("x".join(map(str, size[1:])) for size in (card.image_shape, card.input_shape))
    channels = card.input_shape[0]
    possible = {
        f"this run resizes a photo to {stored} and its centre to {seen}, timm resizes it once": (
            timm_share(card) is None
        ),
        f"this run averages {card.eval_views} views of an image, this model takes one": card.eval_views > 1,
        f"images have {channels} channels, Transformers' pipeline makes them RGB": channels != RGB,
    }
    return [difference for difference, holds in possible.items() if holds]


def timm_share(card: ModelCard) -> float | None:
    """The `crop_pct` by which timm resizes and crops photos as for a card; None if there is none."""
    stored, seen = card.image_shape[1:], card.input_shape[1:]
    largest = min(side / size for side, size in zip(seen, stored, strict=True))
    for share in (card.eval_crop, largest, math.nextafter(largest, 0)):
        if tuple(stored_side(side, share) for side in seen) == stored:
            return share if card.centre == seen else None
    return None


def readme(card: ModelCard, run: RunDir | None, name: str, differences: Sequence[str], base: dict[str, Any]) -> str:
    """The model card in Markdown, with the fields that the hub of Hugging Face reads at its top.

    `base` has timm's facts about the published weights that the training started from, if any.
    """
    words = [] if run is None else ["lockstep", "train", *read_overrides(run.overrides)]
    summary = {} if run is None else run.read_summary()
    tested = summary.get("test") if summary.get("best_step") == card.step else None
    scores = []
    for split, figures in (("evaluation", card.scores), ("test", tested or {})):
        shown = telling(figures, card.classes).items()
        texts = [f"- {markdown(figure_text(figure, value))}" for figure, value in shown if value is not None]
        scores += [f"On the {split} split:", "", *texts, ""] if texts else []
    counts = images.items() if isinstance(images := card.trained_on.get("images"), dict) else ()
    numbers = ", ".join(f"{number} images in the {SPLIT_NAMES.get(split, split)} split" for split, number in counts)
    origin = ", ".join(filter(None, (base.get("hf_hub_id"), base.get("license"), base.get("origin_url"))))
    code = f"""import timm

model = timm.create_model({f"local-dir:{name}"!r}, pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))"""
    lines = [
        *("---", "library_name: timm", "pipeline_tag: image-classification", "tags: [image-classification, timm]"),
        *([f"base_model: {json.dumps(base['hf_hub_id'])}"] if base.get("hf_hub_id") else []),
        *("---", "", f"# {markdown(name)}", ""),
        f"{markdown_code(card.model_name)}, trained on {markdown(data_shown(run, card))} with Lockstep "
        f"{markdown(card.lockstep)}, step {card.step:,}{', averaged weights' * card.averaged}.",
        *([f"Fine-tuned from {markdown(origin)}."] if origin else []),
        "",
        *([f"Data: {markdown(numbers)}.", ""] if numbers else []),
        *([f"Classes: {markdown(', '.join(card.names))}.", ""] if card.classes <= MATRIX_CLASSES else []),
        *scores,
        f"Images: {'x'.join(map(str, card.input_shape))} (channels, height, width), {card.fit}, the central "
        f"{percent(card.eval_crop, '.1f')}, {card.interpolation}; mean {list(card.mean)}, "
        f"standard deviation {list(card.std)}. Outputs: {card.classes:,} {card.targets} ({card.probabilities}).",
        *(f"Predictions can differ from the run's: {difference}." for difference in differences),
        "",
        *([markdown_code(shell_command(words), "bash"), ""] if words else []),
        *(markdown_code(code, "python"), ""),
    ]
    return "\n".join(lines)
