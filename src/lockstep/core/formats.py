"""The numbers of the formats of files that outlast a version of Lockstep; docs/formats.md describes the files.

One file of a folder has the number, next to the version that wrote it. A reader ignores keys that it does not know,
and a missing key has its default. A key that is added needs a new number only if earlier readers would go wrong.
"""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import lockstep
from lockstep.core.errors import InputError, shown
from lockstep.core.safe_read import UnreadableFile

_VERSION = re.compile(r"\d[\w.+-]{0,40}", re.ASCII)  # a sentence has it in a command


class FileFormat(StrEnum):
    run = "run folder"
    checkpoint = "checkpoint"
    weights = "weights"
    sweep = "sweep"
    packed = "packed data set"
    evaluation = "evaluation"


FORMAT_NUMBERS = dict.fromkeys(FileFormat, 1)


class NewerFormat(InputError):
    """A file of a later version. It is not damaged: nobody may skip, repair or replace it."""


def stamp(kind: FileFormat) -> dict[str, Any]:
    """The number of a format and the version of Lockstep, to be written into a file."""
    return {"format": FORMAT_NUMBERS[kind], "lockstep": lockstep.__version__}


def check_format(kind: FileFormat, facts: Any, path: object) -> None:
    """Check a file's format, which is 1 without a version, as before 1.0. Raises NewerFormat, or UnreadableFile."""
    if not isinstance(facts, Mapping) or "lockstep" not in facts:
        return
    number, version, newest = facts.get("format"), str(facts["lockstep"]), FORMAT_NUMBERS[kind]
    if type(number) is not int or number < 1 or not _VERSION.fullmatch(version):
        raise UnreadableFile(path, f"has format {shown(number)} of Lockstep {shown(version)}, expected 1 to {newest}")
    if number > newest:
        raise NewerFormat(
            f"{path} has format {number} of a {kind}, and Lockstep {lockstep.__version__} reads up to {newest}; "
            f"use Lockstep {version} or later: pip install 'lockstep>={version}'"
        )
