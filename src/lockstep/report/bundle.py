"""`lockstep report --bundle`: what a bug report needs of a run or a sweep, in one zip, for its sender to read first.

Only small texts are in it: no data, weights, images, predictions or source. A link may lead to any file of this
machine, so none is followed.
"""

import os
import zipfile
from pathlib import Path
from typing import Any

from lockstep.core import log, safe_read
from lockstep.core.errors import InputError
from lockstep.core.run import Run, State
from lockstep.core.run_dir import SWEEP, RunDir, slug
from lockstep.core.safe_read import KB, MB, UnreadableFile
from lockstep.core.safe_write import replacing, storing
from lockstep.records.ledger import JOBS
from lockstep.records.runs import run_folders
from lockstep.report.redaction import redacted, secrets_in
from lockstep.runtime.host import format_bytes

RUN_LIMIT, JOB_LIMIT, BUNDLE_LIMIT = MB, 64 * KB, 32 * MB  # bytes: a file of a run, of a sweep's job; all files


def write_bundle(folder: Path) -> None:
    """Write the zip of a run or a sweep into the current folder, and show what is in it; unfinished jobs go first.

    Raises InputError, also if the zip exists, and StorageError.
    """
    jobs = [place for place in run_folders(folder) if place != folder]
    places = [folder, *sorted(jobs, key=lambda place: Run(place).state == State.done)]
    files = [(path, RUN_LIMIT if place == folder else JOB_LIMIT) for place in places for path in _texts_of(place)]
    if not _texts_of(folder):
        raise InputError(f"{folder} is neither a run nor a sweep; `lockstep runs {folder}` lists those in it")
    secrets = [*secrets_in([dict(os.environ), *(_values(path) for path, _ in files)])]
    target = Path(f"lockstep-{slug(redacted(folder.resolve().name, secrets))}.zip")
    if os.path.lexists(target):
        raise InputError(f"{target} exists; remove it, or run the command in another folder")
    left_out, size = [], 0
    with storing(target), replacing(target) as new, zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as zipped:
        for path, limit in files:
            name = redacted(path.relative_to(folder).as_posix(), secrets).replace("\n", r"\n")
            try:
                text = redacted(_shortened(path, limit), secrets).encode()
            except UnreadableFile as error:
                left_out.append(f"{name} {error.reason}")
                continue
            if (size := size + len(text)) > BUNDLE_LIMIT:
                left_out.append(f"{name}: all files have more than {format_bytes(BUNDLE_LIMIT)}")
                continue
            zipped.writestr(name, text)
            log.show(f"{format_bytes(len(text)):>9}  {name}")
    for sentence in left_out:
        log.show(f" left out  {sentence}")
    log.show(
        f"wrote {target}, {format_bytes(target.stat().st_size)}, without data, weights, images and predictions. "
        "Secrets, names of images, home folders and your user name are hidden where they are recognized: read it "
        "before you send it"
    )


def _texts_of(folder: Path) -> list[Path]:
    """The texts of a run, or of a sweep without its jobs, for a bundle."""
    run = RunDir(folder)
    paths = run.prepared_files() - {run.lock, run.code_diff} | {run.metrics, run.gpu, run.incident / "incident.json"}
    paths |= {folder / SWEEP, *folder.glob(f"{JOBS}/*.json"), *folder.glob(f"{JOBS}/*.log")}
    return sorted(
        path for path in paths if os.path.lexists(path) and not (path.parent != folder and path.parent.is_symlink())
    )


def _values(path: Path) -> Any:
    """The plain values in a YAML or JSON file; None for another file, and for one that cannot be read as such."""
    try:
        if path.suffix == ".yaml":
            return safe_read.read_yaml(path)
        return safe_read.read_json(path) if path.suffix == ".json" else None
    except UnreadableFile:
        return None


def _shortened(path: Path, limit: int) -> str:
    """The text of a file; a long one in its first and last lines only. Raises UnreadableFile."""
    with safe_read.open_plain(path) as file:
        text = file.read(limit)
        if rest := file.seek(0, os.SEEK_END) - len(text):
            text = text[: text.rfind(b"\n", 0, limit // 2) + 1]
            file.seek(-(limit // 2), os.SEEK_END)
            end = file.read(limit // 2).partition(b"\n")[2]
            cut = limit + rest - len(text) - len(end)
            text += f"[{cut:,} bytes in the middle are left out]\n".encode() + end
    return text.decode(errors="backslashreplace")
