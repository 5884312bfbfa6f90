"""Dropout and accumulation: another number of micro-batches draws other masks, so it is another run.

One generator serves all layers in the order in which they run. With four micro-batches they run in another order. The
right way seeds the mask of an example by its number and the layer, so that it does not matter when it is drawn.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ranks import examples, relative, show

BATCH, WIDTH, DROPPED = 32, 24, 0.5
Mask = Callable[[list[int], int], Tensor]


def drawn(indices: list[int], layer: int) -> Tensor:
    """Masks from torch's generator, as `nn.Dropout` draws them."""
    return torch.rand(len(indices), WIDTH, dtype=torch.float64)


def keyed(indices: list[int], layer: int) -> Tensor:
    """Masks from the number of each example, and the layer."""
    generators = (torch.Generator().manual_seed(1000 * index + layer) for index in indices)
    return torch.stack([torch.rand(WIDTH, generator=generator, dtype=torch.float64) for generator in generators])


def gradient(mask: Mask, pieces: int) -> Tensor:
    """The gradient of the first layer for one batch, accumulated over `pieces` micro-batches."""
    inputs, labels = examples(BATCH)
    torch.manual_seed(0)
    first, second, last = (
        nn.Linear(*shape, dtype=torch.float64) for shape in ((16, WIDTH), (WIDTH, WIDTH), (WIDTH, 4))
    )
    for piece in torch.arange(BATCH).chunk(pieces):
        hidden = inputs[piece]
        for number, layer in enumerate((first, second)):
            hidden = F.relu(layer(hidden)) * (mask(piece.tolist(), number) > DROPPED) / (1 - DROPPED)
        (F.cross_entropy(last(hidden), labels[piece], reduction="sum") / BATCH).backward()
    result: Tensor = first.weight.grad  # type: ignore[assignment]
    return result


def difference(mask: Mask) -> float:
    """By how many percent four micro-batches give another gradient than one."""
    one = gradient(mask, 1)
    return relative(gradient(mask, 4) - one, one)


if __name__ == "__main__":
    show("wrong", "torch's generator, percent by which 4 micro-batches change the gradient", difference(drawn))
    show("right", "masks by example and layer, percent by which 4 micro-batches change it", difference(keyed))
