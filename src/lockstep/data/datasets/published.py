"""The published data sets that are downloaded: MNIST, FashionMNIST and the CIFARs.

Their files are read compressed or not, from any of several folders.
"""

import contextlib
import gzip
import io
import math
import pickle
import re
import tarfile
import zlib
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.core.errors import InputError
from lockstep.core.fields import pathname
from lockstep.core.safe_read import opened
from lockstep.data.datasets.builtin import ArraySource

GZIP = b"\x1f\x8b"
BYTES = b"\0\0\x08"  # how an IDX file of bytes begins; the number of its dimensions follows
MOST_BYTES = 2**30  # of a decompressed file: MNIST's largest has 47 MB, CIFAR's 31 MB


@dataclass(frozen=True, kw_only=True)
class Published(ArraySource):
    """A data set whose files may lie in several usual folders. Missing files are downloaded by one process at a time.

    Fields:
        root: the folder of all data sets.
    """

    root: str = pathname("data")

    downloads: ClassVar[bool] = True
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
        batches = self._batches(self.train_files if train else self.eval_files)
        pixels = np.concatenate([np.asarray(batch["data"], dtype=np.uint8) for batch in batches])
        return pixels.reshape(-1, *self.image_shape), [label for batch in batches for label in batch[self.label_key]]

    def _batches(self, names: Sequence[str]) -> list[Mapping[str, Any]]:
        """The content of these files: in a folder `unpacked`, in one of `places` itself, or in an `archive`."""
        for folder in [*(place / self.unpacked for place in self.places), *self.places]:
            if (folder / names[0]).is_file():
                return [_unpickled(_contents(folder / name)) for name in names]
        path = _first_file([place / self.archive for place in self.places])
        with opened(path, links=True) as file, tarfile.open(fileobj=file, mode="r:*") as tar:
            members = {Path(member.name).name: member for member in tar if member.isfile()}
            return [_unpickled(_all_of(tar.extractfile(members[name]), name)) for name in names]

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


def read_idx(folders: Sequence[Path], stem: str) -> NDArray[np.uint8]:
    """The array in the first of `folders` that has the file `stem`, such as `train-images-idx3`.

    The name may have a dot instead of a hyphen. The file may be compressed by gzip, or lie in a folder of its name.

    Raises:
        FileNotFoundError: no folder has it.
        Exception: it cannot be read, or is not such a file.
    """
    plain = f"{stem}-ubyte"
    names = [f"{name}{suffix}" for name in (plain, plain.replace("-idx", ".idx")) for suffix in ("", ".gz")]
    names += [f"{name}/{name}" for name in names]
    path = _first_file([folder / name for folder in folders for name in names])
    content = _contents(path)
    start = 4 + 4 * int.from_bytes(content[3:4])
    shape = [int.from_bytes(content[at : at + 4]) for at in range(4, start, 4)]
    if content[:3] != BYTES or len(content) != start + math.prod(shape):
        raise ValueError(f"{path} is no IDX file of bytes, or is cut short")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def _reason(error: Exception) -> str:
    """Why a download failed, without what torchvision and urllib write around it.

    torchvision writes a line for each mirror that it has tried; the last one says what the last mirror has answered.
    """
    last = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
    return re.sub(r"^<urlopen error (?:\[Errno -?\d+\] )?(.*)>$|^\[Errno -?\d+\] (.*)$", r"\1\2", last.strip())


def _first_file(paths: Sequence[Path]) -> Path:
    file = next((path for path in paths if path.is_file()), None)
    if file is None:
        raise FileNotFoundError(f"there is no {paths[0].name}")
    return file


def _contents(path: Path) -> bytes:
    with opened(path, links=True) as file:
        packed = file.read(len(GZIP)) == GZIP
        file.seek(0)
        try:
            return _all_of(gzip.GzipFile(fileobj=file) if packed else file, path)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{path} is damaged or cut short ({error})") from error


def _all_of(file: Any, name: object) -> bytes:
    content: bytes = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"{name} has more than {MOST_BYTES:,} bytes")
    return content


def _unpickled(data: bytes) -> Mapping[str, Any]:
    content = _ArrayUnpickler(io.BytesIO(data), encoding="latin1").load()
    if not isinstance(content, Mapping):
        raise ValueError("it holds no dictionary")
    return content


class _ArrayUnpickler(pickle.Unpickler):
    """Reads plain values and arrays only, because a pickle can call any function."""

    def find_class(self, module: str, name: str) -> Any:
        match module.replace("numpy._core", "numpy.core"), name:
            case "numpy.core.multiarray", "_reconstruct":
                return np.empty(0).__reduce__()[0]
            case "numpy", "ndarray" | "dtype":
                return getattr(np, name)
            case "_codecs", "encode":
                return lambda text, encoding: text.encode(encoding)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no array needs")
