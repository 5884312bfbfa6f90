"""Tries a loss or a task of the user's on a few examples before the first step: no example may depend on the others.

Ranks and micro-batches cut a batch. A loss that compares its examples, as contrastive losses do, would be another one
for each number of them. Our own losses and tasks are not tried.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.config.options import option_name
from lockstep.core.batch import Batch
from lockstep.core.errors import InputError
from lockstep.core.protocols import Task
from lockstep.core.world import World
from lockstep.losses import MaskedLoss, check_losses
from lockstep.models.nets import sketch
from lockstep.training.resolved_job import ResolvedJob

# A part of the largest loss. For another size of a batch kernels round in another way, in a teacher in bfloat16 by
# almost as much; other examples change a loss by more.
ROUNDED = 1e-2
COARSE_SIDE = 4  # pixels that the network's stand-in looks at


def check_apart(what: str, losses: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, targets: Tensor) -> None:
    """Raise InputError if `losses`, (n,) of inputs and targets (n, ...), give two halves other losses than the whole.

    Losses that draw random numbers, or that do not take a few examples, are not judged.
    """
    device = inputs.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            whole, again = losses(inputs, targets), losses(inputs, targets)
            parts = [losses(*half) for half in zip(inputs.chunk(2), targets.chunk(2), strict=True)]
        except Exception:  # any error of the user's code; the first step shows it
            return
    check_losses(what, whole, len(inputs))
    largest = ROUNDED * float(whole.detach().abs().nan_to_num(0).max())

    def same(others: Tensor) -> bool:
        return torch.allclose(whole, others, rtol=0, atol=largest, equal_nan=True)

    if same(again) and not same(torch.cat(parts)):
        raise InputError(
            f"{what} gives an example another loss beside other examples, as two halves of a batch show, so ranks "
            "and micro-batches would change the run; compare an example with what no batch changes, such as another "
            "view of it, a vector for each class in the network, or the outputs of a teacher"
        )


def check_task(job: ResolvedJob, task: Task, loss: MaskedLoss, targets: Tensor, world: World) -> None:
    """`check_apart` for a task, on as many random images as targets, with a stand-in for the network."""
    loss = copy.deepcopy(loss)  # it may count
    generator = torch.Generator().manual_seed(0)
    channels, *size = job.train_shape
    try:
        network = _stand_in(job, world, generator)
    except Exception:  # any error of any network on the meta device
        return
    coarse = torch.randn((len(targets), channels, COARSE_SIDE, COARSE_SIDE), generator=generator)
    images = F.interpolate(coarse, size).to(world.device, job.precision.sums)

    def losses(images: Tensor, targets: Tensor) -> Tensor:
        return task.losses(Batch(images, targets, network, loss, lambda *_: None))[0]

    check_apart(f"task={option_name(type(job.task))}", losses, images, targets)


def _stand_in(job: ResolvedJob, world: World, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    """A function with the outputs of the job's network, by shape, that never mixes examples, as batch norm does."""
    model: Any = sketch(job.model, job.dataset.classes, job.dataset.input_shape)
    with torch.no_grad():
        shape = model.train()(torch.empty((2, *job.train_shape), device="meta")).shape[1:]
    values = job.train_shape[0] * COARSE_SIDE**2
    weights = torch.randn((values, shape.numel()), generator=generator).to(world.device, job.precision.sums)

    def network(images: Tensor) -> Tensor:
        seen = F.adaptive_avg_pool2d(images, COARSE_SIDE).flatten(1)
        return (seen @ weights / values**0.5).view(-1, *shape)

    return network
