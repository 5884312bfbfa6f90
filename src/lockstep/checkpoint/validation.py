"""Checks whether a checkpoint is undamaged, and reads its facts and its state. What is wrong is a ValueError.

Somebody else may have written a checkpoint. So only plain files with our names are read, and their contents are
parsed as numbers and texts only. A fault may have changed any bit. So nothing is trusted before its hash matches: the
manifest has a hash of itself and of each file, and a file whose hash matches is trusted. A checkpoint may be a whole
one of another run. So the facts and the state both name their run and step, and the summary names the run of all
checkpoints in its folder. Checkpoints of older versions name nothing, and are not compared.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from types import MappingProxyType
from typing import Any

import torch

from lockstep.core.run_dir import MANIFEST
from lockstep.core.safe_read import MB, UnreadableFile, checked_json, opened, read_bytes, read_json

FACTS, STATE, MODEL, EMA = "facts.json", "state.pt", "model.safetensors", "ema.safetensors"
NAMES = "names"  # what a file of a checkpoint names, in its facts and in its state
FACTS_LIMIT = 64 * MB  # large, because the open window has a loss for each micro-batch since the last log point

Facts = Mapping[str, Any]


def sha256(path: Path) -> str:
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def manifest_text(
    folder: Path, known: Mapping[str, str] = MappingProxyType({}), names: Iterable[str] | None = None
) -> str:
    """The text of `manifest.json`: sizes and hashes of the files in a checkpoint's folder, and its own hash.

    `known` are hashes that have been computed. `names` are the files; None is all but the manifest.
    """
    if names is None:
        names = {path.name for path in folder.iterdir()} - {MANIFEST}
    sizes = {name: (folder / name).stat().st_size for name in sorted(names)}
    digests = {name: known[name] if name in known else sha256(folder / name) for name in sizes}
    return json.dumps({"bytes": sizes, "sha256": digests, "self": _own_hash(sizes, digests)}, indent=2) + "\n"


def _own_hash(sizes: Mapping[str, Any], digests: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps([sizes, digests], sort_keys=True).encode()).hexdigest()


@contextmanager
def _reasons() -> Iterator[None]:
    """Raise a file that cannot be read as a ValueError: what is wrong with its checkpoint."""
    try:
        yield
    except UnreadableFile as error:
        raise ValueError(f"{error.path.name} {error.reason}") from error


@_reasons()
def manifest(path: Path) -> dict[str, str]:
    """The sha256 of each file of a checkpoint, after checking the sizes of the files.

    Raises:
        ValueError: the manifest or a file is missing or damaged, or the manifest lists another name.
    """
    if path.is_symlink():
        raise ValueError("the folder is a symbolic link")
    match read_json(path / MANIFEST):
        case {"bytes": dict(sizes), "sha256": dict(digests), "self": str(own)} if sizes.keys() == digests.keys():
            if {FACTS, MODEL} <= digests.keys() <= {FACTS, STATE, MODEL, EMA}:
                if own != _own_hash(sizes, digests):
                    raise ValueError(f"{MANIFEST} does not match its own sha256")
                for name, expected in sizes.items():  # without reading: a sparse file can be terabytes of zeros
                    with opened(path / name) as file:
                        if (size := os.fstat(file.fileno()).st_size) != expected:
                            raise ValueError(f"{name} has {size} bytes, expected {expected}")
                return digests
    raise ValueError(f"{MANIFEST} does not list the files of a checkpoint")


def has_state(path: Path) -> bool:
    """Whether a checkpoint has more than weights, so that a run can resume from it if it is undamaged."""
    try:
        return STATE in manifest(path)
    except ValueError:
        return True


def find_corruption(path: Path, run: str | None = None) -> str:
    """What is wrong with the checkpoint at `path`, or an empty string. `run` is the run that it should be of."""
    try:
        _check(path, run)
    except ValueError as error:
        return str(error)
    return ""


@_reasons()
def _check(path: Path, run: str | None) -> None:
    digests = manifest(path)
    with ThreadPoolExecutor(len(digests)) as pool:  # hashing releases Python's lock
        for name, digest in zip(digests, pool.map(lambda name: sha256(path / name), digests), strict=True):
            if digest != digests[name]:
                raise ValueError(f"{name} does not match its sha256")
    names = read_facts(path).get(NAMES)
    if STATE in digests and read_state(path).get(NAMES) != names:
        raise ValueError(f"{STATE} and {FACTS} are of different checkpoints")
    if run is not None and names is not None and names["run"] != run:
        raise ValueError(f"it is of run {names['run']}, and the summary of this folder names run {run}")


def read_state(path: Path) -> dict[str, Any]:
    """The content of `state.pt` of a checkpoint whose hashes have been checked; the file is mapped, not read.

    Raises:
        ValueError: it cannot be loaded.
    """
    try:
        return dict(torch.load(path / STATE, map_location="cpu", weights_only=True, mmap=True))
    except Exception as error:  # torch raises all kinds
        reason = f"{STATE} cannot be loaded ({str(error).partition(chr(10))[0]})"
        if isinstance(error, UnpicklingError) or "weights_only" in str(error):  # torch's text would advise to load it
            reason = f"{STATE} contains more than tensors and plain values"
        raise ValueError(reason) from error


@_reasons()
def read_facts(path: Path) -> dict[str, Any]:
    """The facts of a checkpoint. They are trusted if their hash matches.

    Raises:
        ValueError: they are missing, do not match their sha256, or are not those of this checkpoint.
    """
    data, digests = read_bytes(path / FACTS, FACTS_LIMIT), manifest(path)
    if hashlib.sha256(data).hexdigest() != digests[FACTS]:
        raise ValueError(f"{FACTS} does not match its sha256")
    match checked_json(path / FACTS, data):
        case {"format": 1, "identity": {}, "progress": {"step": int(step)}} as facts:
            step_name = re.fullmatch(r"step-([0-9]{8,18})", path.name)  # a copy may have another name
            if step_name and int(step_name[1]) != step:
                raise ValueError(f"its facts are those of step {step}")
            return dict(facts)
    raise ValueError(f"{FACTS} is not the facts of a checkpoint")
