"""What an option and its keys mean, read from the source of its class: for `--help` and the generated documents.

The first paragraph of the docstring is the meaning of the option. The meaning of a key is the comment above its
field or after it on its line, or its entry below `Fields:` in the docstring; or else the base class's.
"""

import ast
import functools
import inspect
import itertools
import json
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import yaml

from lockstep.config.schema import MANY

COLUMNS = 118
COMMENT_COLUMN = 23  # of the comment after a key and its value


def meaning_of(cls: type[Any]) -> str:
    """The first paragraph of a class's docstring; empty without one."""
    text = inspect.cleandoc(vars(cls).get("__doc__") or "")
    is_generated = text.startswith(f"{cls.__name__}(")  # by `dataclass`, for a class without a docstring
    return "" if is_generated else " ".join(text.partition("\n\n")[0].split())


def meanings_of(cls: type[Any]) -> dict[str, str]:
    """The meaning of each key that has one. Keys of the class come before keys of its base classes."""
    bases = [base for base in cls.__mro__ if "__dataclass_fields__" in vars(base)]
    comments: dict[str, str] = {}
    for base in reversed(bases):
        comments |= _comments_of(base)
    last = {name: place for place, base in enumerate(bases) for name in vars(base)["__dataclass_fields__"]}
    names = sorted((field.name for field in fields(cls)), key=last.__getitem__)
    return {name: comments.get(name, "") for name in names}


def _comments_of(cls: type[Any]) -> dict[str, str]:
    """The comments at the fields of a class, and the entries below `Fields:` in its docstring."""
    try:
        lines, definitions = _parsed(cls.__module__)
        body = definitions[cls.__name__].body
    except (OSError, TypeError, LookupError, SyntaxError):  # written in a console, or inside a function
        lines, body = [], []
    _, _, section = (inspect.cleandoc(vars(cls).get("__doc__") or "")).partition("\nFields:\n")
    entries = re.findall(r"^(\w+): (.*(?:\n +.*)*)", textwrap.dedent(section), re.MULTILINE)
    comments = {name: " ".join(text.split()) for name, text in entries}
    for field in body:
        if isinstance(field, ast.AnnAssign) and field.end_lineno is not None:
            above = [*itertools.takewhile(lambda line: re.match(" +# ", line), reversed(lines[: field.lineno - 1]))]
            words = [*reversed(above), lines[field.end_lineno - 1][field.end_col_offset :]]
            if comment := " ".join(line.strip().removeprefix("# ") for line in words if line.strip()):
                comments[ast.unparse(field.target)] = comment
    return comments


@functools.cache
def _parsed(module: str) -> tuple[list[str], dict[str, ast.ClassDef]]:
    """The lines of a module, and its classes."""
    text = inspect.getsource(sys.modules[module])
    return text.splitlines(), {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}


def as_yaml(value: Any) -> str:
    """A value in one line of YAML."""
    if isinstance(value, list | dict):
        return json.dumps(value)
    return yaml.safe_dump(value, width=1000).removesuffix("...\n").strip()


def config_text(
    group: str, name: str, meaning: str, node: Mapping[str, Any], keys: Mapping[str, str], note: str = ""
) -> str:
    """The text of `conf/GROUP/NAME.yaml`: `keys` are the meanings of the node's keys, `note` is one of the class."""
    lines = [*_wrapped(meaning)]
    indent = "  " * (group in MANY)
    if indent:
        lines.append(f"{name}:")
    if "defaults" in node:
        lines.append("defaults:")
        lines += [f"  - {key}: {option}" for item in node["defaults"] for key, option in item.items()]
    lines.append(f"{indent}_target_: {node['_target_']}{note}")
    for key, comment in keys.items():
        line = f"{key}: {as_yaml(node[key])}"
        in_one = f"{indent}{line:<{COMMENT_COLUMN}}  # {comment}"
        lines += [in_one] if len(in_one) <= COLUMNS else [*_wrapped(comment, indent), f"{indent}{line}"]
    return "".join(f"{line.removesuffix('  # ').rstrip()}\n" for line in lines)


def _wrapped(comment: str, indent: str = "") -> Iterable[str]:
    width = COLUMNS - len(f"{indent}# ")
    lines = textwrap.wrap(comment, width, break_on_hyphens=False, break_long_words=False)
    return [f"{indent}# {line}" for line in lines]
