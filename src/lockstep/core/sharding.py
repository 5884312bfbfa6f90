"""Functions that work for whole tensors, and for tensors of which this rank has a part or nothing.

A tensor can be cut over the ranks (torch's `DTensor`), or belong to a stage of the model on another rank: it is then
on torch's meta device. For any other tensor, the whole and this rank's part are the tensor itself. This module does
not import `DTensor`, which takes a second; it recognises one by its methods.
"""

import enum
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> bool:
    """Whether each rank has only a part of `tensor`."""
    return hasattr(tensor, "full_tensor")


def has_shards(model: nn.Module) -> bool:
    """Whether a rank lacks some parameters of `model`. The forward pass is then collective."""
    return any(is_sharded(parameter) or parameter.is_meta for parameter in model.parameters())


def has_stages(model: nn.Module) -> bool:
    """Whether the layers of `model` are distributed over the ranks, so that each rank has some of them."""
    return any(parameter.is_meta for parameter in model.parameters())


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, without a copy."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def own_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """This rank's parts of tensors, without gradients or a copy; tensors on other ranks are left out."""
    return [own_part(tensor.detach()) for tensor in tensors if not tensor.is_meta]


def norm_over_stages(model: nn.Module, norm: Tensor) -> Tensor:
    """The L2 norm over all stages of a model, from the `norm` of this rank's stage; collective if it has stages."""
    if not has_stages(model):
        return norm
    example = next(parameter for parameter in model.parameters() if not parameter.is_meta)
    squared = norm.to(example.device, torch.float64).square()
    dist.all_reduce(squared)
    return squared.sqrt().to(example.dtype)


def wire(device: torch.device) -> torch.device:
    """The device for sending a tensor to one rank and for receiving it: gloo uses host memory only."""
    return torch.device("cpu") if dist.get_backend() == "gloo" else device


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor from the parts of all ranks; collective if it is cut.

    Parts in host memory are copied to the device first, because NCCL only sends device memory.
    """
    if not is_sharded(tensor):
        return tensor
    return tensor.detach().to(tensor.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]


def part_like(example: Tensor, tensor: Tensor) -> Tensor:
    """This rank's part of the whole `tensor`, cut like `example`. Every rank has the whole, so nothing is sent."""
    if example.is_meta:
        return tensor.to("meta")
    if not is_sharded(example):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    on_device = tensor.to(example.device_mesh.device_type)  # type: ignore[attr-defined]
    return distribute_tensor(on_device, example.device_mesh, example.placements, src_data_rank=None)  # type: ignore[attr-defined]


class UpdateScope(enum.IntEnum):
    """The update of a number depends on the gradient of that number, of its parameter, or of the whole model.

    This decides how the state of an optimizer may be cut over the ranks.
    """

    element = 0
    parameter = 1
    model = 2


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer of a whole model, with the state of only some parameters on each rank.

    `own` is the optimizer of this rank's parameters. It has the same groups; some of them may be empty.
    """

    own: torch.optim.Optimizer


@torch.no_grad()
def load_whole(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """`model.load_state_dict` for whole tensors. A sharded model takes its parts of them.

    Raises:
        RuntimeError: the names or shapes are not those of the model.
    """
    current = model.state_dict()
    model.load_state_dict(
        {name: part_like(current[name], tensor) if name in current else tensor for name, tensor in tensors.items()}
    )
