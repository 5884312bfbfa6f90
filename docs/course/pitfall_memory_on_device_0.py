"""Memory on device 0 under DataParallel: it has the batch, the gathered outputs and the optimizer's state as well.

This counts bytes on the CPU; no GPU is used. Four ranks take a real step under DDP, and count their tensors and what
autograd saves. DataParallel does not run on a CPU: the bytes of such a step are put where the source of
`torch.nn.DataParallel` puts them (scatter, replicate, apply, gather).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ranks import on_ranks, show

DEVICES, BATCH, FEATURES, CLASSES = 4, 256, 64, 1000


class Memory(NamedTuple):
    """Bytes at the end of a forward pass and during the backward pass."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    batch: int
    outputs: int


def size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def counted(rank: int) -> Memory:
    """What this rank needs for its shard, counted in a step of AdamW under DDP, whose buckets are the gradients."""
    model = nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, CLASSES))
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(BATCH // DEVICES, FEATURES)
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) and tensor.data_ptr() != inputs.data_ptr():
            saved[tensor.untyped_storage().data_ptr()] = size(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = replica(inputs)
    F.cross_entropy(outputs, torch.zeros(len(inputs), dtype=torch.int64)).backward()
    optimizer.step()
    weights = sum(size(parameter) for parameter in model.parameters())
    gradients = sum(size(parameter.grad) for parameter in model.parameters() if parameter.grad is not None)
    state = sum(size(value) for values in optimizer.state.values() for value in values.values())
    return Memory(weights, gradients, state, sum(saved.values()), size(inputs), size(outputs))


def data_parallel(part: Memory) -> list[Memory]:
    """The bytes of each device: device 0 also has the whole batch, all outputs, and alone the optimizer's state."""
    first = part._replace(batch=part.batch * DEVICES, outputs=part.outputs * (DEVICES + 1))
    return [first] + [part._replace(optimizer=0)] * (DEVICES - 1)


if __name__ == "__main__":
    ranks = on_ranks(counted, DEVICES)
    for name, text, memory in (("wrong", "DataParallel", data_parallel(ranks[0])), ("right", "DDP", ranks)):
        first, other = sum(memory[0]), min(sum(device) for device in memory)
        show(
            name,
            f"{text}, device 0 has {first // 1024} KiB, which is more than the least by KiB",
            (first - other) // 1024,
        )
