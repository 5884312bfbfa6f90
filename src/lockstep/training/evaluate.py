"""Exact evaluation: every example of the split once, on any number of ranks."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from lockstep.core.errors import InputError
from lockstep.core.model import has_shards
from lockstep.core.model_card import VIEWS
from lockstep.core.protocols import Precision
from lockstep.core.world import World
from lockstep.data.loading.shards import EvalLoader
from lockstep.data.transforms.augment import reflected
from lockstep.data.transforms.device import DeviceTransforms
from lockstep.losses import MaskedLoss
from lockstep.metrics import Block, EvaluationObserver


@torch.no_grad()
def evaluate(
    model: nn.Module,
    *,
    loss: MaskedLoss,
    loader: EvalLoader,
    transforms: DeviceTransforms,
    precision: Precision,
    world: World,
    views: int = 1,
    observers: Sequence[EvaluationObserver] = (),
    between: Callable[[int, int], None] = lambda done, blocks: None,
) -> Mapping[str, float]:
    """The mean of the loss in evaluation mode (`loss`) and accuracies in percent (`top1`, `top5`).

    The raw model is called, never the replica: the first evaluation forward of DDP hides a collective.
    With fewer than five classes, `top5` counts all of them. Broken images do not count. The logits, averaged over
    `views` of an image (see `weighted_views`), go to `observers`. `between` gets the numbers of finished blocks and
    of all, after each block and equally often on every rank: it may contain a collective, and may raise.

    Raises:
        InputError: more images are broken than `dataset.skip` allows, or all of them.
    """
    world.share_buffers(model)
    training = model.training
    model.eval()
    loss.loss.eval()
    for observer in observers:
        observer.start()
    summed = torch.zeros(1, dtype=torch.float64, device=world.device)
    counts = torch.zeros(4, dtype=torch.int64, device=world.device)
    rounds = loader.eval_rounds
    done = 0
    for done, (images, labels) in enumerate(loader.eval(), start=1):
        logits = logits_of(model, images, transforms=transforms, precision=precision, views=views)
        labels = labels[: len(logits)]  # in a pipeline only the last stage has logits
        losses = loss(logits, labels, labels)
        summed += losses.sum()
        best = best_classes(logits)
        hit = best == labels[:, None]
        counts += torch.stack([hit[:, 0].sum(), hit.sum(), (labels >= 0).sum(), (labels < 0).sum()])
        first = ((done - 1) * loader.world.size + loader.world.rank) * loader.eval_batch
        block = Block(images[: len(logits)], logits, best[:, 0], labels, losses, first)
        for observer in observers:
            observer.update(block)
        between(done, rounds)
    for idle in range(done, rounds):
        if has_shards(model):  # the forward pass gathers the parameters, which needs every rank
            logits_of(model, loader.eval_image(), transforms=transforms, precision=precision, views=views)
        for observer in observers:
            observer.update_without()
        between(idle + 1, rounds)
    model.train(training)
    loss.loss.train()
    world.sum(summed)
    top1, top5, count, broken = world.sum(counts).tolist()
    assert count + broken == len(loader.eval_labels), f"evaluated {count} of {len(loader.eval_labels)} examples"
    loader.count_skipped()
    if count == 0:
        raise InputError("dataset: no image of the split can be decoded; see the warnings")
    return {"loss": summed.item() / count, "top1": 100 * top1 / count, "top5": 100 * top5 / count}


def logits_of(
    model: nn.Module, images: Tensor, *, transforms: DeviceTransforms, precision: Precision, views: int = 1
) -> Tensor:
    """The logits (B, classes) of stored uint8 images (B, C, H, W), averaged over `views`, in `precision.sums`.

    `model` is in evaluation mode. Everything that runs a trained model calls this: equal images give equal bits.
    """
    with precision.autocast(images.device):
        logits = [
            weight * model(view.to(precision.dtype, memory_format=transforms.memory_format)).to(precision.sums)
            for weight, view in weighted_views(transforms.eval(images), views)
        ]
    return torch.stack(logits).sum(0)


def best_classes(logits: Tensor) -> Tensor:
    """The five classes with the highest logits (or all, if there are fewer), int64 (B, 5), the prediction first.

    Logits may be equal, often in 16-bit formats; of these `argmax` may choose another class.
    """
    return logits.topk(min(5, logits.shape[1])).indices


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
