"""What `--help` shows: everything, with the options of extensions, or the keys of the options of the line."""

import re
import shutil
import sys
from collections.abc import Sequence

import yaml

from lockstep.config import extensions, meanings, options
from lockstep.config.commands import program_name
from lockstep.config.schema import CONF, GLOBAL, GROUPS, RECIPES
from lockstep.core.terminal import fill

COLUMN = 14  # of the names of options, behind the name of their group
MARK = "*"  # behind the name of an option of an extension


def show_help(words: Sequence[str]) -> None:
    """Show the help of the options of a line (`optimizer=sgd --help`), or of everything; Hydra's takes 0.3 s."""
    chosen = [word.partition("=")[::2] for word in words if "=" in word]
    if texts := [text for group, name in chosen if (text := _of_option(group, name))]:
        sys.stdout.write("\n".join([*texts, f"`{program_name()} --help` shows all options and keys.\n"]))
        return
    columns = shutil.get_terminal_size((100, 40)).columns
    sys.stdout.write("".join(f"{fill(line, columns, COLUMN)}\n" for line in _of_everything()))


def _of_option(group: str, name: str) -> str:
    """The keys of an option with their defaults and meanings, or the file of a recipe; empty if there is none."""
    if not re.fullmatch(r"[\w.-]+", name):
        return ""
    files = [CONF / group / f"{name}.yaml", *extensions.files(f"{group}={name}")]
    if group == "model" and (library := options.model_of(name)):
        files.append(CONF / group / f"{library[0]}.yaml")
    if file := next((file for file in files if file.is_file()), None):
        text = file.read_text()
    elif group in GROUPS and (cls := extensions.classes_of_user(group).get(name)) is not None:
        node = options.default_node(group, cls)
        text = meanings.config_text(group, name, meanings.meaning_of(cls), node, meanings.meanings_of(cls))
    else:
        return ""
    lines = [line for line in text.splitlines() if "_target_: " not in line and line.strip() != GLOBAL]
    head = f"{group}={name}, its keys as {group}.KEY=VALUE:" if group in GROUPS else f"{group}={name} sets:"
    return "\n".join([head, *lines, ""])


def _of_everything() -> list[str]:
    """The lines of the help, with the options that extensions have. Imports no extension, which takes seconds."""
    template: str = yaml.safe_load((CONF / "config.yaml").read_text())["hydra"]["help"]["template"]
    lines = template.replace("python train.py", program_name()).splitlines()
    own: dict[str, list[str]] = {}
    for extension in extensions.active():
        for group, name in extension.option_names():
            own.setdefault(group, []).append(f"{name}{MARK}")
    for group, names in own.items():
        start = next((place for place, line in enumerate(lines) if line.startswith(f"  {group} ")), None)
        if start is None:
            lines.insert(lines.index("", _end(lines, RECIPES) - 1), f"  {group:<{COLUMN - 3}} {' '.join(names)}")
        else:
            lines[_end(lines, group) - 1] += f" {' '.join(names)}"
    if own:
        named = ", ".join(extension.package for extension in extensions.active())
        lines.insert(lines.index("", _end(lines, RECIPES) - 1), f"  {MARK} of {named}")
    return lines


def _end(lines: list[str], group: str) -> int:
    """The place of the line behind the options of a group."""
    start = next(place for place, line in enumerate(lines) if line.startswith(f"  {group} "))
    return next(place for place in range(start + 1, len(lines)) if not lines[place].startswith(" " * COLUMN))
