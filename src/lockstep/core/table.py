"""Tables for people, no wider than the terminal, in LaTeX and in Markdown; and their rows as CSV and JSON."""

import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from lockstep.core import console, log
from lockstep.core.errors import escaped
from lockstep.core.figures import csv_row

GAP = "  "
INDENT = 4  # of the second line of a row
UNSET = ("null", "{}", "[]")  # values of keys that a table shows as `none`
_FRACTION = re.compile(r"(?<![\w.])\d+\.\d+(e[+-]?\d+)?(?![\w.])")
_ALIGNED_RIGHT = re.compile(r"([-+]?[\d.,]+(e[-+]?\d+)?)?( ?(±.*|%|[kMGT]?B))?")
_LATEX = {**{sign: f"\\{sign}" for sign in "&%$#_{}"}, "±": r"$\pm$", "\\": r"\textbackslash{}"}
_LATEX |= {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
# What begins markup, HTML, a formula or a link, also an address without marks.
_MARKDOWN = re.compile(r"[\\`*_~\[\]<>|&$@]|/(?=/)|(?<=[Ww]{3})\.")


class Setting(str):
    """The value of a config key, as JSON or a bare text. `is_default`: a config has it without overrides."""

    is_default = False

    @property
    def as_json(self) -> Any:
        try:
            return json.loads(self) if self else None
        except ValueError:
            return str(self)


@dataclass(frozen=True)
class Column:
    """A column of a table for people; with `may_move` it may go below each row, `best` are the rows in bold."""

    head: str
    cells: Sequence[str]
    may_move: bool = False
    best: Sequence[int] = ()

    def head_lines(self, *, folded: bool) -> list[str]:
        """The head in one line; `folded`, in lines about as wide as the cells."""
        pieces = re.split(r"(?<=[._/ ])", escaped(self.head, keep="")) if folded else [escaped(self.head, keep="")]
        width, lines = max([*map(cell_len, self.cells), *map(cell_len, pieces)]), [""]
        for piece in pieces:
            lines = [*lines[:-1], lines[-1] + piece] if cell_len(lines[-1] + piece) <= width else [*lines, piece]
        return [line.rstrip() for line in lines]

    def width(self, *, folded: bool) -> int:
        return max(map(cell_len, [*self.head_lines(folded=folded), *(escaped(cell, keep="") for cell in self.cells)]))

    @property
    def is_right(self) -> bool:
        """Whether it is aligned at the right, as numbers are."""
        return all(map(_ALIGNED_RIGHT.fullmatch, self.cells))

    def styled(self, row: int) -> Text:
        cell = self.cells[row]
        style = "bold" if row in self.best else "dim" if isinstance(cell, Setting) and cell.is_default else ""
        return Text(escaped(cell, keep=""), style)


def shortened(text: str, digits: int = 3) -> str:
    """A text with its fractions cut to so many significant digits at most: `lr=0.004043878` becomes `lr=0.00404`."""

    def short(match: re.Match[str]) -> str:
        value, significant = float(match[0]), re.sub(r"e.*|\.", "", match[0]).strip("0")
        rounded = f"{value:.0f}" if value >= 10**digits - 0.5 else f"{value:.{digits}g}"
        return rounded if len(significant) > digits else match[0]

    return _FRACTION.sub(short, text)


def column_of_settings(key: str, values: Sequence[str]) -> Column:
    """The column of a key, with as few digits, from three on, as show that different values are different."""

    def short(value: str, digits: int) -> Setting:
        text = Setting("none" if value in UNSET else shortened(value, digits))
        text.is_default = isinstance(value, Setting) and value.is_default
        return text

    rounded = ([short(value, digits) for value in values] for digits in range(3, 17))
    cells = next((cells for cells in rounded if len({*cells}) == len({*values})), list(values))
    return Column(key, cells, may_move=True)


def show_table(columns: Sequence[Column], form: str = "table") -> None:
    """Print a table: at most as wide as the terminal; where there is none, each row is a line. Or as a `form`."""
    if form == "table":
        for line in lines_of(columns, console.terminal.width if log.has_terminal() else None):
            console.terminal.print(line, soft_wrap=True)
        return
    for text in (_latex if form == "latex" else _markdown)(columns):
        console.terminal.print(text, soft_wrap=True)


def lines_of(columns: Sequence[Column], width: int | None, *, second_lines: bool = True) -> Iterator[Text]:
    """The lines of a table.

    Where the `width` is too small, first the heads get several lines. Then the last columns that may move are left
    out. Their values that are not the defaults are a second line below each row with `second_lines`.
    """

    def total(shown: Sequence[Column], *, folded: bool) -> int:
        return sum(column.width(folded=folded) + len(GAP) for column in shown) - len(GAP)

    shown, folded = list(columns), width is not None and total(columns, folded=False) > width
    while folded and width is not None and total(shown, folded=True) > width and any(c.may_move for c in shown):
        shown.remove([column for column in shown if column.may_move][-1])
    moved = [column for column in columns if column not in shown]
    heads = [column.head_lines(folded=folded) for column in shown]
    height = max(map(len, heads))
    widths = [column.width(folded=folded) for column in shown]

    def line(texts: Sequence[Text]) -> Text:
        for text, size, column in zip(texts, widths, shown, strict=True):
            text.pad_left(size - text.cell_len) if column.is_right else text.pad_right(size - text.cell_len)
        joined = Text(GAP).join(texts)
        joined.rstrip()
        return joined

    for number in range(height):
        yield line([Text(([""] * (height - len(head)) + head)[number], "bold") for head in heads])
    for row in range(len(columns[0].cells)):
        yield line([column.styled(row) for column in shown])
        texts = [column.styled(row) for column in moved]
        rest = [
            f"{column.head}={text}" for column, text in zip(moved, texts, strict=True) if text and text.style != "dim"
        ]
        if rest and second_lines:
            yield Text(log.wrapped(" " * INDENT + GAP.join(rest), INDENT))


def _latex(columns: Sequence[Column]) -> Iterator[str]:
    def text(cell: str) -> str:
        return "".join(_LATEX.get(sign, sign) for sign in escaped(cell, keep=""))

    yield rf"\begin{{tabular}}{{{''.join('lr'[column.is_right] for column in columns)}}}"
    yield r"\toprule"
    yield " & ".join(text(column.head) for column in columns) + r" \\"
    yield r"\midrule"
    for row in range(len(columns[0].cells)):
        cells = [(text(column.cells[row]), row in column.best) for column in columns]
        yield " & ".join(rf"\textbf{{{cell}}}" if best else cell for cell, best in cells) + r" \\"
    yield r"\bottomrule"
    yield r"\end{tabular}"


def markdown(text: str) -> str:
    """A text as words in a line of Markdown, whatever is in it."""
    return _MARKDOWN.sub(r"\\\g<0>", escaped(text, keep=""))


def markdown_code(text: str, language: str = "") -> str:
    """A text as code in Markdown, whatever is in it: in a line, or as a block of a language."""
    text = escaped(text, keep="\n" if language else "")
    ticks = "`" * max(3 if language else 1, 1 + max(map(len, re.findall("`+", text)), default=0))
    gap = "\n" if language else " " * ("`" in text)
    return f"{ticks}{language}{gap}{text}{gap}{ticks}"


def _markdown(columns: Sequence[Column]) -> Iterator[str]:
    yield f"| {' | '.join(markdown(column.head) for column in columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in range(len(columns[0].cells)):
        cells = [(markdown(column.cells[row]), row in column.best) for column in columns]
        yield f"| {' | '.join(f'**{cell}**' if best else cell for cell, best in cells)} |"


def html_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a table of HTML, whatever text is in them; empty without rows."""
    lines = [[html.escape(shortened(escaped(str(cell)), 4)) for cell in line] for line in _filled(rows)]
    text = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in line)}</tr>" for line in lines)
    return f"<table>{text}</table>" if rows else ""


def _filled(rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """The names of the columns, and the values of each row, which are empty texts where a row has none."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [[*names], *(["" if row.get(name) is None else row[name] for name in names] for row in rows)]


def json_lines(content: Any) -> list[str]:
    """The lines of JSON; the values of config keys are numbers, lists and null."""
    if isinstance(content, Sequence):
        content = [
            {key: value.as_json if isinstance(value, Setting) else value for key, value in row.items()}
            for row in content
        ]
    return json.dumps(content, indent=1, allow_nan=False).splitlines()


def show_json(content: Any) -> None:
    for line in json_lines(content):
        console.terminal.print(line, soft_wrap=True)


def row_lines(rows: Sequence[Mapping[str, Any]], form: str) -> list[str]:
    """The lines of rows as `csv` or `json`."""
    if form == "json":
        return json_lines(rows)
    return [csv_row(line) for line in _filled(rows)] if rows else []


def show_rows(rows: Sequence[Mapping[str, Any]], form: str) -> None:
    for line in row_lines(rows, form):
        console.terminal.print(line, soft_wrap=True)
