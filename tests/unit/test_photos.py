"""Photos of all usual file formats, compared with Pillow's conversion of the same file."""

from __future__ import annotations

import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor

from helpers import ROOT, decoded
from lockstep.core.errors import InputError
from lockstep.data.datasets import photos
from lockstep.data.datasets.decode import ImageFile
from lockstep.data.datasets.splits import Crop, FileSplit
from lockstep.data.transforms.augment import RandomResizedCrop

REAL = ROOT.parent / "shared" / "data" / "imagenet_samples.tar.gz"
SIZE = 24
Y, X = np.mgrid[0:SIZE, 0:SIZE] / (SIZE - 1)
COLOURS = Image.fromarray((255 * np.stack([X, Y, (X + Y) / 2], -1)).astype(np.uint8))
GREYS = (X + Y) / 2  # from 0 to 1
ALPHA = Image.fromarray((255 * (X > 0.5)).astype(np.uint8))
ORIENTATION = 0x0112


def read(path: Path) -> Tensor:
    """The pixels of a file, read by a split."""
    return FileSplit([path], torch.tensor([0]), SIZE).fetch([0])[0]


def by_pillow(path: Path) -> Tensor:
    """The pixels by Pillow alone: upright, RGB, transparent parts on white."""
    if path.suffix == ".heic":
        photos.readable(photos.HEIC)
    with Image.open(path) as image:
        image = ImageOps.exif_transpose(image)
        if image.has_transparency_data:
            image = image.convert("LA") if image.mode == "La" else image
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def grey(levels: np.ndarray) -> Tensor:
    return torch.from_numpy(levels.astype(np.uint8)).expand(3, SIZE, SIZE)


def with_alpha(mode: str) -> Image.Image:
    image = COLOURS.convert("RGB")
    image.putalpha(ALPHA)
    return image.convert(mode)


def palette_with_transparency() -> Image.Image:
    image = COLOURS.quantize(16)
    image.info["transparency"] = 3
    return image


def twelve_bits() -> bytes:
    """A TIFF of packed 12-bit pixels. Pillow can read this format, but not write it."""
    levels = (4095 * GREYS).astype(int).reshape(-1, 2)
    rows = b"".join(bytes([a >> 4, (a & 15) << 4 | b >> 8, b & 255]) for a, b in levels.tolist())
    tags = [(256, 4, SIZE), (257, 4, SIZE), (258, 3, 12), (259, 3, 1), (262, 3, 1), (273, 4, 8), (277, 3, 1)]
    tags += [(278, 4, SIZE), (279, 4, len(rows))]
    entries = b"".join(struct.pack("<HHI", tag, kind, 1) + struct.pack("<I", value) for tag, kind, value in tags)
    return b"II*\0" + struct.pack("<I", 8 + len(rows)) + rows + struct.pack("<H", len(tags)) + entries + bytes(4)


def saver(image: Image.Image | Callable[[], Image.Image], **options: object) -> Callable[[Path], None]:
    return lambda path: (image if isinstance(image, Image.Image) else image()).save(path, **options)


def tiff_of(levels: np.ndarray) -> Callable[[Path], None]:
    return lambda path: Image.fromarray(levels).save(path)


