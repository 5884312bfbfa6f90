"""Checks whether a checkpoint is undamaged, and reads its facts.

Somebody else may have written a checkpoint. So only plain files with our names are read, and their contents are
parsed as numbers and texts only. A fault may have changed any bit. So nothing is trusted before its hash matches: the
manifest has a hash of itself and of each file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lockstep.core.errors import InputError
from lockstep.core.run_dir import MANIFEST
from lockstep.core.safe_read import MB, UnreadableFile, is_number, opened, parse_json, read_bytes, read_json

FACTS, STATE, MODEL, EMA = "facts.json", "state.pt", "model.safetensors", "ema.safetensors"
FACTS_LIMIT = 64 * MB  # large, because the open window has a loss for each micro-batch since the last log point

Facts = Mapping[str, Any]


def sha256(path: Path) -> str:
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def manifest_text(folder: Path) -> str:
    """The text of `manifest.json`: sizes and hashes of the other files in a checkpoint's folder, and its own hash."""
    names = sorted(path.name for path in folder.iterdir() if path.name != MANIFEST)
    sizes = {name: (folder / name).stat().st_size for name in names}
    digests = {name: sha256(folder / name) for name in names}
    return _manifest_text(sizes, digests)


def _manifest_text(sizes: Mapping[str, Any], digests: Mapping[str, Any]) -> str:
    return json.dumps({"bytes": sizes, "sha256": digests, "self": _own_hash(sizes, digests)}, indent=2) + "\n"


def _own_hash(sizes: Mapping[str, Any], digests: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps([sizes, digests], sort_keys=True).encode()).hexdigest()


def manifest(path: Path) -> dict[str, str]:
    """The sha256 of each file of a checkpoint, after checking the sizes of the files.

    Raises:
        UnreadableFile, ValueError: the manifest or a file is missing or damaged, or the manifest lists another name.
    """
    if path.is_symlink():
        raise ValueError("the folder is a symbolic link")
    match read_json(path / MANIFEST):
        case {"bytes": dict(sizes), "sha256": dict(digests), "self": str(own)} if sizes.keys() == digests.keys():
            known = {FACTS, MODEL} <= digests.keys() <= {FACTS, STATE, MODEL, EMA}
            if known and all(map(_is_digest, digests.values())):
                if own != _own_hash(sizes, digests):
                    raise ValueError(f"{MANIFEST} does not match its own sha256")
                _check_sizes(path, sizes)
                return digests
    raise ValueError(f"{MANIFEST} does not list the files of a checkpoint")


def has_state(path: Path) -> bool:
    """Whether a checkpoint has more than weights, so that a run can resume from it if it is undamaged."""
    try:
        return STATE in manifest(path)
    except (UnreadableFile, ValueError):
        return True


def manifest_without_state(path: Path) -> str:
    """The text of a checkpoint's manifest after the removal of its state.

    Raises:
        UnreadableFile, ValueError: see `manifest`.
    """
    digests = {name: digest for name, digest in manifest(path).items() if name != STATE}
    sizes = {name: (path / name).stat().st_size for name in digests}
    return _manifest_text(sizes, digests)


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _check_sizes(path: Path, sizes: Mapping[str, Any]) -> None:
    """Raise ValueError if a size differs, without reading the file: a sparse file can be terabytes of zeros."""
    for name, expected in sizes.items():
        with opened(path / name) as file:
            if (size := os.fstat(file.fileno()).st_size) != expected:
                raise ValueError(f"{name} has {size} bytes, expected {expected}")


def find_corruption(path: Path) -> str:
    """What is wrong with the checkpoint at `path`, or an empty string."""
    try:
        digests = manifest(path)
        with ThreadPoolExecutor(len(digests)) as pool:  # hashing releases Python's lock
            actual = pool.map(lambda name: sha256(path / name), digests)
            for (name, expected), digest in zip(digests.items(), actual, strict=True):
                if digest != expected:
                    raise ValueError(f"{name} does not match its sha256")
        _facts(path)
    except UnreadableFile as error:
        return f"{error.path.name} {error.reason}"
    except ValueError as error:
        return str(error)
    return ""


def _facts(path: Path) -> dict[str, Any]:
    """The facts of a checkpoint; raises UnreadableFile or ValueError if they are missing or have changed."""
    data = read_bytes(path / FACTS, FACTS_LIMIT)
    if hashlib.sha256(data).hexdigest() != manifest(path)[FACTS]:
        raise ValueError(f"{FACTS} does not match its sha256")
    facts = parse_json(path / FACTS, data)
    match facts:
        case {"format": 1, "identity": {}, "progress": {"step": int(step)} as progress} if step > 0:
            if _is_progress(progress):
                step_name = re.fullmatch(r"step-([0-9]{8,18})", path.name)  # a copy may have another name
                if step_name and int(step_name[1]) != step:
                    raise ValueError(f"its facts are those of step {step}")
                return dict(facts)
    raise ValueError(f"{FACTS} is not the facts of a checkpoint")


def _is_progress(parsed: Mapping[str, Any]) -> bool:
    """Whether parsed JSON has the keys and types of the progress of a run."""
    match parsed:
        case {"best_step": int(best_step), "best": best, "score": score, "window": window}:
            known = parsed.keys() == {"step", "score", "best", "best_step", "window"} and best_step >= 0
            return known and all(value is None or is_number(value) for value in (best, score)) and _is_window(window)
    return False


def _is_window(parsed: Any) -> bool:
    """Whether parsed JSON is the `WindowState` of telemetry, or null."""
    match parsed:
        case None:
            return True
        case {"flushed": int(flushed), "trails": [_, *_] as ranks, "epoch": epoch} if len(parsed) == 3:
            return flushed >= 0 and _is_epoch(epoch) and all(map(_is_rank_window, ranks))
    return False


def _is_rank_window(parsed: Any) -> bool:
    """Whether parsed JSON is the `RankWindowState` of telemetry. A loss may be infinite if a scaler tolerates it."""
    match parsed:
        case {"losses": [*losses], "steps": [*steps], "examples": [*examples], "hits": int()} if len(parsed) == 4:
            integers = all(isinstance(value, int) for value in [*steps, *examples])
            floats = all(isinstance(loss, float) for loss in losses)
            return integers and floats and len(losses) == len(steps) == len(examples)
    return False


def _is_epoch(parsed: Any) -> bool:
    """Whether parsed JSON is the `EpochState` of telemetry."""
    match parsed:
        case {"number": int(), "loss": float(), "hits": int(), "examples": int(examples)} if len(parsed) == 4:
            return examples >= 0
    return False


def damaged(path: Path, reason: str) -> InputError:
    """The error for a damaged checkpoint."""
    return InputError(f"resume: checkpoint {path} is damaged ({reason}); name another one")


def read_facts(path: Path) -> dict[str, Any]:
    """The facts of a checkpoint.

    Raises:
        InputError: the facts cannot be read, or do not match their sha256.
    """
    try:
        return _facts(path)
    except UnreadableFile as error:
        raise damaged(path, f"{error.path.name} {error.reason}") from error
    except ValueError as error:
        raise damaged(path, str(error)) from error
