"""The run folder of a job: the paths of its files, its summary, how it is created, and how it is found again."""

import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from lockstep.core.errors import InputError, Stopped, StorageError, as_known, close_to
from lockstep.core.formats import FileFormat, NewerFormat, check_format, stamp
from lockstep.core.safe_read import UnreadableFile, is_number, read_json, read_name, read_text, read_yaml
from lockstep.core.safe_write import absent, fail_if_full, make_folder, storing, sync, write_atomic
from lockstep.core.tags import Direction

NAME_LIMIT = 100
LATEST, BEST = "latest", "best"  # text files with the name of a folder next to them
SWEEP = "sweep.json"  # in the folder of a sweep
MANIFEST = "manifest.json"  # marks a folder as a checkpoint or a packed data set
# The types of what is read in `summary.json`. Each key may be missing; all but texts may be null.
TEXTS = ("status", "run", "error", "monitor", "stopped_early")
NUMBERS = (
    *("started", "seconds", "step", "steps", "steps_per_epoch", "objective", "best", "best_step", "skipped"),
    *("img_per_s", "data_wait_pct", "gpu_memory", "cpu_mem_gb"),
)
TABLES = ("spent", "time", "scores", "test")  # numbers by their names
# The logs that a job can have written before training starts.
PREPARED_LOGS = ("rank*.log", "rank*.error.json", "slurm-*.log")


def slug(text: str) -> str:
    """`text` as one safe folder name: no separator or leading dot; a long one is cut and gets a hash of the text."""
    clean = re.sub(r"[^\w.,=+-]+", "_", text).strip("._") or "job"
    if len(clean.encode()) <= NAME_LIMIT:
        return clean
    digest = hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:8]
    return f"{clean.encode()[: NAME_LIMIT - 9].decode(errors='ignore')}-{digest}"


