"""`lockstep report --bundle`: what a bug report needs of a run or a sweep, in one zip, for its sender to read first.

Only small texts are in it: no data, weights, images, predictions or source. A link may lead to any file of this
machine, so none is followed.
"""

import os
import zipfile
from pathlib import Path

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
    if not (own := _texts_of(folder)):
        raise InputError(f"{folder} is neither a run nor a sweep; `lockstep runs {folder}` lists those in it")
    jobs = [place for place in run_folders(folder) if place != folder]
    jobs.sort(key=lambda place: Run(place).state == State.done)
    files = [(path, RUN_LIMIT) for path in own] + [(path, JOB_LIMIT) for job in jobs for path in _texts_of(job)]
    runs = map(Run, (folder, *jobs))
    secrets = [*secrets_in([dict(os.environ), *([run.composed, run.overrides] for run in runs)])]
    target = Path(f"lockstep-{slug(redacted(folder.resolve().name, secrets))}.zip")
    if os.path.lexists(target):
        raise InputError(f"{target} exists; remove it, or run the command in another folder")
    left_out, size = [], 0
    with storing(target), replacing(target) as new, zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as zipped:
        for path, limit in files:
            name = redacted(path.relative_to(folder).as_posix(), secrets).replace("\n", r"\n")
            try:
                text = redacted(_shortened(path, limit), secrets).encode()
                if size + len(text) > BUNDLE_LIMIT:
                    raise UnreadableFile(path, f"does not fit: all files may have {format_bytes(BUNDLE_LIMIT)}")
            except UnreadableFile as error:
                left_out.append(f" left out  {name} {error.reason}")
                continue
            zipped.writestr(name, text)
            size += len(text)
            log.show(f"{format_bytes(len(text)):>9}  {name}")
    for sentence in left_out:
        log.show(sentence)
    log.show(
        f"wrote {target}, {format_bytes(target.stat().st_size)}: no data, weights, images or predictions. Secrets, "
        "home folders, your user name and names of images are hidden where they are recognized; read it before "
        "you send it"
    )


def _texts_of(folder: Path) -> list[Path]:
    """The texts of a run, or of a sweep without its jobs, for a bundle."""
    run = RunDir(folder)
    paths = run.prepared_files() - {run.lock, run.code_diff} | {run.metrics, run.gpu, run.incident / "incident.json"}
    paths |= {folder / SWEEP, *folder.glob(f"{JOBS}/*.json"), *folder.glob(f"{JOBS}/*.log")}
    return sorted(
        path for path in paths if os.path.lexists(path) and not (path.parent != folder and path.parent.is_symlink())
    )


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
