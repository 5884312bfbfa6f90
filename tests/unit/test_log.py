"""Messages on the terminal and in the log files; names that anybody can have chosen stay one line and one cell."""

import contextlib
import csv
import gc
import io
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.table import Table
from rich.text import Text

from lockstep.core import console, log, terminal
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
from lockstep.core.table import (
    Column,
    Setting,
    column_of_settings,
    html_table,
    json_lines,
    lines_of,
    markdown,
    markdown_code,
    row_lines,
    shortened,
    show_json,
    show_rows,
    show_table,
)
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


@pytest.mark.parametrize("level", [logging.NOTSET, logging.ERROR])
@pytest.mark.parametrize("propagate", [True, False])
@pytest.mark.parametrize("error", [None, InputError("refused")], ids=str)
def test_a_program_has_its_logger_as_it_was(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, level: int, propagate: bool, error: Exception | None
) -> None:
    monkeypatch.setattr(log.logger, "level", level)
    monkeypatch.setattr(log.logger, "propagate", propagate)
    gc.collect()  # files that other tests have left open
    handlers, files = [*log.logger.handlers], len([*Path("/dev/fd").iterdir()])
    with contextlib.suppress(InputError), log.rank_logging(run, 0, separate=False):
        assert (log.logger.level, log.logger.propagate) == (logging.INFO, False)
        if error is not None:
            raise error
    assert (log.logger.level, log.logger.propagate, log.logger.handlers) == (level, propagate, handlers)
    assert len([*Path("/dev/fd").iterdir()]) == files


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
    show_table([Column("path", cells[:1]), Column("its.reason", cells[1:], may_move=True)])
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["path", "its.reason"]
    assert row == f"{cells[0]}  {cells[1].strip()}"


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
    literal = r"name\x1b]0;x\x07\r\x9b31m\u202e[red]bold[/red] :smile:"
    assert shown.out.count(literal) == 5, "said and warned of, the title, the head and the cell"


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
    broken = BrokenImage(1, name, name)
    assert [len(text.splitlines()) for text in (str(broken), broken.failure)] == [1, 1]
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


def test_what_is_quiet_within_something_quiet_leaves_it_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(console.QUIET_VARIABLE, raising=False)
    states = []
    with console.quiet():
        with console.quiet():
            states.append((console.terminal.quiet, console.QUIET_VARIABLE in os.environ))
        states.append((console.terminal.quiet, console.QUIET_VARIABLE in os.environ))
    states.append((console.terminal.quiet, console.QUIET_VARIABLE in os.environ))
    assert states == [(True, True), (True, True), (False, False)]


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


def on_screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """Have a terminal of 40 columns and a few colours for standard output and error.

    No fixture, because pytest replaces the streams between a fixture and its test.
    """
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    screen = Screen()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, screen)
    monkeypatch.setattr(console, "terminal", console.Terminal(highlight=False, file=screen))
    return screen


def test_a_stream_is_a_terminal_if_it_says_so_and_is_open() -> None:
    (closed := Screen()).close()
    gone: Any = SimpleNamespace(write=lambda text: None, flush=lambda: None)
    (ended := io.StringIO()).close()
    files = [Screen(), io.StringIO(), closed, gone, ended]
    assert [console.Terminal(file=file).is_terminal for file in files] == [True, False, True, False, False]


@pytest.mark.parametrize("term", [None, "xterm", "DUMB", "dumb", "Unknown", "unknown", "linux"])
def test_a_cursor_moves_on_a_terminal_that_is_not_dumb(monkeypatch: pytest.MonkeyPatch, term: str | None) -> None:
    screen = on_screen(monkeypatch)
    monkeypatch.delenv("TERM") if term is None else monkeypatch.setenv("TERM", term)
    moves = (term or "").lower() not in ("dumb", "unknown")
    for stdout, stderr, expected in ((screen, None, (moves, False)), (io.StringIO(), screen, (False, moves))):
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(sys, "stderr", stderr)
        assert (log.has_terminal(), log.has_terminal("stderr")) == expected


@pytest.mark.parametrize("has_kernel", [False, True])
@pytest.mark.parametrize("is_quiet", [False, True])
def test_a_notebook_is_a_kernel_of_ipython_in_a_program_that_is_not_quiet(
    monkeypatch: pytest.MonkeyPatch, has_kernel: bool, is_quiet: bool
) -> None:
    monkeypatch.setattr(console.terminal, "quiet", is_quiet)
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not log.in_notebook()
    shell = SimpleNamespace(**{"kernel": None} if has_kernel else {})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    assert log.in_notebook() is (has_kernel and not is_quiet)


