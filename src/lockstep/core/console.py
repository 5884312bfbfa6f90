"""The terminal as rich writes to it. `core.log` imports it for its first line: `--help` and `--cfg job` show none."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, cast

from rich.console import Console
from rich.text import Text

from lockstep.core.errors import escaped
from lockstep.core.terminal import standard

# The variable that keeps the ranks of a quiet program from writing to standard output.
QUIET_VARIABLE = "LOCKSTEP_QUIET"


class Terminal(Console):
    """A console that shows every text literally, in one line: no control characters, no markup."""

    @property
    def is_terminal(self) -> bool:
        """Not rich's, which FORCE_COLOR makes true for a pipe; a notebook sets it."""
        with suppress(AttributeError, ValueError):
            return self.file.isatty()
        return False

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(escaped(text, keep=""), **{**options, "markup": False, "emoji": False})

    def print_wrapped(self, lines: str, style: str = "") -> None:
        """Print what `log.wrapped` returns."""
        self.print(Text(lines), soft_wrap=True, style=style)


# Prints plain lines in a notebook too, where rich would otherwise show each line as an HTML block.
terminal = Terminal(
    highlight=False, force_jupyter=False, quiet=QUIET_VARIABLE in os.environ, file=cast(IO[str], standard("stdout"))
)


@contextmanager
def quiet() -> Iterator[None]:
    """A context in which only warnings are shown, on standard error; the log files have all lines."""
    before, os.environ[QUIET_VARIABLE], terminal.quiet = terminal.quiet, "1", True
    try:
        yield
    finally:
        terminal.quiet = before
        if not before:
            del os.environ[QUIET_VARIABLE]
