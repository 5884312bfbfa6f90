"""Copies a run's state to host memory: the only part of a save that training waits for."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.core.model import tensors_in
from lockstep.core.sharding import is_sharded, whole, wire

ALIGNMENT = 16  # bytes; more than any dtype needs


class HostCopies:
    """Copies tensors to host memory.

    Tensors of a GPU are copied to one pinned buffer, and the host waits once for all copies. The buffer is reused, so
    the next call of `of` overwrites the tensors that the previous call returned.
    """

    def __init__(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8)

    def of(self, tree: Any) -> Any:
        """`tree` (dicts and lists) with each tensor replaced by a contiguous copy in host memory."""
        staged = iter(self._staged([tensor for tensor in tensors_in(tree) if _on_gpu(tensor)]))

        def copied(tensor: Tensor) -> Tensor:
            if _on_gpu(tensor):
                return next(staged)
            return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)

        return map_tensors(tree, copied)

    def _staged(self, tensors: list[Tensor]) -> list[Tensor]:
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
        if self.buffer.numel() < sum(sizes):
            self.buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        copies = []
        for tensor, part in zip(tensors, self.buffer[: sum(sizes)].split(sizes), strict=True):
            copies.append(part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            copies[-1].copy_(tensor.detach(), non_blocking=True)
        if tensors and tensors[0].is_cuda:
            torch.cuda.current_stream(tensors[0].device).synchronize()
        return copies


def gathered(tree: Any, *, keep: bool) -> Any:
    """`tree` (dicts and lists) with each tensor that is cut over the ranks made whole, in host memory. Collective.

    A device holds one whole tensor at a time, and only ranks with `keep` hold the results. Main is the rank with
    `keep`. Tensors of stages on other ranks are sent to main; the trees then have the same structure on all ranks.
    """
    own = list(tensors_in(tree))
    if any(tensor.is_meta for tensor in own):
        whole_tensors = iter(_from_stages(own, keep=keep))
        return map_tensors(tree, lambda tensor: next(whole_tensors))

    def gather(tensor: Tensor) -> Tensor:
        if not is_sharded(tensor):
            return tensor
        full = whole(tensor)
        return full.cpu() if keep else tensor

    return map_tensors(tree, gather)


def _from_stages(tensors: list[Tensor], *, keep: bool) -> list[Tensor]:
    """The tensors of all stages, in host memory if they were received; unchanged without `keep`. Collective."""
    example = next(tensor for tensor in tensors if not tensor.is_meta)
    lacking = torch.tensor([tensor.is_meta for tensor in tensors], dtype=torch.int32, device=example.device)
    lacking_by_rank = [torch.empty_like(lacking) for _ in range(dist.get_world_size())]
    dist.all_gather(lacking_by_rank, lacking)
    owners = torch.stack(lacking_by_rank).argmin(0).tolist()
    whole_tensors = []
    for own, owner in zip(tensors, owners, strict=True):
        tensor = own
        if keep and owner != dist.get_rank():
            message = torch.empty(own.shape, dtype=own.dtype, device=wire(example.device))
            dist.recv(message, owner)
            tensor = message.cpu()
        elif not keep and owner == dist.get_rank():
            dist.send(own.detach().to(wire(example.device)).contiguous(), 0)
        whole_tensors.append(tensor)
    return whole_tensors


def map_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`tree` (dicts, lists and tuples) with `change` applied to each tensor, in the order of `tensors_in`."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(item, change) for key, item in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tensors(item, change) for item in tree)
    return tree


def with_own_storage(tensor: Tensor) -> Tensor:
    """`tensor` in a storage of its size, because torch.save writes the whole storage of each tensor."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda
