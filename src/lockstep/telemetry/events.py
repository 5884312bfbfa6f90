"""Trims TensorBoard's event files when a run resumes: removes the steps that will be done again."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from io import BytesIO
from pathlib import Path

from lockstep.core import log
from lockstep.core.safe_read import MB, opened
from lockstep.core.safe_write import sync, write_atomic

EVENTS = "events.out.tfevents.*"
SESSION = "run/"  # the beginning of the tags of texts that describe the run
# How all tags begin that describe the run: each part of a run writes them anew.
ABOUT_RUN = (SESSION, "_hparams_/", "custom_scalars__")
# How the tags begin that are written after the figures of their step, in an evaluation; or in the step after it.
LATER = ("loss/val", "loss/train_epoch", "perf/time/", "images/")
RECORD_LIMIT = 64 * MB  # a usual record has a few hundred bytes


def place_of(step: int, tags: Iterable[str]) -> float:
    """Where figures are in the order of a run: those of an evaluation are half a step behind its step."""
    return step + 0.5 if any(tag.startswith(LATER) for tag in tags) else step


def trim_events(paths: list[Path], after: float) -> None:
    """Remove from event files, oldest first, all events after `RunInfo.after`, and what describes the run.

    The resumed run writes both again. TensorBoard's purge only hides such steps: other readers of the files would
    find them twice. A record that a kill cut short ends its file. A damaged record is left out, with a warning.

    Raises:
        UnreadableFile: one is not a plain file.
        StorageError, OSError: one cannot be written.
    """
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    keys: set[tuple[str, int]] = set()
    for path in paths:
        trimmed, damaged, before = BytesIO(), False, len(keys)
        for record in _records(path):
            try:
                if record is None:
                    raise DecodeError
                event = Event.FromString(record)
            except DecodeError:
                damaged = True
                continue
            values = {(value.tag, event.step) for value in event.summary.value}
            tags = [tag for tag, _ in values]
            about_run = any(tag.startswith(ABOUT_RUN) for tag in tags)
            if place_of(event.step, tags) <= after and not about_run and not values & keys:
                keys |= values
                RecordWriter(trimmed).write(record)
        if damaged:
            log.warn(f"{path} is damaged: records that cannot be read are left out of TensorBoard")
        if len(keys) == before:
            path.unlink()
        elif len(trimmed.getvalue()) != path.stat().st_size:  # replace only if needed: a viewer may have it open
            write_atomic(path, trimmed.getvalue())
            sync(path.parent)


def _records(path: Path) -> Iterator[bytes | None]:
    """The records of an event file; None for one whose checksum is wrong. A damaged length ends the file."""
    with opened(path) as file:
        while len(header := file.read(12)) == 12:
            (length,) = struct.unpack("<Q", header[:8])
            if not _checksum_matches(header[:8], header[8:]) or length > RECORD_LIMIT:
                yield None
                return
            record, checksum = file.read(length), file.read(4)
            if len(checksum) < 4:  # cut short by a kill
                return
            yield record if _checksum_matches(record, checksum) else None


def _checksum_matches(data: bytes, checksum: bytes) -> bool:
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    return bool(struct.pack("<I", masked_crc32c(data)) == checksum)
