"""Small files that ask for much memory or time, and unusual ones that do not."""

import io
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from helpers import decoded
from lockstep.core.errors import InputError
from lockstep.data.datasets import WebDataset
from lockstep.data.datasets.decode import ImageFile
from lockstep.inference.images import stored_image

END = bytes(2 * tarfile.BLOCKSIZE)
GREY = np.random.default_rng(0).integers(0, 256, (48, 64), dtype=np.uint8)
Bomb = Callable[[], bytes]


def saved(kind: str, size: tuple[int, int] = (16, 16), **options: object) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, "red").save(file, kind, **options)
    return file.getvalue()


def tiff(tags: dict[int, list[int]], content: list[bytes]) -> bytes:
    """A grey TIFF of tiles."""
    tags = {258: [8], 262: [1], 277: [1], **tags, 324: [0] * len(content), 325: [*map(len, content)]}
    entries, arrays, start = b"", b"", 14 + 12 * len(tags)
    start_of_content = start + 4 * sum(len(numbers) for numbers in tags.values() if len(numbers) > 1)
    tags[324] = [start_of_content + sum(map(len, content[:number])) for number in range(len(content))]
    for tag, numbers in sorted(tags.items()):
        packed = struct.pack(f"<{len(numbers)}I", *numbers)
        entries += struct.pack("<HHI", tag, 4, len(numbers))
        entries += packed if len(numbers) == 1 else struct.pack("<I", start + len(arrays))
        arrays += packed if len(numbers) > 1 else b""
    head = b"II*\0" + struct.pack("<IH", 8, len(tags))
    return head + entries + bytes(4) + arrays + b"".join(content)


def canvas(width: int, height: int) -> bytes:
    """An animated WebP of two small frames on a large canvas."""
    content = saved("WEBP", save_all=True, append_images=[Image.new("RGB", (16, 16))])
    return content[:24] + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little") + content[30:]


def run_lengths(side: int) -> bytes:
    header = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 8, 1, 4 * side, 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 0, 0, 0, 54 + 1024) + header + bytes(1024) + b"\1\0\0\0" * side


def member(kind: bytes = b"0", size: int = 0, content: bytes = b"", name: str = "a.jpg") -> bytes:
    """A header of a tar file, with its content."""
    header = bytearray(tarfile.TarInfo(name).tobuf(tarfile.GNU_FORMAT))
    header[124:136] = tarfile.itn(size, 12, tarfile.GNU_FORMAT)  # type: ignore[attr-defined]
    header[156:157], header[148:156] = kind, b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + content + bytes(-len(content) % tarfile.BLOCKSIZE)


def pax(kind: bytes = b"x", **records: str) -> bytes:
    content = tarfile.TarInfo._create_pax_generic_header(  # type: ignore[attr-defined]
        {key.replace("__", ".sparse."): value for key, value in records.items()}, kind, "utf-8"
    )[tarfile.BLOCKSIZE :]
    length = len(content.rstrip(b"\0"))
    return member(kind, length, content[:length])


PLAIN, END_OF_DATA = "its member 'a.jpg' is a link, a device or sparse", "unexpected end of data"
PHOTO = member(size=3, content=b"abc")
TARS: dict[str, tuple[bytes, str]] = {
    "a negative size": (member(name="b.jpg") + member(size=-512) + END, "has -512 bytes|header"),
    "a negative size of pax": (pax(size="-512") + PHOTO + END, "has -512 bytes|header"),
    "a size of pax that is no number": (pax(size="many") + PHOTO + END, "its header at byte 1,536 is damaged"),
    "a header of pax of a negative size": (member(b"x", -512) + PHOTO, "header|negative"),
    "a record of pax of no length": (member(b"x", 5, b"0 a=\n") + PHOTO + END, "invalid header"),
    "a long name of 4 TB": (member(b"L", 2**42) + PHOTO, "too much memory"),
    "a file of 4 TB": (member(size=2**42) + END, END_OF_DATA),
    "a file that is cut short": (member(name="b.jpg") + member(size=9000, content=b"x" * 5000), END_OF_DATA),
    "a header that is cut short": (PHOTO + member()[:300], "its header at byte 1,024 is damaged"),
    "a damaged header": (PHOTO + b"x" * 512, "its header at byte 1,024 is damaged"),
    "a description of nothing": (PHOTO + pax(path="b"), "header"),
    "nothing": (b"", "empty file"),
    "a sparse file of GNU": (member(b"S", 3, b"abc") + END, PLAIN),
    "a sparse file of pax, 0.0": (pax(GNU__size=str(2**42), GNU__offset="0") + PHOTO + END, PLAIN),
    "a sparse file of pax, 0.1": (pax(GNU__map="x", GNU__size=str(2**42)) + PHOTO + END, "invalid literal|header"),
    "a sparse file of pax, 1.0": (pax(GNU__major="1", GNU__minor="0", GNU__realsize=str(2**42)) + PHOTO + END, ""),
    "a hard link": (member(b"1") + END, PLAIN),
    "a device": (member(b"3") + END, PLAIN),
}


