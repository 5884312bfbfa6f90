"""The loss of a run, tried once before the first step."""

from __future__ import annotations

import torch

from lockstep.core.errors import InputError
from lockstep.core.world import World
from lockstep.losses import SummedLoss
from lockstep.training.build_data import TrainingData
from lockstep.training.resolved_job import ResolvedJob

TRIED = 3  # examples that the loss is tried on


def build_loss(job: ResolvedJob, data: TrainingData, world: World) -> SummedLoss:
    """The loss of a job on its device.

    Raises:
        InputError: the loss has parameters, which nothing would train, or does not give one number per example.
    """
    classes = job.dataset.classes
    module = job.loss.build(classes, data.train.labels).to(world.device)
    name = type(job.loss).__name__
    if next(module.parameters(), None) is not None:
        raise InputError(f"the loss {name} has parameters, which no optimizer trains; make them buffers or constants")
    logits = torch.zeros((TRIED, classes), device=world.device, dtype=job.precision.sums)
    labels = torch.arange(TRIED, device=world.device) % classes
    targets = labels if data.pipeline.mix is None else torch.eye(classes, device=world.device)[labels].to(logits)
    shape = tuple(module(logits, targets).shape)
    if shape != (TRIED,):
        raise InputError(
            f"the loss {name} gives a tensor of shape {shape} for {TRIED} examples, expected ({TRIED},), a number "
            'for each; a loss of torch.nn does so with reduction="none"'
        )
    return SummedLoss(module, tolerates_broken=max(data.train.skip, data.val.skip) > 0)
