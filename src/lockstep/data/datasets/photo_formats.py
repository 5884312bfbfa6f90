"""The formats of photos that Pillow reads only with other packages: the extra `photos`."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass

BRANDS = 64  # the brands of a file are in its first bytes, up to this offset


@dataclass(frozen=True)
class PhotoFormat:
    """A format that Pillow alone does not read.

    Fields:
        name: its usual name.
        pillow: its name in Pillow.
        suffixes: the suffixes of its files.
        brands: the words at the start of a file that name its format.
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
    """Whether the package that reads this format is installed."""
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
    """The format of a file by its first bytes; None if it is neither AVIF nor HEIC."""
    if data[4:8] != b"ftyp":
        return None
    brands = data[8 : min(BRANDS, int.from_bytes(data[:4]))]
    return next((kind for kind in (AVIF, HEIC) if any(brand in brands for brand in kind.brands)), None)


def of_suffix(suffix: str) -> PhotoFormat | None:
    """The format of a file by its suffix in lower case; None if it is neither AVIF nor HEIC."""
    return next((kind for kind in (AVIF, HEIC) if suffix in kind.suffixes), None)
