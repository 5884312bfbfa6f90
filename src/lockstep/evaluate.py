"""Exact evaluation: every example of the split once, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn import functional as F

from lockstep.data.loader import Loader
from lockstep.data.pipeline import Pipeline
from lockstep.errors import InputError
from lockstep.protocols import Precision
from lockstep.world import World


@torch.no_grad()
def evaluate(
    model: nn.Module,
    *,
    loader: Loader,
    pipeline: Pipeline,
    precision: Precision,
    world: World,
    alive: Callable[[], None] = lambda: None,
) -> Mapping[str, float]:
    """Mean cross-entropy (`loss`, without label smoothing) and accuracies in percent (`top1`, `top5`).

    The raw model is called, never the replica: the first evaluation forward of DDP hides a collective.
    `top5` is `topk` over all classes where there are fewer than five. Broken images do not count. `alive` is called
    after each block.

    Raises:
        InputError: more images are broken than may be, or all of them.
    """
    world.share_buffers(model)
    training = model.training
    model.eval()
    loss = torch.zeros(1, dtype=torch.float64, device=world.device)
    counts = torch.zeros(4, dtype=torch.int64, device=world.device)
    for images, labels in loader.eval():
        with precision.autocast(world.device):
            logits = model(pipeline.eval(images)).to(precision.storage)
        loss += F.cross_entropy(logits, labels, reduction="sum")
        hit = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
        counts += torch.stack([hit[:, 0].sum(), hit.sum(), (labels >= 0).sum(), (labels < 0).sum()])
        alive()
    model.train(training)
    world.sum(loss)
    top1, top5, count, broken = world.sum(counts).tolist()
    assert count + broken == len(loader.eval_labels), f"evaluated {count} of {len(loader.eval_labels)} examples"
    loader.left_out()
    if count == 0:
        raise InputError("dataset: no image of the evaluation split can be decoded; see the warnings")
    return {"loss": loss.item() / count, "top1": 100 * top1 / count, "top5": 100 * top5 / count}
