"""TAB completion: words of a job that Hydra cannot complete, and the words of the other commands.

After `lockstep -sc install=bash`, the shell calls Hydra's `-sc query=bash` with the line in COMP_LINE.
"""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lockstep.config.commands import FOLDERS, RUNS
from lockstep.config.messages import key_of
from lockstep.config.timm_names import tagged_names
from lockstep.core.run_dir import LATEST, MANIFEST, RunDir

OUTPUTS = "outputs"


def answered(words: list[str]) -> bool:
    """Print the completions of a shell's line if they are ours; else Hydra prints its own."""
    query = next((word.partition("=")[2] for word in words if word.startswith("query=")), "")
    completions = matches(os.environ.get("COMP_LINE", "").rpartition(" ")[2]) if query else None
    if completions is not None:
        write(completions, query)
    return completions is not None


def write(completions: Sequence[str], shell: str) -> None:
    """Print completions as a shell reads them."""
    sys.stdout.write(("\n" if shell == "fish" else " ").join(completions) + "\n")


def matches(word: str) -> list[str] | None:
    """The completions of a word of a job; None if Hydra completes the word."""
    key, equals, value = word.partition("=")
    if key_of(word) == "model" and "." in value:
        values = [name for name in tagged_names(value.partition(".")[0]) if name.startswith(value)]
    elif equals and key_of(word) in RUNS:
        values = runs(value)
    elif equals and key_of(word) in FOLDERS:
        values = _paths(value, "*/")
    else:
        return None
    return [f"{key}={text}" for text in values]


def command_words(commands: Sequence[str], line: str) -> list[str]:
    """The completions of the last word of `lockstep COMMAND ...`, for the commands other than `train`."""
    *words, last = line.split(" ")
    words = [word for word in words if word]
    if len(words) < 2:
        return [command for command in commands if command.startswith(last)]
    if words[1] in ("evaluate", "predict", "export", "demo") and len(words) == 2:
        return runs(last)
    if words[1] in ("compare", "runs", "clean") and not last.startswith("-"):
        return _paths(last or f"{OUTPUTS}/", "*/")
    return matches(last) or _paths(last, "*")


def runs(text: str) -> list[str]:
    """The completions of a run or checkpoint: `latest`, the runs of the usual folder, and the folders elsewhere."""
    latest = [LATEST] if LATEST.startswith(text) and Path(OUTPUTS, LATEST).is_file() else []
    paths = _paths(text or f"{OUTPUTS}/", "*/")
    return latest + (paths if text else [path for path in paths if not path.endswith("/")])


def _paths(start: str, pattern: str) -> list[str]:
    """The paths that begin with `start` and go on as `pattern`; the slash after a folder is left out after a run."""
    expanded = os.path.expanduser(start)  # noqa: PTH111, keeps the slash at the end
    paths = [Path(path) for path in glob.glob(glob.escape(expanded) + pattern) if path.isprintable()]  # noqa: PTH207
    ends = {str(path): path.is_dir() and not _is_run(path) for path in sorted(paths)}
    return [f"{start}{path[len(expanded) :]}{'/' * is_open}" for path, is_open in ends.items()]


def _is_run(folder: Path) -> bool:
    return RunDir(folder).overrides.is_file() or (folder / MANIFEST).is_file()
