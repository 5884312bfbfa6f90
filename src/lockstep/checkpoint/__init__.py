"""Checkpoints: one folder each, written under a temporary name, hashed, renamed, and checked before use.

A folder `checkpoints/step-00000042` holds `model.safetensors` (and `ema.safetensors`), `state.pt` (optimizer and
scaler; loads with `weights_only=True`), `facts.json` (the fingerprint of the run and its progress) and
`manifest.json` (the size and the sha256 of each of these files, and its own sha256). `checkpoints/last` and
`checkpoints/best` hold the name of a folder, for people and for `lockstep clean`: a resume does not read them, nor
does a command that uses the weights. A checkpoint that is only kept as one of the best has no `state.pt`. Until the
first checkpoint is saved, the file `checkpoints/none-yet` exists.
"""

from lockstep.checkpoint.files import (
    MODEL,
    Removable,
    find_corruption,
    manifest_text,
    most_bytes,
    removable,
    remove,
)
from lockstep.checkpoint.reading import (
    LoadedCheckpoint,
    check_fingerprint,
    difference,
    latest_valid,
    load,
    load_newest,
    mark_saved_or_not,
    newest_of_run,
    read_facts,
    restore,
)
from lockstep.checkpoint.state import HostCopies, gathered
from lockstep.checkpoint.weights import check_tensors, find_card, load_start, read_card, weights_file
from lockstep.checkpoint.writing import RETRY_S, Checkpointer
from lockstep.core.run import candidates

__all__ = [
    "MODEL",
    "RETRY_S",
    "Checkpointer",
    "HostCopies",
    "LoadedCheckpoint",
    "Removable",
    "candidates",
    "check_fingerprint",
    "check_tensors",
    "difference",
    "find_card",
    "find_corruption",
    "gathered",
    "latest_valid",
    "load",
    "load_newest",
    "load_start",
    "manifest_text",
    "mark_saved_or_not",
    "most_bytes",
    "newest_of_run",
    "read_card",
    "read_facts",
    "removable",
    "remove",
    "restore",
    "weights_file",
]
