"""Averages of a run's weights: the exponential one of `train.ema`, and the plain mean of `train.swa_from`."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lockstep.core.model import BatchNorm, model_mode, own_parts
from lockstep.core.plan import Averaging, Plan
from lockstep.core.world import World
from lockstep.strategy.base import copy_back, flattened
from lockstep.training.resolved_job import ResolvedJob, averaging_of, decisions


class EMA(AveragedModel):
    """An exponential moving average of a model's parameters and buffers; the first update copies them.

    The average is kept in `copy`, which is cut over the ranks like `model`, or else in a deep copy of `model`. With
    `warmup`, the decay of update n is at most (1 + n) / (10 + n), as in TensorFlow, so that the first weights fade.

    Only the update differs from torch's class: one kernel averages all floats, and one copies all counters. torch's
    class collects the tensors again at each step. It also copies its counter to the device, which waits for the
    device. And it averages buffers that are infinite, such as the bounds of a clamp that limits nothing, to NaN; here
    they are copied.
    """

    def __init__(
        self, model: nn.Module, decay: float, copy: nn.Module | None = None, warmup: bool = False, every: int = 1
    ) -> None:
        super().__init__(model if copy is None else nn.Identity(), use_buffers=True)
        if copy is not None:
            self.module = copy
        self.decay, self.warmup, self.start, self.every = decay, warmup, 1, every
        # Of a mean (`SWA`): its steps, and the batch norms that need new statistics, from so many images.
        self.steps: Averaging | None = None
        self.norms: list[tuple[BatchNorm, nn.Module]] = []
        self.images = 0
        averages, sources = (own_parts((*module.parameters(), *module.buffers())) for module in (self.module, model))
        self.averaged: tuple[list[Tensor], list[Tensor]] = ([], [])
        self.copied: tuple[list[Tensor], list[Tensor]] = ([], [])
        for average, source in zip(averages, sources, strict=True):
            is_averaged = source.is_floating_point() and not source.isinf().any()
            for tensors, tensor in zip(self.averaged if is_averaged else self.copied, (average, source), strict=True):
                tensors.append(tensor)

    def due(self, step: int) -> bool:
        """Whether the average is updated at a step, counted from 1."""
        return (step - 1) % self.every == 0

    def share(self, update: int) -> float:
        """The share of the new weights at an update, counted from 1."""
        decay = min(self.decay, (1 + update) / (10 + update)) if self.warmup else self.decay
        return 1 - decay if update > 1 else 1.0

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        torch._foreach_lerp_(*self.averaged, self.share(int(self.n_averaged) + 1))
        if self.copied[0]:  # torch refuses empty lists
            torch._foreach_copy_(*self.copied)
        self.n_averaged.add_(1)  # in place: to set a buffer of a module takes fifteen calls

    @torch.no_grad()
    def renew_statistics(
        self,
        frozen: Sequence[nn.Module],
        blocks: Iterable[Tensor],
        number: int,
        forward: Callable[[nn.Module, Tensor], object],
        world: World,
    ) -> None:
        """Compute the running statistics of batch norm for the averaged weights, as torch's `update_bn`. Collective.

        They are the means over the statistics of `number` blocks of images, dealt to the ranks in turns; blocks after
        the last one do not count. Each block has a row, which one rank fills, so the sum over the ranks has the same
        bits on any number of ranks. Other layers are in evaluation mode, so nothing is dropped at random.

        Args:
            frozen: the norms of the trained model that keep their statistics, as `Freezing.norms`.
            blocks: this rank's blocks, as many on each rank.
        """
        norms = [norm for norm, of_model in self.norms if of_model not in frozen]
        if not norms:
            return
        means, variances = ([getattr(norm, name) for norm in norms] for name in ("running_mean", "running_var"))
        statistics, rows = own_parts([*means, *variances]), []
        with model_mode(self.module, training=False):
            for norm in norms:
                norm.train()
                norm.reset_running_stats()
            for images in blocks:
                forward(self.module, images)
                if statistics:  # the stage of this rank may have none
                    rows.append(flattened(statistics))
        if rows:
            table = rows[0].new_zeros((len(rows) * world.size, len(rows[0])))
            table[world.rank :: world.size] = torch.stack(rows)
            copy_back(world.sum(table)[:number].mean(0), statistics)
        for norm in norms:
            norm.get_buffer("num_batches_tracked").fill_(number)


class SWA(EMA):
    """Stochastic weight averaging (Izmailov et al. 2018): the mean of the weights of `steps`.

    Update n has the decay 1 - 1/n. So many training `images` give the mean its statistics of batch norm.
    """

    steps: Averaging

    def __init__(self, model: nn.Module, copy: nn.Module | None, steps: Averaging, images: int = 0) -> None:
        super().__init__(model, 1.0, copy)
        self.steps, self.start, self.images = steps, steps.start, images
        pairs = zip(self.module.modules(), model.modules(), strict=True)
        self.norms = [
            (norm, of_model) for norm, of_model in pairs if isinstance(norm, BatchNorm) and norm.track_running_stats
        ]
        for norm, _ in self.norms:
            norm.momentum = 1.0  # in training mode, the running statistics come from the last block alone

    def due(self, step: int) -> bool:
        return self.steps.due(step)

    def share(self, update: int) -> float:
        return 1 / update


def build_average(job: ResolvedJob, plan: Plan, model: nn.Module, copy: nn.Module) -> EMA:
    if job.train.ema is not None:
        return EMA(model, job.train.ema, copy, warmup=job.train.ema_warmup, every=job.train.ema_every)
    return SWA(model, copy, averaging_of(decisions(job, plan)), job.train.swa_images)