# Formats of 8 bits per channel: name, how it is written, and the largest allowed difference from Pillow's pixels.
KINDS: dict[str, tuple[str, Callable[[Path], None], int]] = {
    "jpeg": ("a.jpg", saver(COLOURS, quality=95), 4),
    "progressive jpeg": ("a.jpeg", saver(COLOURS, quality=95, progressive=True), 4),
    "grey jpeg": ("a.jpg", saver(COLOURS.convert("L")), 2),
    "cmyk jpeg": ("a.jpg", saver(COLOURS.convert("CMYK"), quality=95), 4),
    "png": ("a.png", saver(COLOURS), 0),
    "1-bit png": ("a.png", saver(COLOURS.convert("1")), 0),
    "palette png": ("a.png", saver(COLOURS.quantize(16)), 0),
    "palette png with transparency": ("a.png", saver(palette_with_transparency), 0),
    "grey png with alpha": ("a.png", saver(lambda: with_alpha("LA")), 0),
    "rgb png with alpha": ("a.png", saver(lambda: with_alpha("RGBA")), 0),
    "webp": ("a.webp", saver(COLOURS), 0),
    "webp with alpha": ("a.webp", saver(lambda: with_alpha("RGBA"), lossless=True), 0),
    "gif": ("a.gif", saver(COLOURS), 0),
    "gif with transparency": ("a.gif", saver(palette_with_transparency, transparency=3), 0),
    "animated gif": ("a.gif", saver(COLOURS, save_all=True, append_images=[COLOURS.rotate(90)]), 0),
    "animated webp": ("a.webp", saver(COLOURS, save_all=True, append_images=[COLOURS.rotate(90)]), 0),
    "bmp": ("a.bmp", saver(COLOURS), 0),
    "palette bmp": ("a.bmp", saver(COLOURS.quantize(16)), 0),
    "ppm": ("a.ppm", saver(COLOURS), 0),
    "pgm": ("a.pgm", saver(COLOURS.convert("L")), 0),
    "pbm": ("a.pbm", saver(COLOURS.convert("1")), 0),
    "tiff": ("a.tiff", saver(COLOURS), 0),
    "tiff in lzw": ("a.tif", saver(COLOURS, compression="tiff_lzw"), 0),
    "1-bit tiff": ("a.tif", saver(COLOURS.convert("1")), 0),
    "palette tiff": ("a.tif", saver(COLOURS.quantize(16)), 0),
    "cmyk tiff": ("a.tif", saver(COLOURS.convert("CMYK")), 0),
    "tiff with alpha": ("a.tif", saver(lambda: with_alpha("RGBA")), 0),
    "avif": ("a.avif", saver(COLOURS), 0),
    "heic": ("a.heic", saver(COLOURS), 0),
    "two pages of tiff": ("a.tif", saver(COLOURS, save_all=True, append_images=[COLOURS.rotate(90)]), 0),
}


@pytest.fixture(autouse=True)
def heic() -> None:
    photos.readable(photos.HEIC)


def write(kind: str, folder: Path) -> Path:
    name, save, _ = KINDS[kind]
    for extra in (photos.AVIF, photos.HEIC):
        if Path(name).suffix in extra.suffixes and not photos.readable(extra):
            pytest.skip(extra.remedy)
    save(folder / name)
    return folder / name


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_holds_the_pixels_that_pillow_finds_in_it(tmp_path: Path, kind: str) -> None:
    path = write(kind, tmp_path)
    assert (read(path).int() - by_pillow(path).int()).abs().max() <= KINDS[kind][2]


def test_an_avif_may_name_its_whole_family_before_itself(tmp_path: Path) -> None:
    usual = write("avif", tmp_path)
    content = usual.read_bytes()
    (tmp_path / "family.avif").write_bytes(content[:8] + b"mif1" + content[12:])
    assert torch.equal(read(tmp_path / "family.avif"), read(usual))


WIDE: dict[str, tuple[str, Callable[[Path], object], np.ndarray]] = {
    "tiff of 12 bits": ("a.tif", lambda path: path.write_bytes(twelve_bits()), (4095 * GREYS).astype(int) >> 4),
    "12 bits in 16": ("a.tif", tiff_of((4095 * GREYS).astype(np.uint16)), (4095 * GREYS).astype(int) >> 4),
    "tiff of 16 bits": ("a.tif", tiff_of((65535 * GREYS).astype(np.uint16)), (65535 * GREYS).astype(int) >> 8),
    "a largest value that is stated": (
        "a.tif",
        lambda path: Image.fromarray((16383 * GREYS).astype(np.uint16)).save(path, tiffinfo={281: 16383}),
        (16383 * GREYS).astype(int) >> 6,
    ),
    "signed tiff of 32 bits": (
        "a.tif",
        tiff_of((2.0**31 * (2 * GREYS - 1)).clip(max=2**31 - 1).astype(np.int32)),
        ((2.0**31 * (2 * GREYS - 1)).clip(0, 2**31 - 1)).astype(np.int64) >> 23,
    ),
    "float tiff": ("a.tif", tiff_of((0.3 * GREYS - 0.1).astype(np.float32)), (255 * GREYS).round()),
    "float tiff of large numbers": ("a.tif", tiff_of((9e5 * GREYS).astype(np.float32)), (255 * GREYS).round()),
    "png of 16 bits": ("a.png", tiff_of((65535 * GREYS).astype(np.uint16)), (65535 * GREYS).astype(int) >> 8),
    "pgm of 16 bits": (
        "a.pgm",
        lambda path: Image.fromarray((65535 * GREYS).astype(np.int32)).save(path),
        (65535 * GREYS).astype(int) >> 8,
    ),
    "pfm": ("a.pfm", tiff_of(GREYS.astype(np.float32)), (255 * GREYS).round()),
}


