"""Rows for other programs, as CSV or JSON, with names of files and classes that anybody can have chosen."""

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.core import log
from lockstep.core.errors import escaped

# A spreadsheet computes a cell that begins like this; the last four are the wide forms of the first.
_FORMULA = re.compile(r"[=+\-@\uff1d\uff0b\uff0d\uff20]")
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?(e[+-]?\d+)?")


def csv_row(values: Sequence[object]) -> str:
    """One line, without its end: quoted as usual, with control characters as `\\n` and so on.

    A text that a spreadsheet would compute begins with an apostrophe; numbers stay numbers.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(map(_cell, map(str, values)))
    return text.getvalue()


def _cell(text: str) -> str:
    computed = _FORMULA.match(text) and not _NUMBER.fullmatch(text)
    return escaped(f"'{text}" if computed else text, keep="")


def show_rows(rows: Sequence[Mapping[str, Any]], form: str) -> None:
    """Print rows as `csv` or `json`."""
    if form == "json":
        lines = json.dumps(rows, indent=1).splitlines()
    else:
        names = dict.fromkeys(name for row in rows for name in row)
        values = [["" if (value := row.get(name)) is None else value for name in names] for row in rows]
        lines = [csv_row(cells) for cells in ([*names], *values) if rows]
    for line in lines:
        log.console.print(line, soft_wrap=True)
