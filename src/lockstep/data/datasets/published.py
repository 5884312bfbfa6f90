"""The published data sets that are downloaded by torchvision: MNIST, FashionMNIST and the CIFARs."""

import contextlib
import math
import re
import zlib
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.core.errors import InputError
from lockstep.core.fields import pathname
from lockstep.core.safe_read import read_bytes
from lockstep.data.datasets.builtin import ArraySource

GZIP = b"\x1f\x8b"
BYTES = b"\0\0\x08"  # how an IDX file of bytes begins; the number of its dimensions follows
MOST_BYTES = 2**30  # of a decompressed file: MNIST's largest has 47 MB


@dataclass(frozen=True, kw_only=True)
class Published(ArraySource):
    """A data set in the folders of torchvision. Missing files are downloaded by one process at a time."""

    root: str = pathname("data")

    downloads: ClassVar[bool] = True
    factory: ClassVar[str]  # the class of torchvision

    @abstractmethod
    def read_files(self, train: bool) -> tuple[np.ndarray, Any]:
        """The images and labels of a split, as stored. A missing or damaged file raises any exception."""

    @property
    @abstractmethod
    def remedy(self) -> str:
        """Which files to put where."""

    def read(self, train: bool) -> tuple[Tensor, Tensor]:
        try:
            pixels, labels = self.read_files(train)
            images = torch.from_numpy(np.array(pixels))
            return images, torch.as_tensor(np.array(labels), dtype=torch.int64)
        except InputError:
            raise
        except Exception as error:  # the readers raise all kinds of errors for a damaged file
            raise InputError(
                f"data_root: {self.factory} cannot be read from {self.root} ({type(error).__name__}: {error}); "
                f"{self.remedy}"
            ) from error

    def prepare(self) -> None:
        try:
            super().prepare()
        except InputError as error:
            self._download(error)

    def torchvision(self, train: bool, *, download: bool = False) -> Any:
        from torchvision import datasets

        dataset: Callable[..., Any] = getattr(datasets, self.factory)
        return dataset(root=self.root, train=train, download=download)

    def _fetch(self) -> None:
        for train in (True, False):
            self.torchvision(train, download=True)

    def _download(self, missing: InputError) -> None:
        from filelock import FileLock

        root = Path(self.root)
        lock = root / f".{self.factory}.lock"
        try:
            root.mkdir(parents=True, exist_ok=True)
            with FileLock(lock):
                self._fetch()
        except Exception as error:  # torchvision passes on any error of the download
            if not isinstance(missing.__cause__, FileNotFoundError):
                raise missing from error
            raise InputError(
                f"data_root: {self.factory} cannot be read from {root} ({missing.__cause__}) and cannot be "
                f"downloaded ({_reason(error)}); {self.remedy}, or name another folder with data_root=FOLDER"
            ) from error
        finally:
            lock.unlink(missing_ok=True)  # a process that still waits for it will find the files
            for folder in (f"{self.factory}/raw", self.factory, "."):
                with contextlib.suppress(OSError):  # not empty, or not there
                    (root / folder).rmdir()
        super().prepare()


@dataclass(frozen=True, kw_only=True)
class MNIST(Published):
    """70,000 handwritten digits, 28x28 grey (LeCun et al. 1998)."""

    factory = "MNIST"
    image_shape = (1, 28, 28)
    mean = (0.1307,)
    std = (0.3081,)
    usual_augment = "shift"
    parts: ClassVar[tuple[str, str]] = ("images-idx3", "labels-idx1")
    # Another data set has files of the same names: its first labels, and its name.
    lookalike: ClassVar[tuple[tuple[int, ...], str]] = ((9, 0, 0, 3, 0, 2, 7, 2, 5, 5), "fashion_mnist")

    def read_files(self, train: bool) -> tuple[np.ndarray, Any]:
        # torchvision's reader gives the same, but an import of torchvision takes a second at each start.
        images, labels = (
            read_idx(self.folder / f"{'train' if train else 't10k'}-{part}-ubyte") for part in self.parts
        )
        first_labels, name = self.lookalike
        if train and tuple(labels[: len(first_labels)].tolist()) == first_labels:
            raise InputError(f"data_root: the files in {self.root} are those of dataset={name}; {self.remedy}")
        return images[:, None], labels

    @property
    def folder(self) -> Path:
        return Path(self.root, self.factory, "raw")

    @property
    def remedy(self) -> str:
        files = ", ".join(f"{split}-{part}-ubyte.gz" for split in ("train", "t10k") for part in self.parts)
        return f"put {files} (compressed or not) into {self.folder}"


@dataclass(frozen=True, kw_only=True)
class FashionMNIST(MNIST):
    """70,000 pieces of clothing, 28x28 grey (Xiao et al. 2017)."""

    factory = "FashionMNIST"
    mean = (0.2860,)
    std = (0.3530,)
    usual_augment = "crop_flip"
    lookalike = ((5, 0, 4, 1, 9, 2, 1, 3, 1, 4), "mnist")


@dataclass(frozen=True, kw_only=True)
class CIFAR10(Published):
    """60,000 photographs of 10 classes, 32x32 (Krizhevsky 2009)."""

    factory = "CIFAR10"
    image_shape = (3, 32, 32)
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2470, 0.2435, 0.2616)
    usual_augment = "crop_flip"
    archive: ClassVar[str] = "cifar-10-python.tar.gz"
    unpacked: ClassVar[str] = "cifar-10-batches-py"

    def read_files(self, train: bool) -> tuple[np.ndarray, Any]:
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


@dataclass(frozen=True, kw_only=True)
class CIFAR100(CIFAR10):
    """60,000 photographs of 100 classes, 32x32 (Krizhevsky 2009)."""

    factory = "CIFAR100"
    classes = 100
    mean = (0.5071, 0.4865, 0.4409)
    std = (0.2673, 0.2564, 0.2762)
    archive = "cifar-100-python.tar.gz"
    unpacked = "cifar-100-python"


def read_idx(path: Path) -> NDArray[np.uint8]:
    """The array in an IDX file of bytes, which may be compressed by gzip and end with `.gz`.

    Raises:
        FileNotFoundError: there is no such file.
        Exception: it cannot be read, or is not such a file.
    """
    file = next((name for name in (path, path.with_name(f"{path.name}.gz")) if name.is_file()), None)
    if file is None:
        raise FileNotFoundError(f"there is no {path.name}")
    content = read_bytes(file, MOST_BYTES, links=True)
    if content.startswith(GZIP):
        try:
            content = zlib.decompressobj(wbits=31).decompress(content, MOST_BYTES)
        except zlib.error as error:
            raise ValueError(f"{file} is damaged ({error})") from error
    start = 4 + 4 * int.from_bytes(content[3:4])
    shape = [int.from_bytes(content[at : at + 4]) for at in range(4, start, 4)]
    if content[:3] != BYTES or len(content) != start + math.prod(shape):
        raise ValueError(f"{file} is no IDX file of bytes, or is cut short")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def _reason(error: Exception) -> str:
    """Why a download failed, without what torchvision and urllib write around it.

    torchvision writes a line for each mirror that it has tried; the last one says what the last mirror has answered.
    """
    last = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
    return re.sub(r"^<urlopen error (?:\[Errno -?\d+\] )?(.*)>$|^\[Errno -?\d+\] (.*)$", r"\1\2", last.strip())
