"""Images per second from files and arrays to the input of a model: Lockstep, torchvision's loaders, timm's.

    python benchmarks/input.py --json input.json

The benchmark makes JPEG files of 32x32 and of 500x375 pixels, unless `--small` and `--large` name folders of class
folders. Small images are padded, cropped and mirrored. For large images the box of a random resized crop is resized
to 224 and mirrored, as in torchvision's training recipe (ImageFolder, RandomResizedCrop, RandomHorizontalFlip,
ToTensor, Normalize, a DataLoader). Arrays of 32x32 are resized to 336. The result is always normalised float32 on
the CPU. The same small images are read packed, too, and the policies of
augmentation are called on smooth noise; random erasing on normalised noise. Large files are read into squares as for
training, which may decode them at a fraction of their size, and as for an evaluation. One thread computes; workers
are processes in a DataLoader and threads in Lockstep. The files are in the page cache. Figures "of a core" count the
processor time of the process, all others the elapsed time. The last tables have the decoders alone, and two threads
against two processes.
"""

from __future__ import annotations

import io
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch
from PIL import Image
from timm.data.auto_augment import augment_and_mix_transform, auto_augment_transform, rand_augment_transform
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision import transforms as T
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2

from lockstep.core.data_protocols import Crop, Source, Split
from lockstep.core.plan import Plan
from lockstep.core.rng import ERASE, SampleRNG, sample_keys
from lockstep.core.world import World
from lockstep.data.datasets.arrays import ArraySplit
from lockstep.data.datasets.builtin import CIFAR10
from lockstep.data.datasets.decode import ImageFile
from lockstep.data.datasets.files import FileSplit
from lockstep.data.datasets.folder import Folder
from lockstep.data.datasets.packed import Packed, pack_source
from lockstep.data.loading.loaders import Resident, Streaming
from lockstep.data.loading.shards import Loader
from lockstep.data.transforms.augment import CropFlip
from lockstep.data.transforms.crops import RandomResizedCrop
from lockstep.data.transforms.device import DeviceTransforms
from lockstep.data.transforms.mixing import Erase
from lockstep.data.transforms.policies import (
    AugMix,
    AutoAugment,
    RandAugment,
    ThreeAugment,
    TimmRandAugment,
    TrivialAugment,
)
from lockstep.precision import FP32
from measure import Figures, Rows, in_turns, parser, show, write

HERE = World.solo()
SQUARES = (32, 64, 100, 160, 256)
Cases = dict[str, Callable[[], float]]
Clock = Callable[[], float]


