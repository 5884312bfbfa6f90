"""TAB completion of what Hydra cannot complete: tagged weights of timm's models, and runs.

After `lockstep -sc install=bash`, the shell calls Hydra's `-sc query=bash` with the line in COMP_LINE.
"""

import glob
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from lockstep.config.commands import RUNS
from lockstep.config.messages import key_of
from lockstep.config.options import tagged_names
from lockstep.core.run_dir import LATEST, MANIFEST, RunDir

OUTPUTS = "outputs"


def shell_asking(words: Sequence[str]) -> str:
    """The shell that asks for completions; empty if none does."""
    return next((word.partition("=")[2] for word in words if word.startswith("query=")), "")


def answered(words: Sequence[str]) -> bool:
    """Print the completions of a shell's line if they are ours; else Hydra prints its own."""
    shell = shell_asking(words)
    completions = matches(os.environ.get("COMP_LINE", "").rpartition(" ")[2]) if shell else None
    if completions is not None:
        write(completions, shell)
    return completions is not None


@contextmanager
def without_targets(words: Sequence[str]) -> Iterator[None]:
    """Leaves `_target_`, which an option sets, out of the completions that Hydra prints."""
    shell = shell_asking(words)
    if not shell:
        yield
        return
    with redirect_stdout(io.StringIO()) as printed:
        yield
    write([word for word in printed.getvalue().split() if not word.endswith("_target_=")], shell)


def write(completions: Sequence[str], shell: str) -> None:
    """Print completions as a shell reads them."""
    sys.stdout.write(("\n" if shell == "fish" else " ").join(completions) + "\n")


def matches(word: str) -> list[str] | None:
    """The completions of a word of a job; None if Hydra completes the word, as it does paths from `/` or `./`."""
    key, _, value = word.partition("=")
    if key_of(word) == "model" and "." in value:
        values = [name for name in tagged_names(value.partition(".")[0]) if name.startswith(value)]
    elif key_of(word) in RUNS and not value.startswith(("/", ".", "~")):
        values = [LATEST] if LATEST.startswith(value) and Path(OUTPUTS, LATEST).is_file() else []
        paths = sorted(Path().glob(f"{glob.escape(value or f'{OUTPUTS}/')}*/"))
        for path in filter(lambda path: str(path).isprintable(), paths):
            is_run = RunDir(path).overrides.is_file() or (path / MANIFEST).is_file()
            values.append(f"{path}{'' if is_run else '/'}")
    else:
        return None
    return [f"{key}={text}" for text in values]