@pytest.mark.parametrize("before", [False, True])
def test_a_quiet_program_shows_and_starts_nothing_that_shows_more_than_warnings(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], before: bool
) -> None:
    monkeypatch.delenv(console.QUIET_VARIABLE, raising=False)
    if before:
        monkeypatch.setenv(console.QUIET_VARIABLE, "1")
    monkeypatch.setattr(console.terminal, "quiet", before)
    words = [
        sys.executable,
        "-c",
        "from lockstep.core import log; log.show('a sentence'); log.show_warning('careful')",
    ]
    with log.rank_logging(run, 0, separate=False), console.quiet():
        for say in (log.show, log.note, log.say, log.warn):
            say(f"{say.__name__}: a sentence")
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "warning: warn: a sentence\n")
    assert (done.stdout, done.stderr) == ("", "warning: careful\n")
    lines = [line.partition(",")[2][4:] for line in run.log.read_text().splitlines()]
    assert lines == ["INFO say: a sentence", "WARNING warn: a sentence"]
    assert (console.terminal.quiet, console.QUIET_VARIABLE in os.environ) == (before, before)


def test_sentences_are_wrapped_and_labelled_and_notes_and_warnings_have_their_colours(
    monkeypatch: pytest.MonkeyPatch, run: RunDir
) -> None:
    def shown() -> list[str]:
        text = screen.getvalue()
        screen.seek(0)
        screen.truncate()
        return text.split("\n")[:-1]

    screen, words = on_screen(monkeypatch), "one two three four five six seven eight nine"
    with log.rank_logging(run, 0, separate=False):
        log.say(words)
        assert shown() == ["one two three four five six seven eight", "  nine"]
        log.say_row("data", words)
        assert shown() == ["      data  one two three four five six", " " * 12 + "seven eight nine"]
        log.say_row("", words, indent=6)
        assert shown() == ["one two three four five six seven eight", " " * 6 + "nine"]
        log.say_command("again", "lockstep runs")
        assert shown() == ["   again        lockstep runs"]
        log.say_command("of a long name", "lockstep runs")
        assert shown() == ["   of a long name lockstep runs"]
        log.say("what is logged", shown=Text("x" * 50, style="bold"))
        assert shown() == [f"\x1b[1m{'x' * 50}\x1b[0m"]
        log.warn("careful")
        assert shown() == ["\x1b[33mwarning: careful\x1b[0m"]
        log.note("an aside")
        assert shown() == ["\x1b[2man aside\x1b[0m"]
    lines = [line.partition(",")[2][4:] for line in run.log.read_text().splitlines()]
    logged = [words, f"      data  {words}", words, "   again        lockstep runs"]
    logged += ["   of a long name lockstep runs", "what is logged"]
    assert lines == [*(f"INFO {line}" for line in logged), "WARNING careful"]


def test_a_narrow_terminal_has_lines_of_twice_the_indent(monkeypatch: pytest.MonkeyPatch) -> None:
    on_screen(monkeypatch)
    monkeypatch.setenv("COLUMNS", "5")
    assert log.wrapped("one two three four", 6) == "one two\n      three\n      four"


