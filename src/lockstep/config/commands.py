"""The command that the user typed, and commands in messages, quoted so that the user can paste them into a shell."""

import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

from lockstep.core.named_paths import pointed
from lockstep.core.run_dir import LATEST

# The keys whose values are paths of runs and checkpoints, and the keys whose values are other folders.
RUNS = ("resume", "init_from")
FOLDERS = ("data_root", "output_root", "dataset.path", "hydra.run.dir", "hydra.sweep.dir")
# The words before the overrides of the user's command.
_WORDS = ["lockstep", "train"]


def shell_command(words: Iterable[object]) -> str:
    """Words as a command line, quoted for a shell if necessary."""
    return shlex.join(map(str, words))


def override(key: str, value: object) -> str:
    """The override that sets `key` to a text: one word, quoted for Hydra if its grammar requires quotes.

    Characters such as `=`, `,`, brackets and quotes have a meaning in an override, and so do texts such as `null` and
    `1e3`. The word is not yet quoted for a shell (see `typed`).
    """
    text = str(value)
    plain = f"{key}={text}"
    if parsed(plain) == text:
        return plain
    quote = Quote.single if '"' in text else Quote.double  # a shell's own quotes are usually single ones
    return f"{key}={QuotedString(text, quote).with_quotes()}"


def quoted_path(word: str) -> str:
    """A word of the command line, quoted for Hydra if it sets a path that exists, or a path that begins with `~`.

    The runs of a sweep have `=` and `,` in their names, and a shell completes these names without quotes. Shells do
    not expand the `~` of `dataset.path=~/photos`, and Hydra cannot parse it. `outputs/latest` becomes the run that it
    names now: it names another one when this run is resumed.
    """
    key, _, path = word.partition("=")
    if key not in (*RUNS, *FOLDERS) or not path:
        return word
    if (key in RUNS and Path(path).is_file()) or (key, path) == ("init_from", LATEST):
        path = str(pointed(Path(path), Path("outputs"), key))
        word = f"{key}={path}"
    return override(key, path) if path.startswith("~/") or Path(path).exists() else word


def parsed(word: str) -> object:
    """The value that Hydra reads from an override; None if Hydra cannot parse it or reads several values."""
    try:
        read = OverridesParser.create().parse_override(word)
    except HydraException:
        return None
    return None if read.is_sweep_override() else read.value()


def started_as(program: str) -> None:
    """Set the command from `sys.argv[0]` of this process: `python train.py` or `lockstep train`."""
    name = Path(program).name
    if name.endswith(".py") and name != "__main__.py":
        _WORDS[:] = ["python", name]


def program_words() -> list[str]:
    """The two words before the overrides of the user's command."""
    return [*_WORDS]


def program_name() -> str:
    return " ".join(_WORDS)


def command_of_program() -> list[str]:
    """The words that start this program in a fresh interpreter."""
    if Path(sys.argv[0]).suffix == ".py" and Path(sys.argv[0]).name != "__main__.py":
        return [sys.executable, str(Path(sys.argv[0]).absolute())]
    return [sys.executable, "-m", "lockstep", "train"]
