"""Finds the files in a tar archive that somebody else may have written.

`tarfile` parses the headers only: a negative size would lead it back for ever, and a sparse file may have any size.
"""

import os
import tarfile
from collections.abc import Iterator
from typing import BinaryIO

BLOCK, TEXT = tarfile.BLOCKSIZE, ("utf-8", "surrogateescape")
LONG_NAME, PAX = b"L", (b"x", b"X")
DESCRIPTIONS = (LONG_NAME, *PAX, b"K", b"g")  # the types of members that describe the next one, or the archive
LONGEST = 2**16  # bytes of a description; a name has up to 4 kB, attributes of the file may be beside it


def stored_files(archive: BinaryIO) -> Iterator[tuple[str, int, int]]:
    """The name, the offset and the size of each file in an archive, which is then at this offset.

    Raises:
        ValueError: it is no tar archive or cut short, or a member is neither a plain file nor a folder.
    """
    offset, end, described = 0, archive.seek(0, os.SEEK_END), dict[str, str]()
    while archive.seek(offset) == offset and (block := archive.read(BLOCK)).strip(b"\0"):
        try:
            member = tarfile.TarInfo.frombuf(block, *TEXT)
        except tarfile.HeaderError as error:
            raise ValueError(f"{error} at byte {offset:,}") from error
        offset += BLOCK
        describes, most = member.type in DESCRIPTIONS, end - offset
        name, size = described.get("path", member.name), int(described.get("size", member.size))
        if describes:
            size, most = member.size, min(most, LONGEST)
        elif member.isdir():
            size = 0
        elif "sparse" in described or member.type == tarfile.GNUTYPE_SPARSE or not member.isreg():
            raise ValueError(f"its member {name!r} is a link, a device or sparse; use tar -h --hard-dereference")
        if not 0 <= size <= most:
            raise ValueError(f"its member {name!r} has {size:,} bytes, expected 0 to {most:,}")
        if describes:
            described |= _description(member.type, archive.read(size))
        else:
            if not member.isdir():
                yield name, offset, size
            described = {}
        offset += -(-size // BLOCK) * BLOCK
    if described or not end:
        raise ValueError("it is empty or cut short")


def _description(kind: bytes, content: bytes) -> dict[str, str]:
    """The `path` and the `size` that a member states for the next one, and whether that is `sparse`."""
    if kind == LONG_NAME:
        return {"path": content.partition(b"\0")[0].decode(*TEXT)}
    described, start = {}, 0
    while kind in PAX and start < len(content):
        digits, _, _ = content[start : start + 6].partition(b" ")  # a record is "LENGTH KEY=VALUE\n"
        end = start + int(digits)
        if not start < end <= len(content):
            raise ValueError("a record of pax is cut short")
        key, _, value = content[start + len(digits) + 1 : end - 1].partition(b"=")
        described[key.partition(b".sparse.")[1].decode()[1:-1] or key.decode(*TEXT)] = value.decode(*TEXT)
        start = end
    return {key: described[key] for key in ("path", "size", "sparse") if key in described}
