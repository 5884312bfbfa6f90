"""Tensors that are cut over the ranks (torch's `DTensor`), and functions that work for any tensor.

For a tensor that is not cut, the whole and a rank's part are the tensor itself. Nothing here imports `DTensor`, which
takes a second: a tensor that is cut is recognised by its methods.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> bool:
    """Whether each rank has a part of `tensor` only."""
    return hasattr(tensor, "full_tensor")


def has_shards(model: nn.Module) -> bool:
    """Whether a parameter of `model` is cut over the ranks: its forward pass is then collective."""
    return any(map(is_sharded, model.parameters()))


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, without a copy."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return part


def whole(tensor: Tensor) -> Tensor:
    """The tensor from the parts of all ranks; collective if it is cut.

    Parts that are kept in host memory travel over the device, because NCCL sends nothing else.
    """
    if not is_sharded(tensor):
        return tensor
    full: Tensor = tensor.detach().to(tensor.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]
    return full


def part_like(example: Tensor, tensor: Tensor) -> Tensor:
    """The whole `tensor` cut as `example` is: this rank's part of it. Every rank has the whole; nothing is sent."""
    if not is_sharded(example):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    on_device = tensor.to(example.device_mesh.device_type)  # type: ignore[attr-defined]
    return distribute_tensor(on_device, example.device_mesh, example.placements, src_data_rank=None)  # type: ignore[attr-defined]


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer of a whole model, of which each rank has the state of some parameters only.

    `own` is the optimizer of this rank's parameters. It has the same groups, of which some may be empty.
    """

    own: torch.optim.Optimizer


@torch.no_grad()
def load_whole(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """`model.load_state_dict` for whole tensors, of which a sharded model takes its parts.

    Raises:
        RuntimeError: the names or shapes are not those of the model.
    """
    own = model.state_dict()
    model.load_state_dict(
        {name: part_like(own[name], tensor) if name in own else tensor for name, tensor in tensors.items()}
    )
