"""Copies of a run's state in host memory: the only part of a save that training waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes; more than any number format asks for


class HostCopies:
    """Copies tensors to host memory.

    The tensors of a GPU go into one pinned buffer, which is kept from save to save: the copies follow each other
    without the host, which waits once for all of them. So what `of` returned is overwritten by its next call.
    """

    def __init__(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8)

    def of(self, tree: Any) -> Any:
        """`tree`, of dicts and lists, with a contiguous copy in the place of each tensor."""
        staged = iter(self._staged([each for each in _tensors(tree) if _on_gpu(each)]))

        def copied(tensor: Tensor) -> Tensor:
            if _on_gpu(tensor):
                return next(staged)
            return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)

        return mapped(tree, copied)

    def _staged(self, tensors: list[Tensor]) -> list[Tensor]:
        sizes = [-(-each.nbytes // ALIGNMENT) * ALIGNMENT for each in tensors]
        if self.buffer.numel() < sum(sizes):
            self.buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        copies = []
        for tensor, part in zip(tensors, self.buffer[: sum(sizes)].split(sizes), strict=True):
            copies.append(part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            copies[-1].copy_(tensor.detach(), non_blocking=True)
        if tensors and tensors[0].is_cuda:
            torch.cuda.current_stream(tensors[0].device).synchronize()
        return copies


def mapped(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`tree`, of dicts and lists, with `change` of each of its tensors."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: mapped(item, change) for key, item in tree.items()}
    if isinstance(tree, list):
        return [mapped(item, change) for item in tree]
    return tree


def alone(tensor: Tensor) -> Tensor:
    """`tensor` with a storage of its own: torch.save writes the whole storage of each tensor."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors of a tree, in the order of `mapped`."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (dict, list)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(item)


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda
