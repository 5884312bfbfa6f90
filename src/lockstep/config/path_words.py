"""Suggestions for a user who typed a path instead of the name of an option, or instead of KEY=VALUE."""

from __future__ import annotations

import os
from pathlib import Path

from lockstep.config.commands import override, typed
from lockstep.core.run_dir import MANIFEST, RunDir

WEIGHTS = ".safetensors"
TABLES = (".csv", ".tsv")
# Files that the package `datasets` writes into a saved data set.
HF_FILES = ("dataset_dict.json", "state.json")


def suggest_overrides(group: str, word: str) -> str:
    """` Did you mean ...?` with overrides for a path after `GROUP=`, or for a path alone (`group` is empty).

    Empty if the word does not look like a path, or no override fits the path.
    """
    path = Path(os.path.expanduser(word))  # noqa: PTH111, raises nothing
    try:
        exists, is_folder, is_run = path.exists(), path.is_dir(), RunDir(path).composed.exists()
    except (OSError, ValueError):  # the path is too long, or has a NUL byte
        return ""
    weights, listed = path.suffix == WEIGHTS, path.suffix in TABLES
    overrides: list[str] = []
    if weights or is_run:
        start_override = override("resume" if is_run and not group else "init_from", word)
        overrides = {"": [start_override], "model": ["model=NAME", start_override]}.get(group, [])
    elif (group == "dataset" and (is_folder or listed or (os.sep in word and not exists))) or (
        not group and exists and (is_folder or listed)
    ):
        overrides = _dataset(path, word)
    return f" Did you mean {typed(overrides)}?" if overrides else ""


def _dataset(path: Path, word: str) -> list[str]:
    """The overrides that choose the data set at a path."""
    name = "folder"
    if path.suffix in TABLES:
        name = "csv"
    elif (path / MANIFEST).exists():
        name = "packed"
    elif any((path / file).exists() for file in HF_FILES):
        name = "hf"
    return [f"dataset={name}", override("dataset.path", word)]