@pytest.mark.parametrize("entrance", [lambda path: path, Path.read_bytes], ids=["path", "bytes"])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (run_lengths(12_000), "its header says 12000x12000, expected at most 134217728 pixels"),
        (canvas(65_000, 65_000), "its header says too much: Image size"),
    ],
)
def test_an_image_of_a_size_that_no_photo_has_is_not_decoded(
    tmp_path: Path, content: bytes, says: str, entrance: Callable[[Path], Any]
) -> None:
    (tmp_path / "image").write_bytes(content)
    with pytest.raises(InputError, match=f"cannot be read as an image \\({says}"):
        stored_image(entrance(tmp_path / "image"), (3, 8, 8))


def test_a_file_that_is_longer_than_any_image_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "image").open("wb") as file:
        file.truncate(2**42)
    with pytest.raises(InputError, match="it has 4,398,046,511,104 bytes, expected at most 1,073,741,824"):
        stored_image(tmp_path / "image", (3, 8, 8))


@pytest.mark.parametrize("name", TARS)
def test_a_tar_file_that_leads_astray_is_one_sentence(tmp_path: Path, name: str) -> None:
    archive, says = TARS[name]
    (tmp_path / "train.tar").write_bytes(archive)
    with pytest.raises(InputError, match=rf"train.tar cannot be indexed \(.*({says})"):
        WebDataset(path=str(tmp_path)).list_files()


def tiles_of_grey(side: int) -> bytes:
    """GREY as a TIFF of tiles, padded with zeros."""
    padded = np.pad(GREY, [(0, -size % side) for size in GREY.shape])
    rows = np.split(padded, len(padded) // side)
    tiles = [part.tobytes() for row in rows for part in np.split(row, row.shape[1] // side, 1)]
    return tiff({256: [64], 257: [48], 259: [8], 322: [side], 323: [side]}, [*map(zlib.compress, tiles)])


LEGAL: dict[str, Bomb] = {
    "a TIFF of tiles": lambda: tiles_of_grey(16),
    "a TIFF of one tile that is larger": lambda: tiles_of_grey(64),
    "a progressive JPEG": lambda: saved("JPEG", (64, 48), progressive=True),
    "a PGM in text": lambda: b"P2 # width, height\n3 2\n255\n# pixels\n1 2 3 4 5 6\n",
    "a BMP of run lengths": lambda: run_lengths(40),
    "an animated WebP": lambda: canvas(40, 30),
    "a PNG of 16 bits": lambda: _png_of_16_bits(),
}


def _png_of_16_bits() -> bytes:
    rows = b"".join(b"\0" + bytes(range(6 * row, 6 * row + 24)) for row in range(3))  # 4 pixels of RGB
    chunks = (b"IHDR" + struct.pack(">IIBBBBB", 4, 3, 16, 2, 0, 0, 0), b"IDAT" + zlib.compress(rows), b"IEND")
    parts = [struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body)) for body in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize("name", LEGAL)
def test_an_unusual_image_is_read_as_pillow_reads_it(name: str) -> None:
    content = LEGAL[name]()
    with Image.open(io.BytesIO(content)) as image:
        expected = np.array(image.convert("RGB")).astype(int)
    assert np.abs(decoded(ImageFile.of(content))[0] - expected).max() <= 4 * content.startswith(b"\xff\xd8")
