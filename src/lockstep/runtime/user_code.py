"""The code of the user that a run uses: the Python files of extensions, scripts and modules, and their repositories.

`env.json` keeps it, and `code.diff` what no commit has. A run without code of the user needs none of this.
"""

import ast
import functools
import hashlib
import inspect
import linecache
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

from lockstep.config import extensions, options
from lockstep.config.extensions import MAIN
from lockstep.config.roles import TARGET
from lockstep.core import safe_read
from lockstep.core.fields import leaves
from lockstep.core.run import Code, Run
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_read import KB, MB, UnreadableFile
from lockstep.core.safe_write import write_atomic
from lockstep.runtime.environment import UNKNOWN, git

FILES_LISTED = 300  # the files of a larger package are known by their common hash alone
FILES_SHOWN = 4
DIFF_LIMIT, NEW_FILE_LIMIT = MB, 64 * KB
UNIFORM = ("--no-ext-diff", "--no-textconv", "--no-color", "--no-relative", "--src-prefix=a/", "--dst-prefix=b/")


@dataclass(frozen=True)
class UserCode:
    """The code of a package or a module: facts for `env.json`, and the diff to the commit of its repository."""

    facts: Code
    diff: bytes


def code_of(config: Mapping[str, Any], parts: Iterable[Any] = ()) -> dict[str, UserCode]:
    """The code of the classes that a config names, and of further classes and functions, by package or module."""
    targets = {str(value) for key, value in leaves(config) if key.endswith(f".{TARGET}")}
    used = (extension for extension in extensions.active() if any(map(extension.has, targets)))
    named = [cls for cls in extensions.of_program().values() if options.class_path(cls) in targets]
    return {extension.package: read(extension.folder) for extension in used} | _code_in([*named, *parts])


def code_here(names: Iterable[str]) -> dict[str, UserCode]:
    """The code of all extensions, and of further packages and modules that this process has loaded."""
    places = {name: place for name in names if (place := _place(name))}
    places |= {extension.package: extension.folder for extension in extensions.active()}
    return {name: read(place) for name, place in places.items()}


def _code_in(parts: Iterable[Any]) -> dict[str, UserCode]:
    """The code of classes with their bases, and of functions, without what is installed."""
    members, code = dict[str, list[Any]](), dict[str, UserCode]()
    for part in parts:
        for own in inspect.getmro(part) if isinstance(part, type) else [part]:
            members.setdefault(str(own.__module__).partition(".")[0], []).append(own)
    for name, of_module in members.items():
        if place := _place(name):
            code[name] = read(place)
        elif name == MAIN and (sources := _sources_of_cells(of_module)):
            hashes = {own: hashlib.sha256(text.encode()).hexdigest() for own, text in sorted(sources.items())}
            code[name] = UserCode(_facts(hashes, {"place": "", "git": UNKNOWN, "git_changes": UNKNOWN}), b"")
    return code


def _place(name: str) -> Path | None:
    """The folder of a loaded package or the file of a loaded module; None if it is installed: versions tell those."""
    module = vars(sys.modules[name]) if name in sys.modules else {}
    place = Path(next(iter(module.get("__path__", ())), module.get("__file__")) or "")
    folders = [Path(sysconfig.get_path("stdlib")), Path(__file__).parents[1]]
    packages = {"site-packages", "dist-packages"} & {*place.parts}
    return None if place == Path() or packages or any(map(place.is_relative_to, folders)) else place


def _sources_of_cells(parts: Iterable[Any]) -> dict[str, str]:
    """The sources of a notebook's classes and functions, and of those that these name, as far as they are known."""
    sources, waiting = dict[str, str](), [*parts]
    for own in waiting:  # it grows
        if own.__qualname__ not in sources:
            sources[own.__qualname__] = text = _source_in_cell(own)
            # A sweep has what was pickled: functions with the names that they use, and not the program's module.
            scopes = [vars(sys.modules[MAIN]), *(function.__globals__ for function in _functions_of(own))]
            named = [scope.get(word) for scope in scopes for word in re.findall(r"\w+", text)]
            own_kind = [value for value in named if isinstance(value, type | FunctionType)]
            waiting += [value for value in own_kind if value.__module__ == MAIN]
    return {name: text for name, text in sources.items() if text}


def _functions_of(own: Any) -> list[FunctionType]:
    """A function itself, or the methods of a class."""
    return [value for value in (own, *vars(own).values()) if isinstance(value, FunctionType)]


def _source_in_cell(own: Any) -> str:
    """The source of a class or a function in the cell of a function of it, or else in the newest cell with its name.

    Empty if Python does not have it. `inspect` finds a class by the file of its module, and a notebook has none.
    """
    cells = [name for name in reversed(linecache.cache) if not Path(name).exists()]
    for name in [*(function.__code__.co_filename for function in _functions_of(own)), *cells]:
        with suppress(SyntaxError):
            for node in ast.walk(ast.parse("".join(linecache.getlines(name)))):
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == own.__name__:
                    return ast.unparse(node)
    return ""


@functools.cache
def read(place: Path) -> UserCode:
    """The code in a folder or a file. Read once: forks of this process run the code that it has loaded."""
    folder, paths = (place, python_files(place)) if place.is_dir() else (place.parent, [place])
    hashes = {path.relative_to(folder).as_posix(): _hash(path) for path in paths}
    state, diff = _repository(folder, [*hashes], "*.py" if place.is_dir() else f":(literal){place.name}")
    return UserCode(_facts(hashes, state), diff)


