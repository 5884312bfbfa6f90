"""The parts of a job, for a training loop that the user writes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lockstep.core.data_protocols import MicroBatch
from lockstep.core.plan import Plan
from lockstep.core.world import World
from lockstep.data.loading.shards import Loader, Shard
from lockstep.data.pipeline import Pipeline
from lockstep.losses import MaskedLoss
from lockstep.optim.optimizers import set_learning_rate
from lockstep.training.build_data import build_data, build_loader
from lockstep.training.build_model import build_loss, build_network
from lockstep.training.freezing import Freezing
from lockstep.training.resolved_job import ResolvedJob


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A job in parts, on one device.

    Fields:
        job: the job, with a value for every `auto`.
        plan: the plan in steps.
        model: the model, on the device.
        optimizer: the optimizer of the model's parameters, at the base learning rate.
        set_keys: has to be called before a forward pass over examples that are not a whole batch of `batches`,
            so that the model's random layers draw the numbers of these examples.
        freezing: the layers that are frozen, and in which steps.
        scaler: the loss scaler; disabled if the number format needs none.
        loader: reads the images of both splits.
        pipeline: from stored uint8 images to the input of the model.
        criterion: the loss: from logits (b, classes) and targets to one loss per example, (b,).
    """

    job: ResolvedJob
    plan: Plan
    model: nn.Module
    optimizer: torch.optim.Optimizer
    criterion: nn.Module
    freezing: Freezing
    set_keys: Callable[[MicroBatch], None]
    scaler: torch.amp.GradScaler
    loader: Loader
    pipeline: Pipeline

    def batches(self, after: int = 0) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The global batches of the steps after step `after`: the step, images and targets, on the device.

        They are those of `lockstep train`, in its order and with its augmentation: float images (b, C, H, W), and
        labels (b,), or shares of the classes (b, classes) under Mixup and CutMix.
        """
        for shard in self.pipeline.train(self.loader.train(after=after)):
            images, targets = self.pipeline.mixed(shard)
            self.set_keys(shard)
            yield shard.step, images, targets

    def update(self, shard: Shard) -> float:
        """Forward, backward and optimizer step on a global batch; returns the mean loss of its unbroken images."""
        loss, criterion = 0.0, MaskedLoss(self.criterion, tolerates_broken=True)
        for micro, _ in shard.micro_batches(self.plan.micro_batches):
            if not len(micro.labels):  # not every model takes an empty one
                continue
            images, targets = self.pipeline.mixed(micro)
            self.set_keys(micro)
            with self.job.precision.autocast(images.device):
                logits = self.model(images).to(self.job.precision.sums)
                part = criterion(logits, targets, micro.labels).sum() / shard.count
            self.scaler.scale(part).backward()
            loss += float(part.detach())
        self.scaler.unscale_(self.optimizer)
        if self.job.train.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.job.train.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss * shard.count / max(1, int((shard.labels >= 0).sum()))

    def evaluation(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The evaluation split in blocks: float images (b, C, H, W) and labels (b,), on the device."""
        for images, labels in self.loader.eval():
            yield self.pipeline.eval(images).to(self.pipeline.dtype), labels

    def set_learning_rate(self, step: int) -> None:
        """Give the optimizer its learning rates for a step, counted from 1, and freeze what `train.freeze` says."""
        self.freezing.freeze_for(step)
        set_learning_rate(self.optimizer, self.job.optimizer.lr * self.job.schedule.factor(step, self.plan))


def build_parts(job: ResolvedJob) -> Parts:
    """The parts of a resolved job.

    Raises:
        InputError: the data or the model do not fit.
    """
    world = World.solo("cuda:0" if job.device == "cuda" else job.device)
    torch.manual_seed(job.seed)
    job.precision.configure()
    job, data = build_data(job, world)
    network = build_network(job, world, data.plan, lambda number: data.normalised(number, world))
    return Parts(
        job=job,
        plan=data.plan,
        model=network.model,
        optimizer=network.optimizer,
        criterion=build_loss(job, data, world).loss,
        freezing=network.freezing,
        set_keys=network.draws.set_keys,
        scaler=network.scaler,
        loader=build_loader(job, data, world),
        pipeline=data.pipeline,
    )
