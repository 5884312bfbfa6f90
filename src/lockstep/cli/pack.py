"""`lockstep pack`: the images of a data set, decoded once."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from lockstep.config.commands import OVERRIDE, key_of, override, shell_command
from lockstep.core import log
from lockstep.core.data_protocols import splits_of
from lockstep.core.errors import BrokenImage, InputError
from lockstep.data.datasets import packed
from lockstep.job.prepare import job_here
from lockstep.runtime.host import cores, format_bytes
from lockstep.telemetry.progress import progress


def pack(words: Sequence[str], *, check: str | None = None, **flags: str | None) -> None:
    """Pack a data set into a new folder, or check the packed folder `check`.

    `words` are the folder and the overrides of the data set, or the folder of a `dataset=folder`, the new folder and
    more overrides. `flags` are keys of `dataset`.
    """
    overrides = [f"dataset.{key}={value}" for key, value in flags.items() if value is not None]
    if check is not None and not (words or overrides):
        check_packed(check)
        return
    paths = [*itertools.takewhile(lambda word: not OVERRIDE.match(word), words)]
    if check is not None or len(paths) not in (1, 2) or len(words) < 2:
        raise InputError(
            "pack: expected TARGET and the overrides of a data set, SOURCE and TARGET, or --check TARGET alone; "
            "`lockstep pack --help`"
        )
    folder = ["dataset=folder", override("dataset.path", paths[0])] if len(paths) == 2 else []
    job = job_here(["batch=1", *folder, *overrides, *words[len(paths) :]], "pack decodes images")
    source, target = job.dataset, paths[-1]
    torch.set_num_threads(1)  # each core decodes another image
    images = sum(map(len, splits_of(source).values()))
    for note in source.notes():
        log.warn(note)
    try:
        with progress("packing", images) as advance:
            broken = packed.pack_source(source, Path(target).absolute(), threads=cores(), advanced=advance)
    except BrokenImage as error:
        raise InputError(error.told("--skip=N")) from error
    for image in broken:
        log.warn(f"{image.failure}: skipped")
    images -= len(broken)
    stored = format_bytes(images * math.prod(source.image_shape))
    task = [word for word in words if key_of(word) == "task"]
    line = shell_command(["dataset=packed", override("dataset.path", target), *task])
    log.say(f"packed {images:,} images, {stored}; train with {line}")
    if source.crops_files:
        size = source.image_shape[1]
        log.say(
            f"random crops are now cut from squares of {size} pixels, and not from the files: a run has other images "
            "than on the files"
        )


def check_packed(target: str) -> None:
    """Read a packed data set whole and compare it with the hashes in its manifest."""
    folder = Path(target).absolute()
    size = sum(file.stat().st_size for kind in packed.KINDS for file in folder.glob(f"*.{kind}"))
    with progress("checking", size) as advance:
        packed.check(folder, advance)
    log.say(f"{target} is complete: every file matches its sha256")