def _facts(hashes: Mapping[str, str], state: Code) -> Code:
    together = "".join(f"{digest} {name}\n" for name, digest in hashes.items())
    files = {name: digest[:12] for name, digest in hashes.items()} if len(hashes) <= FILES_LISTED else {}
    return {"sha256": hashlib.sha256(together.encode()).hexdigest(), **state, "files": files}


def python_files(package: Path) -> list[Path]:
    """The Python files of a package, sorted. A subfolder without any is not searched: it may be a data set."""
    paths = []
    for name, subfolders, names in os.walk(package):
        modules = [Path(name, file) for file in names if file.endswith(".py") and file[:-3].isidentifier()]
        paths += modules
        is_searched = modules or Path(name) == package
        subfolders[:] = [folder for folder in subfolders if is_searched and folder.isidentifier()]
    return sorted(paths)


def _hash(path: Path) -> str:
    """The hash of a Python file with the line ends of Unix, because git may change them."""
    try:
        content = safe_read.read_bytes(path, 64 * MB, links=True)
    except UnreadableFile:
        content = b"unreadable"
    return hashlib.sha256(content.replace(b"\r\n", b"\n")).hexdigest()


def _repository(folder: Path, files: Sequence[str], pattern: str) -> tuple[Code, bytes]:
    """What git says of the Python `files` of a folder, all that fit `pattern`: facts, and differences to the commit.

    The differences have no ignored file and no other kind of file: they may hold secrets.
    """
    places = _texts(git(folder, "rev-parse", "--show-toplevel", "--show-prefix", "HEAD"), "\n")
    tracked = _texts(git(folder, "ls-files", "-z", "--", pattern), "\0")
    untracked = sorted({*files} - {*tracked})
    options = ("--literal-pathspecs", "ls-files", "-oz", "--exclude-standard", "--", *untracked)
    new = _texts(git(folder, *options), "\0") if untracked else []
    if len(places) != 3 or not (new or len(untracked) < len(files)):  # no commit yet, or none of its files
        return {"place": "", "git": UNKNOWN, "git_changes": UNKNOWN}, b""
    top, place, commit = places
    changed = git(folder, "status", "--porcelain", "--untracked-files=no")
    diff = git(folder, "diff", "HEAD", *UNIFORM, "--", pattern) or b"" if changed else b""
    for name in new:
        part = git(Path(top), "diff", "--no-index", *UNIFORM, "--", "/dev/null", place + name, codes=(0, 1)) or b""
        left_out = f"# left out: {place}{name} is new, and its diff has {len(part):,} bytes\n".encode()
        diff += part if len(part) <= NEW_FILE_LIMIT else left_out
    if len(diff) > DIFF_LIMIT:
        diff = diff[:DIFF_LIMIT] + f"\n# cut: the diff has {len(diff):,} bytes\n".encode()
    has_changes = UNKNOWN if changed is None else bool(changed or new)
    return {"place": place.rstrip("/"), "git": commit, "git_changes": has_changes}, diff


def _texts(output: bytes | None, end: str) -> list[str]:
    """The texts of a command's output, each of which has this end."""
    return (output or b"").decode(errors="replace").split(end)[:-1]


def changes(earlier: Mapping[str, Code], present: Mapping[str, UserCode]) -> dict[str, str]:
    """The packages whose code is not what was recorded, each with its changed files, for a sentence."""
    changed = {}
    for package in sorted({*present} & {*earlier}):
        before, now = earlier[package]["files"], present[package].facts["files"]
        names = [
            name + (" (new)" if name not in before else " (gone)" if name not in now else "")
            for name in sorted({*before, *now})
            if before.get(name) != now.get(name)
        ]
        more = [f"{len(names) - FILES_SHOWN} more"] if len(names) > FILES_SHOWN else []
        if earlier[package].get("sha256") != present[package].facts["sha256"]:
            changed[package] = ", ".join([*names[:FILES_SHOWN], *more]) if before and now else "its files"
    return changed


def write_code(run_dir: RunDir, present: Mapping[str, UserCode], step: int) -> Code:
    """Write the diffs of a run that begins after `step`; returns what `env.json` keeps.

    A run that was resumed with other code keeps the hash and the commit of the earlier one. Raises StorageError.
    """
    run = Run(run_dir.path)
    earlier, history, diffs = run.code or {}, [*run.earlier_code], b""
    for package, code in present.items():
        before = {key: value for key, value in earlier.get(package, {"sha256": None}).items() if key != "files"}
        if step and before["sha256"] != code.facts["sha256"]:
            history.append({"package": package, "until_step": step, **before})
        if code.diff and code.facts != earlier.get(package):
            diffs += f"# {package} after step {step}, against commit {code.facts['git']}\n".encode() + code.diff
    if diffs:
        write_atomic(run_dir.code_diff, (safe_read.read_if_exists(run_dir.code_diff) or b"") + diffs)
    return {"code": {package: code.facts for package, code in present.items()}, "earlier_code": history}


def frame_of(error: BaseException, *callers: Path) -> traceback.FrameSummary | None:
    """The line of the user's file where an error comes from; the file was called from files below `callers`."""
    stack = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in stack if not {*callers} & {*Path(frame.filename).parents}]
    own = [frame for frame in frames if frame.filename == frames[0].filename]  # the last one is the deepest
    return own[-1] if own else None
