"""TAB completion: words of a job that Hydra cannot complete, and the words of the other commands.

After `lockstep -sc install=bash`, the shell calls Hydra's `-sc query=bash` with the line in COMP_LINE.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from hydra.plugins.completion_plugin import CompletionPlugin

from lockstep.config.commands import FOLDERS, RUNS, quoted_path
from lockstep.config.messages import key_of
from lockstep.config.timm_names import tagged_names, timm_models
from lockstep.core.run_dir import LATEST, MANIFEST, RunDir

OUTPUTS = "outputs"


def prepare(words: list[str]) -> None:
    """Quote the paths of a command line for Hydra. If a shell asks for completions, add ours to Hydra's."""
    words[1:] = map(quoted_path, words[1:])
    if not {"-sc", "--shell-completion"}.isdisjoint(words):
        _install()


def _install() -> None:
    """Have Hydra's plugins for all shells call `matches` first, and Hydra's own code if the result is None."""
    hydra_query = CompletionPlugin._query

    def query(self: CompletionPlugin, config_name: str | None, line: str) -> list[str]:
        word = "" if not line or line.endswith(" ") else line.split()[-1]
        completions = matches(word, line)
        return hydra_query(self, config_name, line) if completions is None else completions

    CompletionPlugin._query = query  # type: ignore[method-assign]


def matches(word: str, line: str = "") -> list[str] | None:
    """The completions of a word of a job; None if Hydra completes the word."""
    key, equals, value = word.partition("=")
    if not equals:
        return None
    if key_of(word) == "model" and "." in value:
        return [f"{key}={name}" for name in _tagged(value)]
    if key_of(word) in RUNS:
        return [f"{key}={path}" for path in runs(value, _output_root(line))]
    if key_of(word) in FOLDERS:
        return [f"{key}={path}" for path in _paths(value, folders=True)]
    return None


def command_words(commands: Sequence[str], line: str) -> list[str]:
    """The completions of the last word of `lockstep COMMAND ...`, for the commands other than `train`."""
    words = line.split()
    last = "" if line.endswith(" ") or not words else words.pop()
    if len(words) < 2:
        return [command for command in commands if command.startswith(last)]
    if words[1] in ("evaluate", "predict", "export", "demo") and len(words) == 2:
        return list(runs(last, OUTPUTS))
    return list(matches(last) or _paths(last, folders=False))


def runs(text: str, root: str) -> Iterator[str]:
    """The completions of a run or checkpoint: `latest`, the runs below `root`, and the folders that lead to them."""
    if LATEST.startswith(text) and Path(root, LATEST).is_file():
        yield LATEST
    if not text:
        yield from sorted(f"{run.parent.parent}" for run in Path(root).glob("*/.hydra/overrides.yaml"))
        return
    for path in _paths(text, folders=True):
        folder = Path(path)
        is_complete = RunDir(folder).overrides.is_file() or (folder / MANIFEST).is_file()
        yield str(folder) if is_complete else path


def _paths(text: str, *, folders: bool) -> Iterator[str]:
    """The paths that begin with `text`; a folder ends with a slash."""
    parent, _, name = text.rpartition("/")
    base = Path(f"{parent}/" if "/" in text else ".").expanduser()
    prefix = f"{parent}/" if "/" in text else ""
    try:
        entries = sorted(os.scandir(base), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(name) and (name or not entry.name.startswith(".")):
            if entry.is_dir():
                yield f"{prefix}{entry.name}/"
            elif not folders:
                yield f"{prefix}{entry.name}"


def _output_root(line: str) -> str:
    """The folder of the runs for a command line: its `output_root`, or the default."""
    named = [word.partition("=")[2] for word in line.split() if word.startswith("output_root=")]
    return named[-1] if named else OUTPUTS


def _tagged(text: str) -> list[str]:
    """timm's names with a tag of their weights (`resnet50.a1_in1k`) that begin with `text`."""
    architecture = text.partition(".")[0]
    names = tagged_names(architecture) if architecture in timm_models() else []
    return [name for name in names if name.startswith(text)]
