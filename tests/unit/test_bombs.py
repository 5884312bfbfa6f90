"""Small files that ask for much memory or time, and unusual ones that do not."""

import gzip
import io
import lzma
import re
import resource
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from helpers import decoded, preprocessing
from lockstep.checkpoint.weights import load_start
from lockstep.core.errors import BrokenImage, InputError, LockstepError
from lockstep.core.safe_read import MOST_BYTES
from lockstep.data.datasets import CSV, MNIST, WebDataset, decode
from lockstep.data.datasets.builtin import read_idx
from lockstep.data.datasets.decode import ImageFile
from lockstep.data.datasets.files import FileSplit
from lockstep.data.datasets.photos import scans_of_jpeg
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
    "a long name of 4 TB": (
        member(b"L", 2**42) + PHOTO,
        "a header of it has 4,398,046,511,104 bytes, expected at most 1,073,741,824",
    ),
    "a file of 4 TB": (member(size=2**42) + END, END_OF_DATA),
    "a file that is cut short": (member(name="b.jpg") + member(size=9000, content=b"x" * 5000), END_OF_DATA),
    "a file that ends behind a member": (PHOTO, "it ends without a block of zeros"),
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
        stored_image(entrance(tmp_path / "image"), preprocessing(8, 8))


def test_a_file_that_is_longer_than_any_image_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "image").open("wb") as file:
        file.truncate(2**42)
    with pytest.raises(InputError, match="it has 4,398,046,511,104 bytes, expected at most 1,073,741,824"):
        stored_image(tmp_path / "image", preprocessing(8, 8))


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


