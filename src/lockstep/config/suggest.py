"""What a user meant: by a misspelt key, a word of another program, or a path in place of an option or KEY=VALUE."""

import os
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from lockstep.config import extensions
from lockstep.config.commands import override, parsed, shell_command
from lockstep.config.options import is_builtin, model_of, options_with
from lockstep.config.other_words import ABSENT, KEYS, VALUE_WORDS
from lockstep.config.schema import BLOCKS, GROUPS, Job
from lockstep.core.errors import close_to
from lockstep.core.run_dir import MANIFEST, RunDir

OFF = ("false", "0", "no", "off", "none")
WEIGHTS = (".safetensors", ".pth", ".pt", ".bin", ".ckpt")
TABLE_SUFFIXES = (".csv", ".tsv")
SHARDS = ".tar"
# Files that the package `datasets` writes into a saved data set.
HF_FILES = ("dataset_dict.json", "state.json")


def suggest_override(name: str, value: str | None = None) -> str:
    """The overrides for a key or flag of another program, or a key without its block; empty if unknown."""
    block, _, last = name.lower().replace("-", "_").rpartition(".")
    chosen = [word.partition("=")[2] for word in sys.argv[1:] if word.startswith("model=")]
    if last == "pretrained" and any(map(model_of, chosen)):
        return "model.pretrained=true"  # the model is chosen already
    template = next((text for text, names in KEYS.items() if _plain(last) in _plain(names).split()), "")
    if not template and not block:
        # A key of the job or of one of its blocks, from the last part of its name.
        places: dict[str, type[Any]] = {"": Job, **{f"{name}.": cls for name, cls in BLOCKS.items()}}
        having = (place for place, cls in places.items() if last in {field.name for field in fields(cls)} - {*BLOCKS})
        template = last if last in GROUPS else next((f"{place}{last}={{}}" for place in having), "")
    if template in GROUPS or template == "device":
        return suggest_option(template, value or "")
    if "{}" not in template:
        return "" if (value or "").lower() in OFF else shell_command(template.split())
    *before, (key, _, form) = *template.split()[:-1], template.split()[-1].partition("=")
    if value is not None and (special := _named_elsewhere(key, value)):
        return shell_command([*before, special])
    text = form.format("VALUE" if value is None else value)
    word = f"{key}={text}"
    return shell_command([*before, word if parsed(word) is not None else override(key, text)])


def _plain(name: str) -> str:
    """A word as people spell it: `batch-size`, `batch_size` and `BatchSize` are one."""
    return re.sub("[-_]", "", name).lower()


def explain_absent(name: str) -> str:
    """The sentence about a key or flag of another program that has no counterpart here; empty if it is none."""
    last = _plain(name.rpartition(".")[2])
    return next((sentence for words, sentence in ABSENT.items() if last in _plain(words).split()), "")


def suggest_option(group: str, value: str) -> str:
    """The overrides to type for the option of a group that another program calls `value`; empty if unknown."""
    if is_builtin(group, value):
        return shell_command([f"{group}={value}"])
    if group == "device" and value in ("cpu", "cuda", "auto"):
        return f"device={value}"
    return _named_elsewhere(group, value)


def _named_elsewhere(key: str, value: str) -> str:
    names = {words: name.split() for words, name in VALUE_WORDS.items() if words.split("=")[0] == key}
    return next((words for words, others in names.items() if value.lower() in others), "")


def suggest_for_path(group: str, word: str) -> str:
    """` Did you mean ...?` for a path after `GROUP=`, or alone (`group` is empty); empty if no override fits."""
    if not word:  # to pathlib it is the current folder
        return ""
    path = Path(os.path.expanduser(word))  # noqa: PTH111, raises nothing
    try:
        exists, is_folder, is_run = path.exists(), path.is_dir(), RunDir(path).composed.exists()
    except (OSError, ValueError):  # the path is too long, or has a NUL byte
        return ""
    weights, listed = path.suffix in WEIGHTS, path.suffix in (*TABLE_SUFFIXES, SHARDS)
    overrides: list[str] = []
    if weights or is_run:
        start_override = override("resume" if is_run and not group else "init_from", word)
        overrides = {"": [start_override], "model": ["model=NAME", start_override]}.get(group, [])
    elif (group == "dataset" and (is_folder or listed or (os.sep in word and not exists))) or (
        not group and exists and (is_folder or listed)
    ):
        overrides = _data_set_at(path, word)
    return f" Did you mean {shell_command(overrides)}?" if overrides else ""


