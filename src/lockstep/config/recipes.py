"""The config files of keys that a line chooses: recipes, files of the user's own groups, and what these list.

A folder of a user's `conf` is a group if it is none of ours: `conf/debug/fast.yaml` is chosen with `debug=fast`. Its
files set keys of the job, as recipes do. No default job has such a group, so Hydra itself demands `+debug=fast`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from lockstep.config import options
from lockstep.config.schema import BLOCKS, GLOBAL, GROUPS, RECIPES
from lockstep.core.errors import OF_YAML, InputError, close_to
from lockstep.core.fields import nested

Key = tuple[str, ...]

EXTENSION = "extension"  # the first part of the provider name of an extension's configs
# What an extension's file may say to Hydra besides what any file may: it comes with code that the user installed.
SEARCH: tuple[Key, ...] = (("sweeper",), ("launcher",))


@dataclass(frozen=True)
class ChosenFiles:
    """What the chosen files say about groups and to Hydra."""

    listed: frozenset[str]  # the user's own groups that the files list
    choices: dict[str, str]  # options of Hydra's groups, by extensions' files
    values: frozenset[tuple[Key, str]]  # values below `hydra`, by extensions' files


def is_own_group(name: str, sources: Sequence[Any]) -> bool:
    """Whether a name is a group of the user's: a folder with configs of one of Hydra's config `sources`."""
    return options.can_be_group(name) and any(source.is_group(name) for source in sources)


def words_for_hydra(words: Sequence[Override], files: ChosenFiles, sources: Sequence[Any]) -> list[str]:
    """The words of a line as Hydra needs them, with the choices of extensions' files.

    A group of the user's that no file lists is added to the default job, behind the recipe, whose values it
    overrides. Where a file lists it, another choice takes its place. The last choice of a line counts.
    """
    typed = {word.key_or_group: word for word in words}  # `~debug` is `debug=null`
    lines = [f"{group}={name}" for group, name in files.choices.items() if group not in typed]
    for word in words:
        line, group = str(word.input_line), word.key_or_group
        if word.is_sweep_override() or not is_own_group(group, sources):
            lines.append(line)
        elif word is typed[group] and (word.is_delete() or word.value() is None):
            lines += [f"~{group}"] * (group in files.listed)
        elif word is typed[group]:
            lines.append(line.lstrip("+") if group in files.listed else f"+{line.lstrip('+')}")
    return lines


def read_chosen(words: Sequence[Override], sources: Sequence[Any]) -> ChosenFiles:
    """The files that a line chooses, and what these list. Raises InputError for what Hydra ignores or misreads."""
    typed = {word.key_or_group: None if word.is_delete() else word.value() for word in words}
    own = [group for group in typed if is_own_group(group, sources)]
    waiting = [(group, name) for group in (RECIPES, *own) for name in _names(typed.get(group))]
    listed, choices = set[str](), dict[str, str]()
    values, overridden = set[tuple[Key, str]](), dict[str, str]()
    parents = dict[str, list[str]]()
    for group, name in waiting:  # it grows
        path = f"{group}/{name}"
        if (source := next((source for source in sources if source.is_config(path)), None)) is None:
            continue
        loaded = source.load_config(path)
        node: Any = OmegaConf.to_container(loaded.config, resolve=False)
        if loaded.header.get("package") != "_global_":
            raise InputError(f"{path}.yaml: begin it with the line `{GLOBAL}`, or its keys are no job's")
        entries = _checked_defaults(path, node)
        is_trusted = source.provider.startswith(EXTENSION)
        pairs = nested(node.get("hydra")) if is_trusted else ()
        values |= {(key, str(value)) for key, value in pairs if key[:1] in SEARCH}
        for written, of, option in _entries(path, group, entries, sources):
            overrides, is_own = written.startswith("override"), is_own_group(of, sources)
            if of.startswith("hydra/"):
                if is_trusted and (of.removeprefix("hydra/"),) in SEARCH and overrides:
                    choices.setdefault(of, option)
                elif not (overrides and typed.get(of) == option):
                    raise InputError(f"{path}.yaml cannot choose {of}; remove its line, and type -m {of}={option}")
                continue
            if is_own and overrides:
                overridden[of] = f"{path}.yaml has `- {written}: {option}`"
            elif is_own:
                listed.add(of)
            elif of or option == "_self_":
                continue
            further = _pairs(of, typed.get(of, option)) if is_own else _pairs(group, option)
            waiting += [pair for pair in further if pair not in waiting]
            for pair in further:
                parents.setdefault("/".join(pair), []).append(path)
    _check_no_circle(parents)
    for group, sentence in overridden.items():
        if group not in listed:
            raise InputError(f"{sentence}, expected `- /{group}: NAME`: the default job has no {group} to override")
    return ChosenFiles(frozenset(listed), choices, frozenset(values))


def _check_no_circle(parents: Mapping[str, Sequence[str]]) -> None:
    """Raise InputError for a file that lists itself, perhaps by way of others: Hydra would read without end."""
    try:
        TopologicalSorter(parents).prepare()
    except CycleError as error:
        first, *others = error.args[1][:-1]
        way = f" by way of {', '.join(f'{path}.yaml' for path in others)}" if others else ""
        raise InputError(f"{first}.yaml lists itself{way} in its defaults; remove that line") from None


def _names(value: Any) -> list[str]:
    """The names of the options in the value of a group, which may be one name, a list or null."""
    return [str(name) for name in (value if isinstance(value, list) else [value]) if name is not None]


def _pairs(group: str, value: Any) -> list[tuple[str, str]]:
    return [(group, _bare(group, name)) for name in _names(value)]


def _bare(group: str, name: str) -> str:
    """The name of an option of a group, without the group and the end of the file's name."""
    return re.sub(rf"^/?({group}/)?", "", name.removesuffix(".yaml"))


