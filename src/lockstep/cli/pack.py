"""`lockstep pack`: decode a folder of image files once, for data that is too big to be resident."""

import math
from pathlib import Path

import torch

from lockstep.config.commands import override, typed
from lockstep.core import log
from lockstep.core.errors import InputError
from lockstep.core.fields import problems
from lockstep.data.datasets import packed
from lockstep.data.datasets.files import USUAL_STORED
from lockstep.data.datasets.folder import Folder
from lockstep.runtime.limits import cores
from lockstep.telemetry.progress import progress

# Replaces the keys in the sentences of `dataset=folder` by the arguments of this command.
WORDS = {
    "dataset.path: ": "",
    "the folder above: dataset.path=": "the folder above: lockstep pack ",
    "dataset.path=FOLDER": "lockstep pack SOURCE TARGET",
    "dataset.skip=N": "--skip N",
    "dataset.val_folder: ": "",
    "name the one of the validation split with dataset.val_folder=NAME": "make it",
    "name the one of the validation split with dataset.val_folder=": "link it there as ",
    "use dataset.train_folder=. dataset.val_share=0.1": "move them into train/ and add --val-share 0.1",
    "use dataset.path=": "link the class folders in ",
    " dataset.train_folder=": " as train: ",
    " dataset.val_folder=": " as val: ",
    "dataset.val_share=0.1": "--val-share 0.1",
    "dataset.val_share": "--val-share",
}


def pack(
    source: str | None,
    target: str | None,
    *,
    size: int | None = None,
    skip: int | None = None,
    val_share: float | None = None,
    check: str | None = None,
) -> None:
    """Pack the class folders of `source`, as images of side `size`, into the new folder `target`; or check `check`.

    `skip` and `val_share` are the keys of `dataset=folder`. `lockstep.cli.arguments` allows one of both actions.

    Raises:
        InputError: the source does not exist, too many of its images are broken, or `target` exists.
        StorageError: `target` cannot be written.
    """
    if source is None or target is None:
        check_packed(str(check))
        return
    size, skip = USUAL_STORED if size is None else size, skip or 0
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
        with progress("packing", images) as advance:
            broken = packed.pack(folder, Path(target).absolute(), threads=cores(), advanced=advance)
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
    log.say(f"random crops are now cut from squares of {size} pixels, and not from the files, so it is another run")


def check_packed(target: str) -> None:
    """Read a packed data set whole and compare it with the hashes in its manifest."""
    folder = Path(target).absolute()
    size = sum(file.stat().st_size for file in folder.glob("*.*") if file.is_file())
    with progress("checking", size) as advance:
        packed.check(folder, advance)
    log.say(f"{target} is whole: every file matches its sha256")
