"""Objects of a program on their way to fresh interpreters: with their code, without it, and what cannot go."""

from __future__ import annotations

import dataclasses
import importlib
import linecache
import pickle
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.extensions import MAIN
from lockstep.core.errors import InputError
from lockstep.models.nets import DigitNet
from lockstep.optim import SGD
from lockstep.runtime.pickled import packed, unpacked


@pytest.fixture(autouse=True)
def _own_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linecache, "cache", {})
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture(params=["cloudpickle", "pickle"])
def pickler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The library that packs: without cloudpickle it is pickle."""
    if request.param == "pickle":
        monkeypatch.setitem(sys.modules, "cloudpickle", None)  # as if it was not installed
    else:
        pytest.importorskip("cloudpickle")
    return str(request.param)


def of_main(name: str, source: str) -> Any:
    """What a cell of a notebook defines under this name."""
    values: dict[str, Any] = {"__name__": MAIN}
    exec(compile(source, "/tmp/cell-7.py", "exec"), values)
    return values[name]


@pytest.mark.usefixtures("pickler")
def test_objects_come_back_in_their_order_and_leave_no_file() -> None:
    with packed((torch.arange(3), DigitNet(width=8), SGD)) as (file,):
        tensor, option, cls = unpacked(Path(file))
    assert not Path(file).parent.exists()
    assert tensor.tolist() == [0, 1, 2]
    assert (option, cls) == (DigitNet(width=8), SGD)


def test_without_objects_there_is_no_file() -> None:
    with packed(()) as files:
        assert files == ()
    with packed((None,)) as files:
        assert unpacked(Path(*files)) == (None,)


def test_a_rank_has_the_cells_of_the_program_and_looks_last_where_the_program_looks_for_modules() -> None:
    program = ["/a/of/program", "/b/of/program", *sys.path[:1]]
    cell = (6, None, ["x = 1\n"], "<cell>")
    linecache.cache |= {"<cell>": cell, "/a/file.py": (6, 1.5, ["x = 2\n"], "/a/file.py"), "lazy": (lambda: "",)}
    sys.path[:] = program
    with packed((1,)) as (file,):
        sys.path[:] = ["/of/the/rank", *program[1:2]]
        linecache.cache.clear()
        linecache.cache["own"] = own = (1, None, ["\n"], "own")
        assert unpacked(Path(file)) == (1,)
    assert linecache.cache == {"own": own, "<cell>": cell}, "files are read where they are needed"
    assert sys.path == ["/of/the/rank", "/b/of/program", "/a/of/program", program[2]]


@pytest.mark.usefixtures("pickler")
def test_a_rank_imports_the_modules_of_the_objects_from_the_folders_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_the_program.py").write_text("class Own:\n    size = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    with packed((importlib.import_module("of_the_program").Own(),)) as (file,):
        sys.path.remove(str(tmp_path))
        monkeypatch.delitem(sys.modules, "of_the_program")
        (own,) = unpacked(Path(file))
        assert (own.size, type(own).__module__) == (3, "of_the_program")


def test_a_function_of_a_cell_keeps_the_name_of_its_cell_and_a_field_without_default_stays_one() -> None:
    pytest.importorskip("cloudpickle")
    function = of_main("double", "def double(x):\n    return 2 * x\n")
    source = "import dataclasses\n@dataclasses.dataclass\nclass Own:\n    size: int\n"
    with packed((function, of_main("Own", source), dataclasses.MISSING)) as (file,):
        doubled, own, missing = unpacked(Path(file))
    assert doubled(4) == 8
    assert doubled.__code__.co_filename == "/tmp/cell-7.py", "a traceback shows its lines"
    assert own(3).size == 3
    assert missing is dataclasses.fields(own)[0].default is dataclasses.MISSING


def test_without_cloudpickle_classes_and_functions_of_a_script_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    cls = type("Own", (), {"__module__": MAIN})
    function = of_main("Own", "def Own():\n    pass\n")
    says = rf"^Own is of {MAIN}, .* pip install cloudpickle, or move"
    for own in (cls, cls(), [function], {"a": function}):
        with pytest.raises(InputError, match=says), packed((own,)):
            pass


class Refusing:
    """An object whose class does not let it be pickled, as many do."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> str:
        raise self.error


@pytest.mark.usefixtures("pickler")
@pytest.mark.parametrize("error", [pickle.PicklingError("odd"), TypeError("odd"), AttributeError("odd")], ids=repr)
def test_an_object_that_cannot_be_pickled_is_refused_with_the_reason(error: Exception) -> None:
    says = r"an object cannot go to the processes of several ranks \({}.*\); use launcher\.ranks=1"
    with pytest.raises(InputError, match=says.format("odd")), packed((Refusing(error),)):
        pass
    with pytest.raises(InputError, match=says.format("cannot pickle '_thread.lock'")), packed((threading.Lock(),)):
        pass
