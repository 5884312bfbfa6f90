"""Turns a path, bytes, a Pillow image or an array into an image as the data set would store it."""

import glob
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from lockstep.core.errors import InputError, StorageError, out_of_memory, reason_of
from lockstep.core.model_card import Preprocessing
from lockstep.data.datasets.decode import GREY, RGB, ImageFile, contents
from lockstep.data.datasets.folder import image_files, suffixes_of
from lockstep.data.datasets.photos import PILLOW_FORMATS
from lockstep.data.datasets.preprocess import orientation_of, to_rgb, upright

# An image: a file by its path, the bytes of one, a Pillow image, a uint8 array (H, W) or (H, W, C), or a uint8
# tensor (C, H, W).
ImageLike = str | Path | bytes | Image.Image | NDArray[np.uint8] | Tensor


def stored_images(images: ImageLike | Iterable[ImageLike], how: Preprocessing) -> Tensor:
    """Images as a data set with this preprocessing would store them: uint8 (B, C, H, W), on the CPU.

    A tensor may also be a batch (B, C, H, W). Arrays and tensors of the right shape are not changed. All other images
    are processed like image files by `ImageFile.stored`; colours become grey if C is 1.

    Raises:
        InputError: one is not an image, or the data set has images that no file can hold.
    """
    if isinstance(images, Tensor) and images.dim() == 4:
        images = list(images)
    if isinstance(images, (str, Path, bytes, Image.Image, np.ndarray, Tensor)):
        images = [images]
    stored = [stored_image(image, how) for image in images]
    return torch.stack(stored) if stored else torch.empty((0, *how.image_shape), dtype=torch.uint8)


def stored_image(image: ImageLike, how: Preprocessing) -> Tensor:
    """One image as by `stored_images`: uint8 (C, H, W)."""
    shape = how.image_shape
    if isinstance(image, (np.ndarray, Tensor)):
        tensor = _tensor(image)
        if tuple(tensor.shape) == shape:
            return tensor
        image = _pillow(tensor) if shape[0] in (GREY, RGB) else _npy(tensor)
    name = str(image) if isinstance(image, (str, Path)) else "the image"
    try:
        file = ImageFile.of(contents(Path(image)) if isinstance(image, (str, Path)) else _bytes(image), shape[0])
        return torch.from_numpy(np.ascontiguousarray(file.stored(how)))
    except FileNotFoundError:
        raise InputError(f"{name}: there is no such file or folder") from None
    except StorageError:
        raise
    except Exception as error:  # the decoders raise all kinds of errors for a damaged file
        if memory := out_of_memory(error, name):
            raise memory from error
        reason = error.strerror if isinstance(error, OSError) and error.strerror else reason_of(error)
        raise InputError(f"{name} cannot be read as an image ({reason})") from error


def files_in(path: Path, channels: int = RGB) -> list[Path]:
    """The image files below a folder, sorted; the matches of a pattern that no shell expanded; else only this path.

    Of a folder, these are the files that can hold an image of so many channels. Raises InputError for a folder
    without images, or a pattern without files.
    """
    if not path.exists() and glob.has_magic(str(path)):
        if names := sorted(glob.glob(str(path))):  # noqa: PTH207, the pattern may begin at the root
            return [file for name in names for file in files_in(Path(name), channels)]
        raise InputError(f"no file has a name like {path}")
    if not path.is_dir():
        return [path]
    suffixes = suffixes_of(channels)
    images = sorted(path / image for image in image_files(path, Counter(), suffixes))
    if not images:
        raise InputError(f"{path} has no images in it ({', '.join(sorted(suffixes))})")
    return images


def _tensor(image: NDArray[np.uint8] | Tensor) -> Tensor:
    """An array or a tensor as uint8 (C, H, W)."""
    tensor = torch.from_numpy(np.array(image)) if isinstance(image, np.ndarray) else image.cpu()
    if isinstance(image, np.ndarray):
        tensor = tensor[None] if tensor.dim() == 2 else tensor.movedim(-1, 0) if tensor.dim() == 3 else tensor
    if tensor.dtype != torch.uint8 or tensor.dim() != 3 or 0 in tensor.shape:
        raise InputError(
            f"an image is {str(image.dtype).removeprefix('torch.')} of shape {tuple(image.shape)}, expected uint8: "
            "an array (H, W) or (H, W, C), or a tensor (C, H, W)"
        )
    return tensor


def _pillow(image: Tensor) -> Image.Image:
    if len(image) not in (1, RGB):
        raise InputError(f"an image has {len(image)} channels, expected 1 or {RGB}")
    return Image.fromarray(image[0].numpy() if len(image) == 1 else image.movedim(0, -1).contiguous().numpy())


def _npy(image: Tensor) -> bytes:
    np.save(file := BytesIO(), image.movedim(0, -1).numpy())
    return file.getvalue()


def _bytes(image: bytes | Image.Image) -> bytes:
    """An image as the content of a file, so that the same code decodes all images."""
    if isinstance(image, bytes):
        return image
    # Nobody can have changed an image that Pillow has not decoded yet, so it is read as its file is.
    if getattr(image, "tile", None) and image.format in (*PILLOW_FORMATS, "MPO") and image.tell() == 0:
        image.fp.seek(0)  # type: ignore[attr-defined]
        content: bytes = image.fp.read()  # type: ignore[attr-defined]
        ImageFile.of(content)  # refuses what would take too long to load
        with suppress(OSError):  # of a damaged file; the decoder of its content decides
            image.load()  # then Pillow closes the file
        return content
    file = BytesIO()
    Image.fromarray(upright(to_rgb(image), orientation_of(image))).save(file, "BMP")
    return file.getvalue()
