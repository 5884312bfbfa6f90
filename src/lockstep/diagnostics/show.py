"""`lockstep show`: the training images of a job as one picture."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lockstep.core import log
from lockstep.core.errors import InputError, escaped, percent
from lockstep.core.figures import digits
from lockstep.core.model_card import CLASSES, VALUES
from lockstep.core.safe_write import check_out, write_atomic
from lockstep.core.world import World
from lockstep.data.loading.loaders import Streaming
from lockstep.data.transforms.device import DeviceTransforms
from lockstep.job.prepare import job_here
from lockstep.telemetry.pictures import channels_shown, sheet
from lockstep.training.build_data import build_data, build_loader
from lockstep.training.resolved_job import ResolvedJob

MOST = 64  # rows or columns
LEAST = 96  # pixels of the longer side of an image
LINES = 4  # the most labels or values under an image
Cell = tuple[Tensor, Tensor]  # uint8 (C, H, W), and the share of each class, (classes,)


def show(overrides: Sequence[str], *, images: int, epochs: int, out: str | None) -> None:
    for option, number in (("images", images), ("epochs", epochs)):
        if not 1 <= number <= MOST:
            raise InputError(f"--{option} is {number}, expected from 1 to {MOST}: --{option}=4")
    file = Path("show.png" if out is None else out)
    check_out(file, ".png")
    job = job_here(overrides, "show draws images")
    cells = cells_of(job, images, epochs)
    classes = job.dataset.class_names or tuple(map(str, range(job.dataset.classes)))
    drawn = [cell for row in cells for cell in row]
    captions = ["" if cell is None else "\n".join(caption(cell[1], classes, job.task.targets)) for cell in drawn]
    pixels = [None if cell is None else cell[0].numpy() for cell in drawn]
    heads = [f"epoch {epoch + 1}" for epoch in range(epochs)]
    write_atomic(file, sheet(pixels, captions, columns=epochs, heads=heads, least=LEAST))
    note = channels_shown(job.dataset.image_shape[0])
    log.show(f"wrote {file}: {len(cells)} images{note} in epochs 1 to {epochs}, augmentation: {job.augment}")


def cells_of(job: ResolvedJob, images: int, epochs: int) -> list[list[Cell | None]]:
    """The first images of the first step: rows of their epochs, with None where an epoch leaves one out."""
    world = World.solo("cuda:0" if job.device == "cuda" else job.device)
    # Stream the images: a loader only moves bytes, so all loaders give the same pixels.
    job = replace(job, loader=Streaming(workers=0), steps=None, epochs=max(epochs, job.epochs))
    job, data = build_data(job, world)
    loader = build_loader(job, data, world)
    chosen = loader.global_batch(1).indices[:images].cpu() % data.plan.examples
    rows: dict[int, list[Cell | None]] = {int(example): [None] * epochs for example in chosen}
    for epoch in range(epochs):
        for example, group in loader.one_by_one(chosen, epoch):
            (shard,) = data.transforms.train([group])
            pixels, targets = data.transforms.mixed(shard)
            shares = targets if targets.is_floating_point() else torch.eye(job.dataset.classes)[targets.cpu()]
            rows[example][epoch] = (stored_pixels(pixels, data.transforms)[0], shares[0].float().cpu())
    return [*rows.values()]


def stored_pixels(images: Tensor, transforms: DeviceTransforms) -> Tensor:
    """The inputs of a model (b, C, H, W) as uint8, on the CPU: without the normalisation."""
    pixels = (images.to(transforms.shift.dtype) - transforms.shift) / transforms.scale
    return pixels.round().clamp(0, 255).to(torch.uint8).cpu()


def caption(shares: Tensor, classes: Sequence[str], targets: str = CLASSES) -> list[str]:
    """The class of an image, or the two of a mixed one, with their shares in front; some labels; or some values."""
    if targets != CLASSES:
        named = [(share, escaped(name, keep="")) for share, name in zip(shares.numpy(), classes, strict=True)]
        if targets == VALUES:
            return [f"{name} {digits(value)}" for value, name in named[:LINES]]
        some = [name if share == 1 else f"{percent(share)} {name}" for share, name in named if share > 0]
        return some[:LINES] or ["no label"]
    ordered = [(round(100 * float(shares[label])), escaped(classes[label], keep="")) for label in shares.argsort()]
    mixed = [f"{share} % {name}" for share, name in ordered[:-3:-1] if share]
    return mixed if len(mixed) == 2 else [ordered[-1][1]]
