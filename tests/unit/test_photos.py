"""Photos of all usual file formats, compared with Pillow's conversion of the same file."""

import importlib.util
import io
import os
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo
from torch import Tensor
from torchvision.transforms.v2.functional import to_dtype

from helpers import ROOT, decoded, preprocessing
from lockstep.core.errors import InputError
from lockstep.data.datasets.decode import ImageFile, contents
from lockstep.data.datasets.files import FileSplit
from lockstep.data.datasets.preprocess import orientation_of, preprocess, to_rgb, whole_size
from lockstep.inference.images import stored_image

REAL = ROOT.parent / "shared" / "data" / "imagenet_samples.tar.gz"
SIZE = 24
Y, X = np.mgrid[0:SIZE, 0:SIZE] / (SIZE - 1)
COLOURS = Image.fromarray((255 * np.stack([X, Y, (X + Y) / 2], -1)).astype(np.uint8))
GREYS = (X + Y) / 2  # from 0 to 1
ALPHA = Image.fromarray((255 * (X > 0.5)).astype(np.uint8))
ORIENTATION = 0x0112


def read(path: Path) -> Tensor:
    """The pixels of a file, read by a split."""
    return FileSplit([path], torch.tensor([0]), preprocessing(SIZE, SIZE)).fetch([0])[0]


def by_pillow(path: Path) -> Tensor:
    """The pixels by Pillow alone: upright, RGB, transparent parts on white."""
    if path.suffix == ".heic":
        pytest.importorskip("pillow_heif").register_heif_opener()
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
    return tiff(12, b"".join(bytes([a >> 4, (a & 15) << 4 | b >> 8, b & 255]) for a, b in levels.tolist()))


def tiff(bits: int, rows: bytes, *more: tuple[int, int, int]) -> bytes:
    """A grey TIFF; `more` are further tags, in their order."""
    tags = [(256, 4, SIZE), (257, 4, SIZE), (258, 3, bits), (259, 3, 1), (262, 3, 1), (273, 4, 8), (277, 3, 1)]
    tags += [(278, 4, SIZE), (279, 4, len(rows)), *more]
    entries = b"".join(struct.pack("<HHI", tag, kind, 1) + struct.pack("<I", value) for tag, kind, value in tags)
    return b"II*\0" + struct.pack("<I", 8 + len(rows)) + rows + struct.pack("<H", len(tags)) + entries + bytes(4)


def saver(image: Image.Image | Callable[[], Image.Image], **options: object) -> Callable[[Path], None]:
    return lambda path: (image if isinstance(image, Image.Image) else image()).save(path, **options)


def tiff_of(levels: np.ndarray, **options: object) -> Callable[[Path], None]:
    return lambda path: Image.fromarray(levels).save(path, **options)


