"""Names that anybody can have chosen, in what a user reads: one line stays one line, and no cell is computed."""

from __future__ import annotations

import csv
import io

import pytest
from rich.table import Table

from lockstep.cli.rows import csv_row
from lockstep.core import log
from lockstep.core.errors import BY_EXIT_CODE, BrokenImage, LockstepError, RankFailed, as_known
from lockstep.runtime import program

ENDS = [*"\n\r\v\f\x1c\x1d\x1e\x85", *"\u2028\u2029"]
CONTROLS = [*ENDS, *"\0\t\x08\x1b\x7f\x9b", *"\u200e\u202e\u2066", "\udc80"]


@pytest.mark.parametrize("control", CONTROLS, ids=ascii)
def test_a_name_is_one_line_wherever_it_is_shown(control: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"cat{control}lockstep: forged"
    expected = f"cat{control.encode('unicode_escape').decode()}lockstep: forged"
    if control == "\udc80":
        expected = "cat\\udc80lockstep: forged"
    table = Table("class")
    table.add_row(name)
    outputs = (lambda: log.console.print(name), lambda: log.show(name), lambda: log.say(name), lambda: log.warn(name))
    for show in (*outputs, lambda: log.say_row("data", name), lambda: log.show_command("type", name)):
        show()
        (line,) = capsys.readouterr().out.splitlines()
        assert line.endswith(expected), line
    log.console.print(table)
    assert [expected in line for line in capsys.readouterr().out.splitlines()].count(True) == 1
    for error in (*(cls(name) for cls in BY_EXIT_CODE.values()), RankFailed(name), as_known(ValueError(name))):
        program.say(error)
        assert len(capsys.readouterr().err.splitlines()) <= 1  # a stop is shown by main alone
        assert len(str(error).splitlines()) == 1
    assert len(str(BrokenImage(1, name, name)).splitlines()) == len(BrokenImage(1, name, name).failure.splitlines())
    assert len(str(LockstepError(name, name)).splitlines()) == 2


@pytest.mark.parametrize("control", CONTROLS, ids=ascii)
def test_a_name_is_one_line_and_one_cell_of_a_csv_file(control: str) -> None:
    text = csv_row([f"a{control}b", 'c","d', "e,f"])
    assert len(text.splitlines()) == 1
    (cells,) = csv.reader(io.StringIO(text))
    assert len(cells) == 3
    assert cells[1:] == ['c","d', "e,f"]


@pytest.mark.parametrize("begin", [*"=+-@\t\r\n", *"\uff1d\uff0b\uff0d\uff20"], ids=ascii)
def test_no_cell_is_a_formula(begin: str) -> None:
    (cells,) = csv.reader(io.StringIO(csv_row([f"{begin}HYPERLINK(1)", f'{begin}1+1","=2'])))
    assert len(cells) == 2
    for cell in cells:
        assert cell[0] in "'\\"
        assert cell.isprintable()


@pytest.mark.parametrize("number", ["1", "-1", "+1", "0.25", "-0.5", "1e-05", "-1.5e+10"])
def test_a_number_stays_a_number(number: str) -> None:
    assert csv_row([number]) == number
