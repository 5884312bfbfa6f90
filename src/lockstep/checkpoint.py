"""Checkpoints: one folder each, written under a temporary name, hashed, renamed, and checked before use.

A folder `checkpoints/step-00000042` holds `model.safetensors` (and `ema.safetensors`), `state.pt` (optimizer
and scaler; loads with `weights_only=True`), `facts.json` (what the run was, and how far it had come) and
`manifest.json` (the sha256 of each of these). `checkpoints/last` and `checkpoints/best` hold a folder's name, for
people: nothing here reads them. A checkpoint can come from someone else, so that it is read only where it is made of
plain files of these names, and nothing in it is taken for more than numbers and words.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import stat
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
from lockstep.rundir import MANIFEST, RunDir, sync, write_atomic

FACTS, STATE, MODEL, EMA = "facts.json", "state.pt", "model.safetensors", "ema.safetensors"
LAST, BEST = "last", "best"
RETRY_S = 30.0  # after a save that failed

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


def _plain(path: Path) -> Path:
    """`path`, which has to be a file: a link could lead anywhere, and a pipe would be waited for."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise ValueError(f"{path.name} is not a plain file")
    return path


def _manifest(path: Path) -> dict[str, str]:
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
        digests = _manifest(path)
        with ThreadPoolExecutor(len(digests)) as pool:  # hashing releases Python's lock
            found = pool.map(lambda name: _sha256(_plain(path / name)), digests)
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
        return bool(_manifest(path) and _facts(path))
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
            ema=load_file(path / EMA) if EMA in _manifest(path) else None,
            state=torch.load(path / STATE, map_location="cpu", weights_only=True),
        )
    except Exception as error:  # the hashes fit, so someone wrote it so: torch and safetensors raise all kinds
        raise _damaged(path, str(error).partition("\n")[0]) from error


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
        keep: how many of the newest checkpoints stay.
        keep_best: how many of the best ones stay besides, by validation top-1.
        writes: whether this rank is the one that writes.
        every_s: seconds after which a checkpoint is overdue; null where steps decide.
    """

    run_dir: RunDir
    identity: Facts
    keep: int
    keep_best: int
    writes: bool
    every_s: float | None = None
    saved_at: float = field(default_factory=time.monotonic)
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "checkpoint"))
    pending: Future[None] | None = None
    failure: str = ""

    def mend(self, best_step: int) -> None:
        """Export the best weights of a run that was killed after it had saved them and before they were exported."""
        best, exported = self.run_dir.checkpoints / f"step-{best_step:08d}", self.run_dir.weights
        if not self.writes:
            return
        try:
            digests = _manifest(best)
        except (OSError, ValueError, RecursionError):  # none, or damaged
            return
        # Mostly the weights are there, and the whole checkpoint need not be read once more to see it.
        whole = exported.exists() and _sha256(exported) == digests.get(EMA, digests[MODEL])
        if not whole and not damage(best):
            write_atomic(self.run_dir.checkpoints / BEST, best.name)
            self._export(best)

    def overdue(self) -> bool:
        """Whether the last checkpoint is older than `every_s`, by the writer's clock, or failed `RETRY_S` ago."""
        if self.pending is not None and self.pending.done():
            self.wait()  # a failure is said now, and not at the next save
        waits = [RETRY_S] if self.failure else []
        waits += [self.every_s] if self.every_s is not None else []
        return self.writes and bool(waits) and time.monotonic() - self.saved_at >= min(waits)

    def save(
        self,
        *,
        model: nn.Module,
        ema: AveragedModel | None,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        progress: Mapping[str, Any],
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
        self.pending = self.pool.submit(self._write, weights, state, facts)

    def wait(self) -> None:
        """Wait for the write under way. The first that fails is a warning: the checkpoint before it still stands."""
        if self.pending is None:
            return
        pending, self.pending = self.pending, None
        try:
            pending.result()
        except (OSError, RuntimeError, SafetensorError) as error:  # a full disk is any of these
            if not self.failure:
                log.warn(f"a checkpoint could not be written ({error}); the run goes on and tries again")
            self.failure = str(error)
        else:
            if self.failure:
                log.say("checkpoints are written again")
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

    def _write(self, weights: Mapping[str, dict[str, Tensor]], state: dict[str, Any], facts: Facts) -> None:
        folder, progress = self.run_dir.checkpoints, facts["progress"]
        folder.mkdir(exist_ok=True)
        for torn in folder.glob(".step-*.tmp"):  # what a kill left behind
            shutil.rmtree(torn, ignore_errors=True)
        name = f"step-{progress['step']:08d}"
        temporary, final = folder / f".{name}.tmp", folder / name
        try:
            temporary.mkdir()
            for file, tensors in weights.items():
                save_file(tensors, temporary / file)
            torch.save(state, temporary / STATE)
            (temporary / FACTS).write_text(json.dumps(facts, indent=2) + "\n")
            digests = {each.name: _sha256(each) for each in sorted(temporary.iterdir())}
            (temporary / MANIFEST).write_text(json.dumps({"sha256": digests}, indent=2) + "\n")
            for each in (*temporary.iterdir(), temporary):
                sync(each)
            if final.exists():  # damaged, or its step would not be done again
                _remove(final)
            temporary.rename(final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)  # on a full disk its room is what others need
            raise
        sync(folder)
        write_atomic(folder / LAST, name)
        if progress["best_step"] == progress["step"]:
            write_atomic(folder / BEST, name)
            self._export(final)
        self._retire(final)

    def _export(self, best: Path) -> None:
        """Give the run folder the best weights so far: the averaged ones where there are any."""
        source = best / EMA if (best / EMA).exists() else best / MODEL
        temporary = self.run_dir.weights.with_suffix(".tmp")
        try:
            shutil.copyfile(source, temporary)
            temporary.replace(self.run_dir.weights)
        finally:
            temporary.unlink(missing_ok=True)

    def _retire(self, written: Path) -> None:
        """Remove all but the newest `keep` checkpoints and the `keep_best` best ones, once `written` can be read.

        Ones of later steps are those that a resume passed over: they stay until their step is done again.
        """
        found = candidates(self.run_dir.checkpoints)
        found = found[found.index(written) :]
        scores = {each: score for each in reversed(found) if (score := _score(each)) is not None}
        best = sorted(scores, key=lambda each: -scores[each])[: self.keep_best]  # of equal ones the earliest
        retired = [each for each in found[self.keep :] if each not in best]
        if retired and (reason := damage(written)):
            log.warn(f"checkpoint {written} cannot be read back ({reason}); no older one is removed")
            return
        for each in retired:
            _remove(each)


def _remove(path: Path) -> None:
    """Remove a checkpoint in one step: a kill on the way leaves none that is half there."""
    torn = path.with_name(f".{path.name}.old.tmp")
    path.rename(torn)
    shutil.rmtree(torn)


def _score(path: Path) -> float | None:
    """The validation top-1 of a checkpoint, where it was evaluated and can be read."""
    try:
        score = _facts(path)["progress"]["score"]
    except (OSError, ValueError, RecursionError):
        return None
    return None if score is None else float(score)


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
