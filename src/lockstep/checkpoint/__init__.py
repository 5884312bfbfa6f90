"""Checkpoints: one folder each, written under a temporary name, hashed, renamed, and checked before use.

A folder `checkpoints/step-00000042` holds `model.safetensors` (and `ema.safetensors`), `state.pt` (optimizer and
scaler; loads with `weights_only=True`), `facts.json` (the fingerprint of the run and its progress) and
`manifest.json` (the size and the sha256 of each of these files, and its own sha256). `checkpoints/last` and
`checkpoints/best` hold the name of a folder, for people: nothing here reads them. Until the first checkpoint there is
`checkpoints/none-yet`.
"""

from lockstep.checkpoint.header import find_card, read_card
from lockstep.checkpoint.history import candidates, latest_valid, load_newest, mark_saved_or_not, newest_of_run
from lockstep.checkpoint.reading import (
    LoadedCheckpoint,
    check_fingerprint,
    check_tensors,
    difference,
    load,
    load_start,
    load_weights,
    restore,
    weights_file,
)
from lockstep.checkpoint.staging import HostCopies
from lockstep.checkpoint.validation import MODEL, find_corruption, manifest_text, read_facts
from lockstep.checkpoint.writing import RETRY_S, Checkpointer

__all__ = [
    "MODEL",
    "RETRY_S",
    "Checkpointer",
    "HostCopies",
    "LoadedCheckpoint",
    "candidates",
    "check_fingerprint",
    "check_tensors",
    "difference",
    "find_card",
    "find_corruption",
    "latest_valid",
    "load",
    "load_newest",
    "load_start",
    "load_weights",
    "manifest_text",
    "mark_saved_or_not",
    "newest_of_run",
    "read_card",
    "read_facts",
    "restore",
    "weights_file",
]
