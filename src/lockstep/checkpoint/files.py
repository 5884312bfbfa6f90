"""The folders of checkpoints: which there are, whether they are undamaged, and their removal. Damage is a ValueError.

Only plain files with our names are read, as numbers and texts, and a file is trusted if its hash is the manifest's.
"""

import hashlib
import json
import mmap
import os
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lockstep.core.formats import FileFormat, check_format, stamp
from lockstep.core.run import Run
from lockstep.core.run_dir import MANIFEST, RunDir
from lockstep.core.safe_read import MB, UnreadableFile, check_size, checked_json, open_plain, read_bytes, read_json
from lockstep.core.safe_write import append, usual_mode
from lockstep.core.tags import Monitor

FACTS, STATE, MODEL, EMA = "facts.json", "state.pt", "model.safetensors", "ema.safetensors"
# A key of the metadata of a weights file: the hash of all else in it. The entry has 80 bytes, which keep the tensors
# aligned to 16: a program that maps the file (Transformers) would else sum in another order, and get other last bits.
SEAL = "own_sha256"
FACTS_LIMIT = 64 * MB  # large, because the open window has a loss for each micro-batch since the last log point

Facts = Mapping[str, Any]


def sha256(path: Path) -> str:
    with open_plain(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save_weights(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a weights file with its own hash in the metadata. Equal tensors and metadata give equal bytes."""
    with usual_mode(path):
        save_file(dict(tensors), path, {**(metadata or {}), SEAL: "0" * 64})
    with append(path, "r+b") as file:
        header, _, digest = _header_and_digest(file)
        # safetensors writes the metadata in any order.
        header["__metadata__"] = dict(sorted({**header["__metadata__"], SEAL: digest}.items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        assert len(text) <= length, "safetensors writes the same text, and spaces behind it"
        file.write(text.ljust(length))


def load_weights(file: Path) -> dict[str, Tensor]:
    """The tensors of a weights file, on the CPU. Raises UnreadableFile if it does not match the hash in it."""
    tensors: dict[str, Tensor] = load_file(file)
    if not _matches_seal(file):
        raise UnreadableFile(
            file, f"is damaged, or was changed: it does not match the {SEAL} in its metadata; copy it again"
        )
    return tensors


def _matches_seal(file: Path) -> bool:
    """Whether a weights file that safetensors can read matches the hash in it, or has none, like older ones."""
    with open_plain(file, links=True) as data:
        _, seal, digest = _header_and_digest(data)
    return seal in (None, digest)


def _header_and_digest(file: Any) -> tuple[dict[str, Any], str | None, str]:
    """The header of an open weights file without its hash, this hash, and what it should be."""
    header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    seal = header.get("__metadata__", {}).pop(SEAL, None)
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    return header, seal, hashlib.file_digest(file, lambda: digest).hexdigest()


def manifest_text(folder: Path, known: Mapping[str, str] = MappingProxyType({})) -> str:
    """The text of `manifest.json`: sizes and hashes of the other files in a checkpoint's folder, some `known`."""
    names = {path.name for path in folder.iterdir()} - {MANIFEST}
    sizes = {name: (folder / name).stat().st_size for name in sorted(names)}
    digests = {name: known[name] if name in known else sha256(folder / name) for name in sizes}
    return json.dumps({**stamp(FileFormat.checkpoint), "bytes": sizes, "sha256": digests}, indent=2) + "\n"


@contextmanager
def _reasons() -> Iterator[None]:
    """Raise a file that cannot be read as a ValueError: what is wrong with its checkpoint."""
    try:
        yield
    except UnreadableFile as error:
        raise ValueError(f"{error.path.name} {error.reason}") from error


@_reasons()
def manifest(path: Path) -> dict[str, str]:
    """The sha256 of a checkpoint's files; checks names and sizes. Raises ValueError: damaged; NewerFormat."""
    if path.is_symlink():
        raise ValueError("the folder is a symbolic link")
    check_format(FileFormat.checkpoint, facts := read_json(path / MANIFEST), path / MANIFEST)
    match facts:
        case {"bytes": dict(sizes), "sha256": dict(digests)} if sizes.keys() == digests.keys():
            if {FACTS, MODEL} <= digests.keys() <= {FACTS, STATE, MODEL, EMA}:
                for name, expected in sizes.items():  # without reading: a sparse file can be terabytes of zeros
                    with open_plain(path / name) as file:
                        if (size := os.fstat(file.fileno()).st_size) != expected:
                            raise ValueError(f"{name} has {size} bytes, expected {expected}")
                return digests
    raise ValueError(f"{MANIFEST} does not list the files of a checkpoint")


def find_corruption(path: Path) -> str:
    """What is wrong with the checkpoint at `path`, or an empty string."""
    try:
        _check(path)
    except ValueError as error:
        return str(error)
    return ""


@_reasons()
def _check(path: Path) -> None:
    if STATE not in (digests := manifest(path)):  # one of the best of an earlier version
        raise ValueError("it has weights only")
    with ThreadPoolExecutor(len(digests)) as pool:  # hashing releases Python's lock
        for name, digest in zip(digests, pool.map(lambda name: sha256(path / name), digests), strict=True):
            if digest != digests[name]:
                raise ValueError(f"{name} does not match its sha256")
    read_facts(path)


def read_state(path: Path) -> dict[str, Any]:
    """The content of `state.pt`, whose hash has been checked; the file is mapped, not read. Raises ValueError."""
    try:
        check_archive(path / STATE)
        return dict(torch.load(path / STATE, map_location="cpu", weights_only=True, mmap=True))
    except Exception as error:  # torch raises all kinds
        reason = f"{STATE} cannot be loaded ({str(error).partition(chr(10))[0]})"
        if isinstance(error, UnpicklingError) or "weights_only" in str(error):  # torch's text would advise to load it
            reason = f"{STATE} contains more than tensors and plain values"
        raise ValueError(reason) from error


def check_archive(file: Path) -> None:
    """Raise ValueError for what `torch.save` does not write, and `torch.load` would make any number of bytes of."""
    with open_plain(file, links=True) as stored:
        if not os.fstat(stored.fileno()).st_size:  # nothing can be mapped
            raise ValueError("it is empty")
        with mmap.mmap(stored.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(b"\nbytearray\n") >= 0:  # as a pickle names the class, and not a key of the user
                raise ValueError("it has an array of bytes")
    for member in zipfile.ZipFile(file).infolist() if zipfile.is_zipfile(file) else ():
        check_size(member.file_size if member.filename.endswith(".pkl") else 0, f"{member.filename} in it has")
        if member.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{member.filename} in it is compressed")


@_reasons()
def read_facts(path: Path) -> dict[str, Any]:
    """The facts of a checkpoint, which are trusted if their hash matches. Raises ValueError."""
    data, digests = read_bytes(path / FACTS, FACTS_LIMIT), manifest(path)
    if hashlib.sha256(data).hexdigest() != digests[FACTS]:
        raise ValueError(f"{FACTS} does not match its sha256")
    match checked_json(path / FACTS, data):
        case {"identity": {}, "progress": {"step": int()}} as facts:
            return dict(facts)
    raise ValueError(f"{FACTS} is not the facts of a checkpoint")


def whole_weights(path: Path) -> bool:
    """Whether the weights at `path`, a checkpoint or a run folder, are undamaged, as far as they have a sha256."""
    try:
        if (path / MANIFEST).exists():
            # `manifest` checks the sizes first: hashing a huge sparse file would take hours.
            return manifest(path)[MODEL] == sha256(path / MODEL)
        return bool(header(path / MODEL)[0]) and _matches_seal(path / MODEL)
    except (UnreadableFile, ValueError):
        return False


def header(file: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """The shapes of the tensors in a weights file, and its metadata. Raises UnreadableFile."""
    try:
        with open_plain(file, links=True), safe_open(file, framework="pt") as tensors:
            shapes = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
            return shapes, tensors.metadata() or {}
    except SafetensorError as error:
        raise UnreadableFile(file, f"cannot be read as safetensors ({error})") from error


@dataclass(frozen=True)
class Removable:
    """What stays of a run, what can go, and its bytes; `more` is of `stay`, if the run is completed and exported."""

    stay: tuple[Path, ...]
    go: tuple[Path, ...]
    size: int
    more: int


def removable(run_dir: RunDir, keep: int, *, everything: bool = False) -> Removable:
    """The checkpoints that can be removed from a run that is not active.

    The newest `keep` undamaged checkpoints stay, for a resume, and so does the best one. If all are damaged, all
    stay. With `everything`, none stays if the run is completed and its best weights are exported.
    """
    run = Run(run_dir.path)
    checkpoints = run.checkpoints
    stay: list[Path] = []
    is_finished = run.summary.get("status") == "completed" and whole_weights(run_dir.path)
    if not (everything and is_finished):
        whole = (path for path in checkpoints if not find_corruption(path))
        stay = [path for path, _ in zip(whole, range(keep), strict=False)]
        stay = [*dict.fromkeys([*stay, *best_scored(checkpoints, 1)])] if stay else checkpoints
    go = [path for path in checkpoints if path not in stay]
    go += run_dir.checkpoints.glob(".step-*.tmp")  # left by a writer that was killed
    return Removable(tuple(stay), tuple(go), sum(map(_size, go)), sum(map(_size, stay)) if is_finished else 0)


def best_scored(checkpoints: list[Path], number: int) -> list[Path]:
    """The `number` checkpoints with the best scores of these, newest first; the earlier one of equal ones."""
    gains = {path: gain for path in reversed(checkpoints) if (gain := _gain(path)) is not None}
    return sorted(gains, key=lambda path: -gains[path])[:number]


def _gain(path: Path) -> float | None:
    """The score of a checkpoint, larger for a better one; None if it was not evaluated or cannot be read."""
    with suppress(ValueError, LookupError, TypeError, AttributeError):
        facts = read_facts(path)
        return Monitor.parse(facts["identity"]["monitor"]).gain(score_of(facts["progress"]))
    return None


def score_of(progress: Mapping[str, Any]) -> float | None:
    """The monitored figure at the step of a checkpoint; None without one."""
    return dict(progress["scores"]).get(progress["step"])


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() and not path.is_symlink() else (path,)
    return sum(file.lstat().st_size for file in files if not file.is_dir() or file.is_symlink())


def remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a kill never leaves half a checkpoint."""
    delete(path if path.name.startswith(".") else path.rename(path.with_name(f".{path.name}.old.tmp")))


def delete(path: Path) -> None:
    """Remove a folder, a file or a link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
