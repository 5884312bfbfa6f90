"""The parts of a job, for a training loop that the user writes."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lockstep.core.world import World
from lockstep.data.loading.shards import Loader, Shard
from lockstep.data.transforms.device import DeviceTransforms
from lockstep.training.build_data import build_data, build_loader
from lockstep.training.build_model import build_loss, build_network
from lockstep.training.resolved_job import ResolvedJob
from lockstep.training.train_step import TrainStep, inputs_of


@dataclass(kw_only=True)
class Parts(TrainStep):
    """A job in parts, on one device.

    Fields:
        job: the job, with a value for every `auto`.
        plan: the plan in steps.
        model: the model, on the device.
        optimizer: the optimizer of the model's parameters, at the base learning rate.
        criterion: the loss: from logits (b, classes) and targets to one loss per example, (b,).
        set_keys: has to be called before a forward pass over examples that are not a whole batch of `batches`,
            so that the model's random layers draw the numbers of these examples.
        loader: reads the images of both splits.
        transforms: from stored uint8 images to the input of the model.
    """

    loader: Loader
    transforms: DeviceTransforms

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model, self.optimizer, self.criterion = self.network.model, self.network.optimizer, self.loss.loss
        self.set_keys = self.network.draws.set_keys

    def batches(self, after: int = 0) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The global batches of the steps after step `after`: the step, images and targets, on the device.

        They are those of `lockstep train`, in its order and with its augmentation: float images (b, C, H, W), and
        labels (b,), or shares of the classes (b, classes) under Mixup and CutMix.
        """
        for shard in self.transforms.train(self.loader.train(after=after)):
            images, targets = self.transforms.mixed(shard)
            self.set_keys(shard)
            yield shard.step, images, targets

    def loss_of_step(self, shard: Shard) -> float:
        """Update the weights on a global batch; returns the mean loss of its unbroken images."""
        losses: list[Tensor] = []
        self.record = lambda loss, *_: losses.append(loss)
        self.update(shard)
        return float(torch.stack(losses).sum()) / max(1, int((shard.labels >= 0).sum()))

    def evaluation(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The evaluation split in blocks: float images (b, C, H, W) and labels (b,), on the device."""
        for images, labels in self.loader.eval():
            yield self.transforms.eval(images).to(self.transforms.dtype), labels


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
        world=world,
        plan=data.plan,
        network=network,
        loss=build_loss(job, data.train.labels, world, skip=max(data.train.skip, data.val.skip)),
        inputs=partial(inputs_of, data.transforms, network.draws),
        loader=build_loader(job, data, world),
        transforms=data.transforms,
    )
