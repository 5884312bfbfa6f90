"""The published data sets that are downloaded: MNIST, FashionMNIST and the CIFARs."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lockstep.core.errors import InputError
from lockstep.core.fields import pathname
from lockstep.data.datasets.builtin import ArraySource
from lockstep.data.datasets.published_files import read_cifar, read_idx


@dataclass(frozen=True, kw_only=True)
class Published(ArraySource):
    """A data set whose files may lie in several usual folders. Missing files are downloaded by one process at a time.

    Fields:
        root: the folder of all data sets.
    """

    root: str = pathname("data")

    factory: ClassVar[str]  # the class of torchvision that downloads the files
    folders: ClassVar[tuple[str, ...]]  # the folders in `root` that are searched; a download fills the first

    @abstractmethod
    def read_files(self, train: bool) -> tuple[np.ndarray, Any]:
        """The images and labels of a split, as stored. A missing or damaged file raises any exception."""

    @property
    @abstractmethod
    def remedy(self) -> str:
        """Which files to put where."""

    @property
    def places(self) -> list[Path]:
        return [Path(self.root, folder) for folder in self.folders]

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

    def _fetch(self) -> None:
        from torchvision import datasets

        dataset: Callable[..., Any] = getattr(datasets, self.factory)
        for train in (True, False):
            dataset(root=self.root, train=train, download=True)

    def _download(self, missing: InputError) -> None:
        from filelock import FileLock

        try:
            Path(self.root).mkdir(parents=True, exist_ok=True)
            with FileLock(Path(self.root) / f".{self.factory}.lock"):
                self._fetch()
        except Exception as error:  # torchvision passes on any error of the download
            if not isinstance(missing.__cause__, FileNotFoundError):
                raise missing from error
            raise InputError(
                f"data_root: {self.factory} cannot be read from {self.root} and cannot be downloaded "
                f"({type(error).__name__}: {' '.join(str(error).split())}); {self.remedy}, or name another folder "
                "with data_root=FOLDER"
            ) from error
        finally:
            self._tidy()
        super().prepare()

    def _tidy(self) -> None:
        """Remove empty folders and the lock file. A process that still waits for the lock will find the files."""
        (Path(self.root) / f".{self.factory}.lock").unlink(missing_ok=True)
        for folder in (f"{self.factory}/raw", self.factory, "."):
            with contextlib.suppress(OSError):  # not empty, or not there
                Path(self.root, folder).rmdir()


@dataclass(frozen=True, kw_only=True)
class MNIST(Published):
    """70,000 handwritten digits, 28x28 grey (LeCun et al. 1998)."""

    factory = "MNIST"
    image_shape = (1, 28, 28)
    mean = (0.1307,)
    std = (0.3081,)
    usual_augment = "shift"
    folders = ("MNIST/raw", "MNIST", "raw", ".")
    parts: ClassVar[tuple[str, str]] = ("images-idx3", "labels-idx1")
    # Another data set has files of the same names: its first labels, and its name.
    lookalike: ClassVar[tuple[tuple[int, ...], str]] = ((9, 0, 0, 3, 0, 2, 7, 2, 5, 5), "fashion_mnist")

    def read_files(self, train: bool) -> tuple[np.ndarray, Any]:
        images, labels = (read_idx(self.places, f"{'train' if train else 't10k'}-{part}") for part in self.parts)
        first_labels, name = self.lookalike
        if train and tuple(labels[: len(first_labels)].tolist()) == first_labels:
            raise InputError(f"data_root: the files in {self.root} are those of dataset={name}; {self.remedy}")
        return images[:, None], labels

    @property
    def remedy(self) -> str:
        files = ", ".join(f"{split}-{part}-ubyte.gz" for split in ("train", "t10k") for part in self.parts)
        return f"put {files} (compressed or not) into {self.places[0]}"


@dataclass(frozen=True, kw_only=True)
class FashionMNIST(MNIST):
    """70,000 pieces of clothing, 28x28 grey (Xiao et al. 2017)."""

    factory = "FashionMNIST"
    mean = (0.2860,)
    std = (0.3530,)
    usual_augment = "crop_flip"
    folders = ("FashionMNIST/raw", "FashionMNIST", "raw", ".")
    lookalike = ((5, 0, 4, 1, 9, 2, 1, 3, 1, 4), "mnist")


@dataclass(frozen=True, kw_only=True)
class CIFAR10(Published):
    """60,000 photographs of 10 classes, 32x32 (Krizhevsky 2009)."""

    factory = "CIFAR10"
    image_shape = (3, 32, 32)
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2470, 0.2435, 0.2616)
    usual_augment = "crop_flip"
    folders = (".", "CIFAR10", "cifar10")
    archive: ClassVar[str] = "cifar-10-python.tar.gz"
    unpacked: ClassVar[str] = "cifar-10-batches-py"
    train_files: ClassVar[tuple[str, ...]] = tuple(f"data_batch_{number}" for number in range(1, 6))
    eval_files: ClassVar[tuple[str, ...]] = ("test_batch",)
    label_key: ClassVar[str] = "labels"

    def read_files(self, train: bool) -> tuple[np.ndarray, Any]:
        names = self.train_files if train else self.eval_files
        batches = read_cifar(self.places, self.unpacked, self.archive, names)
        pixels = np.concatenate([np.asarray(batch["data"], dtype=np.uint8) for batch in batches])
        return pixels.reshape(-1, *self.image_shape), [label for batch in batches for label in batch[self.label_key]]

    @property
    def remedy(self) -> str:
        return f"put {self.archive} into {self.root}, or unpack it there to {Path(self.root, self.unpacked)}"


@dataclass(frozen=True, kw_only=True)
class CIFAR100(CIFAR10):
    """60,000 photographs of 100 classes, 32x32 (Krizhevsky 2009)."""

    factory = "CIFAR100"
    classes = 100
    mean = (0.5071, 0.4865, 0.4409)
    std = (0.2673, 0.2564, 0.2762)
    folders = (".", "CIFAR100", "cifar100")
    archive = "cifar-100-python.tar.gz"
    unpacked = "cifar-100-python"
    train_files = ("train",)
    eval_files = ("test",)
    label_key = "fine_labels"