@pytest.mark.parametrize("kind", WIDE)
def test_wide_pixels_are_scaled_by_the_range_of_their_format_and_floats_by_their_own(
    tmp_path: Path, kind: str
) -> None:
    name, save, expected = WIDE[kind]
    save(tmp_path / name)
    assert (read(tmp_path / name).int() - grey(expected).int()).abs().max() <= ("float" in kind or kind == "pfm")


def test_an_unsigned_tiff_of_32_bits_is_not_taken_for_a_signed_one(tmp_path: Path) -> None:
    values = ((2.0**32 - 1) * GREYS).astype(np.uint32)
    Image.fromarray(values.view(np.int32)).save(tmp_path / "a.tif")
    signed, unsigned = (struct.pack("<HHIHH", 339, 3, 1, sample_format, 0) for sample_format in (2, 1))
    content = (tmp_path / "a.tif").read_bytes()
    assert signed in content
    (tmp_path / "a.tif").write_bytes(content.replace(signed, unsigned))
    assert torch.equal(read(tmp_path / "a.tif"), grey(values >> 24))


@pytest.mark.parametrize(
    "values", [(65535 * GREYS).astype(np.uint16), (9e5 * GREYS).astype(np.float32)], ids=["16 bits", "float"]
)
def test_a_wide_tiff_whose_zero_is_white_is_no_negative(tmp_path: Path, values: np.ndarray) -> None:
    Image.fromarray(values).save(tmp_path / "black.tif")
    content = (tmp_path / "black.tif").read_bytes()
    black, white = (struct.pack("<HHIHH", 262, 3, 1, zero, 0) for zero in (1, 0))
    assert black in content
    (tmp_path / "white.tif").write_bytes(content.replace(black, white))
    assert torch.equal(read(tmp_path / "white.tif"), 255 - read(tmp_path / "black.tif"))


def test_a_float_image_with_holes_is_scaled_by_what_is_finite(tmp_path: Path) -> None:
    values = GREYS.astype(np.float32)
    values[0, :3] = np.nan, np.inf, -np.inf
    Image.fromarray(values).save(tmp_path / "a.tif")
    assert read(tmp_path / "a.tif")[0, 0, :3].tolist() == [0, 255, 0]
    Image.fromarray(np.full((SIZE, SIZE), 7, dtype=np.float32)).save(tmp_path / "flat.tif")
    assert read(tmp_path / "flat.tif").unique().tolist() == [0]


def test_black_ink_on_a_transparent_ground_stays_readable(tmp_path: Path) -> None:
    ink = Image.new("RGBA", (SIZE, SIZE), (0, 0, 0, 0))
    ink.paste((0, 0, 0, 255), (8, 8, 16, 16))
    for name in ("a.png", "a.webp", "a.tif"):
        ink.save(tmp_path / name, **({"lossless": True} if name == "a.webp" else {}))
        assert read(tmp_path / name)[0].unique().tolist() == [0, 255]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp", "a.tif", "a.avif", "a.heic"])
