"""A tape stands for a CUDA graph on a CPU, and is as strict.

It records torch's operations with their tensors and numbers, and a replay does them again in the same memory. So
whatever Python computed in the recorded step (a learning rate, an epoch, an `if`) comes back at every step, as
it would from a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class Tape(TorchDispatchMode):
    """The methods of `CudaGraph`, for operations below autograd on a CPU."""

    replays: ClassVar[list[int]] = []  # of each tape
    waits = torch.ops.aten._local_scalar_dense.default

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.number = len(Tape.replays)
        Tape.replays.append(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tape.waits:
            raise RuntimeError("operation not permitted when stream is capturing")
        results = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, tensors(results)))
        return results

    def warm_up(self, function: Callable[[], None]) -> None:
        function()

    def record(self, function: Callable[[], None]) -> None:
        with self:
            try:
                function()
            except RuntimeError as error:
                raise RuntimeError("operation failed due to a previous error during capture") from error

    def replay(self) -> None:
        Tape.replays[self.number] += 1
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for func, args, kwargs, recorded in self.calls:
                for tensor, result in zip(recorded, tensors(func(*args, **kwargs)), strict=True):
                    if tensor.data_ptr() != result.data_ptr():  # neither a view nor in place
                        tensor.copy_(result)
