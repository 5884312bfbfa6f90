"""The data sets that fit in memory: digits, random images, and those that torchvision downloads (MNIST, CIFAR)."""

import contextlib
import functools
import gzip
import hashlib
import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from lockstep.config.options import is_ours, option
from lockstep.core.data_protocols import SPLIT_NAMES, Source
from lockstep.core.errors import InputError, StorageError
from lockstep.core.fields import choice, in_config, pathname, pixels, ranged, sides
from lockstep.core.model_card import LABELS, TARGETS, VALUES
from lockstep.core.safe_read import check_size, open_plain, stored
from lockstep.core.safe_write import absent, check_names, locked, remove_empty
from lockstep.data.datasets.arrays import ArraySplit, as_array, as_bytes, as_labels
from lockstep.data.datasets.sizes import AUTO
from lockstep.data.datasets.splitting import CutSource, Examples


@dataclass(frozen=True, kw_only=True)
class ArraySource(CutSource):
    """A data set in memory. With a cut training split, the published evaluation split is for the test."""

    # size in pixels of the images that the model sees, the side of a square or [height,width]; they are resized on
    # the device. null: the stored size. `auto`: the size of the weights that the model starts from, or else the
    # stored size
    input_size: Any = pixels(AUTO, AUTO, None)
    # share of each class of the published training images to evaluate, chosen by a hash; the published evaluation
    # images are the test split then
    val_share: float | None = None

    image_shape: ClassVar[tuple[int, int, int]]
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]

    @property
    def classes(self) -> int:
        if not self.class_names:
            raise InputError(f"dataset: {type(self).__name__} has no classes; write `classes = N` in the class")
        return len(self.class_names)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        usual = self.input_size in (AUTO, None)
        return self.image_shape if usual else (self.image_shape[0], *sides(self.input_size))

    @property
    def stored(self) -> Self:
        """The data set with the usual size of its input, on which its stored images do not depend."""
        return replace(self, input_size=AUTO)

    @abstractmethod
    def read(self, train: bool) -> tuple[Any, Any]:
        """The images and labels of the training or the evaluation split, as tensors or arrays of NumPy.

        Images (N, C, H, W) are uint8, or floats from 0 to 1, or booleans. Labels are integers (N,); with `targets` in
        the class, `labels` are numbers from 0 to 1 and `values` any numbers, (N, classes).
        """

    def train(self) -> ArraySplit:
        return _arrays(self.stored, "train")

    def eval(self) -> ArraySplit:
        return _arrays(self.stored, "val")

    def test(self) -> ArraySplit | None:
        return _arrays(self.stored, "test") if self.is_cut else None

    def fingerprint(self) -> dict[str, dict[str, str]]:
        return {name: _hashes(self.stored, name) for name in SPLIT_NAMES if name != "test" or self.is_cut}


@functools.cache
def _arrays(source: ArraySource, name: str) -> ArraySplit:
    """The split `name`, one of `SPLIT_NAMES`."""
    split = _published(source, name == "train" or (name == "val" and source.is_cut))
    if source.is_cut and name != "test":
        split = _part(split, source.evaluated(_examples(source, split)) == (name == "val"))
    return split if source.limit is None else _part(split, _examples(source, split).within(source.limit))


def _examples(source: ArraySource, split: ArraySplit) -> Examples:
    names = [b"%d" % number for number in range(len(split))]
    return Examples(names, split.labels, source.class_names, source.targets)


def _part(split: ArraySplit, chosen: NDArray[np.bool_]) -> ArraySplit:
    part = torch.from_numpy(np.flatnonzero(chosen))
    numbers = part if split.numbers is None else split.numbers[part]
    return ArraySplit(split.images[part], split.labels[part], numbers)


def _published(source: ArraySource, train: bool) -> ArraySplit:
    stored, known = source.read(train) if is_ours(type(source)) else _read_own(source, train)
    where = "the training split" if train else "the evaluation split"
    labels = as_labels(known, source.classes, source.targets, where)
    try:
        images = as_bytes(as_array(stored), f"an image of {where}")
    except ValueError as error:
        raise InputError(f"dataset: {error}") from error
    expected = (len(labels), *source.image_shape)
    if images.shape != expected:
        channels_last = images.ndim == 4 and np.moveaxis(images, -1, 1).shape == expected
        raise InputError(
            f"dataset: {where} has images {images.shape}, expected one for each label, {expected}"
            + "; return np.moveaxis(images, -1, 1)" * channels_last
        )
    return ArraySplit(torch.from_numpy(images), labels)


def _read_own(source: ArraySource, train: bool) -> tuple[Any, Any]:
    """What a user's class reads. Raises InputError."""
    from lockstep.data.datasets.composed import called  # few jobs have data of the user

    pair = called(source, "read", train)
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise InputError(
            f"dataset: {type(source).__name__}.read returns {type(pair).__name__}, expected (images, labels)"
        )
    return pair[0], pair[1]


