"""How fast images are read that `lockstep pack` has decoded: batches of random rows of a memory map.

    python benchmarks/packed.py --json packed.json

The first table compares ways to gather the rows of a batch (256 random ones) from a map in the page cache: torch's
advanced index, its index_select on whole rows, NumPy's index and its take (which Lockstep uses), and rows in the
order of the file. The second compares the batches of `loader=streaming`, from index lists to the device, with
decoding the same images from their folder. Figures are thousands of images per second, medians; CPU.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lockstep.core.data_protocols import Split
from lockstep.core.world import World
from lockstep.data.datasets import packed
from lockstep.data.datasets.folder import Folder
from lockstep.data.datasets.packed import Packed
from lockstep.data.loading.loaders import Streaming
from measure import Figures, Rows, in_turns, parser, show, timed, write

BATCH = 256
BATCHES = 20
IMAGES = {32: 20_000, 256: 2_000}  # by the side of a stored image


def build(root: Path, size: int) -> tuple[Folder, Packed]:
    """A folder of JPEGs of noise (which decode more slowly than photographs), and the same packed."""
    generator = np.random.default_rng(0)
    for split, count in (("train", IMAGES[size]), ("val", 10)):
        (root / split / "noise").mkdir(parents=True)
        for number in range(count):
            pixels = generator.integers(0, 256, (size, size, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / split / "noise" / f"{number}.jpg", quality=90)
    folder = Folder(path=str(root), decode_size=size)
    packed.pack(folder, root / "packed", threads=2, advanced=lambda n: None)
    return folder, Packed(path=str(root / "packed"))


def rate(batches: Iterable[object], images: int) -> float:
    """Thousands of images per second of an iterator, which is consumed without storing its batches."""
    return images / timed(partial(deque, batches, maxlen=0)) / 1000


def gathering(source: Packed) -> Figures:
    """Thousands of images per second of each way to gather a batch."""
    images = source.train().images
    rows, array = images.flatten(1), images.numpy()

    def in_file_order(indices: Tensor) -> Tensor:
        order = indices.argsort()
        gathered = torch.empty((len(indices), *images.shape[1:]), dtype=torch.uint8)
        gathered[order] = rows.index_select(0, indices[order]).view_as(gathered)
        return gathered

    ways: dict[str, Callable[[Tensor], object]] = {
        "torch, images[indices]": lambda indices: images[indices],
        "torch, index_select": lambda indices: rows.index_select(0, indices),
        "numpy, array[indices]": lambda indices: torch.from_numpy(array[indices.numpy()]),
        "numpy, take": lambda indices: torch.from_numpy(array.take(indices.numpy(), axis=0)),
        "index_select, in file order": in_file_order,
    }

    def measured(way: Callable[[Tensor], object]) -> float:
        index_batches = torch.randint(len(images), (BATCHES, BATCH))
        return rate(map(way, index_batches), BATCHES * BATCH)

    return in_turns({name: partial(measured, way) for name, way in ways.items()}, 15)


def streaming(split: Split, *, workers: int, batches: int = BATCHES) -> float:
    """Thousands of images per second of the feed of `loader=streaming`, without the start of its workers."""
    feed = Streaming(workers=workers).feed(split, World.solo())
    fed = feed((0, indices) for indices in torch.randint(len(split), (batches + 1, BATCH)))
    next(fed)
    return rate(fed, batches * BATCH)


def reading(folder: Folder, source: Packed) -> Figures:
    """Thousands of images per second of the feeds, from the folder and packed."""
    cases = {
        "folder, 0 workers": partial(streaming, folder.train(), workers=0, batches=4),
        "packed, 0 workers": partial(streaming, source.train(), workers=0),
        "packed, 2 workers": partial(streaming, source.train(), workers=2),
    }
    return in_turns(cases, 5)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--threads", type=int, default=1, help="of torch [1]")
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    tables: dict[str, Rows] = {"a batch of 256, thousands of images/s": {}, "the feed, thousands of images/s": {}}
    for size in IMAGES:
        with tempfile.TemporaryDirectory() as root:
            folder, source = build(Path(root), size)
            gathers, feeds = tables.values()
            gathers[f"{size} px"] = gathering(source)
            feeds[f"{size} px"] = reading(folder, source)
    for title, rows in tables.items():
        show(title, rows)
    write(arguments.json, tables)


if __name__ == "__main__":
    main()
