"""What is read of checkpoints: which one is whole, what it says, and its way into the parts of a run.

A checkpoint can come from someone else, so that it is read only where it is made of plain files of our names, and
nothing in it is taken for more than numbers and words.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lockstep import log
from lockstep.errors import InputError
from lockstep.rundir import MANIFEST

FACTS, STATE, MODEL, EMA = "facts.json", "state.pt", "model.safetensors", "ema.safetensors"

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that passed its hashes, on the CPU."""

    path: Path
    facts: dict[str, Any]
    model: dict[str, Tensor]
    ema: dict[str, Tensor] | None
    state: dict[str, Any]


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _plain(path: Path) -> Path:
    """`path`, which has to be a file: a link could lead anywhere, and a pipe would be waited for."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise ValueError(f"{path.name} is not a plain file")
    return path


def manifest(path: Path) -> dict[str, str]:
    """The sha256 of each file of a checkpoint; raises ValueError where it is not a list of our files."""
    if path.is_symlink():
        raise ValueError("the folder is a symbolic link")
    match json.loads(_plain(path / MANIFEST).read_text()):
        case {"sha256": dict(digests)} if {FACTS, STATE, MODEL} <= digests.keys() <= {FACTS, STATE, MODEL, EMA}:
            if all(isinstance(each, str) and re.fullmatch("[0-9a-f]{64}", each) for each in digests.values()):
                return digests
    raise ValueError(f"{MANIFEST} does not list the files of a checkpoint")


def damage(path: Path) -> str:
    """What is wrong with the checkpoint at `path`, or an empty string."""
    try:
        digests = manifest(path)
        with ThreadPoolExecutor(len(digests)) as pool:  # hashing releases Python's lock
            found = pool.map(lambda name: sha256(_plain(path / name)), digests)
            for name, digest in zip(digests, found, strict=True):
                if digest != digests[name]:
                    return f"{name} does not match its sha256"
        _facts(path)
    except (OSError, ValueError, RecursionError) as error:
        return f"{type(error).__name__}: {error}" if isinstance(error, OSError) else str(error)
    return ""


def candidates(folder: Path) -> list[Path]:
    """The checkpoints in a `checkpoints` folder, newest step first."""
    named = (each for each in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", each.name) and each.is_dir())
    return sorted(named, key=lambda each: int(each.name[5:]), reverse=True)


def newest_good(folder: Path) -> Path | None:
    """The newest checkpoint of a `checkpoints` folder that passes its hashes; warns of each that does not."""
    for path in candidates(folder):
        reason = damage(path)
        if not reason:
            return path
        log.warn(f"checkpoint {path} is damaged ({reason}); trying the one before it")
    return None


def _facts(path: Path) -> dict[str, Any]:
    """The facts of a checkpoint; raises ValueError where they are not of their types."""
    facts = json.loads(_plain(path / FACTS).read_text())
    match facts:
        case {"format": 1, "identity": {}, "progress": {"step": int(step)} as progress} if step > 0:
            if _is_progress(progress):
                return dict(facts)
    raise ValueError(f"{FACTS} does not say what a checkpoint says")


def _is_progress(found: Mapping[str, Any]) -> bool:
    """Whether a progress, as JSON gives it, has the keys and types of that of a run."""
    match found:
        case {"best_step": int(best_step), "best": best, "score": score, "window": window}:
            known = found.keys() == {"step", "score", "best", "best_step", "window"} and best_step >= 0
            return known and all(each is None or _is_number(each) for each in (best, score)) and _is_window(window)
    return False


def _is_window(found: Any) -> bool:
    """The same of the window that was open: the last log point, and what each rank has behind it."""
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


def _is_number(found: Any) -> bool:
    return isinstance(found, (int, float)) and math.isfinite(found)


def _damaged(path: Path, reason: str) -> InputError:
    return InputError(f"resume: checkpoint {path} is damaged ({reason}); name another one")


def read_facts(path: Path) -> dict[str, Any]:
    """The facts of a checkpoint.

    Raises:
        InputError: they cannot be read.
    """
    try:
        return _facts(path)
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, f"{FACTS}: {error}") from error


def newest_readable(folder: Path) -> Path | None:
    """The newest checkpoint of a folder whose facts can be read. What else is in it is checked when it is loaded."""
    return next((path for path in candidates(folder) if _readable(path)), None)


def _readable(path: Path) -> bool:
    try:
        return bool(manifest(path) and _facts(path))
    except (OSError, ValueError, RecursionError):
        return False


def load_newest(folder: Path) -> Loaded | None:
    """Read the newest checkpoint of a `checkpoints` folder that is whole; warns of each that is not.

    Raises:
        InputError: its hashes fit, and yet it is none.
    """
    found = newest_good(folder)
    return None if found is None else _read(found)


def load(path: Path) -> Loaded:
    """Read a checkpoint to the CPU.

    Raises:
        InputError: it is damaged.
    """
    if reason := damage(path):
        raise _damaged(path, reason)
    return _read(path)


def _read(path: Path) -> Loaded:
    """Read a checkpoint without damage."""
    try:
        return Loaded(
            path=path,
            facts=read_facts(path),
            model=load_file(path / MODEL),
            ema=load_file(path / EMA) if EMA in manifest(path) else None,
            state=torch.load(path / STATE, map_location="cpu", weights_only=True),
        )
    except Exception as error:  # the hashes fit, so someone wrote it so: torch and safetensors raise all kinds
        reason = str(error).partition("\n")[0]
        if isinstance(error, UnpicklingError) or "weights_only" in str(error):  # torch advises to run what is in it
            reason = f"{STATE} has more in it than tensors and plain values"
        raise _damaged(path, reason) from error


def difference(expected: Facts, found: Facts) -> str:
    """The identity of this run next to that of a checkpoint, where they differ: `key: here X, there Y`."""
    return "; ".join(
        f"{key}: here {expected[key]}, there {found.get(key)}" for key in expected if expected[key] != found.get(key)
    )


def check_identity(expected: Facts, path: Path) -> None:
    """Raise InputError, with the difference, if the checkpoint at `path` is of another run than `expected`."""
    if different := difference(expected, read_facts(path)["identity"]):
        raise InputError(
            f"resume: {path} is a checkpoint of another run ({different}); resume with the same values, "
            "or take only its weights with init_from=PATH"
        )


def weights_file(path: Path) -> Path:
    """The file of weights at `path`: a safetensors file, a checkpoint or a run folder.

    Raises:
        InputError: there is none.
    """
    places = [path, path / MODEL] if path.suffix == ".safetensors" else [path / MODEL]
    file = next((each for each in places if each.is_file()), None)
    if file is None:
        raise InputError(f"init_from: there are no weights at {path}, expected a .safetensors file or a run folder")
    return file


def load_weights(model: nn.Module, path: Path) -> None:
    """Fill `model` with the weights at `path` (as for `weights_file`).

    Raises:
        InputError: there is no such file, or its tensors are not those of the model.
    """
    file = weights_file(path)
    try:
        weights = load_file(file)
    except Exception as error:  # safetensors has its own exception for a broken file
        raise InputError(f"init_from: {file} cannot be read ({error})") from error
    mine = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    theirs = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if mine != theirs:
        different = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
        shown = ", ".join(f"{name} (here {mine.get(name)}, there {theirs.get(name)})" for name in different[:3])
        raise InputError(f"init_from: {file} is of another model: {len(different)} tensors differ, e.g. {shown}")
    model.load_state_dict(weights)


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Take over what the optimizer gathered for each parameter; its options stay those that this run asked for."""
    asked = [
        {key: value for key, value in group.items() if key in optimizer.defaults or key == "scale"}
        for group in optimizer.param_groups
    ]
    optimizer.load_state_dict(state)
    for group, options in zip(optimizer.param_groups, asked, strict=True):
        group.update(options)


def restore(
    loaded: Loaded,
    *,
    model: nn.Module,
    ema: AveragedModel | None,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
) -> dict[str, Any]:
    """Put a checkpoint into the parts of a run; returns its progress.

    Raises:
        InputError: the tensors do not fit the model.
    """
    if ema is not None and loaded.ema is None:
        raise InputError(f"resume: {loaded.path} has no averaged weights; use train.ema=null")
    try:
        model.load_state_dict(loaded.model)
        _load_optimizer(optimizer, loaded.state["optimizer"])
        scaler.load_state_dict(loaded.state["scaler"])
        if ema is not None and loaded.ema is not None:
            ema.module.load_state_dict(loaded.ema)
            ema.n_averaged.fill_(loaded.state["ema_updates"])
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"resume: {loaded.path} does not fit this model ({error})") from error
    return dict(loaded.facts["progress"])
