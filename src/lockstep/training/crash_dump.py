"""The dump of a run whose loss or weights are no longer finite: `incident/` in the run folder."""

from __future__ import annotations

import json
import shutil

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from lockstep import checkpoint
from lockstep.core import log
from lockstep.core.errors import BrokenImage, NumericalError
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_write import write_atomic
from lockstep.training.trainer import Trainer


def keep(error: NumericalError, trainer: Trainer, weights: dict[str, Tensor], run_dir: RunDir) -> None:
    """Write the global batch of the first bad step, as stored, and the present weights.

    `incident.json` names the step, its samples and the last checkpoint before it: a run resumed there comes to the
    step with the same batch. Called by main only. A failed write is only a warning, because the run ends with its own
    error; it leaves no incomplete `incident/`.
    """
    try:
        _write(error, trainer, weights, run_dir)
    # A full disk raises any of these.
    except (OSError, RuntimeError, MemoryError, SafetensorError, BrokenImage) as failure:
        log.warn(f"{run_dir.incident} could not be written ({failure}), so nothing is kept of the bad step")
        shutil.rmtree(run_dir.incident, ignore_errors=True)


def _write(error: NumericalError, trainer: Trainer, weights: dict[str, Tensor], run_dir: RunDir) -> None:
    step = error.step or trainer.progress.step
    batch = trainer.loader.global_batch(step)
    folder = run_dir.incident
    folder.mkdir(exist_ok=True)
    torch.save(
        {"images": batch.images.cpu(), "labels": batch.labels.cpu(), "indices": batch.indices.cpu()},
        folder / "batch.pt",
    )
    on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    save_file(on_host, folder / "model.safetensors")
    earlier = [checkpoint_folder.name for checkpoint_folder in checkpoint.candidates(run_dir.checkpoints)]
    facts = {
        "error": str(error),
        "step": step,
        "epoch": batch.epoch,
        "seen_at_step": trainer.progress.step,
        "learning_rate": trainer.lr * trainer.schedule.factor(step, trainer.plan),
        "samples": (batch.indices % trainer.plan.examples).tolist(),
        "checkpoint": earlier[0] if earlier else None,
    }
    write_atomic(folder / "incident.json", json.dumps(facts, indent=2) + "\n")
    log.warn(f"the batch of step {step} and the weights are kept in {folder}")
