"""Tensors that are not whole on every rank, and what all code may do with any tensor.

A tensor can be cut over the ranks (torch's `DTensor`), or be another rank's, which has another stage of the model: it
is then on torch's meta device. A tensor that is neither is its own whole and its own part. Nothing here imports
`DTensor`, which takes a second: a tensor that is cut can be told from others by its methods.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> bool:
    """Whether each rank has a part of `tensor` only."""
    return hasattr(tensor, "full_tensor")


def has_shards(model: nn.Module) -> bool:
    """Whether a rank has not all parameters of `model`: its forward pass is then collective."""
    return any(is_sharded(parameter) or parameter.is_meta for parameter in model.parameters())


def has_stages(model: nn.Module) -> bool:
    """Whether the layers of `model` are dealt out to the ranks. Each rank then lacks some and has some."""
    return any(parameter.is_meta for parameter in model.parameters())


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, without a copy."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return part


def own_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """This rank's parts of tensors, without gradients or a copy; those of other ranks are left out."""
    return [own_part(tensor.detach()) for tensor in tensors if not tensor.is_meta]


def norm_over_stages(model: nn.Module, norm: Tensor) -> Tensor:
    """The L2 norm over all stages of a model, from that of this rank's; collective if there are several."""
    if not has_stages(model):
        return norm
    example = next(parameter for parameter in model.parameters() if not parameter.is_meta)
    squared = norm.to(example.device, torch.float64).square()
    dist.all_reduce(squared)
    return squared.sqrt().to(example.dtype)


def wire(device: torch.device) -> torch.device:
    """Where a tensor is sent to one rank from, and received: gloo reads and writes host memory only."""
    return torch.device("cpu") if dist.get_backend() == "gloo" else device


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
    if example.is_meta:
        return tensor.to("meta")
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
