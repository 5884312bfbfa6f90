"""The code of the user that a run uses: the Python files of its extensions, and the state of their repositories.

`env.json` keeps it, and `code.diff` what no commit has. A run without extensions needs none of this.
"""

import functools
import hashlib
import os
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config import extensions
from lockstep.config.extensions import Extension
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
    """The code of an extension: facts for `env.json`, and its differences to the commit of its repository."""

    facts: Code
    diff: bytes


def code_of(config: Mapping[str, Any]) -> dict[str, UserCode]:
    """The code of the extensions whose classes a config names, by package."""
    targets = [str(value) for key, value in leaves(config) if key.endswith(f".{TARGET}")]
    used = (extension for extension in extensions.active() if any(map(extension.has, targets)))
    return {extension.package: read(extension) for extension in used}


def code_here() -> dict[str, UserCode]:
    """The code of all extensions, by package."""
    return {extension.package: read(extension) for extension in extensions.active()}


@functools.cache
def read(extension: Extension) -> UserCode:
    """The code of an extension. Read once: forks of this process run the code that it has loaded."""
    folder = extension.folder
    hashes = {path.relative_to(folder).as_posix(): _hash(path) for path in python_files(folder)}
    state, diff = _repository(folder, [*hashes])
    together = "".join(f"{digest} {name}\n" for name, digest in hashes.items())
    listed = hashes.items() if len(hashes) <= FILES_LISTED else ()
    files = {name: digest[:12] for name, digest in listed}
    return UserCode({"sha256": hashlib.sha256(together.encode()).hexdigest(), **state, "files": files}, diff)


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


def _repository(folder: Path, files: Sequence[str]) -> tuple[Code, bytes]:
    """What git says of the Python `files` of a folder: facts, and their differences to the commit.

    The differences have no ignored file and no other kind of file: they may hold secrets.
    """
    places = _texts(git(folder, "rev-parse", "--show-toplevel", "--show-prefix", "HEAD"), "\n")
    tracked = _texts(git(folder, "ls-files", "-z", "--", "*.py"), "\0")
    untracked = sorted({*files} - {*tracked})
    options = ("--literal-pathspecs", "ls-files", "-oz", "--exclude-standard", "--", *untracked)
    new = _texts(git(folder, *options), "\0") if untracked else []
    if len(places) != 3 or not (new or len(untracked) < len(files)):  # no commit yet, or none of its files
        return {"place": "", "git": UNKNOWN, "git_changes": UNKNOWN}, b""
    top, place, commit = places
    changed = git(folder, "status", "--porcelain", "--untracked-files=no")
    diff = git(folder, "diff", "HEAD", *UNIFORM, "--", "*.py") or b"" if changed else b""
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


def write(run_dir: RunDir, present: Mapping[str, UserCode], step: int) -> Code:
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
