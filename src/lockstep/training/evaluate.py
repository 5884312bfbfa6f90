"""Exact evaluation: every example of the split once, on any number of ranks. `Patience` ends a run by its scores."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from lockstep.core.batch import Batch
from lockstep.core.errors import InputError
from lockstep.core.fields import parse_duration
from lockstep.core.model import has_shards, is_broken
from lockstep.core.model_card import VIEWS
from lockstep.core.plan import Plan
from lockstep.core.protocols import Precision, Task
from lockstep.core.tags import Monitor, figure_name, figure_parts
from lockstep.core.world import World
from lockstep.data.loading.shards import EvalLoader
from lockstep.data.transforms.augment import reflected
from lockstep.data.transforms.device import DeviceTransforms
from lockstep.losses import MaskedLoss
from lockstep.scores import EvaluationBlock, EvaluationObserver
from lockstep.training.train_step import ignore


@torch.no_grad()
def evaluate_model(
    model: nn.Module,
    *,
    task: Task,
    loss: MaskedLoss,
    loader: EvalLoader,
    transforms: DeviceTransforms,
    precision: Precision,
    world: World,
    views: int = 1,
    observers: Sequence[EvaluationObserver] = (),
    between: Callable[[int, int], None] = lambda done, blocks: None,
) -> Mapping[str, float]:
    """The mean of the loss in evaluation mode (`loss`), and the scores of the task, by name.

    The raw model is called, never the replica: the first evaluation forward of DDP hides a collective. Broken images
    do not count. The logits, averaged over `views` of an image (see `weighted_views`), go to `observers`. `between`
    gets the numbers of finished blocks and of all, after each block and equally often on every rank: it may contain a
    collective, and may raise. Raises InputError: more images are broken than `dataset.skip` allows, or all of them.
    """
    training = model.training
    model.eval()
    loss.loss.eval()
    for observer in observers:
        observer.start()
    summed = torch.zeros(1, dtype=torch.float64, device=world.device)
    counts = torch.zeros(2 + len(task.counted), dtype=torch.int64, device=world.device)
    rounds = loader.eval_rounds
    done = 0
    network = partial(outputs_of, model, precision=precision, memory_format=transforms.memory_format, views=views)
    for done, (images, labels) in enumerate(loader.eval(), start=1):
        losses, logits = task.evaluate(Batch(transforms.eval(images), labels, network, loss, ignore))
        labels = labels[: len(logits)]  # in a pipeline only the last stage has logits
        broken, predicted = is_broken(labels), task.predict(logits)
        losses = losses.masked_fill(broken, 0)
        summed += losses.sum()
        whole = torch.stack([broken.sum(), (~broken).sum()])
        counts += torch.cat([whole, task.counts(predicted, labels)])
        first = ((done - 1) * loader.world.size + loader.world.rank) * loader.eval_batch
        block = EvaluationBlock(images[: len(logits)], logits, predicted, labels, losses, first)
        for observer in observers:
            observer.update(block)
        between(done, rounds)
    for idle in range(done, rounds):
        if has_shards(model):  # the forward pass gathers the parameters, which needs every rank
            network(transforms.eval(loader.eval_image()))
        for observer in observers:
            observer.update_without()
        between(idle + 1, rounds)
    model.train(training)
    loss.loss.train()
    return _figures(task, loader, world.sum(summed).item(), *world.sum(counts).tolist())


def _figures(
    task: Task, loader: EvalLoader, summed: float, skipped: int, count: int, *shares: int
) -> Mapping[str, float]:
    """The figures of an evaluation from the sums of all ranks. Collective."""
    assert count + skipped == len(loader.eval_labels), f"evaluated {count} of {len(loader.eval_labels)} examples"
    loader.count_skipped()
    if count == 0:
        raise InputError("dataset: no image of the split can be decoded; see the warnings")
    scores = {name: 100 * share / count for name, share in zip(task.counted, shares, strict=True)}
    return {"loss": summed / count, **scores}


def outputs_of(
    model: nn.Module, images: Tensor, precision: Precision, memory_format: torch.memory_format, views: int
) -> Tensor:
    """The outputs (B, classes) for images (B, C, H, W) after `transforms.eval`, the mean over `views`.

    They are in `precision.sums`, and equal images give equal bits.
    """
    with precision.autocast(images.device):
        outputs = [
            weight * model(view.to(precision.dtype, memory_format=memory_format)).to(precision.sums)
            for weight, view in weighted_views(images, views)
        ]
    return torch.stack(outputs).sum(0)


def weighted_views(images: Tensor, views: int) -> list[tuple[float, Tensor]]:
    """The views of images (B, C, H, W) and their weights, which add up to one.

    One view is the images themselves. Two views also have their mirror images. Six views also have both of these,
    moved by one pixel, to the lower right and to the upper left; a moved view has half the weight (Jordan 2024, arXiv
    2404.00498).
    """
    height, width = images.shape[-2:]
    weighted = [(1.0, images)]
    if views == max(VIEWS):
        # Not F.pad, which cannot reflect an image of one pixel.
        rows, columns = (reflected(torch.arange(-1, n + 1, device=images.device), n) for n in (height, width))
        padded = images.index_select(-2, rows).index_select(-1, columns)
        weighted += [(0.5, padded[..., at : at + height, at : at + width]) for at in (0, 2)]
    if views > 1:
        weighted += [(weight, view.flip(-1)) for weight, view in weighted]
    total = sum(weight for weight, _ in weighted)
    return [(weight / total, view) for weight, view in weighted]


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Decides from the scores alone, which a checkpoint has: kills, ranks and resumes cannot change where a run ends.

    Fields:
        limit: a number of evaluations, or a duration such as `5ep`; None never ends a run.
        min_delta: by how much a score must be better than the best one before to count as better.
    """

    limit: int | str | None = None
    min_delta: float = 0.0

    def check(self, plan: Plan) -> None:
        """Raise InputError if a run of this plan is over before its patience can be."""
        if self.limit is None:
            return
        evaluations = math.ceil(plan.total_steps / plan.eval_every)
        if self._left(evaluations - 1, plan.total_steps - plan.eval_every, plan) > 0:
            raise InputError(
                f"train.patience is {self.limit}, but the run has {evaluations} evaluation{'s' * (evaluations != 1)} "
                f"(one every {plan.eval_every:,} of {plan.total_steps:,} steps), so it never ends early; use a "
                "smaller one, more epochs, or a smaller train.eval_every"
            )

    def ended(
        self, scores: Sequence[tuple[int, float | None]], monitor: Monitor, plan: Plan, *, averaged: bool = False
    ) -> str:
        """Why a run with these scores, of the averaged weights or not, ends, in a sentence; empty if it continues."""
        if self.limit is None or not scores:
            return ""
        position, step, value = list(self._improvements(scores, monitor))[-1]
        last, since = scores[-1][0], len(scores) - 1 - position
        if self._left(since, last - step, plan) > 0:
            return ""
        number_text, unit = ("", "") if value is None else figure_parts(monitor.name, value)
        best = f"has not been better than {number_text}{unit}" if number_text else "has had no value"
        name = figure_name(monitor.name) + " of the averaged weights" * averaged
        number = f"{since} evaluation{'s' * (since != 1)}"
        return f"{name} {best} (step {step:,}) for {number}; train.patience={self.limit} ends the run"

    def _left(self, evaluations: int, steps: int, plan: Plan) -> int:
        """How many evaluations or steps are left, after so many without a better score."""
        assert self.limit is not None
        parsed = parse_duration(self.limit)
        if parsed is not None and not parsed[1]:
            return int(parsed[0]) - evaluations
        return plan.in_steps("train.patience", self.limit) - steps

    def _improvements(
        self, scores: Sequence[tuple[int, float | None]], monitor: Monitor
    ) -> Iterator[tuple[int, int, float | None]]:
        """The evaluations that were better than all before: number, step and score. The first one counts as one."""
        best = None
        for number, (step, value) in enumerate(scores):
            gain = monitor.gain(value)
            if (gain is not None and (best is None or gain > best + self.min_delta)) or number == 0:
                best = gain
                yield number, step, value