def test_a_photo_is_turned_upright(tmp_path: Path, name: str, orientation: int) -> None:
    kind = next((kind for kind in (photos.AVIF, photos.HEIC) if Path(name).suffix in kind.suffixes), None)
    if kind is not None and not photos.readable(kind):
        pytest.skip(kind.remedy)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    COLOURS.resize((48, 32)).save(tmp_path / name, exif=exif, quality=95)
    file, expected = ImageFile.read(tmp_path / name), by_pillow(tmp_path / name)
    assert (file.height, file.width) == expected.shape[1:]
    difference = decoded(file)[0].transpose(2, 0, 1).astype(int) - expected.numpy()
    assert np.abs(difference).max() <= 4


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_box_is_cut_from_the_upright_photo_at_every_scale(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    COLOURS.resize((320, 200), Image.Resampling.BILINEAR).save(tmp_path / "a.jpg", exif=exif, quality=95)
    whole = by_pillow(tmp_path / "a.jpg")
    file = ImageFile.read(tmp_path / "a.jpg")
    for size in (16, 60):
        pixels = torch.from_numpy(file.box((40, 80, 120, 96), (size, size)))
        expected = torch.nn.functional.interpolate(
            whole[None, :, 40:160, 80:176], (size, size), mode="bilinear", antialias=True
        )[0]
        assert (pixels.int() - expected.int()).abs().float().mean() < 3


def test_the_boxes_of_a_turned_photo_are_drawn_for_its_upright_size(tmp_path: Path) -> None:
    seen_sizes = []

    def boxes(rng: object, sizes: Tensor) -> Tensor:
        seen_sizes.append(sizes)
        return RandomResizedCrop().boxes(rng, sizes)  # type: ignore[arg-type]

    exif = Image.Exif()
    exif[ORIENTATION] = 6
    COLOURS.resize((48, 32)).save(tmp_path / "a.jpg", exif=exif)
    FileSplit([tmp_path / "a.jpg"], torch.tensor([0]), 8, crop=Crop(boxes, 0, (8, 8))).fetch([0])
    assert seen_sizes[0].tolist() == [[48, 32]]


@pytest.mark.parametrize("order", ["<", ">"])
def test_the_note_of_a_jpeg_is_found_behind_other_notes_and_a_damaged_one_is_none(tmp_path: Path, order: str) -> None:
    COLOURS.resize((48, 32)).save(tmp_path / "plain.jpg")
    plain = (tmp_path / "plain.jpg").read_bytes()
    head = b"II*\0" if order == "<" else b"MM\0*"
    block = b"Exif\0\0" + head + struct.pack(f"{order}IHHHIHHI", 8, 1, ORIENTATION, 3, 1, 8, 0, 0)
    xmp = b'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="6"/>'

    def segment(marker: int, body: bytes) -> bytes:
        return bytes([0xFF, marker]) + (len(body) + 2).to_bytes(2) + body

    exif, comment = segment(0xE1, block), segment(0xFE, b"a comment")
    notes = {
        exif: True,
        comment + segment(0xED, b"Photoshop 3.0\0") + exif: True,
        segment(0xE1, xmp): True,
        segment(0xE1, xmp) + exif: True,
        segment(0xE1, block[:-9]): False,
        segment(0xE1, b"Exif\0\0" + bytes(30)): False,
        segment(0xE1, block.replace(struct.pack(f"{order}HH", 8, 0), struct.pack(f"{order}HH", 9, 0))): False,
    }
    for note, turned in notes.items():
        (tmp_path / "a.jpg").write_bytes(plain[:2] + note + plain[2:])
        file = ImageFile.read(tmp_path / "a.jpg")
        assert (file.height, file.width) == ((48, 32) if turned else (32, 48))
        file.square(8)


@pytest.mark.parametrize("kind", [photos.AVIF, photos.HEIC])
def test_without_its_package_a_photo_is_refused_with_the_command_that_installs_it(
    tmp_path: Path, kind: photos.PhotoFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(kind.name.lower(), tmp_path).rename(tmp_path / "IMG_1.jpg")
    monkeypatch.setattr(photos, "readable", lambda kind: False)
    with pytest.raises(InputError, match=rf"IMG_1.jpg.*it is {kind.name}.*pip install '{kind.package}'"):
        read(path)


@pytest.mark.skipif(not REAL.is_file(), reason="there are no real photos beside this checkout")
def test_real_photos_are_read_as_pillow_reads_them(tmp_path: Path) -> None:
    with tarfile.open(REAL) as tar:
        tar.extractall(tmp_path, filter="data")
    files = sorted(tmp_path.rglob("*.JPEG"))
    assert files
    for path in files:
        file, expected = ImageFile.read(path), by_pillow(path)
        pixels = decoded(file)[0].transpose(2, 0, 1)
        assert pixels.shape == expected.shape
        assert np.abs(pixels.astype(int) - expected.numpy()).mean() < 1


@pytest.mark.parametrize("kind", ["eps", "ico", "pcx", "tga"])
def test_other_kinds_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    COLOURS.save(tmp_path / f"a.{kind}")
    with pytest.raises(InputError, match="cannot identify image file, expected one of JPEG, PNG, WEBP, GIF"):
        read(tmp_path / f"a.{kind}")
