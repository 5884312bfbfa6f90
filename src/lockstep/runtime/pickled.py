"""Objects of a program for the ranks that it starts as fresh interpreters."""

import dataclasses
import importlib
import importlib.util
import io
import linecache
import pickle
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from lockstep.config.extensions import MAIN
from lockstep.core.errors import InputError


class ByName(pickle.Pickler):
    """The pickler without cloudpickle: it names classes and functions by their modules, which ranks import."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | FunctionType) and value.__module__ == MAIN:
            raise InputError(
                f"{value.__qualname__} is of {MAIN}, which the processes of several ranks cannot import; pip install "
                "cloudpickle, or move it to a module"
            )
        return NotImplemented


@contextmanager
def packed(objects: tuple[Any, ...]) -> Iterator[tuple[str, ...]]:
    """A file of this user's with the objects, for the context; no file without objects. Raises InputError."""
    if not objects:
        yield ()
        return
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        file = Path(folder, "objects.pickle")
        cells = {name: entry for name, entry in linecache.cache.items() if len(entry) > 1 and entry[1] is None}
        file.write_bytes(pickle.dumps(([*sys.path], cells, _pickled(objects))))
        yield (str(file),)


def _pickler() -> Any:
    """The class of cloudpickle, which takes classes of `__main__` too, or `ByName` without it."""
    if importlib.util.find_spec("cloudpickle") is None:
        return ByName

    class ByCode(importlib.import_module("cloudpickle").Pickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            """MISSING by its name, because dataclasses compare it by identity; code with its file, for tracebacks."""
            if isinstance(value, CodeType):
                create, facts = self.dispatch_table[CodeType](value)
                return create, tuple(value.co_filename if fact == "<dynamic-code>" else fact for fact in facts)
            return "MISSING" if value is dataclasses.MISSING else super().reducer_override(value)

    return ByCode


def _pickled(objects: tuple[Any, ...]) -> bytes:
    content = io.BytesIO()
    try:
        _pickler()(content).dump(objects)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise InputError(
            f"an object cannot go to the processes of several ranks ({error}); use launcher.ranks=1, or give one "
            "that pickle takes"
        ) from error
    return content.getvalue()


def unpacked(file: Path) -> tuple[Any, ...]:
    """The objects in a file of `packed`, after this process got the import path and the cells of the program."""
    paths, cells, content = pickle.loads(file.read_bytes())
    linecache.cache |= cells
    sys.path += [path for path in paths if path not in sys.path]
    return pickle.loads(content)
