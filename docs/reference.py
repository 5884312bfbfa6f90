"""Make conf/GROUP/NAME.yaml of each option, and the lists of options and keys in the documents and in the help.

    python docs/reference.py            rewrites the generated files and parts in place
    python docs/reference.py --check    exits with 1 and names each file that is out of date

An option is declared by its class alone. The first paragraph of the docstring is the meaning of the option. A field
is a key; the comment above the field or after it on its line is the meaning of the key. A field without a comment has
the one of its base class. The lists are in docs/configuration.md, README.md and the help of conf/config.yaml. The
keys of the job have their meanings in conf/config.yaml, and recipes have theirs at the top of their files. The
signatures and docstrings in docs/python.md are those of the interface. tests/public.txt has all public names.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import inspect
import itertools
import re
import textwrap
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import public
import signatures
from lockstep.config import components
from lockstep.config.meanings import as_yaml, config_text, meaning_of, meanings_of
from lockstep.config.options import PRESETS, classes_of, default_node
from lockstep.config.roles import role_of
from lockstep.config.schema import GROUPS, MANY, Job
from lockstep.core.fields import Number, Role, Rule, rule_of

ROOT = Path(__file__).parents[1]
HELP_COLUMNS = 100
WRITTEN = "  # written by docs/reference.py from this class"
# How a comment names a document, and how docs/configuration.md links to it.
DOCUMENT, LINK = r"docs/(\w+\.md)(#[\w-]+)?", r"[\1](\1\2)"


@dataclass(frozen=True)
class Key:
    """A row of a table of keys: dotted name, type in words, default as written in the YAML, role, meaning."""

    name: str
    type: str
    default: str
    role: str
    meaning: str


@dataclass(frozen=True)
class Option:
    """An option of a group, its keys, and the values of its config; a recipe has only a name and a meaning."""

    name: str
    meaning: str
    keys: tuple[Key, ...] = ()
    node: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def generated(root: Path) -> dict[Path, str]:
    """The text that each file should have.

    Raises:
        SystemExit: an option or a key has no meaning, or no class declares the option of a YAML file.
    """
    config = root / "conf" / "config.yaml"
    defaults = {
        group: option
        for default in yaml.safe_load(config.read_text())["defaults"]
        if isinstance(default, dict)
        for group, option in default.items()
    }
    groups = {group: read_options(group, defaults[group]) for group in GROUPS}
    files = {
        root / "conf" / group / f"{option.name}.yaml": yaml_of(group, option)
        for group, options in groups.items()
        for option in options
    }
    for path in (path for group in GROUPS for path in root.joinpath("conf", group).glob("*.yaml")):
        if path not in files:
            raise SystemExit(f"{path}: no class declares this option; write one with @option, and remove the file")
    recipes = [read_recipe(path) for path in sorted(root.joinpath("conf", "experiment").glob("*.yaml"))]
    groups["experiment"] = recipes
    job = tuple(read_keys(config))

    reference, readme = root / "docs" / "configuration.md", root / "README.md"
    text = fill(reference, reference.read_text(), "job", job_table(job))
    for group, options in groups.items():
        text = fill(reference, text, group, group_tables(options))
    rows = ([f"`{group}`", names(options)] for group, options in groups.items())
    readme_text = fill(readme, readme.read_text(), "groups", table(["group", "options"], rows))
    help_text = splice(config, config.read_text(), "      Groups, GROUP=OPTION:\n", "\n", help_of_groups(groups))
    help_text = splice(config, help_text, "...; of the job:\n", "\n", help_of_keys(job))
    interface, public_list = root / "docs" / "python.md", root / "tests" / "public.txt"
    public_names = [
        *key_lines("", [Option("", "", job)]),
        *(line for group, options in groups.items() for line in key_lines(group, options)),
        *public.former_keys(),
        *public.command_lines(),
        *public.exit_codes(),
        *public.python_lines(interface.read_text()),
    ]
    return {
        **files,
        reference: text,
        readme: readme_text,
        config: help_text,
        interface: signatures.as_markdown(interface.read_text()),
        public_list: public.extended(public_list.read_text(), public_names),
    }


def key_lines(group: str, options: Iterable[Option]) -> Iterator[str]:
    """The options of a group and their keys as lines of the public names; of the job without a group."""
    for option in options:
        if group:
            yield f"option {group}={option.name}"
        for key in option.keys:
            name = f"{group}={option.name} {key.name.rpartition('.')[2]}" if group else key.name
            yield f"key {name}: {key.type} = {key.default}; another run: {key.role}"


def read_options(group: str, default: str | list[str]) -> list[Option]:
    """Our options of a group: the default first, the others in alphabetical order."""
    options = [
        read_option(group, name, cls, default_node(group, cls), meaning_of_option(cls))
        for name, cls in classes(group).items()
    ]
    for (of, name), (component, meaning) in PRESETS.items():
        if of == group:
            options.append(read_option(group, name, type(component), components.node(component), meaning))
    return sorted(options, key=lambda option: (option.name != default, option.name))


def classes(group: str) -> dict[str, type[Any]]:
    """Our classes of a group, by the names of their options. The classes of extensions need no file."""
    return {name: cls for name, cls in classes_of(group).items() if cls.__module__.startswith("lockstep.")}


def read_option(group: str, name: str, cls: type[Any], node: Mapping[str, Any], meaning: str) -> Option:
    """The option of a class with the values of its config. Keys of the class come before keys of its base classes."""
    prefix, keys = f"{group}.{name}." if group in MANY else f"{group}.", []
    for field, comment in meanings_of(cls).items():
        if not comment:
            raise SystemExit(f"{place_of(cls)}.{field} has no comment that says what it is")
        key, default = f"{prefix}{field}", as_yaml(node[field])
        keys.append(Key(key, type_of(cls, field), default, role_text(key), comment))
    return Option(name, meaning, tuple(keys), node)


def meaning_of_option(cls: type[Any]) -> str:
    if not (meaning := meaning_of(cls)):
        raise SystemExit(f"{place_of(cls)} has no docstring that says what the option is")
    return meaning


def place_of(cls: type[Any]) -> str:
    return f"{inspect.getsourcefile(cls)}: {cls.__name__}"


def yaml_of(group: str, option: Option) -> str:
    """The text of `conf/GROUP/NAME.yaml`."""
    keys = {key.name.rpartition(".")[2]: key.meaning for key in option.keys}
    return config_text(group, option.name, option.meaning, option.node, keys, WRITTEN)


def read_recipe(path: Path) -> Option:
    """The recipe that a file has."""
    top = itertools.takewhile(lambda line: re.match(r"# (?!command:)", line), path.read_text().splitlines())
    meaning = " ".join(line.removeprefix("# ") for line in top if not line.startswith("# @package"))
    if not meaning:
        raise SystemExit(f"{path}: there is no comment at the top that says what the recipe is")
    return Option(path.stem, meaning)


def read_keys(config: Path) -> Iterator[Key]:
    """The keys of the job in conf/config.yaml. They must be the fields of `Job`."""
    fields = dict(fields_of(Job))
    for name, default, meaning in commented(config.read_text().partition("\nhydra:")[0]):
        if name not in fields:
            raise SystemExit(f"{config}: {name} is not a field of Job")
        if not meaning:
            raise SystemExit(f"{config}: {name} has no comment that says what it is")
        yield Key(name, type_of(*fields.pop(name)), default, role_text(name), meaning)
    if fields:
        raise SystemExit(f"{config}: there is no {', '.join(fields)}, which Job has")


def commented(text: str) -> Iterator[tuple[str, str, str]]:
    """The dotted name of each key of a YAML text, its value as written, and its comment."""
    block, comment = "", []
    for line in text.splitlines():
        if note := re.fullmatch(r" *# (.*)", line):
            comment.append(note[1])
            continue
        if key := re.fullmatch(r"( *)(\w+):(?: +([^#\s].*?))?(?: +# (.*))?", line):
            indent, name, value, trailing = key.groups()
            if value is None:
                block = f"{name}."
            else:
                yield block * bool(indent) + name, value, " ".join([*comment, *([trailing] if trailing else [])])
        comment = []


def fields_of(cls: type[Any], prefix: str = "") -> Iterator[tuple[str, tuple[type[Any], str]]]:
    """The dotted name of each key of a class, with the class and the field's name. A job's groups are left out."""
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.default_factory):
            yield from fields_of(typing.cast(type[Any], field.default_factory), f"{prefix}{field.name}.")
        elif field.name not in GROUPS:
            yield f"{prefix}{field.name}", (cls, field.name)


def type_of(cls: type[Any], name: str) -> str:
    """The type of a field: its possible values, or the values that its rule allows."""
    hint, rule = typing.get_type_hints(cls)[name], rule_of(cls, name)
    members = typing.get_args(hint) or (hint,)
    values: list[str] = []
    if rule is not None and rule.values:
        values = [str(value) for value in rule.values]
    elif bool in members:
        values = ["true", "false"]
    elif choices := [member for member in members if isinstance(member, enum.EnumMeta)]:
        values = list(choices[0].__members__)
    null = type(None) in members
    if values:
        values += ["null"] * null
        return f"{', '.join(values[:-1])} or {values[-1]}"
    listed = any(typing.get_origin(member) is list for member in (hint, *members))
    return "list of " * listed + kind_of(rule) + " or null" * null


def role_text(key: str) -> str:
    """Whether another value of a key makes another run, and in which way: `yes`, `yes: sample` or `no: display`."""
    role = role_of(key)
    return "yes" if role is Role.identity else f"{'yes' if role.makes_another_run else 'no'}: {role}"


def kind_of(rule: Rule | None) -> str:
    """The allowed values, as `int ≥ 1` or `float in [0, 1)`. Larger ends only catch typing errors."""
    if not isinstance(rule, Number):
        return (rule.short or rule.expected).removeprefix("a ") if rule is not None else "text"
    kind = "int" if rule.whole else "float"
    if rule.high < 1000:
        bounds = f" in {'(' if rule.low_open else '['}{rule.low:g}, {rule.high:g}{')' if rule.high_open else ']'}"
    else:
        bounds = f" {'>' if rule.low_open else '≥'} {rule.low:g}" * (rule.low > -1000)
    return " or ".join([*rule.words, kind + bounds])


def job_table(keys: Iterable[Key]) -> str:
    """The keys of the job, as Markdown."""
    rows = ([f"`{key.name}`", key.type, f"`{key.default}`", key.role, key.meaning] for key in keys)
    return table(["key", "type", "default", "another run", "meaning"], rows)


def group_tables(options: list[Option]) -> str:
    """The options of a group and their keys, as Markdown. Options with the same key share its row."""
    text = table(["option", "what it is"], ([f"`{option.name}`", option.meaning] for option in options))
    options_with: dict[Key, list[Option]] = {}
    for option in options:
        for key in option.keys:
            options_with.setdefault(key, []).append(option)
    order = list(dict.fromkeys([text for key in options_with for text in (key.name, key.meaning)]))
    rows, previous = [], Key("", "", "", "", "")
    for key in sorted(options_with, key=lambda key: (order.index(key.name), order.index(key.meaning))):
        meaning = "the same" if (key.name, key.meaning) == (previous.name, previous.meaning) else key.meaning
        default = "required" if key.default == "???" else f"`{key.default}`"
        rows.append([f"`{key.name}`", names(options_with[key]), key.type, default, key.role, meaning])
        previous = key
    headings = ["key", "options", "type", "default", "another run", "meaning"]
    return f"{text}\n\n{table(headings, rows)}" if rows else text


def help_of_groups(groups: Mapping[str, list[Option]]) -> str:
    """The options of each group, as `--help` shows them."""
    return "".join(help_entry(group, (option.name for option in options)) for group, options in groups.items())


def help_of_keys(keys: Iterable[Key]) -> str:
    """The keys of the job with their defaults, as `--help` shows them: one entry for each block of several keys."""
    blocks: dict[str, list[str]] = {}
    for key in keys:
        block, _, name = key.name.rpartition(".")
        has_value = key.default not in ("null", "[]") and "${" not in key.default
        blocks.setdefault(f"{block}." * bool(block), []).append(f"{name}={key.default}" if has_value else name)
    top = blocks.pop("") + [f"{block}{words[0]}" for block, words in blocks.items() if len(words) == 1]
    return help_entry("", top) + "".join(help_entry(block, words) for block, words in blocks.items() if words[1:])


def help_entry(name: str, words: Iterable[str]) -> str:
    """A name and, in a second column, its words, as lines of the help in conf/config.yaml."""
    filled = textwrap.fill(
        " ".join(words),
        width=HELP_COLUMNS,
        initial_indent=f"  {name:<12}",
        subsequent_indent=" " * 14,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return textwrap.indent(filled, " " * 6) + "\n"


def names(options: Iterable[Option]) -> str:
    return " ".join(f"`{option.name}`" for option in options)


def table(headings: list[str], rows: Iterable[list[str]]) -> str:
    """A table in Markdown. The name of a file of docs/ in a cell becomes a link."""
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for row in rows:
        text = " | ".join(cell.replace("|", "\\|") for cell in row)
        lines.append(f"| {re.sub(DOCUMENT, LINK, text)} |")
    return "\n".join(lines)


def fill(path: Path, text: str, part: str, body: str) -> str:
    """The text of a document in which `body` replaces the generated part `part`."""
    body = body.replace(f"[{path.name}]({path.name}#", "[below](#")
    return splice(path, text, f"<!-- generated by docs/reference.py: {part} -->\n", "<!-- end -->\n", f"\n{body}\n\n")


def splice(path: Path, text: str, begin: str, end: str, body: str) -> str:
    """The text of a file in which `body` replaces all between a line that ends with `begin` and the line `end`."""
    before, begin_marker, remainder = text.partition(begin)
    _, end_marker, after = remainder.partition(f"\n{end}")
    if not begin_marker or not end_marker:
        raise SystemExit(f"{path}: there is no {begin.strip()!r} with {end.strip() or 'an empty line'!r} after it")
    return before + begin + body + end + after


def main(arguments: list[str] | None = None, root: Path = ROOT) -> None:
    parser = argparse.ArgumentParser(
        description="Make the files of options, and the lists in the documents and in --help."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is out of date")
    check = parser.parse_args(arguments).check
    stale = {path: text for path, text in generated(root).items() if not path.exists() or path.read_text() != text}
    if check and stale:
        files = ", ".join(str(path.relative_to(root)) for path in stale)
        raise SystemExit(
            f"out of date: {files}; run `python docs/reference.py`, which writes them from the options' classes "
            "and from conf/config.yaml"
        )
    for path, text in stale.items():
        path.write_text(text)


if __name__ == "__main__":
    main()