def test_a_mistake_in_a_message_of_the_log_is_no_fault_of_the_disk(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    with log.rank_logging(run, 1, separate=False):
        log.logger.info("%d images", "many")
        log.logger.info("a word")
    assert "TypeError: %d format" in capsys.readouterr().err
    assert run.rank_log(1).read_text().endswith("INFO a word\n")


@pytest.mark.parametrize(("rank", "separate"), [(0, True), (0, False), (1, False), (1, True)])
def test_what_another_rank_prints_is_in_its_own_file_alone(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, separate: bool
) -> None:
    names = ("stdout", "stderr")
    with contextlib.ExitStack() as stack:
        for name in names:
            monkeypatch.setattr(sys, name, stack.enter_context((tmp_path / name).open("w")))
        with log.rank_logging(run, rank, separate=separate):
            assert terminal._patience_s == terminal.READER_WAIT_S
            for name in names:
                print(f"to {name}", file=getattr(sys, name), flush=True)
    is_apart = rank == 1 and separate
    assert [(tmp_path / name).read_text() for name in names] == ["" if is_apart else f"to {name}\n" for name in names]
    assert run.rank_log(rank).read_text() == "to stdout\nto stderr\n" * is_apart


def setting(text: str, *, is_default: bool = False) -> Setting:
    value = Setting(text)
    value.is_default = is_default
    return value


COLUMNS = (
    Column("run", ["one", "two"]),
    Column("score", ["9.50 ± 1.00", "10.00"], best=[1]),
    Column("optimizer.weight_decay", [setting("0.1"), setting("0.2", is_default=True)], may_move=True),
    Column("name", ["漢字", setting("", is_default=False)], may_move=True),
)
WHOLE = [
    f"run        score  {'optimizer.weight_decay':>22}  name",
    f"one  9.50 ± 1.00  {'0.1':>22}  漢字",
    f"two        10.00  {'0.2':>22}",
]
FOLDED = [
    f"{'':>16}  optimizer.",
    f"{'':>16}  {'weight_':>10}",
    f"run        score  {'decay':>10}  name",
    f"one  9.50 ± 1.00  {'0.1':>10}  漢字",
    f"two        10.00  {'0.2':>10}",
]
ONE_MOVED = [*(line[:28] for line in FOLDED[:4]), "    name=漢字", FOLDED[4]]
BOTH_MOVED = ["run        score", "one  9.50 ± 1.00", "    optimizer.weight_decay=0.1  name=漢字", "two        10.00"]


@pytest.mark.parametrize(
    ("width", "expected"),
    [(None, WHOLE), (46, WHOLE), (45, FOLDED), (34, FOLDED), (33, ONE_MOVED), (28, ONE_MOVED), (27, BOTH_MOVED)],
)
def test_a_table_folds_its_heads_and_then_moves_columns_below_the_rows(
    width: int | None, expected: list[str]
) -> None:
    assert [line.plain for line in lines_of(COLUMNS, width)] == expected
    alone = [line.plain for line in lines_of(COLUMNS, width, second_lines=False)]
    assert alone == [line for line in expected if "name=" not in line]


def test_columns_are_as_wide_as_their_heads_and_cells_are_on_a_terminal() -> None:
    columns = [Column("名", ["漢字漢字", "a"]), Column("漢字漢字", ["1", "22"], may_move=True)]
    whole = ["名        漢字漢字", "漢字漢字         1", "a               22"]
    for width in (None, 18):
        assert [line.plain for line in lines_of(columns, width)] == whole
    moved = ["名", "漢字漢字", "    漢字漢字=1", "a", "    漢字漢字=22"]
    assert [line.plain for line in lines_of(columns, 17)] == moved
    assert Column("漢字.名前", ["漢字"]).head_lines(folded=True) == ["漢字.", "名前"]


def test_heads_and_the_best_are_bold_and_defaults_dim() -> None:
    best = Column("a", [setting("1", is_default=True), setting("2", is_default=True), "3"], best=[0])
    assert [best.styled(row).style for row in range(3)] == ["bold", "dim", ""]
    head, *rows = lines_of([best], None)
    assert [[span.style for span in line.spans] for line in (head, *rows)] == [["bold"], ["bold"], ["dim"], []]
    equal = Column("a", [setting("1", is_default=True), "2", "1"], best=[0, 2])
    assert [equal.styled(row).style for row in range(3)] == ["bold", "", "bold"]
    assert [Column("a", [text]).styled(0).plain for text in ("x\ny", "\x1b")] == [r"x\ny", r"\x1b"]
    assert Column("a", ["x\ny"]).width(folded=False) == 4
    assert Column("not done", ["2"]).head_lines(folded=True) == ["not", "done"]


@pytest.mark.parametrize(
    ("cells", "is_right"),
    [
        *(
            (["1", "-1.5", "+0.25", "1e-05", "1,000", ""], True),
            (["9.5 ± 1.0", "50 %", "1.5 GB", "3 kB", "8 MB"], True),
        ),
        *((["1", "one"], False), (["1x"], False), (["1 2"], False), (["B 1"], False)),
    ],
)
def test_a_column_of_numbers_is_at_the_right(cells: list[str], is_right: bool) -> None:
    assert Column("a", cells).is_right is is_right


def test_settings_have_as_few_digits_as_tell_them_apart_and_defaults_stay_defaults() -> None:
    values = [setting("0.12345", is_default=True), setting("0.12348"), "0.5"]
    column = column_of_settings("lr", values)
    assert (column.cells, column.may_move) == (["0.12345", "0.12348", "0.5"], True)
    assert [getattr(cell, "is_default", None) for cell in column.cells] == [True, False, False]
    assert column_of_settings("lr", ["0.12345", "0.2"]).cells == ["0.123", "0.2"]
    long = ["null", "0.12345678901234567", "0.12345678901234612"]  # which differ in the last digit of a float
    assert column_of_settings("lr", long).cells == ["none", "0.1234567890123457", "0.1234567890123461"]
    same = ["0.1", "0.10000000000000000001"]
    assert column_of_settings("lr", same).cells == same
    assert shortened("lr=0.12345") == "lr=0.123"


def test_a_setting_is_its_value_in_json() -> None:
    values = {"": None, "null": None, "0.5": 0.5, "[1,2]": [1, 2], "sgd": "sgd", "'a'": "'a'", "true": True}
    assert {text: Setting(text).as_json for text in values} == values
    assert json.loads("".join(json_lines([{"a": setting("0.5"), "b": "0.5"}]))) == [{"a": 0.5, "b": "0.5"}]
    assert json_lines({"a": [1]}) == ["{", ' "a": [', "  1", " ]", "}"]
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_lines([{"a": float("nan")}])


def test_rows_have_all_columns_of_any_row() -> None:
    rows = [{"b": 1}, {"a": 2, "b": None}]
    assert row_lines(rows, "csv") == ["b,a", "1,", ",2"]
    assert [row_lines([], "csv"), row_lines([], "json"), html_table([])] == [[], ["[]"], ""]
    cells = "<tr><td>0.1235</td><td>&lt;b&gt;</td></tr>"
    assert html_table([{"a": 0.123456, "b": "<b>"}]) == f"<table><tr><td>a</td><td>b</td></tr>{cells}</table>"


@pytest.mark.parametrize("form", ["table", "latex", "markdown", "csv", "json"])
def test_no_form_of_a_table_is_wrapped(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = on_screen(monkeypatch)
    text = " ".join(["word"] * 30)
    if form in ("csv", "json"):
        show_rows([{"a": text}], form)
    else:
        show_table([Column("a", [text])], form)
    assert text in screen.getvalue()
    show_json({"a": text})
    assert screen.getvalue().count(text) == 2


def test_forms_for_documents_align_mark_and_escape(capsys: pytest.CaptureFixture[str]) -> None:
    columns = [Column("a_b", ["x|y", "50% & more"]), Column("n", ["1", "2"], best=[1])]
    show_table(columns, "latex")
    show_table(columns, "markdown")
    latex = [r"\begin{tabular}{lr}", r"\toprule", r"a\_b & n \\", r"\midrule", r"x|y & 1 \\"]
    latex += [r"50\% \& more & \textbf{2} \\", r"\bottomrule", r"\end{tabular}"]
    lines = [r"| a\_b | n |", "|---|---|", r"| x\|y | 1 |", r"| 50% \& more | **2** |"]
    assert capsys.readouterr().out.splitlines() == [*latex, *lines]
    show_table([Column("$x^2$", ["{~}", "#\\ ±"])], "latex")
    lines = capsys.readouterr().out.splitlines()
    head, first, second = r"\$x\textasciicircum{}2\$ \\", r"\{\textasciitilde{}\} \\", r"\#\textbackslash{} $\pm$ \\"
    assert [lines[at] for at in (2, 4, 5)] == [head, first, second]


def test_a_text_in_markdown_is_words_or_code_whatever_is_in_it() -> None:
    assert markdown("a\nb_c") == r"a\\nb\_c"
    assert markdown(r"*~[]<>|&$@`\\") == r"\*\~\[\]\<\>\|\&\$\@\`\\\\"
    links = {"http://a.b/c": r"http:\//a.b/c", "www.a.b": r"www\.a.b", "WWW.a": r"WWW\.a", "a.b/c": "a.b/c"}
    assert {text: markdown(text) for text in links} == links
    code = {"a": "`a`", "a`b": "`` a`b ``", "``": "``` `` ```", "a\nb": r"`a\nb`"}
    assert {text: markdown_code(text) for text in code} == code
    blocks = {"a\nb": "```py\na\nb\n```", "```": "````py\n```\n````", "`": "```py\n`\n```"}
    assert {text: markdown_code(text, "py") for text in blocks} == blocks


def test_an_error_within_something_quiet_leaves_a_program_as_loud_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(console.QUIET_VARIABLE, raising=False)
    with pytest.raises(InputError), console.quiet():
        raise InputError("refused")
    assert (console.terminal.quiet, console.QUIET_VARIABLE in os.environ) == (False, False)


def test_of_parts_that_fail_at_the_end_of_a_run_that_went_well_the_first_is_its_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    closed: list[str] = []
    first, second = StorageError("no space left"), ValueError("odd")
    parts = failing(first, closed), failing(second, closed), lambda: closed.append("last")
    with pytest.raises(StorageError) as caught, log.close_all(*parts):
        closed.append("body")
    assert caught.value is first
    assert closed == ["body", "failing", "failing", "last"]
    assert capsys.readouterr().out == "warning: another error at the end of the run: ValueError: odd\n"
    with log.close_all(lambda: closed.append("well")):
        pass
    assert closed[-1] == "well"


def test_a_traceback_keeps_its_lines_in_the_log_of_its_rank_alone(run: RunDir) -> None:
    with log.rank_logging(run, 2, separate=False):
        try:
            raise ValueError("\x1b[31mödd")
        except ValueError:
            log.logger.exception("a defect")
    first, second, *_, last = run.rank_log(2).read_text(encoding="utf-8").splitlines()
    assert first.endswith("ERROR a defect")
    assert (second, last) == ("Traceback (most recent call last):", "ValueError: \\x1b[31mödd")
    assert [path.name for path in run.logs.iterdir()] == ["rank2.log"]
    assert not run.log.exists(), "it is main's"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_log_that_cannot_be_opened_is_a_fault_of_the_storage(run: RunDir, rank: int) -> None:
    file = run.log if rank == 0 else run.rank_log(1)
    file.mkdir()
    says = rf"^{file} cannot be written \(Is a directory\)$"
    before = len([*Path("/dev/fd").iterdir()]), [*log.logger.handlers], log.logger.level
    with pytest.raises(StorageError, match=says), log.rank_logging(run, rank, separate=True):
        pytest.fail("the run begins")
    assert (len([*Path("/dev/fd").iterdir()]), log.logger.handlers, log.logger.level) == before


def test_a_line_of_a_job_has_its_time_its_level_and_its_words_in_one_line(run: RunDir) -> None:
    with log.rank_logging(run, 0, separate=False):
        log.say_row("data", "two\nlines", indent=8)
        log.warn("two\nlines")
        log.say("shown\nalso", shown=Text("x"))
    lines = run.log.read_text().splitlines()
    assert lines == run.rank_log(0).read_text().splitlines()
    assert [line[23:] for line in lines] == [
        " INFO   data  two\\nlines",
        " WARNING two\\nlines",
        " INFO shown\\nalso",
    ]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}", line[:23]) for line in lines)


def test_a_variable_that_forces_colours_makes_no_terminal_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert [console.Terminal(file=file).is_terminal for file in (io.StringIO(), Screen())] == [False, True]


def test_the_log_of_a_run_that_is_resumed_goes_on_behind_that_of_before(run: RunDir) -> None:
    for text in ("first", "second"):
        with log.rank_logging(run, 0, separate=False):
            log.logger.info(text)
    for path in (run.log, run.rank_log(0)):
        assert [line[24:] for line in path.read_text().splitlines()] == ["INFO first", "INFO second"]


def test_what_is_below_a_row_is_broken_for_the_terminal_between_two_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    on_screen(monkeypatch)
    keys = ("optimizer.weight_decay", "train.label_smoothing", "x")
    columns = [Column("run", ["one"]), *(Column(key, ["0.1"], may_move=True) for key in keys)]
    (_, row, below) = lines_of(columns, 5)
    assert (row.plain, below.plain.split("\n")) == (
        "one",
        ["    optimizer.weight_decay=0.1", "    train.label_smoothing=0.1  x=0.1"],
    )


LOGS = """
import sys
from pathlib import Path
from lockstep.core import log
from lockstep.core.run_dir import RunDir
with log.rank_logging(RunDir.at(Path(sys.argv[1])), 0, separate=False):
    log.logger.info("\\u00e9\\u6f22 \\udc80")
"""


def test_a_log_is_utf8_whatever_the_language_of_the_machine(tmp_path: Path) -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    subprocess.run([sys.executable, "-c", LOGS, str(tmp_path)], env=environment, check=True)
    run = RunDir(tmp_path)
    for path in (run.log, run.rank_log(0)):
        assert path.read_bytes().decode("utf-8").endswith(" INFO é漢 \\udc80\n")
