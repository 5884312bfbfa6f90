"""Exact evaluation: every example of the split once, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn import functional as F

from lockstep.data.loader import Loader
from lockstep.data.pipeline import Pipeline
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
    `alive` is called after each block. `top5` is `topk` over all classes where there are fewer than five.
    """
    world.share_buffers(model)
    training = model.training
    model.eval()
    loss = torch.zeros(1, dtype=torch.float64, device=world.device)
    hits = torch.zeros(2, dtype=torch.int64, device=world.device)
    count = 0
    for images, labels in loader.eval():
        with precision.autocast(world.device):
            logits = model(pipeline.eval(images)).to(precision.storage)
        loss += F.cross_entropy(logits, labels, reduction="sum")
        hit = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
        hits += torch.stack([hit[:, 0].sum(), hit.sum()])
        count += len(labels)
        alive()
    model.train(training)
    world.sum(loss)
    top1, top5, count = world.sum(torch.cat([hits, hits.new_tensor([count])])).tolist()
    assert count == len(loader.eval_labels), f"evaluated {count} of {len(loader.eval_labels)} examples"
    return {"loss": loss.item() / count, "top1": 100 * top1 / count, "top5": 100 * top5 / count}
