"""Memory on device 0 under DataParallel: it has the batch, the gathered outputs and the optimizer's state as well.

This counts bytes on the CPU; no GPU is used. What is put where follows the source of `torch.nn.DataParallel`:
scatter, replicate, apply, gather. The bytes are those of this model's tensors, and of what autograd saves.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ranks import show

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


def one_shard() -> Memory:
    """What one device needs for its shard, counted from a real step of AdamW."""
    model = nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, CLASSES))
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(BATCH // DEVICES, FEATURES)
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) and tensor.data_ptr() != inputs.data_ptr():
            saved[tensor.untyped_storage().data_ptr()] = size(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = model(inputs)
    F.cross_entropy(outputs, torch.zeros(len(inputs), dtype=torch.int64)).backward()
    optimizer.step()
    weights = sum(size(parameter) for parameter in model.parameters())
    state = sum(size(value) for values in optimizer.state.values() for value in values.values())
    return Memory(weights, weights, state, sum(saved.values()), size(inputs), size(outputs))


def data_parallel() -> list[Memory]:
    """The bytes of each device: device 0 also has the whole batch, all outputs, and alone the optimizer's state."""
    part = one_shard()
    first = part._replace(batch=part.batch * DEVICES, outputs=part.outputs * (DEVICES + 1))
    return [first] + [part._replace(optimizer=0)] * (DEVICES - 1)


def distributed() -> list[Memory]:
    """The bytes of each rank under DistributedDataParallel: every rank has the same."""
    return [one_shard()] * DEVICES


if __name__ == "__main__":
    for name, text, memory in (("wrong", "DataParallel", data_parallel()), ("right", "DDP", distributed())):
        first, other = sum(memory[0]), sum(memory[1])
        show(
            name,
            f"{text}, device 0 has {first // 1024} KiB, which is more than device 1 by KiB",
            (first - other) // 1024,
        )
