"""Reads the published files of MNIST and CIFAR, compressed or not, from any of several folders."""

from __future__ import annotations

import gzip
import io
import math
import pickle
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.core.safe_read import opened

GZIP = b"\x1f\x8b"
BYTES = b"\0\0\x08"  # how an IDX file of bytes begins; the number of its dimensions follows
MOST_BYTES = 2**30  # of a decompressed file: MNIST's largest has 47 MB, CIFAR's 31 MB


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


def read_cifar(folders: Sequence[Path], unpacked: str, archive: str, names: Sequence[str]) -> list[Mapping[str, Any]]:
    """The dictionaries in the files `names`: in a folder `unpacked`, in one of `folders` itself, or in an `archive`.

    Raises:
        FileNotFoundError: no folder has them.
        Exception: one cannot be read, or is not such a file.
    """
    for folder in [*(folder / unpacked for folder in folders), *folders]:
        if (folder / names[0]).is_file():
            return [_unpickled(_contents(folder / name)) for name in names]
    path = _first_file([folder / archive for folder in folders])
    with opened(path, links=True) as file, tarfile.open(fileobj=file, mode="r:*") as tar:
        members = {Path(member.name).name: member for member in tar if member.isfile()}
        return [_unpickled(_member(tar, members[name])) for name in names]


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
            content = (gzip.GzipFile(fileobj=file) if packed else file).read(MOST_BYTES + 1)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{path} is damaged or cut short ({error})") from error
    if len(content) > MOST_BYTES:
        raise ValueError(f"{path} has more than {MOST_BYTES:,} bytes")
    return content


def _member(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member) if member.size <= MOST_BYTES else None
    if file is None:
        raise ValueError(f"{member.name} has more than {MOST_BYTES:,} bytes")
    return file.read()


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
