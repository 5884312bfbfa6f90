"""The two kinds of split, and the decoding of image files."""

import pickle
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.transforms import CenterCropOrPad, ResizeKeepRatio
from torch import Tensor
from torchvision.transforms.v2 import CenterCrop, Compose, Resize
from torchvision.transforms.v2 import functional as T

from helpers import preprocessing
from lockstep.core.data_protocols import Crop
from lockstep.core.errors import BrokenImage, InputError
from lockstep.data.datasets import decode
from lockstep.data.datasets.arrays import check_labels
from lockstep.data.datasets.files import FileSplit

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
COLOUR = (124, 116, 104)  # the mean of ImageNet


def decoded(path: Path, size: int = 20) -> Tensor:
    """The file's pixels, read by a split."""
    return FileSplit([path], torch.tensor([0]), preprocessing(size, size)).fetch([0])[0]


@pytest.mark.parametrize(
    ("size", "fit", "transform"),
    [
        ((8, 8), "crop", Compose([Resize(8), CenterCrop(8)])),
        ((8, 10), "crop", Compose([Resize(8), CenterCrop((8, 10))])),
        ((9, 25), "crop", Compose([ResizeKeepRatio((9, 25)), CenterCrop((9, 25))])),
        ((9, 9), "pad", Compose([ResizeKeepRatio(9, longest=1.0), CenterCropOrPad(9, fill=COLOUR)])),
        ((40, 41), "pad", Compose([ResizeKeepRatio((40, 41), longest=1.0), CenterCropOrPad((40, 41), fill=COLOUR)])),
        ((8, 9), "squash", Resize((8, 9))),
        ((40, 20), "squash", Resize((40, 20))),
    ],
)
def test_a_file_is_fitted_as_torchvision_and_timm_do_it(
    tmp_path: Path, size: tuple[int, int], fit: str, transform: Callable[[Any], Any]
) -> None:
    path = tmp_path / "image.png"
    Image.fromarray(PIXELS).save(path)
    split = FileSplit([path], torch.tensor([0]), preprocessing(*size, fit=fit, mean=(0.485, 0.456, 0.406)))
    # With vector instructions torch resizes bytes, on other CPUs floats, whose rounding depends on the crop.
    difference = split.fetch([0])[0].int() - T.pil_to_tensor(transform(Image.fromarray(PIXELS))).int()
    assert difference.abs().max() <= 1


@pytest.mark.parametrize("crop", [None, Crop(lambda rng, sizes: torch.tensor([[5, 3, 8, 12]]), 0, (20, 30))])
def test_a_file_is_resized_by_the_interpolation_that_is_asked_for(tmp_path: Path, crop: Crop | None) -> None:
    Image.fromarray(PIXELS).save(tmp_path / "image.png")
    whole = T.pil_to_tensor(Image.fromarray(PIXELS))
    for interpolation in ("bilinear", "bicubic"):
        mode = T.InterpolationMode(interpolation)
        how = preprocessing(30, 30, interpolation=interpolation)
        split = FileSplit([tmp_path / "image.png"], torch.tensor([0]), how, crop=crop)
        if crop is None:
            expected = T.center_crop(T.resize(whole, [30, 45], mode, antialias=True), [30, 30])
        else:
            expected = T.resize(whole[:, 5:13, 3:15], [20, 30], mode, antialias=True)
        assert (split.fetch([0])[0].int() - expected.int()).abs().max() <= 1


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "gif", "bmp", "tif"])
@pytest.mark.parametrize("damage", ["cut", "empty", "other bytes"])
def test_a_file_that_cannot_be_decoded_is_named_with_its_index(tmp_path: Path, suffix: str, damage: str) -> None:
    good, bad = tmp_path / f"good.{suffix}", tmp_path / f"bad.{suffix}"
    Image.fromarray(PIXELS).save(good)
    content = {"cut": good.read_bytes()[:300], "empty": b"", "other bytes": b"no image " * 9}
    bad.write_bytes(content[damage])
    split = FileSplit([good, good, bad], torch.tensor([0, 0, 0]), preprocessing(20, 20))
    split.fetch([0])
    with pytest.raises(InputError) as caught:
        split.fetch([0, 2])
    sentence = str(caught.value)
    assert sentence.startswith(f"dataset: image 2, {bad}, cannot be decoded (")
    assert "remove or replace the file" in sentence
    assert ".cpp" not in sentence


