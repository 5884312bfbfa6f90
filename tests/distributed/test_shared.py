"""One copy of a decoded data set for the ranks of a machine, by real ranks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from helpers import launch
from lockstep.core import world
from lockstep.core.data_protocols import Broken, Split
from lockstep.core.errors import InputError
from lockstep.data.datasets.folder import Folder
from lockstep.data.loading import reading
from lockstep.data.loading.loaders import Resident
from lockstep.job import worker

SPOILT = (3, 600)  # in the share of either rank
IMAGES = 700


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks found (below): 700 images of which two cannot be decoded."""
    root = tmp_path_factory.mktemp("shared")
    for split, count in (("train", IMAGES), ("val", 1)):
        (root / split / "a").mkdir(parents=True)
        for number in range(count):
            pixels = np.random.default_rng(number).integers(0, 256, (6, 6, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / split / "a" / f"{number:03}.png")
    for number in SPOILT:
        (root / "train" / "a" / f"{number:03}.png").write_bytes(b"no image")
    launch(exit_as_rank, root, 2)
    return root


def exit_as_rank(folder: Path) -> None:
    """What a rank does: feed itself from shared memory and, where its neighbours cannot be reached, from its own."""
    facts: dict[str, object] = {}
    with worker.join(device="cpu", backend="gloo", timeout=240, threads=1) as here:
        split, read, whole = Folder(path=str(folder), decode_size=6, skip=2).train(), [], reading.read_images
        before = set(os.listdir("/dev/shm"))  # noqa: PTH208

        def counted(split: Split, indices: list[int], epoch: int = 0) -> tuple[Tensor, Broken]:
            read.extend(indices)
            return whole(split, indices, epoch)

        reading.read_images = counted
        images, broken = reading.decode_all(split, here, threads=2)
        facts["read"], facts["broken"] = (min(read), max(read), len(read)), sorted(broken)
        facts["maps"] = [line.split()[4] for line in maps() if "/memfd:lockstep-" in line]
        facts["left"] = sorted(set(os.listdir("/dev/shm")) - before) + memory_files()  # noqa: PTH208
        indices = torch.tensor([0, 3, 350, 600, 699])
        facts["equal"] = [torch.equal(next(fed(split, here, indices)), images[indices])]
        here.barrier()
        images[10 + here.rank] = here.rank + 1
        here.barrier()
        facts["written"] = images[10:12, 0, 0, 0].tolist()
        try:
            reading.decode_all(Folder(path=str(folder), decode_size=6).train(), here, threads=1)
        except InputError as error:
            facts["error"] = str(error)
        mapped = shared_maps()
        del os.memfd_create  # as on another system
        alone, again = reading.decode_all(split, here, threads=2)
        facts["equal"] += [torch.equal(alone[12:], images[12:]), again.keys() == broken.keys()]
        facts["alone"] = shared_maps() - mapped
    (folder / f"found{here.rank}.json").write_text(json.dumps(facts))
    sys.exit(0)


def fed(split: Split, here: world.World, indices: Tensor) -> Iterator[Tensor]:
    for images, _ in Resident().feed(split, here)([(0, indices)]):
        yield images


def shared_maps() -> int:
    return sum("/memfd:lockstep-" in line for line in maps())


def maps() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()


def memory_files() -> list[str]:
    """The files without a name that this process has open still."""
    links = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return [link for link in links if "memfd:lockstep-" in link]


def facts_of(root: Path, key: str) -> list[object]:
    return [json.loads((root / f"found{rank}.json").read_text())[key] for rank in (0, 1)]


def test_the_ranks_of_a_machine_have_the_same_memory_and_no_file_to_leave_behind(root: Path) -> None:
    (first,), (second,) = facts_of(root, "maps")
    assert first == second, "the inode"
    assert facts_of(root, "left") == [[], []]
    assert facts_of(root, "written") == [[1, 2], [1, 2]]


def test_each_rank_decodes_its_share(root: Path) -> None:
    # The image that cannot be decoded makes its chunk be read once more, one by one.
    (low, half, _), (other, high, _) = facts_of(root, "read")
    assert (low, half, other, high) == (0, 349, 350, 699)


def test_all_ranks_know_every_broken_image(root: Path) -> None:
    assert facts_of(root, "broken") == [list(SPOILT)] * 2
    assert [str(error).partition(",")[0] for error in facts_of(root, "error")] == ["dataset: image 3"] * 2


def test_the_pixels_are_those_of_a_rank_that_decodes_for_itself(root: Path) -> None:
    assert facts_of(root, "equal") == [[True, True, True]] * 2
    assert all(int(str(more)) <= 0 for more in facts_of(root, "alone")), "no more is shared than before"