# Formats of 8 bits per channel: name, how it is written, and the largest allowed difference from Pillow's pixels.
KINDS: dict[str, tuple[str, Callable[[Path], None], int]] = {
    "jpeg": ("a.jpg", saver(COLOURS, quality=95), 1),
    "progressive jpeg": ("a.jpeg", saver(COLOURS, quality=95, progressive=True), 1),
    "grey jpeg": ("a.jpg", saver(COLOURS.convert("L")), 1),
    "cmyk jpeg": ("a.jpg", saver(COLOURS.convert("CMYK"), quality=95), 1),
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


def write(kind: str, folder: Path) -> Path:
    name, save, _ = KINDS[kind]
    if kind == "heic":
        pytest.importorskip("pillow_heif").register_heif_opener()
    save(folder / name)
    return folder / name


@pytest.mark.parametrize("kind", KINDS)
def test_a_split_has_the_pixels_of_pillow_and_prediction_the_same_in_any_form(tmp_path: Path, kind: str) -> None:
    path, tolerance = write(kind, tmp_path), KINDS[kind][2]
    expected = read(path)
    assert (expected.int() - by_pillow(path).int()).abs().max() <= tolerance
    for form, pixels in ways(path).items():
        # A loaded JPEG is from Pillow's libjpeg-turbo, not simplejpeg's.
        assert (pixels.int() - expected.int()).abs().max() <= tolerance * (form == "loaded"), form


def ways(path: Path) -> dict[str, Tensor]:
    """What prediction makes of a file in each form in which it takes one."""
    with Image.open(path) as unread, Image.open(path) as loaded:
        loaded.load()
        forms = {"path": path, "bytes": path.read_bytes(), "unread": unread, "loaded": loaded}
        return {form: stored_image(image, preprocessing(SIZE, SIZE)) for form, image in forms.items()}


@pytest.mark.parametrize("format", ["PNG", "TIFF", "BMP", "GIF", "WEBP", "PPM"])
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV"])
def test_every_mode_in_every_format_is_the_picture_that_pillow_shows(tmp_path: Path, mode: str, format: str) -> None:
    image = with_alpha(mode) if mode in ("LA", "PA", "RGBA") else COLOURS.convert(mode)
    try:
        image.save(tmp_path / "image", format)
        expected = by_pillow(tmp_path / "image")
    except (OSError, ValueError):
        pytest.skip(f"Pillow writes or reads no {format} of {mode}")
    assert torch.equal(read(tmp_path / "image"), expected)
    assert all(torch.equal(pixels, expected) for pixels in ways(tmp_path / "image").values())


def numbers(largest: int) -> np.ndarray:
    return (largest * GREYS).astype(np.uint32)


# Numbers of 12 and 16 bits: name, how the file is written, and the 8 bits that are read.
WIDE: dict[str, tuple[str, Callable[[Path], object], np.ndarray]] = {
    "tiff of 12 bits": ("a.tif", lambda path: path.write_bytes(twelve_bits()), numbers(4095) >> 4),
    "tiff of 16 bits": ("a.tif", tiff_of(numbers(65535).astype(np.uint16)), numbers(65535) >> 8),
    "big-endian tiff": ("a.tif", tiff_of(numbers(65535).astype(">u2")), numbers(65535) >> 8),
    "lzw": ("a.tif", tiff_of(numbers(65535).astype(np.uint16), compression="tiff_lzw"), numbers(65535) >> 8),
    "a tiff of 16 bits at night": ("a.tif", tiff_of(numbers(4095).astype(np.uint16)), numbers(4095) >> 8),
    "png of 16 bits": ("a.png", tiff_of(numbers(65535).astype(np.uint16)), numbers(65535) >> 8),
    "pgm of 16 bits": ("a.pgm", tiff_of(numbers(65535).astype(np.int32)), numbers(65535) >> 8),
}


@pytest.mark.parametrize("kind", WIDE)
def test_of_wide_numbers_the_upper_8_bits_of_their_format_are_read(tmp_path: Path, kind: str) -> None:
    name, save, expected = WIDE[kind]
    save(tmp_path / name)
    assert torch.equal(read(tmp_path / name), grey(expected))
    for form, pixels in ways(tmp_path / name).items():
        assert torch.equal(pixels, grey(expected)), form


def test_wide_numbers_become_those_that_torchvision_makes_of_them(tmp_path: Path) -> None:
    values = torch.arange(65536).view(256, 256)
    Image.fromarray(values.numpy().astype(np.uint16)).save(tmp_path / "a.tif")
    expected = to_dtype(values.to(torch.uint16), torch.uint8, scale=True)
    assert torch.equal(stored_image(tmp_path / "a.tif", preprocessing(256, 256)), expected.expand(3, 256, 256))


@pytest.mark.parametrize(
    ("name", "values", "kind"),
    [
        ("a.tif", (2.0**31 * (GREYS - 0.5)).astype(np.int32), "signed integers or integers of 32 bits"),
        ("a.tif", GREYS.astype(np.float32), "floats"),
        ("a.pfm", GREYS.astype(np.float32), "floats"),
    ],
)
def test_numbers_without_a_white_are_refused_with_the_line_that_converts_them(
    tmp_path: Path, name: str, values: np.ndarray, kind: str
) -> None:
    tiff_of(values)(tmp_path / name)
    message = f"{name}.*its pixels are {kind}, and nothing says which value is white.*Image.fromarray"
    for image in (tmp_path / name, (tmp_path / name).read_bytes(), Image.fromarray(values)):
        with pytest.raises(InputError, match=message.removeprefix(f"{name}.*")):
            stored_image(image, preprocessing(SIZE, SIZE))
    with pytest.raises(InputError, match=message):
        read(tmp_path / name)


def test_the_line_that_converts_numbers_without_a_white_makes_a_photo_of_their_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    values = np.linspace(-2, 4, SIZE * SIZE, dtype=np.float32).reshape(SIZE, SIZE)
    with pytest.raises(ValueError, match="nothing says which value is white") as caught:
        to_rgb(Image.fromarray(values))
    line = str(caught.value).rpartition("with Pillow: ")[2]
    exec(line, {"x": values, "LOW": -1, "HIGH": 3, "Image": Image})
    expected = np.interp(values, [-1, 3], [0, 255]).astype(np.uint8)
    assert np.abs(np.asarray(Image.open("NAME.png")).astype(int) - expected).max() <= 1


def test_signed_numbers_of_16_bits_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.tif").write_bytes(tiff(16, numbers(32767).astype("<u2").tobytes(), (339, 3, 2)))
    with pytest.raises(InputError, match="signed integers"):
        read(tmp_path / "a.tif")


def test_a_wide_tiff_whose_zero_is_white_is_no_negative(tmp_path: Path) -> None:
    Image.fromarray(numbers(65535).astype(np.uint16)).save(tmp_path / "black.tif")
    content = (tmp_path / "black.tif").read_bytes()
    black, white = (struct.pack("<HHIHH", 262, 3, 1, zero, 0) for zero in (1, 0))
    assert black in content
    (tmp_path / "white.tif").write_bytes(content.replace(black, white))
    for pixels in ways(tmp_path / "white.tif").values():
        assert torch.equal(pixels, 255 - read(tmp_path / "black.tif"))


@pytest.mark.parametrize("mode", ["L", "I;16", "RGB"])
def test_the_transparent_value_of_a_png_is_white(tmp_path: Path, mode: str) -> None:
    bits, channels = 16 if "16" in mode else 8, 3 if "RGB" in mode else 1
    values = (np.stack([GREYS] * channels, -1) * (2**bits - 1)).astype(f">u{bits // 8}")
    key = values[3, 4]
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", SIZE, SIZE, bits, 2 if channels == 3 else 0, 0, 0, 0),
        b"tRNS": key.astype(">u2").tobytes(),
        b"IDAT": zlib.compress(b"".join(b"\0" + row.tobytes() for row in values)),
        b"IEND": b"",
    }
    content = b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in chunks.items()
    )
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + content)
    expected = (values >> bits - 8).astype(np.uint8)
    expected[(values == key).all(-1)] = 255
    shown = torch.from_numpy(expected).permute(2, 0, 1).expand(3, SIZE, SIZE)
    assert torch.equal(read(tmp_path / "a.png"), shown)
    assert all(torch.equal(pixels, shown) for pixels in ways(tmp_path / "a.png").values())