def photographs(folder: Path, number: int, height: int, width: int) -> Path:
    """JPEG files in two class folders: smooth shapes with grain, about as many bytes as photographs of that size."""
    generator = np.random.default_rng(0)
    for at in range(number):
        coarse = generator.integers(0, 256, (max(2, height // 16), max(2, width // 16), 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
        grain = generator.normal(0, 12, (height, width, 1)).astype(np.int16)
        path = folder / "ab"[at % 2] / f"{at:06}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8)).save(path, quality=90)
    return folder


def per_second(batches: Callable[[], Iterable[Any]], images: int, clock: Clock) -> float:
    """Images per second of a whole pass, by the wall clock or by the processor time of this process."""
    began = clock()
    for _ in batches():
        pass
    return images / (clock() - began)


def clock_of(workers: int) -> Clock:
    """With workers the wall clock; without, the processor time, which other processes do not change."""
    return time.perf_counter if workers else time.process_time


def theirs(data: Dataset[Any], batch: int, workers: int) -> Callable[[], float]:
    """A DataLoader as in the recipes; its workers are started before the clock."""
    loader: DataLoader[Any] = DataLoader(
        data, batch_size=batch, shuffle=True, num_workers=workers, persistent_workers=bool(workers)
    )
    if workers:
        next(iter(loader))
    return partial(per_second, lambda: loader, len(data), clock_of(workers))  # type: ignore[arg-type]


def ours(source: Source, split: Split, kind: Any, augment: Any, batch: int) -> Callable[[], float]:
    """The loader and the transforms of this project, for one epoch of a run."""
    steps = -(-len(split) // batch)
    every = {"log_every": steps, "eval_every": steps, "save_every": steps}
    plan = Plan(examples=len(split), batch=batch, total_steps=steps, micro_batches=1, **every)
    feed = kind.feed(split, HERE)
    loader = Loader(
        world=HERE,
        plan=plan,
        seed=0,
        eval_batch=batch,
        train_labels=split.labels,
        eval_labels=split.labels,
        train_feeds={0: feed},
        eval_feed=feed,
        stride=kind.stride(batch, 3 * source.input_shape[1] * source.input_shape[2], HERE),
    )
    form = partial(DeviceTransforms.of, device=HERE.device, precision=FP32(), seed=0)
    transforms = form(source.preprocessing, augment, cropped=source.crops_files)
    workers = getattr(kind, "workers", 0)
    return partial(per_second, lambda: transforms.train(loader.train(after=0)), len(split), clock_of(workers))


def decoded_first(source: Source, split: Split, augment: Any, batch: int) -> float:
    """The first epoch of the resident loader: every image decoded, and a pass over them."""
    began = time.process_time()
    once = ours(source, split, Resident(), augment, batch)
    once()
    return len(split) / (time.process_time() - began)


def spread(folder: Folder, number: int) -> tuple[FileSplit, list[int]]:
    """Some files, spread evenly over a split, and their indices in it."""
    whole = folder.train()
    places = list(range(0, len(whole), max(1, len(whole) // number)))[:number]
    return replace(whole, paths=[whole.paths[at] for at in places], labels=whole.labels[places]), places


def with_timm(root: Path, places: list[int], workers: int) -> Callable[[], float]:
    """timm's loader with the same augmentation."""
    from timm.data import ImageDataset, create_loader

    data = ImageDataset(str(root))
    data.reader.samples = [data.reader.samples[at] for at in places]
    loader = create_loader(
        data,
        (3, 224, 224),
        32,
        is_training=True,
        use_prefetcher=False,
        color_jitter=0.0,
        interpolation="bilinear",
        num_workers=workers,
        persistent_workers=bool(workers),
        pin_memory=False,
        device=torch.device("cpu"),
    )
    if workers:
        next(iter(loader))
    batches = len(loader)  # timm drops the last, short batch
    return partial(per_second, lambda: loader, 32 * batches, clock_of(workers))


def small(root: Path, workers: int) -> Cases:
    """32x32 files, padded, cropped and mirrored."""
    folder = Folder(path=str(root.parent), train_folder=root.name, val_folder=root.name, decode_size=32)
    split, places = spread(folder, 4096)
    crop = T.RandomCrop(32, padding=4)
    recipe = [crop, T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize(folder.mean, folder.std)]
    files: Dataset[Any] = Subset(ImageFolder(str(root), T.Compose(recipe)), places)
    cases = {
        "torchvision": theirs(files, 128, workers),
        "streaming": ours(folder, split, Streaming(workers=workers), CropFlip(), 128),
    }
    if workers == 0:
        cases["resident, first epoch"] = partial(decoded_first, folder, split, CropFlip(), 128)
        cases["resident, later"] = ours(folder, split, Resident(), CropFlip(), 128)
    return cases


def large(root: Path, workers: int) -> Cases:
    """500x375 files, a random resized crop to 224."""
    augment = RandomResizedCrop()
    square = Folder(path=str(root.parent), train_folder=root.name, val_folder=root.name, input_size=224)
    folder = replace(square, crop_from="file")
    split, places = spread(folder, 160)
    boxes = replace(split, crop=Crop(augment.boxes, 0, (224, 224)))
    recipe = [T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize(folder.mean, folder.std)]
    files: Dataset[Any] = Subset(ImageFolder(str(root), T.Compose(recipe)), places)
    cases = {
        "torchvision": theirs(files, 32, workers),
        "timm": with_timm(root, places, workers),
        "streaming": ours(folder, boxes, Streaming(workers=workers), augment, 32),
        "streaming squares of 256": ours(square, split, Streaming(workers=workers), augment, 32),
    }
    if workers == 0:
        cases["resident, later"] = ours(square, split, Resident(), augment, 32)
    return cases


def packed(root: Path) -> Cases:
    """32x32 files decoded by `lockstep pack`, read as a memory map, beside the files."""
    folder = Folder(path=str(root.parent), train_folder=root.name, val_folder=root.name, decode_size=32)
    target = root.parent / "packed"
    if not target.exists():
        pack_source(folder, target, threads=2, advanced=lambda n: None)
    source = Packed(path=str(target))
    return {
        "files": ours(folder, folder.train(), Streaming(workers=0), CropFlip(), 128),
        "packed": ours(source, source.train(), Streaming(workers=0), CropFlip(), 128),
    }


def policies() -> dict[str, dict[str, Any]]:
    """Each policy here and what the others call it. timm's magnitude stops at 9, because Pillow refuses 0 bits."""
    params = {"translate_pct": 0.45, "img_mean": (124, 116, 104), "interpolation": Image.Resampling.BICUBIC}
    jitter = v2.ColorJitter(0.3, 0.3, 0.3)
    blur = v2.GaussianBlur(9, (0.1, 2.0))
    three = v2.Compose([v2.RandomChoice([v2.Grayscale(3), v2.RandomSolarize(128, p=1), blur]), jitter])
    timm_three = [rand_augment_transform("rand-m9-n1-p1-t3a", params), jitter]
    return {
        "RandAugment": {"torchvision": v2.RandAugment(), "lockstep": RandAugment()},
        "TrivialAugment": {"torchvision": v2.TrivialAugmentWide(), "lockstep": TrivialAugment()},
        "AutoAugment": {
            "torchvision": v2.AutoAugment(),
            "timm": auto_augment_transform("original", params),
            "lockstep": AutoAugment(),
        },
        "AugMix": {
            "torchvision": v2.AugMix(interpolation=v2.InterpolationMode.NEAREST),
            "timm": augment_and_mix_transform("augmix-m3", params),
            "lockstep": AugMix(),
        },
        "timm's RandAugment": {
            "timm": rand_augment_transform("rand-m9-mstd0.5-mmax9-inc1", params),
            "lockstep": TimmRandAugment(),
        },
        "3-Augment": {"torchvision": three, "timm": v2.Compose(timm_three), "lockstep": ThreeAugment()},
        "jitter 0.4": {
            "torchvision": v2.ColorJitter(0.4, 0.4, 0.4),
            "lockstep": RandomResizedCrop(jitter=0.4, flip=0.0),
        },
    }


def augmented(policy: str, size: int, batch: int) -> Cases:
    """A policy without a crop: image by image, and ours for a batch at once."""
    coarse = torch.randint(256, (batch, 3, size // 4, size // 4)).float()
    images = F.interpolate(coarse, (size, size), mode="bicubic").clamp(0, 255).to(torch.uint8)
    pillow = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images]
    rng = SampleRNG(0, 0, torch.arange(batch))
    contenders = policies()[policy]
    ours = contenders.pop("lockstep")
    cases: dict[str, Callable[[], Iterable[Any]]] = {
        f"{name}, Pillow": partial(map, transform, pillow) for name, transform in contenders.items()
    }
    if "torchvision" in contenders:
        cases["torchvision, tensors"] = partial(map, contenders["torchvision"], images)
    cases["lockstep"] = partial(ours.changed if isinstance(ours, RandomResizedCrop) else ours.operate, images, rng)
    return {name: partial(per_second, once, batch, time.process_time) for name, once in cases.items()}


def erased(size: int, batch: int) -> Cases:
    """A rectangle of each normalised image is set to zero."""
    images, keys = torch.randn(batch, 3, size, size), sample_keys(0, 0, torch.arange(batch), ERASE)
    cases: dict[str, Callable[[], Iterable[Any]]] = {
        "torchvision, tensors": partial(map, v2.RandomErasing(p=1), images),
        "timm, tensors": partial(map, RandomErasing(1.0, mode="const", device="cpu"), images),
        "lockstep": partial(map, partial(Erase(1.0).apply, keys=keys), [images]),
    }
    return {name: partial(per_second, once, batch, time.process_time) for name, once in cases.items()}


def upsampled() -> Cases:
    """32x32 arrays resized to 336: sample by sample, as the tutorial does it, and in batches."""
    images = torch.randint(0, 256, (256, 3, 32, 32), dtype=torch.uint8)
    source = CIFAR10(input_size=336)
    transform = T.Compose([T.ToTensor(), T.Resize(336), T.Normalize(source.mean, source.std)])
    pillow = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images]
    files: Dataset[Any] = _Transformed(pillow, transform)
    split = ArraySplit(images, torch.zeros(256, dtype=torch.int64))
    return {"torchvision": theirs(files, 64, 0), "resident": ours(source, split, Resident(), CropFlip(), 64)}


class _Transformed(Dataset[Any]):
    """A data set that transforms each image when it is read."""

    def __init__(self, images: list[Image.Image], transform: Callable[[Image.Image], Tensor]) -> None:
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self.images[index]), 0


def decoders(root: Path, number: int) -> Cases:
    """The decoders alone, on bytes in memory, to RGB; the last only reads the headers."""
    split, _ = spread(Folder(path=str(root.parent), train_folder=root.name, val_folder=root.name), number)
    contents = [ImageFile.read(path).data for path in map(split.paths.__getitem__, range(len(split)))]

    def half(data: bytes) -> None:
        height, width, _, _ = simplejpeg.decode_jpeg_header(data)
        simplejpeg.decode_jpeg(data, min_height=-(-height // 2), min_width=-(-width // 2))

    decoders: dict[str, Callable[[bytes], object]] = {
        "Pillow": lambda data: np.asarray(Image.open(io.BytesIO(data)).convert("RGB")),
        "torchvision": lambda data: decode_jpeg(
            torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=ImageReadMode.RGB
        ),
        "simplejpeg": simplejpeg.decode_jpeg,
        "simplejpeg, half size": half,
        "simplejpeg, header": simplejpeg.decode_jpeg_header,
    }
    return {
        name: partial(per_second, partial(map, decode, contents), len(contents), time.process_time)
        for name, decode in decoders.items()
    }


def stored(root: Path, number: int, size: int) -> dict[str, FileSplit]:
    """Large files as training stores them in squares, and as an evaluation does."""
    folder = Folder(path=str(root.parent), train_folder=root.name, val_folder=root.name, decode_size=size)
    split, _ = spread(folder, number)
    return {"training": split, "evaluation": replace(split, scaled=False)}


def at_a_fraction(root: Path, number: int, size: int) -> Cases:
    """Large files read for training, which decodes a JPEG at a fraction of its size, and for an evaluation."""
    return {
        name: partial(per_second, partial(map, split.fetch, [[*range(number)]]), number, time.process_time)
        for name, split in stored(root, number, size).items()
    }


def differences(root: Path, number: int, size: int) -> Figures:
    """How far the pixels of training are from an evaluation's."""
    one, other = (split.fetch([*range(number)]).float() for split in stored(root, number, size).values())
    by_photo = (one - other).abs().flatten(1).mean(1)
    return {"mean of all": float(by_photo.mean()), "mean of the worst photo": float(by_photo.max())}


def handed_over(root: Path, number: int, size: int, batch: int) -> Cases:
    """Batches decoded by this project, in two processes of a DataLoader and in threads."""
    folder = Folder(path=str(root.parent), train_folder=root.name, val_folder=root.name, decode_size=size)
    split, _ = spread(folder, number)
    index_lists = [list(range(at, min(at + batch, len(split)))) for at in range(0, len(split), batch)]
    loader: DataLoader[Any] = DataLoader(
        _Batches(split), batch_sampler=index_lists, collate_fn=_Batches.as_is, num_workers=2, persistent_workers=True
    )
    next(iter(loader))

    def threads(number: int) -> Iterator[Any]:
        return Streaming(workers=number).feed(split, HERE)((0, torch.tensor(indices)) for indices in index_lists)

    return {
        "2 processes": partial(per_second, lambda: loader, len(split), time.perf_counter),
        "1 thread": partial(per_second, partial(threads, 1), len(split), time.perf_counter),
        "2 threads": partial(per_second, partial(threads, 2), len(split), time.perf_counter),
    }


class _Batches(Dataset[Any]):
    """A split from which a DataLoader reads whole batches."""

    def __init__(self, split: Split) -> None:
        self.split = split

    def __getitems__(self, indices: list[int]) -> Tensor:
        return self.split.fetch(indices)

    @staticmethod
    def as_is(images: Any) -> Any:
        return images


def main() -> None:
    options = parser(__doc__, repeats=5)
    options.add_argument("--small", type=Path, help="class folders of 32x32 JPEG files, e.g. cifar10/train")
    options.add_argument("--large", type=Path, help="class folders of larger JPEG files, e.g. imagenet/val")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        few = arguments.small or photographs(Path(folder, "small", "train"), 4096, 32, 32)
        many = arguments.large or photographs(Path(folder, "large", "train"), 160, 375, 500)
        few, many = few.absolute(), many.absolute()
        tables: dict[str, Rows] = {}
        parts: dict[str, dict[str, Callable[[], Cases]]] = {
            "to the model, img/s of a core": {
                "32x32 JPEG, crop and mirror": partial(small, few, 0),
                "500x375 JPEG, box to 224": partial(large, many, 0),
                "32x32 arrays to 336": upsampled,
                "32x32, crop and mirror, packed": partial(packed, few),
            },
            "policies, img/s of a core": {
                **{
                    f"{policy}, {size} px": partial(augmented, policy, size, batch)
                    for policy in policies()
                    for size, batch in ((32, 512), (224, 64))
                },
                "random erasing, 32 px": partial(erased, 32, 512),
                "random erasing, 224 px": partial(erased, 224, 64),
            },
            "to the model, two workers, img/s": {
                "32x32 JPEG, crop and mirror": partial(small, few, 2),
                "500x375 JPEG, box to 224": partial(large, many, 2),
            },
            "decoders, img/s of a core": {
                "32x32": partial(decoders, few, 2048),
                "500x375": partial(decoders, many, 80),
            },
            "500x375 JPEG to squares, img/s of a core": {
                f"{size} px": partial(at_a_fraction, many, 80, size) for size in SQUARES
            },
            "read in batches of uint8, two workers, img/s": {
                "32x32": partial(handed_over, few, 4096, 32, 256),
                "500x375": partial(handed_over, many, 160, 256, 32),
            },
        }
        for title, rows in parts.items():
            measured: dict[str, Figures] = {}
            for name, cases in rows.items():
                measured[name] = in_turns(cases(), arguments.repeats)
                show(title, {name: measured[name]})
            tables[title] = measured
        title = "training's pixels from an evaluation's, of 255"
        tables[title] = {f"{size} px": differences(many, 80, size) for size in SQUARES}
        show(title, tables[title], ratios=False)
    write(arguments.json, tables)


if __name__ == "__main__":
    main()
