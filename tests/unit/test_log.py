"""Messages on the terminal and in the log files; names that anybody can have chosen stay one line and one cell."""

import contextlib
import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table

from lockstep.core import console, log
from lockstep.core.errors import (
    BY_EXIT_CODE,
    BrokenImage,
    InputError,
    Interrupted,
    LockstepError,
    NumericalError,
    RankFailed,
    StorageError,
    as_known,
)
from lockstep.core.figures import csv_row
from lockstep.core.run_dir import RunDir
from lockstep.core.table import Column, column_of_settings, html_table, lines_of, row_lines, shortened, show_table
from lockstep.runtime import program


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.at(tmp_path / "run")


def test_main_logs_to_the_run_and_to_its_own_file(run: RunDir) -> None:
    with log.rank_logging(run, 0, separate=False):
        log.logger.info("a word")
    log.logger.info("a word too late")
    for path in (run.log, run.rank_log(0)):
        (line,) = path.read_text().splitlines()
        assert line.endswith(" INFO a word")


def test_a_message_or_warning_is_one_unchanged_line_on_screen_and_in_the_log(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    long = " ".join(["[bold]word[/bold]"] * 30)
    with log.rank_logging(run, 0, separate=False):
        log.say(long)
        log.warn("careful")
    assert capsys.readouterr().out.splitlines() == [long, "warning: careful"]
    lines = run.log.read_text().splitlines()
    assert lines[0].endswith(f"INFO {long}")
    assert lines[1].endswith("WARNING careful")


def test_a_table_without_a_terminal_has_each_cell_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    cells = ["a path/" * 30, "why " * 40]
    show_table([Column("path", cells[:1]), Column("reason", cells[1:])])
    out = capsys.readouterr().out
    assert all(cell.strip() in out for cell in cells)


def test_a_log_that_cannot_be_written_is_reported_once_and_ends_nothing(
    run: RunDir, full_disk: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with full_disk(0), log.rank_logging(run, 1, separate=False):
        for _ in range(3):
            log.logger.info("a word")
    captured = capsys.readouterr()
    path = run.rank_log(1)
    assert captured.out == f"warning: {path} cannot be written (File too large); the run continues without it\n"
    assert captured.err == ""


@pytest.mark.parametrize("target", ["full disk", "reader that left"])
def test_words_that_nobody_can_read_end_no_program(target: str) -> None:
    code = "from lockstep.core import log; [log.say('a word' * 1000) for _ in range(99)]; raise SystemExit(3)"
    with Path("/dev/full").open("w") as full:
        pipe = subprocess.PIPE if target == "reader that left" else full
        program = subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=subprocess.PIPE, text=True)
        if program.stdout is not None:
            program.stdout.close()
        assert program.stderr is not None
        assert (program.stderr.read(), program.wait()) == ("", 3)
        program.stderr.close()


HOSTILE = "name\x1b]0;x\x07\r\x9b31m\u202e[red]bold[/red] :smile:"


def test_no_name_steers_the_terminal_or_a_log(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(HOSTILE, title=HOSTILE)
    table.add_row(HOSTILE)
    with log.rank_logging(run, 0, separate=False):
        log.say(HOSTILE)
        log.warn(f"two\n{HOSTILE}")
        log.logger.error("rank 0: %s", HOSTILE)
        console.terminal.print(table, width=200)
    program.explain(InputError(HOSTILE))
    program.explain(RankFailed(HOSTILE, f"Traceback\n{HOSTILE}"))
    shown = capsys.readouterr()
    for text in (shown.out, shown.err, run.log.read_bytes().decode(), run.rank_log(0).read_bytes().decode()):
        assert text.replace("\n", "").isprintable()
        assert r"\x1b]0;x\x07\r\x9b31m\u202e[red]bold[/red] :smile:" in text
    assert "warning: two\\nname" in shown.out


def test_a_program_without_a_standard_output_says_nothing_and_goes_on() -> None:
    with contextlib.redirect_stdout(None):
        log.say("nobody sees this")
        console.terminal.file.flush()


@pytest.mark.parametrize("columns", ["x", "1"])
def test_no_width_of_the_terminal_silences_a_program(columns: str) -> None:
    code = "from lockstep.core import log, table; log.show('a sentence'); "
    code += "table.show_table([table.Column('a', []), table.Column('b', [])])"
    environment = {**os.environ, "COLUMNS": columns}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.startswith("a sentence\n")
    assert "a  b" in done.stdout


@pytest.mark.parametrize("terminal", ["stdout", "stderr"])
def test_a_sentence_is_broken_for_the_terminal_that_shows_it_and_for_no_file(
    terminal: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(log, "has_terminal", lambda stream="stdout": stream == terminal)
    monkeypatch.setenv("COLUMNS", "20")
    for say in (log.show, log.note):
        say("a sentence of more than twenty columns")
    shown = capsys.readouterr()
    assert {"stdout": shown.out.count("\n") > 1, "stderr": shown.err.count("\n") > 1} == {
        name: name == terminal for name in ("stdout", "stderr")
    }


def test_a_table_that_just_fits_has_all_its_columns() -> None:
    columns = [Column("run", ["one"]), Column("lr", ["0.1"], may_move=True)]
    assert {width: "lr" in next(lines_of(columns, width)).plain for width in (7, 8)} == {7: False, 8: True}


def test_a_row_lacks_only_what_is_none() -> None:
    row = {"a": 0, "b": 0.0, "c": False, "d": "", "e": None}
    assert row_lines([row], "csv") == ["a,b,c,d,e", "0,0.0,False,,"]
    assert html_table([row]).endswith("<tr><td>0</td><td>0.0</td><td>False</td><td></td><td></td></tr></table>")
    assert json.loads("".join(row_lines([row], "json"))) == [row]


@pytest.mark.parametrize("width", [1, 39])
def test_a_narrow_terminal_hides_no_column(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    file = io.StringIO()
    monkeypatch.setattr(log, "has_terminal", lambda stream="stdout": True)
    monkeypatch.setattr(console, "terminal", console.Terminal(width=width, file=file))
    row = {"likely cause": "seed", "score": "20.85", "done": "1", "not done": "2 failed", "to the best": "+0.5"}
    show_table([Column(head, [cell]) for head, cell in row.items()])
    for cell in ("likely", "cause", "score", "best", "2 failed", "+0.5"):
        assert cell in file.getvalue()


def failing(error: Exception, closed: list[str]) -> Callable[[], None]:
    def close() -> None:
        closed.append("failing")
        raise error

    return close


@pytest.mark.parametrize("ended_by", [NumericalError("the loss is nan", step=3), Interrupted(), KeyboardInterrupt()])
def test_the_first_error_is_raised_and_later_ones_are_printed(
    ended_by: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    closed: list[str] = []
    parts = (
        failing(OSError("no space left"), closed),
        failing(StorageError("nothing fits"), closed),
        lambda: closed.append("last"),
    )
    with pytest.raises(type(ended_by)) as caught, log.close_all(*parts):
        raise ended_by
    assert caught.value is ended_by
    assert closed == ["failing", "failing", "last"]
    shown = capsys.readouterr().out
    assert "another error at the end of the run: OSError: no space left" in shown
    assert "another error at the end of the run: nothing fits" in shown


def test_a_second_interrupt_waits_for_no_other_part() -> None:
    closed: list[str] = []
    with pytest.raises(Interrupted), log.close_all(failing(Interrupted(), closed), lambda: closed.append("never")):
        raise StorageError("no space left")
    assert closed == ["failing"]


CONTROLS = [*"\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029", *"\0\t\x08\x1b\x7f\x9b", *"\u200e\u202e\u2066", "\udc80"]


@pytest.mark.parametrize("control", CONTROLS, ids=ascii)
def test_a_name_is_one_line_wherever_it_is_shown(control: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"cat{control}lockstep: forged"
    expected = f"cat{control.encode('unicode_escape').decode()}lockstep: forged"
    if control == "\udc80":
        expected = "cat\\udc80lockstep: forged"
    table = Table("class")
    table.add_row(name)
    with_labels = (partial(show, "data") for show in (log.say_row, log.say_command))
    for show in (console.terminal.print, log.show, log.say, log.warn, *with_labels):
        show(name)
        (line,) = capsys.readouterr().out.splitlines()
        assert line.endswith(expected), line
    console.terminal.print(table)
    assert [expected in line for line in capsys.readouterr().out.splitlines()].count(True) == 1
    for error in (*(cls(name) for cls in BY_EXIT_CODE.values()), RankFailed(name), as_known(ValueError(name))):
        program.explain(error)
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
    for number in ("1", "-1", "+1", "0.25", "-0.5", "1e-05", "-1.5e+10"):
        assert csv_row([number]) == number, "a number stays a number"


@pytest.mark.parametrize("begin", [*"=+-@\t\r\n", *"\uff1d\uff0b\uff0d\uff20"], ids=ascii)
def test_no_cell_is_a_formula(begin: str) -> None:
    (cells,) = csv.reader(io.StringIO(csv_row([f"{begin}HYPERLINK(1)", f'{begin}1+1","=2'])))
    assert len(cells) == 2
    for cell in cells:
        assert cell[0] in "'\\"
        assert cell.isprintable()


@pytest.mark.parametrize("unset", ["null", "{}", "[]"])
def test_a_table_shows_a_key_without_a_value_as_none_but_beside_the_option_none_as_it_is(unset: str) -> None:
    assert column_of_settings("metric", [unset, "[auroc]"]).cells == ["none", "[auroc]"]
    assert column_of_settings("augment", [unset, "none"]).cells == [unset, "none"]


@pytest.mark.parametrize(
    ("text", "digits", "expected"),
    [
        ("lr=0.004043878", 3, "lr=0.00404"),
        ("lr=0.0000123", 3, "lr=0.0000123"),
        ("lr=0.00001234", 3, "lr=1.23e-05"),
        ("lr=0.0000123", 2, "lr=1.2e-05"),
        ("a=12.30 b=1234.5", 3, "a=12.30 b=1234"),
        ("a=999.5 b=999.4 c=1.2e-07 v1.234.5", 3, "a=1000 b=999 c=1.2e-07 v1.234.5"),
    ],
)
def test_fractions_of_exactly_the_digits_stay_as_they_are(text: str, digits: int, expected: str) -> None:
    assert shortened(text, digits) == expected
