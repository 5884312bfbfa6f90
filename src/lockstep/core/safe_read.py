"""Reading files that somebody else may have written, or that a fault may have changed: else UnreadableFile.

What the system cannot read of a file that is there is tried again, for network file systems: else UnreadableStorage.

Only plain files of a bounded size are read: opening a pipe blocks, and a device has no end. Only numbers, texts,
lists and mappings are parsed, a few levels deep: a few lines of YAML can expand to gigabytes.
"""

import errno
import json
import math
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, TypeVar

import yaml

from lockstep.core.errors import InputError, StorageError, out_of_memory

KB, MB = 2**10, 2**20
MOST_TEXT_BYTES = 256 * KB  # bytes of a text; a config has about 3 kB
MOST_BYTES = 2**30  # bytes of an image, a table or an array, in its file and decoded: a few kB can ask for any number
LINE_LIMIT = MB
DEPTH = 32  # levels of lists and mappings; a config has 3
WHOLE = 2**63  # Lockstep writes no larger integers, and Python may refuse to print them

# The parser in C is ten times as fast, but not every build of PyYAML has it.
_PARSER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

UNUSABLE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR})
# The errors of a path, or of a library, which reading again does not change.
LASTING_ERRORS = UNUSABLE | {errno.ENOENT, errno.ELOOP, errno.EMFILE, errno.ENFILE, None}
PAUSES_S = (0.1, 0.4, 1.2)  # between the attempts to read; a stop is heard within 3 s
T = TypeVar("T")

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class UnreadableFile(InputError):
    """A file is missing or has the wrong kind or content. `reason` is the sentence without the path."""

    def __init__(self, path: Any, reason: str, *, missing: bool = False) -> None:
        super().__init__(f"{path} {reason}")
        self.path, self.reason, self.missing = path, reason, missing

    def __reduce__(self) -> Any:  # for other ranks
        return type(self), (self.path, self.reason), {"missing": self.missing}


@contextmanager
def unusable_paths() -> Iterator[None]:
    """Turn the error of a path that this user may not look at, or that no system takes, into UnreadableFile."""
    try:
        yield
    except OSError as error:
        if error.errno not in UNUSABLE or not error.filename:
            raise
        raise UnreadableFile(Path(os.fsdecode(error.filename)), f"cannot be used ({error.strerror})") from error


class UnreadableStorage(UnreadableFile, StorageError):
    """The system cannot read a file that is there. Who can do without the file takes it for a damaged one."""

    exit_code = StorageError.exit_code


def stored(read: Callable[[], T], place: object) -> T:
    """The result of `read`, which reads from `place`, after up to three more attempts. Raises UnreadableStorage."""
    for pause in (*PAUSES_S, 0):
        try:
            return read()
        except OSError as error:
            if error.errno in LASTING_ERRORS:
                raise
            failure = error
        time.sleep(pause)
    reason = f"cannot be read ({failure.strerror}, also when it was read again); check its disk or network"
    raise UnreadableStorage(place, reason) from failure


class _PatientFile(FileIO):
    def readinto(self, buffer: Any) -> int | None:
        return stored(partial(super().readinto, buffer), self.name)


def is_plain(path: Path) -> bool:
    """Whether a path is a plain file that this user may look at."""
    with suppress(OSError):
        return path.is_file()
    return False


def check_size(size: int, what: str = "it has", most: int = MOST_BYTES) -> None:
    """Raise ValueError if what is about to be read or decoded takes more bytes than it may."""
    if size > most:
        raise ValueError(f"{what} {size:,} bytes, expected at most {most:,}")


def file_kind(mode: int) -> str:
    """The kind of a file from its `st_mode`, such as "a pipe"; empty for a plain file."""
    return "" if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "a special file")


@contextmanager
def open_plain(path: Path, *, links: bool = False) -> Iterator[BufferedReader]:
    """Open a plain file for reading, without blocking. `links` allows a symbolic link. Raises UnreadableFile."""
    with stored(partial(_open, path, links), path) as file:
        try:
            yield file
        except OSError as error:
            raise UnreadableFile(path, f"cannot be read ({error.strerror})") from error
        except MemoryError as error:
            raise out_of_memory(error, path) or error from error


def _open(path: Path, links: bool) -> BufferedReader:
    try:
        # Check the kind before opening: opening a pipe waits for a writer, and can start an action of a device.
        if not (other_kind := file_kind(path.stat(follow_symlinks=links).st_mode)):
            return BufferedReader(_PatientFile(path))
    except (FileNotFoundError, NotADirectoryError):
        raise UnreadableFile(path, "is missing", missing=True) from None
    except (OSError, ValueError) as error:  # a path with a NUL byte is a ValueError
        if isinstance(error, OSError) and error.errno not in LASTING_ERRORS:
            raise
        reason = error.strerror if isinstance(error, OSError) else error
        raise UnreadableFile(path, f"cannot be read ({reason})") from error
    raise UnreadableFile(path, f"is {other_kind}, expected a plain file")


