"""Reads the description in a file of weights. Only the file's header is read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lockstep.core.errors import InputError
from lockstep.core.model_card import LIMIT, METADATA_KEY, ModelCard
from lockstep.core.safe_read import MB, UnreadableFile, checked_json, opened

LENGTH_BYTES = 8  # the header begins after its length, a little-endian number of this size
# The header escapes the quotes of the card, which can double the card's length. A tensor takes about 100 bytes.
HEADER_LIMIT = 2 * LIMIT + 32 * MB


def read_card(file: Path) -> ModelCard:
    """The card of a safetensors file.

    Raises:
        InputError: the file is not a safetensors file, has no card, or has a wrong one.
    """
    header = _header(file)
    try:
        return ModelCard.parse(header.get("__metadata__") if isinstance(header, dict) else None)
    except ValueError as error:
        raise InputError(f"weights: {file} cannot be used: {error}") from error


def find_card(file: Path) -> ModelCard | None:
    """The card of a safetensors file; None if it has none, like weights of other programs, or cannot be read."""
    try:
        header = _header(file)
    except (UnreadableFile, OSError):  # loading the weights will raise the error
        return None
    has_card = isinstance(header, dict) and METADATA_KEY in (header.get("__metadata__") or {})
    return read_card(file) if has_card else None


def _header(file: Path) -> Any:
    with opened(file, links=True) as data:
        bytes_after_length = os.fstat(data.fileno()).st_size - LENGTH_BYTES
        length = int.from_bytes(data.read(LENGTH_BYTES), "little")
        if not 0 < length <= bytes_after_length:
            raise UnreadableFile(file, "is not a safetensors file")
        if length > HEADER_LIMIT:
            raise UnreadableFile(file, f"has a header of {length:,} bytes, expected at most {HEADER_LIMIT:,}")
        return checked_json(file, data.read(length))
