"""Decoding image files, at the smallest scale that is enough."""

import io
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as T

from helpers import decoded, preprocessing
from lockstep.core.data_protocols import Crop
from lockstep.core.rng import SampleRNG
from lockstep.data.datasets.arrays import ArraySplit
from lockstep.data.datasets.decode import Box, ImageFile, Stored, read_part
from lockstep.data.datasets.files import FileSplit
from lockstep.data.datasets.folder import Folder
from lockstep.data.transforms.crops import RandomResizedCrop


def photograph(height: int, width: int) -> Image.Image:
    """A smooth image, as photographs are, with a gradient along each side."""
    y, x = np.mgrid[0:height, 0:width] / [[[height]], [[width]]]
    waves = 40 * np.sin(9 * x) * np.cos(7 * y)
    return Image.fromarray(np.stack([200 * x, 200 * y, 120 + waves], -1).clip(0, 255).astype(np.uint8))


def saved(folder: Path, image: Image.Image, name: str = "image.jpg") -> ImageFile:
    image.save(folder / name, quality=95)
    return ImageFile.read(folder / name)


def difference(one: Stored, other: Stored) -> float:
    return float(np.abs(one.astype(int) - other.astype(int)).mean())


@pytest.mark.parametrize(
    ("size", "eighths"), [(400, 8), (260, 8), (200, 4), (160, 4), (150, 3), (100, 2), (50, 1), (7, 1)]
)
def test_a_jpeg_is_decoded_at_the_smallest_scale_that_is_enough(tmp_path: Path, size: int, eighths: int) -> None:
    image = photograph(400, 600)
    file = saved(tmp_path, image)
    pixels, scale = decoded(file, size / 400)
    assert (pixels.shape, scale) == ((50 * eighths, 75 * eighths, 3), eighths)
    whole = T.center_crop(T.resize(T.pil_to_tensor(image), [size], antialias=True), [size, size])
    assert difference(file.stored(preprocessing(size, size), scaled=True), whole.numpy()) < 1.5