def read_bytes(path: Path, limit: int = MOST_TEXT_BYTES, *, links: bool = False) -> bytes:
    """The content of a plain file of at most `limit` bytes."""
    with open_plain(path, links=links) as file:
        size = os.fstat(file.fileno()).st_size
        # Not `limit` in any case: `read` takes all the memory that it is asked for. Files of /proc have a size of 0.
        data = file.read(min(limit, max(size, MOST_TEXT_BYTES)) + 1)
        if len(data) > limit:
            raise UnreadableFile(path, f"has {size:,} bytes, expected at most {limit:,}")
    return data


def read_if_exists(path: Path) -> bytes | None:
    """The content of a plain file of at most 64 MB; None if the file does not exist."""
    return read_bytes(path, 64 * MB) if os.path.lexists(path) else None


def read_text(path: Path) -> str:
    """The UTF-8 text of a plain file of at most `MOST_TEXT_BYTES`, with its line ends."""
    return _decoded(path, read_bytes(path))


def read_name(path: Path) -> str:
    """The folder name that a file contains: one component of a path, and not `..`. See `read_text`."""
    name = read_text(path).strip()
    if name in ("", ".", "..") or not name.isprintable() or "/" in name:
        raise UnreadableFile(path, f"has {name[:80]!r} in it, expected the name of a folder next to it")
    return name


def read_json(path: Path, limit: int = MOST_TEXT_BYTES, *, links: bool = False) -> Any:
    """The value in a JSON file: plain values, at most `DEPTH` levels deep."""
    return checked_json(path, read_bytes(path, limit, links=links))


def checked_json(path: Path, data: bytes) -> Any:
    """The value in the content of a JSON file, checked as by `read_json`."""
    try:
        return checked(json.loads(_decoded(path, data)))
    except (ValueError, RecursionError) as error:
        first_line = str(error).partition("\n")[0]
        raise UnreadableFile(path, f"is not JSON ({first_line})") from error


class _Loader(_PARSER):
    """A loader for YAML as OmegaConf writes it: dates are texts."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in _PARSER.yaml_implicit_resolvers.items()
    }


def read_yaml(path: Path) -> Any:
    """The value in a YAML file: plain values, at most `DEPTH` levels deep, no aliases."""
    text, level = read_text(path), 0
    try:
        for event in yaml.parse(text, Loader=_PARSER):  # loading many levels would overflow the stack of libyaml
            level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if level > DEPTH or isinstance(event, yaml.AliasEvent):
                raise ValueError("it is too deep, or has aliases, expected plain keys and values")
        return checked(yaml.load(text, Loader=_Loader))
    except (yaml.YAMLError, ValueError) as error:
        raise UnreadableFile(path, f"is not the YAML of a config ({' '.join(str(error).split())})") from error


def read_lines(path: Path) -> Iterator[str | None]:
    """The lines of a plain file with their ends; None for a line that is not UTF-8 or was cut short.

    Reading stops at a line of more than `LINE_LIMIT` bytes, because Lockstep writes no such line.
    """
    with open_plain(path) as file:
        while line := file.readline(LINE_LIMIT):
            if not line.endswith(b"\n"):
                yield None
                return
            try:
                yield line.decode()
            except UnicodeDecodeError:
                yield None


def checked(value: Any, levels: int = DEPTH) -> Any:
    """`value`, after a check that it has plain values only, `levels` deep at most. Raises ValueError."""
    if levels == 0:
        raise ValueError("it is too deep")
    match value:
        case dict() if all(isinstance(key, str) for key in value):
            for item in (*value, *value.values()):
                checked(item, levels - 1)
        case list():
            for item in value:
                checked(item, levels - 1)
        case str():
            value.encode()
        case None | bool() | float():
            pass
        case int() if is_number(value):
            pass
        case _:
            raise ValueError(f"a value or key is neither a number nor a text: {type(value).__name__}")
    return value


def is_number(value: object) -> bool:
    """Whether a parsed value is a finite number, and no larger integer than Lockstep writes."""
    return (isinstance(value, float) and math.isfinite(value)) or (type(value) is int and -WHOLE <= value < WHOLE)


def _decoded(path: Path, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UnreadableFile(path, f"is not UTF-8 text (byte {error.start:,})") from None
