"""The list of public names in tests/public.txt, one a line with its meaning; docs/reference.py keeps it.

A name is a key of the config, an option of a group, a command, a flag, an exit code, or a name in docs/python.md. The
list only grows: a name that goes or changes its meaning is refused (CONTRIBUTING.md, "Versions").
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any

import signatures
from lockstep.cli.arguments import parsers
from lockstep.config.options import classes_of
from lockstep.config.schema import BLOCKS, GROUPS, Job
from lockstep.core.errors import LockstepError
from lockstep.core.fields import former_names

HEADER = (
    "# The public names of Lockstep, written by docs/reference.py. CONTRIBUTING.md says when a line may change.\n"
)
ADVICE = (
    "CONTRIBUTING.md says in 'Versions' how a name goes; if all that was valid keeps its meaning, take the line out "
    "of tests/public.txt and run `python docs/reference.py` again"
)


def extended(released: str, names: Iterable[str]) -> str:
    """The list with all `names` in their order. The meaning of a deprecated name is `is now NEW NAME`.

    Raises:
        SystemExit: a name of the list is gone or has another meaning, and is not deprecated.
    """
    lines = list(dict.fromkeys(names))
    for line in released.removeprefix(HEADER).splitlines():
        name = line.partition(": ")[0]
        namesakes = [other for other in lines if other.partition(": ")[0] == name]
        if line not in lines and not any(other.startswith(f"{name}: is now ") for other in namesakes):
            change = f"means now {namesakes[0]!r}" if namesakes else "is gone"
            raise SystemExit(f"{line!r} is public, and {change}; {ADVICE}")
    return HEADER + "".join(f"{line}\n" for line in lines)


def former_keys() -> Iterator[str]:
    """The old names of keys (`with_history` at the field), which work until the next major version."""
    blocks: dict[str, type[Any]] = {"": Job, **{f"{name}.": cls for name, cls in BLOCKS.items()}}
    options = ((f"{group}={name} ", cls) for group in GROUPS for name, cls in classes_of(group).items())
    ours = ((place, cls) for place, cls in options if cls.__module__.startswith("lockstep."))
    for place, cls in [*blocks.items(), *ours]:
        for old, new in former_names(cls).items():
            yield f"key {place}{old}: is now {place}{new}"


def command_lines() -> Iterator[str]:
    """The commands, and their arguments with what each takes."""
    for name, parser in parsers()[1].items():
        yield f"command lockstep {name}"
        for action in parser._actions:
            if not isinstance(action, argparse._HelpAction):
                takes = "|".join(map(str, action.choices or ())) or str(action.metavar or "VALUE")
                many = action.nargs if isinstance(action.nargs, str) else ""
                meaning = f": {takes}{many}" if action.nargs != 0 else ""
                yield f"command lockstep {name} {', '.join(action.option_strings) or action.dest}{meaning}"


def exit_codes() -> Iterator[str]:
    """The exit codes, with the class of the error that ends with it."""
    yield "exit code 0: done"
    errors: list[type[LockstepError]] = [LockstepError, *LockstepError.__subclasses__()]
    own = {cls.exit_code: cls for cls in reversed(errors) if cls.__module__ == LockstepError.__module__}
    for code, cls in sorted(own.items()):
        yield f"exit code {code}: {cls.__name__}"


def python_lines(text: str) -> Iterator[str]:
    """The names in the parts of docs/python.md, with their calls or types."""
    for directive, name, options in signatures.PART.findall(text):
        if directive == "automodule":
            tree = ast.parse(inspect.getsource(importlib.import_module(name)))
            own = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
            hidden = signatures.value_of(options, "exclude-members")
            for part in (part for part in own if part[0] != "_" and part not in hidden):
                yield from _class_lines(f"{name}.{part}", options)
        elif directive in ("autoclass", "autoexception"):
            yield from _class_lines(name, options)
        elif directive == "autodata":
            yield f"python {name}"
        else:
            call = re.search(r"```python\n\w+(.*?)\n```", signatures.body(directive, name, ""), re.DOTALL)
            assert call
            yield f"python {name}: {' '.join(call[1].split())}"


def _class_lines(name: str, options: str) -> Iterator[str]:
    yield f"python {name}"
    for line in signatures.described(name, options).splitlines():
        if member := re.match(r"- `(\w+)(?:: )?(.*?)`(:|$)", line):
            yield f"python {name}.{member[1]}{f': {member[2]}' * bool(member[2])}"
