"""Checkpoints: one folder each, written under a temporary name, hashed, renamed, and checked before use.

A folder `checkpoints/step-00000042` holds `model.safetensors` (and `ema.safetensors`), `state.pt` (optimizer
and scaler; loads with `weights_only=True`), `facts.json` (what the run was, and how far it had come) and
`manifest.json` (the sha256 of each of these). `checkpoints/last` and `checkpoints/best` hold a folder's name, for
people: nothing here reads them.
"""

from lockstep.checkpoint.reading import (
    MODEL,
    Loaded,
    candidates,
    check_identity,
    damage,
    difference,
    load,
    load_newest,
    load_weights,
    newest_good,
    newest_readable,
    read_facts,
    restore,
    weights_file,
)
from lockstep.checkpoint.writing import BEST, RETRY_S, Checkpointer, copied_tree

__all__ = [
    "BEST",
    "MODEL",
    "RETRY_S",
    "Checkpointer",
    "Loaded",
    "candidates",
    "check_identity",
    "copied_tree",
    "damage",
    "difference",
    "load",
    "load_newest",
    "load_weights",
    "newest_good",
    "newest_readable",
    "read_facts",
    "restore",
    "weights_file",
]
