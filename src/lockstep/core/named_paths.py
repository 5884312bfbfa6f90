"""What a user means by the path of a run: the newest one for `latest`, and what a misspelt path is close to."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from lockstep.core import safe_read
from lockstep.core.errors import InputError, close_to
from lockstep.core.run_dir import BEST, LATEST, SWEEP, RunDir, relative
from lockstep.core.safe_read import UnreadableFile, read_name, read_text


def latest(root: Path, key: str) -> RunDir:
    """The run that was started last under `root`. Raises InputError, which `key` begins, if there is none."""
    folder = (root / _content(read_text, root / LATEST, key).replace("\0", "")).resolve()
    if root.resolve() not in folder.parents and not _is_output_root(root, RunDir(folder)):
        raise InputError(f"{key}: {root / LATEST} names {folder}, expected a folder below {root}; name a run folder")
    return RunDir(folder)


def _content(read: Callable[[Path], str], pointer: Path, key: str) -> str:
    try:
        return read(pointer).strip()
    except UnreadableFile as error:
        reason = f"no run has been started in {pointer.parent} yet" if error.missing else error
        raise InputError(f"{key}: {reason}; name a run folder") from error


def _is_output_root(root: Path, run_dir: RunDir) -> bool:
    """Whether a run, which is in another folder (`hydra.run.dir=FOLDER`), was started with this `output_root`."""
    try:
        return Path(safe_read.read_yaml(run_dir.config)["output_root"]).resolve() == root.resolve()
    except (UnreadableFile, LookupError, TypeError, ValueError):
        return False


def near_paths(path: Path) -> list[Path]:
    """What has a similar name, for a path that does not exist: the path itself, or a folder in it."""
    with suppress(OSError, ValueError, StopIteration):  # the path is too long, or nobody may list its folder
        folder = next(parent for parent in path.parents if parent.is_dir() and not path.exists())
        name, *rest = path.relative_to(folder).parts
        paths = [Path(folder, entry, *rest) for entry in close_to(name, (entry.name for entry in folder.iterdir()))]
        return [path for path in paths if path.exists()]
    return []


def near_path(path: Path, words: Iterable[str] = ()) -> str:
    """` Did you mean PATH?` for a path that does not exist; `words` have a meaning in its place, such as `latest`."""
    near = [] if path.exists() else [*close_to(str(path), words), *map(str, near_paths(path))]
    return f" Did you mean {' or '.join(near)}?" if near else ""


def pointed(path: Path, root: Path, key: str) -> Path:
    """The folder that a user's path names: the newest run for `latest`, the best job for `best`, job 3 for `SWEEP/3`.

    `latest` alone is the newest run of `root`. `key` begins the error: InputError for a path that is a misspelt one.
    """
    if path.name.isdecimal() and (path.parent / SWEEP).is_file() and not path.exists():
        return next(path.parent.glob(f"{int(path.name):03}-*"), path)
    if path.name != LATEST and not path.exists() and (near := near_path(path, [LATEST])):
        raise InputError(f"{key}: {path} does not exist.{near}".removeprefix(f"{path}: "))
    if path.name == BEST and path.parent.is_dir() and not path.exists():
        raise InputError(
            f"{key}: there is no {path}: `best` is in the folder of a sweep, from the first job that is done; name a "
            "run folder, or outputs/sweeps/NAME/best"
        )
    if path.name == LATEST and not path.is_dir():
        root = root if path == Path(LATEST) else path.parent
        return relative(latest(root, key).path)
    if path.name == BEST and path.is_file():
        folder = path.parent / _content(read_name, path, key)
        if folder.is_symlink():
            raise InputError(
                f"{key}: {path} names {folder.name}, a symbolic link, expected a folder; name a run folder"
            )
        return folder
    return path
