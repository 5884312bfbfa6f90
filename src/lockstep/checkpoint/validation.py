"""Whether a checkpoint is whole, and what it says.

A checkpoint can come from someone else, so that it is read only where it is made of plain files of our names, and
nothing in it is taken for more than numbers and words. A fault may have changed any bit of it, so that nothing in it
is believed before its hash fits: the manifest has one of itself, and one of each file.
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
FACTS_LIMIT = 64 * MB  # the open window has a loss for each micro-batch since the last log point

Facts = Mapping[str, Any]


def sha256(path: Path) -> str:
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def manifest_text(folder: Path) -> str:
    """What `manifest.json` says of the other files in a checkpoint's folder: their sizes and hashes, and its own."""
    names = sorted(each.name for each in folder.iterdir() if each.name != MANIFEST)
    sizes = {name: (folder / name).stat().st_size for name in names}
    digests = {name: sha256(folder / name) for name in names}
    return json.dumps({"bytes": sizes, "sha256": digests, "self": _own_hash(sizes, digests)}, indent=2) + "\n"


def _own_hash(sizes: Mapping[str, Any], digests: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps([sizes, digests], sort_keys=True).encode()).hexdigest()


def manifest(path: Path) -> dict[str, str]:
    """The sha256 of each file of a checkpoint, whose sizes are right.

    Raises:
        UnreadableFile, ValueError: it is none, or lists other files than ours.
    """
    if path.is_symlink():
        raise ValueError("the folder is a symbolic link")
    match read_json(path / MANIFEST):
        case {"bytes": dict(sizes), "sha256": dict(digests), "self": str(own)} if sizes.keys() == digests.keys():
            ours = {FACTS, STATE, MODEL} <= digests.keys() <= {FACTS, STATE, MODEL, EMA}
            if ours and all(map(_is_digest, digests.values())):
                if own != _own_hash(sizes, digests):
                    raise ValueError(f"{MANIFEST} does not match its own sha256")
                _check_sizes(path, sizes)
                return digests
    raise ValueError(f"{MANIFEST} does not list the files of a checkpoint")


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _check_sizes(path: Path, sizes: Mapping[str, Any]) -> None:
    """A file of another size is not read: a few bytes on a disk can be terabytes of zeros."""
    for name, size in sizes.items():
        with opened(path / name) as file:
            if (found := os.fstat(file.fileno()).st_size) != size:
                raise ValueError(f"{name} has {found} bytes, expected {size}")


def find_corruption(path: Path) -> str:
    """What is wrong with the checkpoint at `path`, or an empty string."""
    try:
        digests = manifest(path)
        with ThreadPoolExecutor(len(digests)) as pool:  # hashing releases Python's lock
            found = pool.map(lambda name: sha256(path / name), digests)
            for name, digest in zip(digests, found, strict=True):
                if digest != digests[name]:
                    raise ValueError(f"{name} does not match its sha256")
        _facts(path)
    except UnreadableFile as error:
        return f"{error.path.name} {error.reason}"
    except ValueError as error:
        return str(error)
    return ""


def _facts(path: Path) -> dict[str, Any]:
    """The facts of a checkpoint; raises UnreadableFile or ValueError where they are not those that were written."""
    data = read_bytes(path / FACTS, FACTS_LIMIT)
    if hashlib.sha256(data).hexdigest() != manifest(path)[FACTS]:
        raise ValueError(f"{FACTS} does not match its sha256")
    facts = parse_json(path / FACTS, data)
    match facts:
        case {"format": 1, "identity": {}, "progress": {"step": int(step)} as progress} if step > 0:
            if _is_progress(progress):
                named = re.fullmatch(r"step-([0-9]{8,18})", path.name)  # a copy may have another name
                if named and int(named[1]) != step:
                    raise ValueError(f"its facts are those of step {step}")
                return dict(facts)
    raise ValueError(f"{FACTS} does not say what a checkpoint says")


def _is_progress(found: Mapping[str, Any]) -> bool:
    """Whether a progress, as JSON gives it, has the keys and types of that of a run."""
    match found:
        case {"best_step": int(best_step), "best": best, "score": score, "window": window}:
            known = found.keys() == {"step", "score", "best", "best_step", "window"} and best_step >= 0
            return known and all(each is None or is_number(each) for each in (best, score)) and _is_window(window)
    return False


def _is_window(found: Any) -> bool:
    """The same of the window that was open: the last log point, and what each rank has gathered since."""
    match found:
        case None:
            return True
        case {"flushed": int(flushed), "trails": [_, *_] as trails} if len(found) == 2 and flushed >= 0:
            return all(map(_is_trail, trails))
    return False


def _is_trail(found: Any) -> bool:
    """The same of the micro-batches of a rank. A loss may be infinite where a scaler tolerates it."""
    match found:
        case {"losses": [*losses], "steps": [*steps], "examples": [*examples], "hits": int()} if len(found) == 4:
            whole = all(isinstance(each, int) for each in [*steps, *examples])
            floats = all(isinstance(each, float) for each in losses)
            return whole and floats and len(losses) == len(steps) == len(examples)
    return False


def damaged(path: Path, reason: str) -> InputError:
    return InputError(f"resume: checkpoint {path} is damaged ({reason}); name another one")


def read_facts(path: Path) -> dict[str, Any]:
    """The facts of a checkpoint.

    Raises:
        InputError: they cannot be read, or do not match their sha256.
    """
    try:
        return _facts(path)
    except UnreadableFile as error:
        raise damaged(path, f"{error.path.name} {error.reason}") from error
    except ValueError as error:
        raise damaged(path, str(error)) from error
