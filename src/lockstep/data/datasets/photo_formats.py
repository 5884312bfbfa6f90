"""The formats of photos that Pillow reads only with other packages: the extra `photos`."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass

BRANDS = 64  # bytes from the start of a file in which its brands are


@dataclass(frozen=True)
class PhotoFormat:
    """A format that Pillow alone does not read.

    Fields:
        name: its usual name.
        pillow: its name in Pillow.
        suffixes: of its files.
        brands: the marks at the start of its files.
        package: the requirement for pip.
    """

    name: str
    pillow: str
    suffixes: frozenset[str]
    brands: tuple[bytes, ...]
    package: str

    @property
    def remedy(self) -> str:
        """How to read its files."""
        return f"pip install '{self.package}' (in the extra `photos`), or convert them to JPEG"


AVIF = PhotoFormat("AVIF", "AVIF", frozenset({".avif"}), (b"avif", b"avis"), "pillow>=11.3")
HEIC = PhotoFormat(
    "HEIC",
    "HEIF",
    frozenset({".heic", ".heif", ".hif"}),
    (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"),
    "pillow-heif",
)


@functools.cache
def readable(kind: PhotoFormat) -> bool:
    """Whether the package that reads it is installed."""
    if kind is HEIC:
        return importlib.util.find_spec("pillow_heif") is not None
    from PIL import features

    return "avif" in features.modules and bool(features.check("avif"))


@functools.cache
def register() -> None:
    """Let Pillow read HEIC, if that is installed."""
    if readable(HEIC):
        from pillow_heif import register_heif_opener

        register_heif_opener()


def of_contents(data: bytes) -> PhotoFormat | None:
    """The format of a file by its first bytes, if it is one of these."""
    if data[4:8] != b"ftyp":
        return None
    brands = data[8 : min(BRANDS, int.from_bytes(data[:4]))]
    return next((kind for kind in (AVIF, HEIC) if any(brand in brands for brand in kind.brands)), None)


def of_suffix(suffix: str) -> PhotoFormat | None:
    """The format of a file by the end of its name, in small letters, if it is one of these."""
    return next((kind for kind in (AVIF, HEIC) if suffix in kind.suffixes), None)