def bomb(path: Path, side: int = 50_000) -> Path:
    """Write a small image file whose header claims `side` by `side` pixels."""
    Image.fromarray(PIXELS).save(path)
    content = bytearray(path.read_bytes())
    if path.suffix == ".png":
        content[16:24] = struct.pack(">II", side, side)
        content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    elif path.suffix == ".gif":
        content[6:10] = struct.pack("<HH", side, side)
    elif path.suffix == ".bmp":
        content[18:26] = struct.pack("<ii", side, side)
    else:
        frame = content.index(b"\xff\xc0") + 5
        content[frame : frame + 4] = struct.pack(">HH", side, side)
    path.write_bytes(content)
    return path


def test_a_strip_that_resizing_would_make_huge_is_refused(tmp_path: Path) -> None:
    Image.new("RGB", (1, 60_000)).save(tmp_path / "strip.png")
    strip, label = [tmp_path / "strip.png"], torch.tensor([0])
    assert FileSplit(strip, label, preprocessing(4, 4)).fetch([0]).shape == (1, 3, 4, 4)
    says = r"its header says 1x60000, expected at most \d+ pixels, also resized to 224x13440000\)"
    with pytest.raises(InputError, match=says):
        FileSplit(strip, label, preprocessing(224, 224)).fetch([0])


@pytest.mark.parametrize("suffix", ["png", "gif", "jpg", "bmp"])
def test_a_header_that_asks_for_too_much_is_refused_before_anything_is_decoded(tmp_path: Path, suffix: str) -> None:
    path = bomb(tmp_path / f"bomb.{suffix}")
    sentence = rf"image 0, {path}, cannot be decoded \(its header says .*(50000x50000|2500000000)"
    with pytest.raises(InputError, match=sentence):
        decoded(path)


@pytest.mark.parametrize("suffix", ["png", "gif", "jpg"])
def test_our_bound_on_pixels_is_not_pillows(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"image.{suffix}"
    Image.fromarray(PIXELS).save(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 310)  # Pillow warns above, and refuses what has twice as many
    monkeypatch.setattr(decode, "PIXELS", 600)
    assert decoded(path).shape == (3, 20, 20)
    assert Image.MAX_IMAGE_PIXELS == 310, "it guards other code of this process"
    monkeypatch.setattr(decode, "PIXELS", 599)
    with pytest.raises(InputError, match="30x20, expected at most 599 pixels"):
        decoded(path)


def test_a_file_of_another_kind_is_not_opened_whatever_it_is_called(tmp_path: Path) -> None:
    # Pillow would start Ghostscript for an EPS file.
    Image.fromarray(PIXELS).save(tmp_path / "image.eps")
    path = (tmp_path / "image.eps").rename(tmp_path / "image.png")
    with pytest.raises(InputError, match="cannot identify image file"):
        decoded(path)


def test_a_broken_image_keeps_its_sentence_on_its_way_from_a_worker() -> None:
    error = BrokenImage(17, Path("a.png"), "cut short")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.failure) == (str(error), error.failure)
    assert error.failure == "image 17, a.png, cannot be decoded (cut short)"


def test_a_label_that_is_no_class_is_named() -> None:
    check_labels(torch.tensor([0, 9]), 10, "the training split")
    for wrong in (10, -1):
        with pytest.raises(InputError, match=rf"example 2 of the training split has label {wrong}, expected 0 to 9"):
            check_labels(torch.tensor([0, 9, wrong, 11]), 10, "the training split")