def _data_set_at(path: Path, word: str) -> list[str]:
    """The overrides that choose the data set at a path."""
    name = "folder"
    if path.suffix in TABLE_SUFFIXES:
        name = "csv"
    elif path.suffix == SHARDS:
        name, word = "webdataset", str(Path(word).parent)
    elif (path / MANIFEST).exists():
        name = "packed"
    elif any((path / file).exists() for file in HF_FILES):
        name = "hf"
    elif path.is_dir() and next(path.glob(f"*{SHARDS}"), None):
        name = "webdataset"
    return [f"dataset={name}", override("dataset.path", word)]


def import_note(group: str, name: str) -> str:
    """A sentence about the file that declares an option, if its package does not import it; empty if none does."""
    for extension in extensions.active():
        if (file := extension.declaring_files().get((group, name))) is not None:
            path = file.parent if file.stem == "__init__" else file.with_suffix("")
            module = ".".join(path.relative_to(extension.folder.parent).parts)
            return (
                f" {file} declares it, but the package does not import it: add `import {module}` to its __init__.py"
            )
    return ""


def size_note(proposal: str) -> str:
    """What to know about a proposal: in most other tools, the batch size is per device."""
    return " (batch counts the images of all devices)" if "batch=" in proposal else ""


def suggest_key(key: str, value: str | None, names: list[str]) -> str:
    """What the user probably meant by a `key` that is none of `names`; empty if nothing is near."""
    block, _, last = key.rpartition(".")
    first = key.partition(".")[0]
    siblings = [name for name in names if name.rpartition(".")[0] == block and not name.endswith("._target_")]
    # A key without its block (`lr`), or in a misspelt block: look for the same last part.
    same_last_part = [name for name in names if name.rpartition(".")[2] == last][:3]
    if sentence_about := explain_absent(key):
        return f" Here {sentence_about}."
    if key == "dataset.path" and (suggestion := suggest_for_path("dataset", value or "")):
        return suggestion
    if block and (option_names := options_with(block, last)):
        choose = f"add {override(block, option_names[0])}" if len(option_names) == 1 else "choose one of them"
        parts = {name: f"_{name.rpartition('.')[2]}" for name in siblings}
        alike = [name for name, part in parts.items() if part.endswith(f"_{last}") or f"_{last}".endswith(part)]
        return f"{_meant(alike, value)} {block}={', '.join(option_names)} has {last}: {choose}, or remove it."
    if (proposal := suggest_override(key, value)) and not proposal.startswith(f"{key}="):
        return f" Did you mean {proposal}{size_note(proposal)}?"
    if block and siblings:
        near = [f"{block}.{name}" for name in close_to(last, [name.rpartition(".")[2] for name in siblings])]
        if not (near := same_last_part or near):
            return f" {block} has {', '.join(name.rpartition('.')[2] for name in siblings)}."
    elif same_last_part:
        near = same_last_part
    elif blocks := close_to(first, {name.partition(".")[0] for name in names} - {first}) if block else []:
        return suggest_key(f"{blocks[0]}.{key.partition('.')[2]}", value, names)
    else:
        near = close_to(key, [name for name in names if "." not in name]) or close_to(key, names)
    return _meant(near, value)


def _meant(names: list[str], value: str | None) -> str:
    shown_names = [repr(name) if value is None else shell_command([f"{name}={value}"]) for name in names]
    return f" Did you mean {' or '.join(shown_names)}?" if names else ""