def test_an_image_that_was_changed_after_it_was_opened_is_not_read_again_from_its_file(tmp_path: Path) -> None:
    COLOURS.save(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        image.paste((9, 8, 7), (0, 0, SIZE, SIZE))
        assert stored_image(image, preprocessing(SIZE, SIZE))[:, 0, 0].tolist() == [9, 8, 7]


@pytest.mark.parametrize("format", ["GIF", "PNG", "TIFF", "WEBP", "AVIF", "MPO"])
@pytest.mark.parametrize("is_loaded", [False, True])
def test_an_image_of_several_frames_is_the_one_that_it_was_left_at(format: str, is_loaded: bool) -> None:
    COLOURS.save(data := io.BytesIO(), format, save_all=True, append_images=[Image.new("RGB", (SIZE, SIZE))])
    with Image.open(data) as image:
        image.seek(1)
        if is_loaded:
            image.load()
        assert stored_image(image, preprocessing(SIZE, SIZE)).max() < 9, "the second one is black"


def test_a_large_jpeg_has_the_same_pixels_in_any_form(tmp_path: Path) -> None:
    COLOURS.resize((400, 300)).save(tmp_path / "a.jpg")
    expected = read(tmp_path / "a.jpg")
    for form, pixels in ways(tmp_path / "a.jpg").items():
        assert (pixels.int() - expected.int()).abs().max() <= (form == "loaded"), form
    with Image.open(tmp_path / "a.jpg") as image:
        stored_image(image, preprocessing(SIZE, SIZE))
        assert np.array_equal(np.asarray(image), np.asarray(Image.open(tmp_path / "a.jpg")))  # it is still usable


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp", "a.tif", "a.avif", "a.heic"])
def test_a_photo_is_turned_upright(tmp_path: Path, name: str, orientation: int) -> None:
    if name == "a.heic":
        pytest.importorskip("pillow_heif").register_heif_opener()
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    COLOURS.resize((48, 32)).save(tmp_path / name, exif=exif, quality=95)
    file, expected = ImageFile.read(tmp_path / name), by_pillow(tmp_path / name)
    assert (file.height, file.width) == expected.shape[1:]
    difference = decoded(file)[0].transpose(2, 0, 1).astype(int) - expected.numpy()
    assert np.abs(difference).max() <= 1
    by_path, *by_others = ways(tmp_path / name).values()
    assert all((pixels.int() - by_path.int()).abs().max() <= 1 for pixels in by_others)


def test_a_png_is_turned_by_a_note_of_any_kind(tmp_path: Path) -> None:
    (exif := Image.Exif())[ORIENTATION] = 6
    raw = exif.tobytes().removeprefix(b"Exif\0\0")
    profile = f"\nexif\n{len(raw) + 6:8}\n{(b'Exif' + bytes(2) + raw).hex()}\n"
    texts = {"XML:com.adobe.xmp": '<x tiff:Orientation="6"/>', "Raw profile type exif": profile, "Comment": "none"}
    for key, text in texts.items():
        (notes := PngInfo()).add_text(key, text)
        COLOURS.resize((48, 32)).save(tmp_path / "a.png", pnginfo=notes)
        file, expected = ImageFile.read(tmp_path / "a.png"), by_pillow(tmp_path / "a.png")
        assert (file.height, file.width) == expected.shape[1:] == ((32, 48) if key == "Comment" else (48, 32))


@pytest.mark.parametrize("brand", [b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"])
def test_a_photo_of_every_brand_of_heic_is_read(tmp_path: Path, brand: bytes) -> None:
    """Phones write the brands of ten bits, of several images and of bursts, too."""
    content = write("heic", tmp_path).read_bytes()
    assert content[8:12] == b"heic"
    assert ImageFile.of(content[:8] + brand + content[12:]).decoder is not None


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (9, 1)])
def test_a_photo_of_one_row_or_column_is_turned_upright(size: tuple[int, int]) -> None:
    for orientation in range(1, 9):
        (exif := Image.Exif())[ORIENTATION] = orientation
        COLOURS.resize(size).save(data := io.BytesIO(), "PNG", exif=exif)
        file = ImageFile.of(data.getvalue())
        expected = np.asarray(ImageOps.exif_transpose(Image.open(data))).transpose(2, 0, 1)
        assert np.array_equal(file.box((0, 0, file.height, file.width), expected.shape[1:]), expected)


def test_a_file_is_read_whole_where_the_system_returns_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(content := bytes(range(256)))
    read = os.read
    monkeypatch.setattr(os, "read", lambda descriptor, size: read(descriptor, min(size, 100)))
    assert contents(tmp_path / "a") == content


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_box_is_cut_from_the_upright_photo_at_every_scale(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    COLOURS.resize((320, 200), Image.Resampling.BILINEAR).save(tmp_path / "a.jpg", exif=exif, quality=95)
    whole = by_pillow(tmp_path / "a.jpg")
    file = ImageFile.read(tmp_path / "a.jpg")
    for size in (16, 60):
        pixels = torch.from_numpy(file.box((40, 80, 120, 96), (size, size)))
        box = whole[None, :, 40:160, 80:176]
        expected = torch.nn.functional.interpolate(box, (size, size), mode="bilinear", antialias=True)[0]
        assert (pixels.int() - expected.int()).abs().float().mean() < 3


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
        segment(0xED, bytes(40_000)) * 2 + exif: True,
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
        file.stored(preprocessing(8, 8))


def test_without_its_package_a_photo_is_refused_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("heic", tmp_path).rename(tmp_path / "IMG_1.jpg")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"IMG_1.jpg.*a HEIC photo needs the package pillow_heif.*pip install"):
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
        assert np.abs(pixels.astype(int) - expected.numpy()).max() <= 1


@pytest.mark.parametrize(
    ("colour", "luminance"), [((255, 0, 0), 76), ((0, 255, 0), 150), ((0, 0, 255), 29), ((90, 90, 90), 90)]
)
def test_grey_is_the_luminance(colour: tuple[int, int, int], luminance: int) -> None:
    image = Image.new("RGB", (8, 8), colour)
    assert stored_image(image, preprocessing(8, 8, 1)).unique().tolist() == [luminance]
    assert stored_image(image, preprocessing(8, 8, 1)).unique().tolist() == [int(np.array(image.convert("L"))[0, 0])]


FACTS = {"image_shape": [3, 8, 8], "input_shape": [3, 4, 4], "eval_crop": 1.0, "fit": "crop"}
FACTS |= {"mean": [0.5, 0.5, 0.5], "interpolation": "bilinear"}


def test_a_model_of_another_format_is_not_given_pixels(tmp_path: Path) -> None:
    COLOURS.save(tmp_path / "a.png")
    expected = preprocess(tmp_path / "a.png", {**FACTS, "format": 1})
    with (tmp_path / "a.png").open("rb") as file:
        for photo in (COLOURS, str(tmp_path / "a.png"), file):
            assert np.array_equal(preprocess(photo, FACTS), expected), "before there were formats"
    for number in (0, 2):
        sentence = f"the model has format {number}, expected 1; use the preprocess.py beside it"
        with pytest.raises(ValueError, match=f"^{sentence}$"):
            preprocess(COLOURS, {**FACTS, "format": number})


def test_of_a_tiny_share_of_a_photo_the_model_sees_its_middle_pixel() -> None:
    photo = COLOURS.resize((8, 8))
    pixels = preprocess(photo, {**FACTS, "eval_crop": 0.01})
    assert pixels.shape == (1, 3, 4, 4)
    assert (pixels == np.asarray(photo)[4, 4][None, :, None, None]).all()


@pytest.mark.parametrize(("sides", "whole"), [((1, 60), (1, 8)), ((60, 1), (8, 1)), ((2, 15), (1, 8))])
def test_a_strip_in_a_frame_is_a_pixel_wide_at_least(sides: tuple[int, int], whole: tuple[int, int]) -> None:
    assert whole_size(sides, (8, 8), "pad") == whole
    strip = Image.new("RGB", sides[::-1], "white")
    strip.save(data := io.BytesIO(), "PNG")
    framed = ImageFile.of(data.getvalue()).stored(preprocessing(8, 8, fit="pad", mean=(0.0, 0.0, 0.0)))
    assert [int((framed[0] == 255).any(axis).sum()) for axis in (1, 0)] == [*whole]
    assert (framed == 255).sum() == 3 * whole[0] * whole[1]


@pytest.mark.parametrize("value", [0, 9, "6", None, (6,)])
def test_a_note_that_is_no_orientation_and_one_that_cannot_be_read_leave_a_photo_as_it_is(value: object) -> None:
    image = SimpleNamespace(format="JPEG", getexif=lambda: {ORIENTATION: value})
    assert orientation_of(image) == 1
    assert orientation_of(SimpleNamespace(format="JPEG", getexif=lambda: {ORIENTATION: 6})) == 6
    assert orientation_of(SimpleNamespace(format="PNG", getexif=dict)) == 1

    def damaged() -> None:
        raise SyntaxError("not a TIFF file")

    assert orientation_of(SimpleNamespace(format="JPEG", getexif=damaged)) == 1


def test_premultiplied_pixels_are_shown_on_white_as_others_are() -> None:
    for mode, premultiplied in (("LA", "La"), ("RGBA", "RGBa")):
        image = with_alpha(mode)
        assert np.array_equal(to_rgb(image.convert(premultiplied)), to_rgb(image))


@pytest.mark.parametrize("brand", [b"mif1", b"msf1"])
def test_an_avif_of_a_general_brand_is_no_heic_photo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, brand: bytes
) -> None:
    content = write("avif", tmp_path).read_bytes()
    assert content[8:12] == b"avif"
    assert b"avif" in content[16:64], "among the brands behind the main one"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # no package for HEIC
    general = content[:8] + brand + content[12:]
    assert np.array_equal(decoded(ImageFile.of(general))[0], decoded(ImageFile.of(content))[0])


def test_a_frame_of_a_mean_beyond_black_and_white_is_black_or_white() -> None:
    facts = {**FACTS, "input_shape": [3, 8, 8], "fit": "pad", "mean": [-0.5, 0.5, 1.5]}
    pixels = preprocess(COLOURS.resize((8, 4)), facts)
    assert (pixels[0, :, [0, 1, 6, 7]] == np.array([0, 128, 255])[None, :, None]).all()