@pytest.mark.parametrize("shape", [(400, 800), (800, 400)])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_long_photo_keeps_the_detail_of_both_sides(tmp_path: Path, shape: tuple[int, int], axis: int) -> None:
    """Stripes of four pixels are those of one at a quarter of the size, and all grey at an eighth."""
    stripes = np.where(np.indices(shape)[axis] // 4 % 2, 220, 30).astype(np.uint8)
    file = saved(tmp_path, Image.fromarray(stripes))
    assert file.stored(preprocessing(100, 100), scaled=True).std() > 80
    if shape[axis] == 400:
        assert file.stored(preprocessing(100, 100, fit="squash"), scaled=True).std() > 80
    height, width = (length // (4 if side == axis else 8) for side, length in enumerate(shape))
    assert file.box((0, 0, *shape), (height, width)).std() > 80


@pytest.mark.parametrize("name", ["image.jpg", "image.png", "image.bmp"])
@pytest.mark.parametrize("box", [(0, 0, 400, 600), (17, 33, 101, 203), (300, 500, 100, 100), (399, 599, 1, 1)])
def test_a_box_is_cut_from_the_whole_image_and_resized(tmp_path: Path, name: str, box: Box) -> None:
    image = photograph(400, 600)
    top, left, height, width = box
    expected = T.resize(T.pil_to_tensor(image)[:, top : top + height, left : left + width], [48, 64], antialias=True)
    pixels = saved(tmp_path, image, name).box(box, (48, 64))
    assert pixels.shape == (3, 48, 64)
    assert difference(pixels, expected.numpy()) < 2


def test_a_box_that_is_scaled_down_has_all_that_it_covers(tmp_path: Path) -> None:
    halves = np.where(np.arange(16) < 8, 0, 255).astype(np.uint8)
    for axis, pixels in enumerate((halves[:, None].repeat(16, 1), halves[None].repeat(16, 0))):
        file = saved(tmp_path, Image.fromarray(pixels))
        assert np.allclose(file.box((4, 4, 8, 8), (1, 1)), 127, rtol=0, atol=20), f"axis {axis}"


def test_a_file_that_is_cut_short_below_a_box_is_refused_too(tmp_path: Path) -> None:
    file = saved(tmp_path, photograph(400, 400))
    (tmp_path / "cut.jpg").write_bytes(file.data[: len(file.data) * 9 // 10])
    with pytest.raises(OSError, match="image file is truncated"):
        ImageFile.read(tmp_path / "cut.jpg").box((0, 0, 50, 50), (20, 20))


@pytest.mark.parametrize(("height", "width"), [(1, 1), (3, 5), (7, 7), (5, 9)])
def test_a_tiny_jpeg_is_decoded_whole(tmp_path: Path, height: int, width: int) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "image.jpg")
    with Image.open(tmp_path / "image.jpg") as image:
        pixels, _ = decoded(ImageFile.read(tmp_path / "image.jpg"))
        assert difference(pixels, np.asarray(image)) < 1


def test_a_jpeg_with_harmless_damage_is_decoded_whole_and_one_that_is_cut_is_refused(tmp_path: Path) -> None:
    file = saved(tmp_path, photograph(400, 300))
    scan = file.data.index(b"\xff\xda")
    harmless = file.data[:scan] + b"\x00\x00" + file.data[scan:]
    with pytest.raises(ValueError, match="extraneous bytes"):
        simplejpeg.decode_jpeg(harmless)
    table = file.data.index(b"\xff\xdb")
    in_header = file.data[:table] + b"\x00\x00" + file.data[table:]
    with pytest.raises(ValueError, match="extraneous bytes"):
        simplejpeg.decode_jpeg_header(in_header)
    behind = file.data[:-2] + bytes(200) + file.data[-2:]
    simplejpeg.decode_jpeg_header(behind)
    with pytest.raises(ValueError, match="extraneous bytes"):
        simplejpeg.decode_jpeg(behind)
    cut = file.data[: len(file.data) // 2]
    for content, fits in ((harmless, True), (in_header, True), (behind, True), (cut, False)):
        (tmp_path / "damaged.jpg").write_bytes(content)
        damaged = ImageFile.read(tmp_path / "damaged.jpg")
        assert (damaged.height, damaged.width) == (400, 300)
        if fits:
            exact = file.stored(preprocessing(100, 100))
            assert difference(damaged.stored(preprocessing(100, 100), scaled=True), exact) < 1
            box = (200, 150, 200, 150)
            assert difference(damaged.box(box, (40, 30)), file.box(box, (40, 30))) < 2
        else:
            with pytest.raises(OSError, match="image file is truncated"):
                damaged.stored(preprocessing(100, 100))


def test_a_split_with_boxes_cuts_others_in_each_epoch_and_the_same_again(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.jpg" for number in range(6)]
    for number, path in enumerate(paths):
        photograph(60 + number, 80).save(path)
    crop = Crop(RandomResizedCrop().boxes, seed=3, size=(16, 24))
    split = FileSplit(paths, torch.zeros(6, dtype=torch.int64), preprocessing(32, 32), crop=crop)
    first = split.fetch([0, 1, 2, 3, 4, 5], 1)
    assert first.shape == (6, 3, 16, 24)
    assert torch.equal(split.fetch([4, 2], 1), first[[4, 2]])
    assert not torch.equal(split.fetch([4, 2], 2), first[[4, 2]])
    again = split.fetch([4, 4 + 6, 4 + 2 * 6], 1)
    assert torch.equal(again[0], first[4])
    assert len({image.numpy().tobytes() for image in again}) == 3, "each repetition of an example has its own box"
    assert split.fetch([], 1).shape == (0, 3, 16, 24)


@pytest.mark.parametrize("mode", ["CMYK", "L", "RGB"])
def test_every_kind_of_jpeg_is_scaled_to_rgb(tmp_path: Path, mode: str) -> None:
    image = photograph(160, 160).convert(mode)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=95)
    with Image.open(buffer) as again:
        expected = np.asarray(again.convert("RGB").resize((40, 40), Image.Resampling.BOX)).transpose(2, 0, 1)
    assert difference(saved(tmp_path, image).stored(preprocessing(40, 40), scaled=True), expected) < 2


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [16, 60, 150, 400])
def test_an_evaluation_has_the_pixels_of_pillow_and_torchvision_and_training_may_scale(
    tmp_path: Path, size: int, interpolation: str
) -> None:
    Image.effect_mandelbrot((601, 403), (-2, -1.5, 1, 1.5), 50).save(tmp_path / "grey.jpg")
    noise = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize((601, 403))
    image.save(tmp_path / "usual.jpg")
    image.save(tmp_path / "fine.jpg", quality=95, subsampling=0, progressive=True)
    image.convert("CMYK").save(tmp_path / "cmyk.jpg")
    paths = sorted(tmp_path.iterdir())
    data = Folder(path=str(tmp_path), decode_size=size)
    how = replace(data.preprocessing, interpolation=interpolation)
    splits = [FileSplit(paths, torch.zeros(4), how, scaled=scaled) for scaled in (False, True)]
    exact, scaled = (split.fetch([0, 1, 2, 3]).int() for split in splits)
    for path, pixels in zip(paths, exact, strict=True):
        with Image.open(path) as photo:
            whole = T.pil_to_tensor(photo.convert("RGB"))
        resized = T.resize(whole, [size], T.InterpolationMode(interpolation), antialias=True)
        assert (pixels - T.center_crop(resized, [size, size]).int()).abs().max() <= 1, path
    assert torch.equal(exact[1:], scaled[1:]) == (size > 403 / 2)  # simplejpeg rounds CMYK otherwise


@pytest.mark.parametrize("crop_from", ["square", "file"])
def test_training_alone_reads_jpegs_at_a_fraction_of_their_size(crop_from: str, tmp_path: Path) -> None:
    for place in ("train/a", "train/b", "val/a", "val/b", "test/a", "test/b"):
        (tmp_path / place).mkdir(parents=True)
        photograph(90, 120).save(tmp_path / place / "0.jpg")
    data = Folder(path=str(tmp_path), test_folder="test", decode_size=16, skip=3, crop_from=crop_from)
    splits = data.train(), data.eval(), data.test()
    assert [split.scaled for split in splits] == [True, False, False]
    assert data.changes == (crop_from == "file"), "another box each time"
    assert [split.skip for split in splits] == [3, 3, 3]
    assert data.read_as(data.train(), data.preprocessing).scaled
    cropped = data.read_as(data.train(), data.preprocessing, Crop(RandomResizedCrop().boxes, seed=0, size=(4, 4)))
    assert cropped.crop is not None
    assert data.read_as(cropped, data.preprocessing).crop is None, "whole images again"


def test_a_pipe_is_no_image_and_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(path: Path, flags: int) -> int:
        assert flags & os.O_NONBLOCK, "it waits for a writer"
        return open_(path, flags)

    open_ = os.open
    monkeypatch.setattr(os, "open", opened)
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(ValueError, match="not a regular file"):
        ImageFile.read(tmp_path / "a.png")


def test_a_turned_photo_is_decoded_at_the_scale_of_its_upright_sides(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    photograph(400, 640).save(tmp_path / "turned.jpg", quality=95, exif=exif)
    file = ImageFile.read(tmp_path / "turned.jpg")
    assert (file.height, file.width) == (640, 400)
    pixels, scale = decoded(file, 0.25)
    assert (pixels.shape, scale) == ((160, 100, 3), 2)


def test_a_file_that_is_read_in_pieces_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, pread = bytes(range(40)), os.pread
    (tmp_path / "a").write_bytes(content)
    monkeypatch.setattr(os, "pread", lambda descriptor, size, offset: pread(descriptor, min(size, 3), offset))
    assert read_part(tmp_path / "a") == content
    assert read_part(tmp_path / "a", 5, 20) == content[5:25]
    assert read_part(tmp_path / "a", 5, 0) == b"", "an empty file of an archive"


@pytest.mark.parametrize("seed", [3, 4])
@pytest.mark.parametrize("epoch", [0, 2])
def test_a_split_asks_for_the_boxes_of_its_seed_epoch_and_examples_by_their_heights_and_widths(
    tmp_path: Path, seed: int, epoch: int
) -> None:
    for number in range(3):
        photograph(20 + number, 40).save(tmp_path / f"{number}.png")
    requested: list[object] = []

    def boxes(draws: SampleRNG, sizes: torch.Tensor) -> torch.Tensor:
        requested.append((draws.seed, draws.epoch, draws.indices.tolist(), sizes.tolist()))
        return torch.tensor([[0, 0, 10, 30]]).expand(len(sizes), 4)

    paths = [tmp_path / f"{number}.png" for number in range(3)]
    crop = Crop(boxes, seed=seed, size=(5, 9))
    split = FileSplit(paths, torch.zeros(3), preprocessing(8, 8, interpolation="bicubic"), crop=crop)
    images = split.fetch([2, 3], epoch)
    assert requested == [(seed, epoch, [2, 3], [[22, 40], [20, 40]])]
    for image, path in zip(images, (paths[2], paths[0]), strict=True):
        expected = ImageFile.read(path).box((0, 0, 10, 30), (5, 9), "bicubic")
        assert np.array_equal(image, expected)


@pytest.mark.parametrize(("height", "width"), [(8, 8), (7, 7), (8, 3), (3, 8), (9, 3)])
def test_a_jpeg_with_a_side_of_eight_pixels_is_scaled_and_a_smaller_one_is_not(
    tmp_path: Path, height: int, width: int
) -> None:
    file = saved(tmp_path, photograph(height, width))
    for share, eighths in ((0.5, 4), (0.25, 2), (0.125, 1), (0.51, 8)):
        pixels, scale = decoded(file, share)
        expected = eighths if max(height, width) >= 8 else 8
        assert scale == expected
        assert pixels.shape == (-(-height * expected // 8), -(-width * expected // 8), 3)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="the open files are listed on Linux")
def test_no_file_stays_open_whether_it_can_be_read_or_not(tmp_path: Path) -> None:
    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    (tmp_path / "a").write_bytes(bytes(10))
    os.mkfifo(tmp_path / "pipe")
    before = opened()
    read_part(tmp_path / "a")
    wrong = {11: "it ends after 10 of 11 bytes", 2**50: "expected at most", None: "it is not a regular file"}
    for size, says in wrong.items():
        with pytest.raises((OSError, ValueError), match=says):
            read_part(tmp_path / ("pipe" if size is None else "a"), size=size)
    assert opened() == before


def test_a_split_that_reads_no_files_stays_as_it_is(tmp_path: Path) -> None:
    data, split = Folder(path=str(tmp_path), decode_size=8), ArraySplit(torch.zeros(1, 3, 8, 8), torch.zeros(1))
    assert data.read_as(split, data.preprocessing, Crop(RandomResizedCrop().boxes, seed=0, size=(4, 4))) is split


def test_a_file_of_a_split_has_its_path_as_its_name_and_its_bytes_as_its_content(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.png", "b.jpg")]
    for path in paths:
        photograph(8, 8).save(path)
    paths.append(tmp_path / "c.jpg")
    paths[2].write_bytes(b"no image")
    split = FileSplit(paths, torch.zeros(3), preprocessing(8, 8))
    assert [split.name(index) for index in (2, 1, 0)] == [str(path) for path in reversed(paths)]
    assert [split.content(index) for index in (2, 1, 0)] == [path.read_bytes() for path in reversed(paths)]


def test_a_whole_photo_for_print_has_pillows_pixels_to_the_bit(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    file = saved(tmp_path, Image.fromarray(noise).convert("CMYK"))
    with Image.open(tmp_path / "image.jpg") as image:
        expected = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
    assert np.array_equal(file.stored(preprocessing(40, 60)), expected)