@contextmanager
def at_most(more: int) -> Iterator[None]:
    """Give this process no more than so many bytes of further memory."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def deflated(size: int) -> bytes:
    """About a megabyte for each gigabyte of zeros."""
    compressor, block = zlib.compressobj(), bytes(2**22)
    first, other = (compressor.compress(block) + compressor.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    return first + other * (size // len(block) - 1)


def bands(sides: dict[int, list[int]], parts: list[bytes], **tags: list[int]) -> bytes:
    """A TIFF of 64x48 pixels of five bands, in tiles that are compressed by Deflate."""
    return tiff(
        {256: [64], 257: [48], 259: [8], 277: [5], **sides, **{int(k[1:]): v for k, v in tags.items()}}, parts
    )


def scans(number: int, side: int) -> bytes:
    """A progressive JPEG, the last scan of which comes as often as asked for."""
    content = saved("JPEG", (side, side), progressive=True)
    last, end = content.rindex(b"\xff\xda"), content.rindex(b"\xff\xd9")
    return content[:last] + content[last:end] * number + content[end:]


def noted(number: int) -> bytes:
    """A JPEG with so many segments of EXIF."""
    content, note = saved("JPEG"), b"Exif\0\0" + bytes(1000)
    return content[:2] + (b"\xff\xe1" + struct.pack(">H", len(note) + 2) + note) * number + content[2:]


def npy(shape: tuple[int, ...]) -> bytes:
    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file := io.BytesIO(), header)
    return file.getvalue() + bytes(1000)


TOO_MUCH = r"(has|have) [\d,]+ bytes, expected at most"
IMAGES: dict[str, tuple[int, Bomb, str]] = {
    "a tile for Pillow": (3, lambda: tiff({**SIZE, 322: [46_000], 323: [46_000]}, [zlib.compress(b"x")]), TOO_MUCH),
    "a tile of RGB for Pillow": (
        3,
        lambda: tiff(
            {**SIZE, 277: [3], 258: [8, 8, 8], 262: [2], 322: [30_000], 323: [30_000]}, [zlib.compress(b"x")]
        ),
        r"has 2,700,000,000 bytes, expected at most",
    ),
    "planes of tiles for Pillow": (
        3,
        lambda: tiff({**SIZE, 277: [3], 262: [2], 284: [2], 322: [46_000], 323: [46_000]}, [zlib.compress(b"x")] * 3),
        TOO_MUCH,
    ),
    "a tile of bands": (5, lambda: bands({322: [60_000], 323: [60_000]}, [zlib.compress(b"x")]), TOO_MUCH),
    "tiles that inflate": (5, lambda: bands({322: [64], 323: [48]}, [deflated(2**32)]), TOO_MUCH),
    "planes that inflate": (5, lambda: bands({322: [64], 323: [48]}, [deflated(2**32)] * 5, t284=[2]), TOO_MUCH),
    "an array": (5, lambda: npy((100_000, 100_000, 5)), TOO_MUCH),
    "scans of a JPEG": (3, lambda: scans(8000, 1024), "8,009 scans, expected at most 512"),
    "EXIF of a JPEG": (3, lambda: noted(10_000), "10,000 segments of EXIF, expected at most 256"),
    "text of a PNG": (3, lambda: png(b"zTXt" + b"a\0\0" + deflated(2**30)), "data too large"),
    "the profile of a PNG": (3, lambda: png(b"iCCP" + b"a\0\0" + deflated(2**30)), "data too large"),
}
SIZE = {256: [64], 257: [48], 259: [8]}


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_cannot_become_more_than_the_limit(name: str) -> None:
    channels, make, says = IMAGES[name]
    pytest.importorskip("tifffile")
    stored_image(bytes(make_plain(channels)), preprocessing(8, 8, channels))  # imports the decoders
    content = make()
    assert len(content) < 25e6
    with at_most(MOST_BYTES // 2), pytest.raises(InputError, match=says):
        stored_image(content, preprocessing(8, 8, channels))


def make_plain(channels: int) -> bytes:
    if channels == 3:
        return tiles_of_grey(16)
    np.save(file := io.BytesIO(), np.zeros((8, 8, channels), dtype=np.uint8))
    return file.getvalue()


def idx(path: Path, shape: tuple[int, ...], content: bytes) -> None:
    (folder := path / "MNIST" / "raw").mkdir(parents=True)
    start = b"\0\0\x08" + bytes([len(shape)]) + struct.pack(f">{len(shape)}I", *shape)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(start) + content)


def sparse(path: Path, start: bytes, size: int) -> None:
    """A file of `size` bytes, nearly all of which are holes."""
    path.write_bytes(start)
    with path.open("r+b") as file:
        file.truncate(size)


def zipped(path: Path) -> None:
    """Weights as `torch.save` writes them, in a ZIP file that is compressed."""
    torch.save({"weight": torch.zeros(2, 2), "more": torch.zeros(2**18)}, path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


class Zeros:
    """A megabyte is in the test; a pickle of the same length can ask for terabytes."""

    def __reduce__(self) -> Any:
        return bytearray, (2**20,)


FILES: dict[str, tuple[Callable[[Path], object], Callable[[Path], object], str]] = {
    "an MNIST gzip of many images": (
        lambda path: idx(path, (2**31, 28, 28), gzip.compress(bytes(2**22)) * 1000),
        lambda path: MNIST(root=str(path)).read(train=True),
        TOO_MUCH,
    ),
    "an MNIST gzip of more than its header says": (
        lambda path: idx(path, (10, 28, 28), gzip.compress(bytes(2**22)) * 1000),
        lambda path: MNIST(root=str(path)).read(train=True),
        "MNIST cannot be read",
    ),
    "a table with a hole": (
        lambda path: sparse(path / "list.csv", b"path,label\na.jpg,", 2**34),
        lambda path: CSV(path=str(path / "list.csv"), val_share=0.5).list_files(),
        "line 2 of .*list.csv has 1,048,576 characters or more",
    ),
    "a table that is a hole": (
        lambda path: sparse(path / "list.csv", b"", 2**34),
        lambda path: CSV(path=str(path / "list.csv"), val_share=0.5).list_files(),
        "line 1 of .*list.csv has 1,048,576 characters or more",
    ),
    "a label of 4 TB": (
        lambda path: sparse(path / "train.tar", member(size=2**42, name="a.cls"), 2**43),
        lambda path: WebDataset(path=str(path)).list_files(),
        rf"train.tar cannot be indexed \(with 'a.cls' its labels {TOO_MUCH}",
    ),
    "labels that are holes": (
        lambda path: sparse(path / "train.tar", member(size=2**34, name="a.cls"), 2**35),
        lambda path: WebDataset(path=str(path)).list_files(),
        "train.tar cannot be indexed",
    ),
    "a long name that is a hole": (
        lambda path: sparse(path / "train.tar", member(b"L", 2**34), 2**35),
        lambda path: WebDataset(path=str(path)).list_files(),
        f"train.tar cannot be indexed .*a header of it {TOO_MUCH}",
    ),
    "weights in a compressed archive": (
        lambda path: zipped(path / "a.pth"),
        lambda path: load_start(nn.Linear(2, 2), path / "a.pth"),
        "a.pth has no weights that can be read safely .*is compressed",
    ),
    "weights with an array of bytes": (
        lambda path: torch.save({"weight": torch.zeros(2), "more": Zeros()}, path / "a.pth"),
        lambda path: load_start(nn.Linear(2, 2), path / "a.pth"),
        "a.pth has no weights that can be read safely .*an array of bytes",
    ),
    "older weights with an array of bytes": (
        lambda path: torch.save({"more": Zeros()}, path / "a.pth", _use_new_zipfile_serialization=False),
        lambda path: load_start(nn.Linear(2, 2), path / "a.pth"),
        "a.pth has no weights that can be read safely .*an array of bytes",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_cannot_become_more_than_the_limit(tmp_path: Path, name: str) -> None:
    make, read, says = FILES[name]
    make(tmp_path)
    with at_most(MOST_BYTES // 2), pytest.raises(InputError, match=says):
        read(tmp_path)


HONEST: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
    "a.png": (
        lambda path: Image.new("RGB", (5000, 5000)).save(path),
        lambda path: stored_image(path, preprocessing(8, 8)),
    ),
    "b.png": (
        lambda path: Image.new("RGB", (5000, 5000)).save(path),
        lambda path: FileSplit([path], torch.zeros(1), preprocessing(8, 8), skip=1).fetch([0]),
    ),
    "c.npy": (
        lambda path: np.save(path, np.zeros((5000, 5000, 5), dtype=np.uint8)),
        lambda path: FileSplit([path], torch.zeros(1), preprocessing(8, 8, 5), skip=1).fetch([0]),
    ),
    "train-images-idx3-ubyte": (
        lambda path: sparse(path, b"\0\0\x08\3" + struct.pack(">3I", 2**19, 28, 28), 16 + 2**19 * 784),
        read_idx,
    ),
    "train.tar": (
        lambda path: sparse(path, member(size=2**29, name="a.cls"), 2**30),
        lambda path: WebDataset(path=str(path.parent)).list_files(),
    ),
}


@pytest.mark.parametrize("name", HONEST)
def test_a_lack_of_memory_names_the_file_and_does_not_count_it_as_damaged(tmp_path: Path, name: str) -> None:
    make, read = HONEST[name]
    make(tmp_path / name)
    with (
        at_most(2**25),
        pytest.raises(LockstepError, match=rf"out of memory while \S+{re.escape(name)} was read") as e,
    ):
        read(tmp_path / name)
    assert not isinstance(e.value, BrokenImage)


LEGAL: dict[str, Bomb] = {
    "a TIFF of tiles": lambda: tiles_of_grey(16),
    "a TIFF of one tile that is larger": lambda: tiles_of_grey(64),
    "a progressive JPEG": lambda: saved("JPEG", (64, 48), progressive=True),
    "a PGM in text": lambda: b"P2 # width, height\n3 2\n255\n# pixels\n1 2 3 4 5 6\n",
    "a BMP of run lengths": lambda: run_lengths(40),
    "an animated WebP": lambda: canvas(40, 30),
    "a PNG of 16 bits": lambda: png(),
    "a photo of as many scans as are allowed": lambda: scans(8000, 48),
}


def png(*more: bytes) -> bytes:
    """A PNG of 16 bits, with more chunks before its pixels."""
    rows = b"".join(b"\0" + bytes(range(6 * row, 6 * row + 24)) for row in range(3))  # 4 pixels of RGB
    header = b"IHDR" + struct.pack(">IIBBBBB", 4, 3, 16, 2, 0, 0, 0)
    chunks = (header, *more, b"IDAT" + zlib.compress(rows), b"IEND")
    parts = [struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body)) for body in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize(("channels", "fits", "too_large"), [(1, 256, 272), (3, 256, 272), (6, 128, 144)])
def test_a_grey_image_has_the_limit_of_a_coloured_one_and_bands_that_of_their_bytes(
    channels: int, fits: int, too_large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "PIXELS", 256)

    def file(pixels: int) -> bytes:
        shape = (pixels // 16, 16, channels)
        if channels == 6:
            np.save(content := io.BytesIO(), np.zeros(shape, np.uint8))
        else:
            Image.fromarray(np.zeros(shape, np.uint8).squeeze()).save(content := io.BytesIO(), "png")
        return content.getvalue()

    assert ImageFile.of(file(fits), channels).height == fits // 16
    with pytest.raises(ValueError, match=rf"its header says 16x{too_large // 16}, expected at most 256 pixels"):
        ImageFile.of(file(too_large), channels)


@pytest.mark.parametrize("name", LEGAL)
def test_an_unusual_image_is_read_as_pillow_reads_it(name: str) -> None:
    content = LEGAL[name]()
    with Image.open(io.BytesIO(content)) as image:
        expected = np.array(image.convert("RGB")).astype(int)
    assert np.abs(decoded(ImageFile.of(content))[0] - expected).max() <= 4 * content.startswith(b"\xff\xd8")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (lambda more: scans(503 + more, 1024), "it has 513 scans, expected at most 512"),
        (lambda more: noted(256 + more), "it has 257 segments of EXIF, expected at most 256"),
    ],
    ids=["scans", "EXIF"],
)
def test_as_much_as_is_allowed_is_read_and_one_more_is_refused(content: Callable[[int], bytes], says: str) -> None:
    ImageFile.of(content(0))
    with pytest.raises(ValueError, match=says):
        ImageFile.of(content(1))


TILE_BYTES = 64 * 48 * 5


@pytest.mark.parametrize(
    ("code", "compress"),
    [(8, zlib.compress), (32946, zlib.compress), (34925, lzma.compress)],
    ids=["Deflate", "older Deflate", "LZMA"],
)
@pytest.mark.parametrize("planes", [False, True])
def test_a_tile_that_inflates_to_more_than_twice_its_size_is_refused_wherever_it_is(
    code: int, compress: Callable[[bytes], bytes], planes: bool
) -> None:
    pytest.importorskip("tifffile")
    size = 2 * (64 * 48 if planes else TILE_BYTES)
    tags: dict[str, list[int]] = {"t284": [2]} if planes else {}
    fitting, bomb = compress(bytes(size // 2)), compress(bytes(size + 1))
    parts = [fitting] * 4 + [bomb] if planes else [bomb]
    file = ImageFile.of(bands({322: [64], 323: [48]}, parts, t259=[code], **tags), 5)
    with pytest.raises(
        ValueError, match=f"^a strip or tile of it has {size + 1:,} bytes, expected at most {size:,}$"
    ):
        file.stored(preprocessing(8, 8, 5))


def test_the_scans_of_a_preview_in_a_photo_are_not_counted() -> None:
    photo, preview = scans(3, 48), saved("JPEG", (32, 24))
    note = b"Exif\0\0" + preview
    noted = photo[:2] + b"\xff\xe1" + struct.pack(">H", len(note) + 2) + note + photo[2:]
    assert [scans_of_jpeg(content) for content in (preview, photo, noted)] == [1, 12, 12]


def test_a_large_photo_may_have_as_many_scans_as_cameras_make(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "SCANNED", 0)  # as if this one had very many pixels
    assert ImageFile.of(scans(7, 16)).height == 16
    with pytest.raises(ValueError, match=r"^it has 17 scans, expected at most 16$"):
        ImageFile.of(scans(8, 16))