class PathBelow:
    """A path below a run folder, as an attribute of `RunDir`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: "RunDir", owner: type["RunDir"]) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunDir:
    """The folder of one job. Each file has one writer: main, or the rank that its name gives."""

    path: Path

    hydra = PathBelow(".hydra")
    lock = PathBelow(".lock")
    logs = PathBelow("logs")
    checkpoints = PathBelow("checkpoints")
    last = PathBelow("checkpoints/last")
    best = PathBelow("checkpoints/best")
    config = PathBelow("config.yaml")
    composed = PathBelow(".hydra/config.yaml")  # as Hydra composed it, before anything was resolved or chosen
    overrides = PathBelow(".hydra/overrides.yaml")
    command = PathBelow("command.txt")
    environment = PathBelow("env.json")
    code_diff = PathBelow("code.diff")
    metrics = PathBelow("metrics.jsonl")
    table = PathBelow("metrics.csv")
    gpu = PathBelow("gpu.jsonl")
    weights = PathBelow("model.safetensors")
    log = PathBelow("train.log")
    summary = PathBelow("summary.json")
    validation = PathBelow("validation.json")
    report = PathBelow("report.html")
    incident = PathBelow("incident")

    @classmethod
    def create(cls, root: Path, name: str) -> Self:
        """A new folder under `root`, which no other job gets. Raises InputError or StorageError."""
        while True:
            stamp = time.strftime("%Y%m%d-%H%M%S")
            path = root / f"{stamp}-{slug(name)}-{secrets.token_hex(2)}"
            with suppress(FileExistsError):
                return cls.at(path, new=True)

    @classmethod
    def provide(cls, folder: Path | None, root: Path, name: str) -> tuple[Self, list[Path]]:
        """The run folder of a job, at `folder` or a new one, and the folders that this call has created for it."""
        new = absent(*(cls(folder).folders if folder is not None else (root,)))
        if folder is not None:
            return cls.at(folder), new
        return (run := cls.create(root, name)), [*run.folders, *new]

    @classmethod
    def at(cls, path: Path, *, new: bool = False) -> Self:
        """The run folder at exactly `path`. The folder and its subfolders are created if they are missing.

        Raises InputError, StorageError if the disk is full, and FileExistsError if a `new` folder exists.
        """
        run = cls(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(exist_ok=not new)
            for folder in run.folders[:-1]:
                make_folder(folder)
            for folder in (path, path.parent):
                sync(folder)
        except FileExistsError as error:
            if new and path.is_dir():  # another job has just created it
                raise
            raise InputError(f"output_root: {error.filename} is a file, expected a folder for the run") from None
        except OSError as error:
            fail_if_full(path, error)
            raise InputError(
                f"output_root: {path} cannot be written ({error.strerror}); "
                "choose a folder that can be, with output_root=FOLDER"
            ) from error
        return run

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders that each run has, the deepest first."""
        return self.hydra, self.logs, self.checkpoints, self.path

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank{rank}.log"

    def rank_samples(self, rank: int) -> Path:
        return self.logs / f"rank{rank}.samples.jsonl"

    def rank_error(self, rank: int) -> Path:
        return self.logs / f"rank{rank}.error.json"

    def rank_errors(self) -> list[Path]:
        return [*self.logs.glob("rank*.error.json")]

    def read_summary(self) -> dict[str, Any]:
        """The content of `summary.json`; empty before the file is written. Raises UnreadableFile if it is damaged."""
        try:
            loaded = read_json(self.summary)
        except UnreadableFile as error:
            if error.missing:
                return {}
            raise
        check_format(FileFormat.run, loaded, self.summary)
        if not isinstance(loaded, dict) or not _is_summary(loaded):
            raise UnreadableFile(self.summary, "is not the summary of a run")
        return loaded

    def _known_summary(self) -> dict[str, Any]:
        """The content of `summary.json` to be carried over; empty if the file is missing or damaged."""
        with suppress(UnreadableFile):
            return self.read_summary()
        return {}

    def write_summary(self, **facts: Any) -> None:
        """Update `summary.json`, without the content of a damaged one. Raises StorageError."""
        facts = {**stamp(FileFormat.run), **self._known_summary(), **facts}
        write_atomic(self.summary, json.dumps(facts, indent=2, allow_nan=False) + "\n")

    def start_summary(self, **facts: Any) -> None:
        """Replace `summary.json` by the summary of a running job. The outcome of an earlier part is dropped."""
        facts = {**stamp(FileFormat.run), "status": "running", **facts}
        write_atomic(self.summary, json.dumps(facts, indent=2, allow_nan=False) + "\n")

    def write_ending(self, error: BaseException) -> None:
        """Write into the summary how the job ended; if it cannot be written, only `error` says it."""
        known = as_known(error)
        status = "stopped" if isinstance(error, Stopped) else "failed"
        with suppress(OSError, StorageError, UnreadableFile, NewerFormat, LookupError, TypeError):
            has_started = self._known_summary().get("status") == "running"
            self.write_summary(status=status, exit_code=known.exit_code, error=str(known))
            if not has_started:  # else it is the newest run already
                self.mark_latest(Path(read_yaml(self.config)["output_root"]))

    @property
    def began(self) -> bool:
        return self.metrics.exists()

    def prepared_files(self) -> set[Path]:
        """The files that a job writes before training starts; some of them may not exist."""
        written = {self.lock, self.config, self.command, self.environment, self.code_diff, self.summary}
        written |= {self.overrides, self.composed, self.hydra / "hydra.yaml"}
        return written | self.log_files() | {self.log}

    def log_files(self) -> set[Path]:
        """The existing logs that a job can have written before training starts."""
        return {path for name in PREPARED_LOGS for path in self.logs.glob(name)} | {*self.path.glob(self.log.name)}

    @property
    def only_prepared(self) -> bool:
        """Whether no training started here: the folder is empty, or the job was killed while it was prepared."""
        expected = {*self.prepared_files(), self.hydra, self.logs, self.checkpoints}
        return all(path in expected or path.suffix == ".tmp" for path in self.path.rglob("*"))

    def mark_latest(self, root: Path) -> None:
        """Write the name of this folder to `root/latest`: TensorBoard would show a link as a second run."""
        with storing(root):
            root.mkdir(parents=True, exist_ok=True)  # the run folder can be outside it: hydra.run.dir=FOLDER
        if not (root / LATEST).is_dir():  # a folder here is a run with this name: hydra.run.dir=outputs/latest
            write_atomic(root / LATEST, f"{os.path.relpath(self.path, root)}\n")


def _is_summary(facts: Mapping[str, Any]) -> bool:
    tables = [facts.get(key) or {} for key in TABLES]
    findings = [facts.get(key) or {} for key in ("verdict", "learning")]
    numbers = [facts.get(key) for key in NUMBERS]
    numbers += [number for table in tables if isinstance(table, Mapping) for number in table.values()]
    return (
        all(isinstance(facts.get(key, ""), str) for key in TEXTS)
        and all(isinstance(table, Mapping) for table in (*tables, *findings, facts.get("directions") or {}))
        and all(number is None or is_number(number) for number in numbers)
        and all(direction in [*Direction] for direction in (facts.get("directions") or {}).values())
    )


def check_folder(folder: Path) -> None:
    """Refuse a run folder, a checkpoint or a sweep of a newer format. Who reads a damaged one says that it is."""
    files = {FileFormat.run: RunDir(folder).summary, FileFormat.checkpoint: folder / MANIFEST}
    files |= {FileFormat.sweep: folder / SWEEP}
    for kind, file in files.items():
        with suppress(UnreadableFile):
            check_format(kind, read_json(file), file)


def relative(path: Path) -> Path:
    """A path as the user would type it from the current folder."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


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
    with suppress(UnreadableFile, LookupError, TypeError, ValueError):
        return Path(read_yaml(run_dir.config)["output_root"]).resolve() == root.resolve()
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

    `latest` alone is the newest run of `root`. Raises NewerFormat; InputError, with `key`, for a misspelt path.
    """
    folder = _pointed(path, root, key)
    check_folder(folder)
    return folder


def _pointed(path: Path, root: Path, key: str) -> Path:
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
