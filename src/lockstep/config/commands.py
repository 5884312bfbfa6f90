"""Commands as they are shown to the user: pasted into a shell, they reach the program as they were meant."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

# The keys whose values are paths: of runs and checkpoints, and of folders.
RUNS = ("resume", "init_from")
FOLDERS = ("data_root", "output_root", "dataset.path", "hydra.run.dir", "hydra.sweep.dir")


def typed(words: Iterable[object]) -> str:
    """Words as a command line, quoted for a shell where that is needed."""
    return shlex.join(map(str, words))


def override(key: str, value: object) -> str:
    """The override that sets `key` to a text: one word, quoted for Hydra where its grammar needs that.

    Characters such as `=`, `,`, brackets and quotes have a meaning in an override, and so have texts such as `null`
    and `1e3`. The word still needs the quotes of a shell (see `typed`).
    """
    text = str(value)
    plain = f"{key}={text}"
    if _parsed(plain) == text:
        return plain
    quote = Quote.single if '"' in text else Quote.double  # a shell's own quotes are usually single ones
    return f"{key}={QuotedString(text, quote).with_quotes()}"


def quoted_path(word: str) -> str:
    """A word of the command line, quoted for Hydra if it sets a path that is there as it stands, or below `~`.

    The runs of a sweep have `=` and `,` in their names, and a shell completes them without quotes. Shells leave the
    `~` of `dataset.path=~/photos` as it is, and Hydra cannot read it.
    """
    key, _, path = word.partition("=")
    if key not in (*RUNS, *FOLDERS) or not path:
        return word
    return override(key, path) if path.startswith("~/") or Path(path).exists() else word


def _parsed(word: str) -> object:
    """What Hydra takes for the value of an override; None if it cannot read it or takes it for several values."""
    try:
        parsed = OverridesParser.create().parse_override(word)
    except HydraException:
        return None
    return None if parsed.is_sweep_override() else parsed.value()


def relative(path: Path) -> Path:
    """A path as the user would type it from the current folder."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
