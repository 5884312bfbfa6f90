"""Checkpoints: one folder each, written under a temporary name, hashed, renamed, and checked before use.

A folder `checkpoints/step-00000042` holds `model.safetensors` (and `ema.safetensors`), `state.pt` (optimizer
and scaler; loads with `weights_only=True`), `facts.json` (what the run was, and how far it had come) and
`manifest.json` (the sha256 of each of these). `checkpoints/last` and `checkpoints/best` hold a folder's name.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lockstep import log
from lockstep.errors import InputError, StorageError
from lockstep.rundir import RunDir, write_atomic

MANIFEST, FACTS, STATE, MODEL, EMA = (
    "manifest.json",
    "facts.json",
    "state.pt",
    "model.safetensors",
    "ema.safetensors",
)
LAST, BEST = "last", "best"

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that passed its hashes, on the CPU."""

    path: Path
    facts: dict[str, Any]
    model: dict[str, Tensor]
    ema: dict[str, Tensor] | None
    state: dict[str, Any]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Have the disk really hold `path` (a file, or a folder's list of names)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def damage(path: Path) -> str:
    """What is wrong with the checkpoint at `path`, or an empty string."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        for name, digest in manifest["sha256"].items():
            if _sha256(path / name) != digest:
                return f"{name} does not match its sha256"
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def candidates(folder: Path) -> list[Path]:
    """The checkpoints in a `checkpoints` folder, newest step first."""
    return sorted((each for each in folder.glob("step-*") if each.is_dir()), reverse=True)


def newest_good(folder: Path) -> Path | None:
    """The newest checkpoint of a `checkpoints` folder that passes its hashes; warns of each that does not."""
    for path in candidates(folder):
        reason = damage(path)
        if not reason:
            return path
        log.warn(f"checkpoint {path} is damaged ({reason}); trying the one before it")
    return None


def read_facts(path: Path) -> dict[str, Any]:
    """The facts of a checkpoint.

    Raises:
        InputError: they cannot be read.
    """
    try:
        facts = json.loads((path / FACTS).read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"resume: checkpoint {path} is damaged ({FACTS}: {error}); name another one") from error
    assert isinstance(facts, dict)
    return facts


def load(path: Path) -> Loaded:
    """Read a checkpoint to the CPU.

    Raises:
        InputError: it is damaged.
    """
    if reason := damage(path):
        raise InputError(f"resume: checkpoint {path} is damaged ({reason}); name another one")
    return Loaded(
        path=path,
        facts=read_facts(path),
        model=load_file(path / MODEL),
        ema=load_file(path / EMA) if (path / EMA).exists() else None,
        state=torch.load(path / STATE, map_location="cpu", weights_only=True),
    )


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


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in host memory, contiguous and unshared, as safetensors wants them."""
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }


def _copied_tree(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied_tree(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied_tree(item) for item in value]
    return value


@dataclass
class Checkpointer:
    """Writes a run's checkpoints from a thread of main's; on other ranks it does nothing.

    Args:
        run_dir: the folder of the job.
        identity: what a resume must agree on.
        keep: how many of the newest checkpoints stay; the best one always does.
        writes: whether this rank is the one that writes.
        every_s: seconds after which a checkpoint is overdue; null where steps decide.
    """

    run_dir: RunDir
    identity: Facts
    keep: int
    writes: bool
    every_s: float | None = None
    saved_at: float = field(default_factory=time.monotonic)
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "checkpoint"))
    pending: Future[None] | None = None
    failure: str = ""

    def overdue(self) -> bool:
        """Whether the last checkpoint is older than `every_s`, by the writer's clock."""
        return self.writes and self.every_s is not None and time.monotonic() - self.saved_at >= self.every_s

    def save(
        self,
        *,
        model: nn.Module,
        ema: AveragedModel | None,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        progress: Mapping[str, Any],
        best: bool,
    ) -> None:
        """Copy the state to host memory and write it in the background, after the write before it."""
        if not self.writes:
            return
        self.wait()
        self.saved_at = time.monotonic()
        weights = {MODEL: _copied(model.state_dict())}
        state = {"optimizer": _copied_tree(optimizer.state_dict()), "scaler": scaler.state_dict()}
        if ema is not None:
            weights[EMA] = _copied(ema.module.state_dict())
            state["ema_updates"] = int(ema.n_averaged)
        facts = {"format": 1, "identity": dict(self.identity), "progress": dict(progress)}
        self.pending = self.pool.submit(self._write, weights, state, facts, best)

    def wait(self) -> None:
        """Wait for the write under way. One that failed is a warning: the checkpoint before it still stands."""
        if self.pending is None:
            return
        pending, self.pending = self.pending, None
        try:
            pending.result()
        except (OSError, RuntimeError, SafetensorError) as error:  # a full disk is any of these
            log.warn(f"a checkpoint could not be written ({error}); the run goes on and the next one is tried")
            self.failure = str(error)
        else:
            self.failure = ""

    def close(self) -> None:
        """Finish the last write.

        Raises:
            StorageError: the last checkpoint of the run could not be written.
        """
        self.wait()
        self.pool.shutdown()
        if self.failure:
            raise StorageError(f"the last checkpoint could not be written to {self.run_dir.path} ({self.failure})")

    def _write(
        self, weights: Mapping[str, dict[str, Tensor]], state: dict[str, Any], facts: Facts, best: bool
    ) -> None:
        folder = self.run_dir.checkpoints
        name = f"step-{facts['progress']['step']:08d}"
        temporary = folder / f".{name}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        for file, tensors in weights.items():
            save_file(tensors, temporary / file)
        torch.save(state, temporary / STATE)
        (temporary / FACTS).write_text(json.dumps(facts, indent=2) + "\n")
        digests = {each.name: _sha256(each) for each in sorted(temporary.iterdir())}
        (temporary / MANIFEST).write_text(json.dumps({"sha256": digests}, indent=2) + "\n")
        for each in temporary.iterdir():
            _sync(each)
        final = folder / name
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        _sync(folder)
        write_atomic(folder / LAST, name)
        if best:
            write_atomic(folder / BEST, name)
            self._export(final)
        self._retire()

    def _export(self, best: Path) -> None:
        """Give the run folder the best weights so far: the averaged ones where there are any."""
        source = best / EMA if (best / EMA).exists() else best / MODEL
        temporary = self.run_dir.weights.with_suffix(".tmp")
        shutil.copyfile(source, temporary)
        temporary.replace(self.run_dir.weights)

    def _retire(self) -> None:
        """Remove all but the newest `keep` checkpoints and the best one."""
        folder = self.run_dir.checkpoints
        best = (folder / BEST).read_text() if (folder / BEST).exists() else ""
        for path in candidates(folder)[max(1, self.keep) :]:
            if path.name != best:
                shutil.rmtree(path)


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
    try:
        model.load_state_dict(loaded.model)
        _load_optimizer(optimizer, loaded.state["optimizer"])
    except (RuntimeError, ValueError, KeyError) as error:
        raise InputError(f"resume: {loaded.path} does not fit this model ({error})") from error
    scaler.load_state_dict(loaded.state["scaler"])
    if ema is not None:
        if loaded.ema is None:
            raise InputError(f"resume: {loaded.path} has no averaged weights; use train.ema=null")
        ema.module.load_state_dict(loaded.ema)
        ema.n_averaged.fill_(loaded.state["ema_updates"])
    progress = loaded.facts["progress"]
    assert isinstance(progress, dict)
    return progress