@functools.cache
def _hashes(source: ArraySource, name: str) -> dict[str, str]:
    split = _arrays(source, name)
    parts = {"images": split.images, "labels": split.labels}
    return {name: hashlib.sha256(part.contiguous().numpy().data).hexdigest() for name, part in parts.items()}


@functools.cache
def _digits() -> Tensor:
    """The pixels and labels of all digits, (1797, 65): parsed once for both splits."""
    # `load_digits` reads the same file, but importing scikit-learn takes most of a second.
    file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    return torch.from_numpy(np.loadtxt(str(file), delimiter=",", dtype=np.int64))


@option("dataset")
class Digits(ArraySource):
    """The 1,797 handwritten digits of scikit-learn, 8x8 grey: 1,442 to train on, 355 to evaluate. No download.

    They have 17 levels of grey. Every fifth digit of a class is evaluated.
    """

    classes = 10
    image_shape = (1, 8, 8)
    mean = (0.3049,)
    std = (0.3754,)
    usual_augment = "shift"

    def read(self, train: bool) -> tuple[Tensor, Tensor]:
        rows = _digits()
        levels, labels = rows[:, :-1].view(-1, 8, 8), rows[:, -1]
        number_in_class = F.one_hot(labels).cumsum(0).gather(1, labels[:, None])[:, 0] - 1
        chosen = (number_in_class % 5 == 4) != train
        return (levels[chosen] * (255 / 16)).to(torch.uint8)[:, None], labels[chosen]


