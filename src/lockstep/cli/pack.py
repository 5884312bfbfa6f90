"""`lockstep pack`: decode a folder of image files once, for data that is too big to be resident."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from lockstep.config.commands import override, typed
from lockstep.core import log
from lockstep.core.errors import InputError
from lockstep.core.fields import problems
from lockstep.data import packing
from lockstep.data.datasets.files import USUAL_STORED
from lockstep.data.datasets.folder import Folder
from lockstep.runtime.host import cores

# Replaces the keys in the sentences of `dataset=folder` by the arguments of this command.
WORDS = {
    "dataset.path: ": "",
    "the folder above: dataset.path=": "the folder above: lockstep pack ",
    "name that with dataset.train_folder=": "make train of the folder ",
    "dataset.path=FOLDER": "lockstep pack SOURCE TARGET",
    "dataset.skip=N": "--skip N",
    "dataset.val_folder: ": "",
    "name the one of the validation split with dataset.val_folder=NAME": "make it",
    "use dataset.train_folder=. dataset.val_share=0.1": "move them into train/ and add --val-share 0.1",
    "dataset.val_share=0.1": "--val-share 0.1",
    "dataset.val_share": "--val-share",
}


def pack_or_check(
    source: str | None,
    target: str | None,
    *,
    size: int | None,
    skip: int | None,
    val_share: float | None,
    check: str | None,
) -> None:
    """Pack `source` to `target`, or check the packed data set `check`; `lockstep.cli.arguments` allows only one."""
    if check is not None:
        check_packed(check)
    else:
        assert source is not None
        assert target is not None
        pack(source, target, size=256 if size is None else size, skip=skip or 0, val_share=val_share)


def pack(source: str, target: str, *, size: int, skip: int, val_share: float | None = None) -> None:
    """Pack the class folders of `source`, as images of side `size`, into the new folder `target`.

    `skip` and `val_share` are the keys of `dataset=folder`.

    Raises:
        InputError: the source does not exist, too many of its images are broken, or `target` exists.
        StorageError: `target` cannot be written.
    """
    for problem in problems(Folder, {"decode_size": size, "skip": skip, "val_share": val_share}):
        for key, argument in (("decode_size", "--size"), ("skip", "--skip"), ("val_share", "--val-share")):
            problem = problem.replace(key, argument)
        problem = problem.replace("auto or ", "").replace("=auto", f"={USUAL_STORED}")
        raise InputError(problem)
    torch.set_num_threads(1)  # each core decodes another image
    folder = Folder(path=source, decode_size=size, skip=skip, val_share=val_share)
    try:
        images = len(folder.train()) + len(folder.eval())
        for note in folder.notes():
            log.warn(note)
        with _bar() as bar:
            task = bar.add_task("packing", total=images)
            broken = packing.pack(
                folder, Path(target).absolute(), threads=cores(), advanced=lambda n: bar.advance(task, n)
            )
    except InputError as error:
        sentence = str(error)
        for key_text, argument in WORDS.items():
            sentence = sentence.replace(key_text, argument)
        raise InputError(sentence) from error
    for image in broken:
        log.warn(f"{image.failure}: left out")
    gigabytes = images * math.prod(folder.image_shape) / 1e9
    words = typed(["dataset=packed", override("dataset.path", target)])
    log.say(f"packed {images - len(broken):,} images, {gigabytes:.2f} GB; train with {words}")


def check_packed(target: str) -> None:
    """Read a packed data set whole and compare it with the hashes in its manifest.

    Raises:
        InputError: a file is missing or has changed.
    """
    folder = Path(target).absolute()
    size = sum(file.stat().st_size for file in folder.glob("*.*") if file.is_file())
    with _bar() as bar:
        task = bar.add_task("checking", total=size)
        packing.check(folder, lambda n: bar.advance(task, n))
    log.say(f"{target} is whole: every file matches its sha256")


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("left"))
    return Progress(
        *columns, TimeRemainingColumn(), console=log.console, transient=True, disable=not log.console.is_terminal
    )