def _entries(path: str, group: str, entries: list[Any], sources: Sequence[Any]) -> Iterator[tuple[str, str, Any]]:
    """The keys of a file's defaults, their groups and values. Raises InputError for what Hydra would misread."""
    for entry in entries:
        # Without the space behind the colon, an entry is one word.
        pairs = entry.items() if isinstance(entry, dict) else [str(entry).rpartition(":")[::2]]
        written, name = next(iter((str(key), value) for key, value in pairs))
        of, parent, expected = re.sub(r"^(override\s+)?/?", "", written), _bare(group, str(name)), ""
        if of == group or (not of and re.match(rf"{group}/|/(?!{group}/)", str(name))):
            expected = parent
        elif is_own_group(of, sources):
            expected = "" if "/" in written else f"/{of}: {name}"
        elif not of.startswith("hydra/") and (known := close_to(of, GROUPS)):
            expected = f"override /{known[0]}: {name}"
        text = f"{written}: {name}" if isinstance(entry, dict) else entry
        if expected not in ("", text):
            raise InputError(f"{path}.yaml has `- {text}`, expected `- {expected}`")
        yield written, of, name


def _checked_defaults(path: str, node: Any) -> list[Any]:
    """The defaults of a recipe. Raises InputError if it has other containers, or keys, than YAML for a job has."""
    if not isinstance(node, dict):
        raise InputError(f"{path}.yaml is a list, expected keys without dashes, such as `seed: 3`")
    for key, value in node.items():
        text = value if isinstance(value, str) else OF_YAML.get(str(value), str(value))
        written, (first, *below), expected = f"{key}: {text}", str(key).split("."), ""
        if key == "defaults":
            is_right, expected = isinstance(value, list), "defaults:` with dashes below it: `- override /GROUP: NAME"
        elif below and first in (*GROUPS, *BLOCKS):
            is_right, expected = False, f"{key.replace('.', ': {')}: {text}{'}' * len(below)}"
        elif "=" in key and value is None:
            is_right, written, expected = False, key, re.sub(r"\s*=\s*", ": ", key, count=1)
        else:
            is_right = key not in (*GROUPS, *BLOCKS) or isinstance(value, dict) or "${" in text
            is_option = key in GROUPS and isinstance(value, str | list) and re.fullmatch(r"[\w.-]+|\[[^{]*\]", text)
            expected = f"- override /{key}: {text}` below `defaults:" if is_option else f"{key}: {{KEY: VALUE}}"
        if not is_right:
            raise InputError(f"{path}.yaml has `{written}`, expected `{expected}`")
    return node.get("defaults") or []
