"""TensorBoard's event files, read again when a run goes on: without the steps that will be done once more."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from lockstep.core import log
from lockstep.core.safe_read import MB, opened
from lockstep.core.safe_write import sync, write_atomic

RECORD_LIMIT = 64 * MB  # one of ours has a few hundred bytes


def trimmed(paths: list[Path], after: int) -> set[str]:
    """Take all events of steps behind `after` out of event files, oldest first; returns the tags that are left.

    TensorBoard hides such steps if it is told to, but whoever reads the files finds both. A record cut short by a
    kill ends its file; one that is damaged is left out, and said.

    Raises:
        UnreadableFile: one is no plain file.
        StorageError, OSError: one cannot be written.
    """
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    seen: set[tuple[str, int]] = set()
    for path in paths:
        kept, damaged, before = BytesIO(), False, len(seen)
        for record in _records(path):
            try:
                if record is None:
                    raise DecodeError
                event = Event.FromString(record)
            except DecodeError:
                damaged = True
                continue
            found = {(value.tag, event.step) for value in event.summary.value}
            if event.step <= after and not found & seen:
                seen |= found
                RecordWriter(kept).write(record)
        if damaged:
            log.warn(f"{path} is damaged: what cannot be read of it is left out of TensorBoard")
        if len(seen) == before:
            path.unlink()
        elif len(kept.getvalue()) != path.stat().st_size:  # a viewer may have the file open: leave it if it is right
            temporary = path.with_name(".events.tmp")  # a name that no viewer takes for one of events
            write_atomic(temporary, kept.getvalue())
            temporary.replace(path)
            sync(path.parent)
    return {tag for tag, _ in seen}


def _records(path: Path) -> Iterator[bytes | None]:
    """The records of an event file; None for one whose checksum does not fit. Behind a damaged length is no other."""
    with opened(path) as file:
        while len(header := file.read(12)) == 12:
            (length,) = struct.unpack("<Q", header[:8])
            if not _fits(header[:8], header[8:]) or length > RECORD_LIMIT:
                yield None
                return
            record, checksum = file.read(length), file.read(4)
            if len(checksum) < 4:  # cut short by a kill
                return
            yield record if _fits(record, checksum) else None


def _fits(data: bytes, checksum: bytes) -> bool:
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    return bool(struct.pack("<I", masked_crc32c(data)) == checksum)
