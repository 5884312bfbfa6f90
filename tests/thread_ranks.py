"""Ranks as threads of this process, whose collectives meet at a barrier.

They compute in milliseconds what several ranks compute together. Only `dist`'s functions below are replaced; whether
gloo and NCCL do the same is for the tests of real ranks.
"""

from __future__ import annotations

import pickle
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.core.world import World

T = TypeVar("T")
LONGEST_S = 120
REDUCTIONS = {dist.ReduceOp.SUM: torch.sum, dist.ReduceOp.MAX: torch.amax}


class Work:
    """A collective whose result is there when it is waited for, and not before."""

    def __init__(self, arrive: Callable[[], object] = bool) -> None:
        self.arrive = arrive

    def wait(self) -> None:
        self.arrive()
        self.arrive = bool


class ThreadRanks:
    """The collectives of `size` threads. A rank that fails breaks the barrier, so that the others fail too.

    Each is alone on its machine, so all ranks but the first differ from their local ranks.
    """

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=LONGEST_S)
        self.tensors: list[Any] = [torch.empty(0)] * size
        self.own = threading.local()
        self.ended: set[int] = set()
        self.mail: dict[tuple[int, int, int], queue.Queue[Tensor]] = {}
        objects = ("all_gather_object", "broadcast_object_list")
        messages = ("send", "isend", "recv", "send_object_list", "recv_object_list", "batch_isend_irecv")
        for name in ("all_reduce", "all_gather", "broadcast", *objects, *messages):
            monkeypatch.setattr(dist, name, getattr(self, name))
        for name in ("all_gather_into_tensor", "all_gather_single"):  # torch 2.14 has renamed it
            monkeypatch.setattr(dist, name, self.all_gather_single, raising=False)
        monkeypatch.setattr(dist, "P2POp", lambda call, tensor, peer: (call, tensor, peer))
        monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: size)
        monkeypatch.setattr(dist, "get_rank", lambda: self.own.rank)
        monkeypatch.setattr(dist, "barrier", self.barrier.wait)

    def run(self, function: Callable[[World], T]) -> list[T]:
        """What `function` returns on each rank."""
        with ThreadPoolExecutor(self.size) as pool:
            results = list(pool.map(lambda rank: self._as_rank(function, rank), range(self.size)))
        assert all(letters.empty() for letters in self.mail.values()), "a sender waits for a receiver"
        return results

    def _as_rank(self, function: Callable[[World], T], rank: int) -> T:
        self.own.rank = rank
        world = World(rank=rank, local_rank=0, size=self.size, local_size=1, device=torch.device("cpu"))
        try:
            return function(world)
        except BaseException:
            self.barrier.abort()
            raise
        finally:
            self.ended.add(rank)

    def gathered(self, tensor: Tensor) -> list[Tensor]:
        tensors = self.objects(tensor.detach().clone())
        assert len({(one.dtype, one.shape) for one in tensors}) == 1, "gloo sends bytes, and reads them as its own"
        return tensors

    def objects(self, value: Any) -> list[Any]:
        self.tensors[self.own.rank] = value
        self.barrier.wait()
        tensors = list(self.tensors)
        self.barrier.wait()
        return tensors

    def all_reduce(
        self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Work:
        reduced = REDUCTIONS[op](torch.stack(self.gathered(tensor)), 0)
        work = Work(lambda: tensor.detach().copy_(reduced))
        if not async_op:
            work.wait()
        return work

    def all_gather(self, output: list[Tensor], tensor: Tensor) -> None:
        for own, other in zip(output, self.gathered(tensor), strict=True):
            own.copy_(other)

    def letters(self, source: int, target: int, tag: int) -> queue.Queue[Tensor]:
        # Not a defaultdict: two threads that ask at once would each get a queue of their own.
        return self.mail.setdefault((source, target, tag), queue.Queue())

    def send(self, tensor: Tensor, target: int, tag: int = 0) -> None:
        assert tensor.is_contiguous(), "gloo sends the numbers in the order of the memory"
        self.letters(self.own.rank, target, tag).put(tensor.detach().clone())

    def isend(self, tensor: Tensor, target: int, group: Any = None, tag: int = 0) -> Work:
        self.send(tensor, target, tag)
        return Work()

    def recv(self, tensor: Tensor, source: int, group: Any = None, tag: int = 0) -> None:
        letter = self.received(source, tag)
        assert (letter.dtype, letter.numel()) == (tensor.dtype, tensor.numel()), "gloo sends bytes"
        tensor.copy_(letter)

    def received(self, source: int, tag: int = 0) -> Tensor:
        mail, until = self.letters(source, self.own.rank, tag), time.monotonic() + LONGEST_S
        while mail.empty():
            assert source not in self.ended or not mail.empty(), f"rank {source} has ended and sent nothing"
            assert time.monotonic() < until, "the ranks wait for each other"
            time.sleep(0.001)
        return mail.get()

    def send_object_list(self, box: list[Any], target: int, group: Any = None) -> None:
        self.send(torch.frombuffer(bytearray(pickle.dumps(box)), dtype=torch.uint8), target)

    def recv_object_list(self, box: list[Any], source: int, group: Any = None) -> None:
        box[:] = pickle.loads(bytes(self.received(source).tolist()))

    def batch_isend_irecv(self, operations: list[tuple[Any, Tensor, int]]) -> list[Work]:
        for call, tensor, peer in operations:
            if call is dist.isend:
                self.send(tensor, peer)
        return [Work(partial(self.recv, tensor, peer)) for call, tensor, peer in operations if call is dist.irecv]

    def all_gather_single(self, output: Tensor, tensor: Tensor) -> None:
        output.copy_(torch.cat(self.gathered(tensor)))

    def broadcast_object_list(self, box: list[Any], src: int, device: Any = None) -> None:
        letters = torch.zeros(1000, dtype=torch.uint8)
        pickled = pickle.dumps(box)
        letters[: len(pickled)] = torch.frombuffer(bytearray(pickled), dtype=torch.uint8)
        box[:] = pickle.loads(bytes(self.gathered(letters)[src].tolist()))

    def broadcast(self, tensor: Tensor, src: int) -> None:
        tensor.detach().copy_(self.gathered(tensor)[src])

    def all_gather_object(self, values: list[Any], value: Any, group: Any) -> None:
        assert len(values) == self.size, "a list has a place for each rank"
        values[:] = self.objects(value)