@option("dataset")
class Fake(Source):
    """Random images and targets that are already on the device: to measure the model's speed without any input."""

    # examples of the training split; the evaluation split has a quarter
    examples: int = ranged(1024, least=1, most=1_000_000_000)
    classes: int = ranged(1000, least=1, most=1_000_000)  # number of classes, labels or values
    channels: int = ranged(3, least=1, most=1024)  # channels of an image
    size: Any = pixels(224)  # size in pixels of an image, a side or [height,width]
    targets: str = choice("auto", "auto", *TARGETS)  # `classes`, `labels` or `values`; `auto`: the task's

    @property
    def mean(self) -> tuple[float, ...]:
        return (0.5,) * self.channels

    @property
    def std(self) -> tuple[float, ...]:
        return (0.25,) * self.channels

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return (self.channels, *sides(self.size))

    @property
    def generated_bytes(self) -> int:
        return (self.examples + self.examples // 4) * math.prod(self.image_shape)

    def train(self) -> ArraySplit:
        return _random(self.image_shape, self.classes, self.targets, self.examples, seed=1)

    def eval(self) -> ArraySplit:
        return _random(self.image_shape, self.classes, self.targets, max(1, self.examples // 4), seed=2)

    def fingerprint(self) -> dict[str, dict[str, str]]:
        """Empty: the number and the shape of the examples determine the data, and are compared separately."""
        return {"train": {}, "val": {}}


@functools.cache
def _random(image_shape: tuple[int, int, int], classes: int, targets: str, n: int, seed: int) -> ArraySplit:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (n, *image_shape), dtype=torch.uint8, generator=generator)
    shape = (n, classes)
    labels = {
        LABELS: lambda: torch.rand(shape, generator=generator).lt(0.3).float(),
        VALUES: lambda: torch.randn(shape, generator=generator),
    }.get(targets, lambda: torch.randint(classes, (n,), generator=generator))
    return ArraySplit(images, labels())


@dataclass(frozen=True, kw_only=True)
class Published(ArraySource):
    """A data set in the folders of torchvision. Missing files are downloaded by one process at a time."""

    root: str = in_config("${data_root}", pathname("data"))  # folder of the data set's files

    downloads: ClassVar[bool] = True
    factory: ClassVar[str]  # the class of torchvision
    classes: ClassVar[int] = 10

    @abstractmethod
    def read_files(self, train: bool) -> tuple[NDArray[np.uint8], Any]:
        """The images and labels of a split, as stored. A missing or damaged file raises any exception."""

    @property
    @abstractmethod
    def remedy(self) -> str:
        """Which files to put where."""

    def read(self, train: bool) -> tuple[Tensor, Tensor]:
        try:
            pixels, labels = stored(partial(self.read_files, train), self.root)
            return torch.from_numpy(np.array(pixels)), torch.as_tensor(np.array(labels), dtype=torch.int64)
        except StorageError:
            raise
        except Exception as error:  # the readers raise all kinds of errors for a damaged file
            raise InputError(
                f"data_root: {self.factory} cannot be read from {self.root} ({type(error).__name__}: {error}); "
                f"{self.remedy}"
            ) from error

    def prepare(self) -> None:
        try:
            super().prepare()
        except StorageError:
            raise
        except InputError as error:
            self._download(error)
            super().prepare()

    def torchvision(self, train: bool, *, download: bool = False) -> Any:
        from torchvision import datasets

        return getattr(datasets, self.factory)(root=self.root, train=train, download=download)

    def fetch(self) -> None:
        """Have torchvision download the files. Raises any exception."""
        for train in (True, False):
            self.torchvision(train, download=True)

    def _download(self, missing: InputError) -> None:
        root = Path(self.root)
        lock = root / f".{self.factory}.lock"
        new = absent(lock, root / self.factory / "raw")
        check_names(root, f"{self.factory}/raw/*", "cifar-*", "cifar-*/*")  # torchvision follows links
        try:
            root.mkdir(parents=True, exist_ok=True)
            with locked(lock, waits=True):
                self.fetch()
        except Exception as error:  # torchvision passes on any error of the download
            if not isinstance(missing.__cause__, FileNotFoundError):
                raise missing from error
            reason = (str(error).strip() or type(error).__name__).splitlines()[-1]  # the others name the mirrors
            raise InputError(
                f"data_root: {self.factory} cannot be read from {root} ({missing.__cause__}) and cannot be "
                f"downloaded ({reason}); {self.remedy}, or name another folder with data_root=FOLDER"
            ) from error
        finally:
            if lock in new:  # a process that still waits for it will find the files
                with contextlib.suppress(OSError):
                    lock.unlink()
            remove_empty(new)


@option("dataset")
class MNIST(Published):
    """70,000 handwritten digits, 28x28 grey (LeCun et al. 1998). Downloaded to `data_root` if missing."""

    factory = "MNIST"
    image_shape = (1, 28, 28)
    mean = (0.1307,)
    std = (0.3081,)
    usual_augment = "shift"
    parts: ClassVar[tuple[str, str]] = ("images-idx3", "labels-idx1")

    def read_files(self, train: bool) -> tuple[NDArray[np.uint8], Any]:
        # torchvision's reader gives the same, but an import of torchvision takes a second at each start.
        split = "train" if train else "t10k"
        images, labels = (read_idx(self.folder / f"{split}-{part}-ubyte") for part in self.parts)
        return images[:, None], labels

    @property
    def folder(self) -> Path:
        return Path(self.root, self.factory, "raw")

    @property
    def remedy(self) -> str:
        files = ", ".join(f"{split}-{part}-ubyte.gz" for split in ("train", "t10k") for part in self.parts)
        return f"put {files} (compressed or not) into {self.folder}"


@option("dataset")
class FashionMNIST(MNIST):
    """70,000 pieces of clothing, 28x28 grey (Xiao et al. 2017). Downloaded to `data_root` if missing."""

    factory = "FashionMNIST"
    mean = (0.2860,)
    std = (0.3530,)
    usual_augment = "crop_flip"


@option("dataset")
class CIFAR10(Published):
    """60,000 photographs of 10 classes, 32x32 (Krizhevsky 2009). Downloaded to `data_root` if missing."""

    factory = "CIFAR10"
    image_shape = (3, 32, 32)
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2470, 0.2435, 0.2616)
    usual_augment = "crop_flip"
    archive: ClassVar[str] = "cifar-10-python.tar.gz"
    unpacked: ClassVar[str] = "cifar-10-batches-py"

    def read_files(self, train: bool) -> tuple[NDArray[np.uint8], Any]:
        if not Path(self.root, self.unpacked).is_dir():
            raise FileNotFoundError(f"there is no {self.unpacked}")
        try:
            dataset = self.torchvision(train)
        except RuntimeError as error:  # it compares the md5 of each file, before it unpickles any
            raise ValueError(f"a file of {self.unpacked} is missing, or not the published one by its md5") from error
        return np.ascontiguousarray(dataset.data.transpose(0, 3, 1, 2)), dataset.targets

    @property
    def remedy(self) -> str:
        return f"put {self.archive} into {self.root}, where it is unpacked"


@option("dataset")
class CIFAR100(CIFAR10):
    """60,000 photographs of 100 classes, 32x32 (Krizhevsky 2009). Downloaded to `data_root` if missing."""

    factory = "CIFAR100"
    classes = 100
    mean = (0.5071, 0.4865, 0.4409)
    std = (0.2673, 0.2564, 0.2762)
    archive = "cifar-100-python.tar.gz"
    unpacked = "cifar-100-python"


def read_idx(path: Path) -> NDArray[np.uint8]:
    """The array in an IDX file of bytes, or in the `.gz` of it. Raises any exception if there is none, or no such."""
    packed = path.with_name(f"{path.name}.gz")
    file = next((name for name in (path, packed) if name.is_file()), None)
    if file is None:
        raise FileNotFoundError(f"there is no {path.name}")
    with open_plain(file, links=True) as raw, gzip.GzipFile(fileobj=raw) if file == packed else raw as content:
        shape = np.frombuffer(content.read(4 * content.read(4)[3]), ">u4").tolist()
        check_size(size := math.prod(shape), "its array has")
        return np.frombuffer(content.read(size + 1), np.uint8).reshape(shape)
