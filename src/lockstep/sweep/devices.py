"""The devices of this machine, and which of them each job of a sweep has."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Needs:
    """What a job takes. `cores` counts on a machine without GPUs only: there is nothing else to share out.

    Jobs of one `kind` take as much memory as another. A job of a known kind on one GPU shares it with others.
    """

    gpus: int = 0
    cores: int = 1
    kind: str = ""


@dataclass(frozen=True)
class Share:
    """The devices of one job: GPUs as `CUDA_VISIBLE_DEVICES` names them, and a number of cores.

    `memory` is the bytes of its GPU that it has; None is the whole GPU.
    """

    gpus: tuple[str, ...] = ()
    cores: int = 0
    memory: int | None = None

    @property
    def environment(self) -> dict[str, str]:
        return {VISIBLE: ",".join(self.gpus)} if self.gpus else {}


class Devices:
    """The devices that are free. With GPUs, a job takes GPUs; without any, it takes cores.

    Jobs share a GPU by their memory: the first one of a kind has a GPU for itself, and how much it took is what the
    others of its kind get. `free_memory` is the bytes of a GPU that nobody uses.
    """

    def __init__(self, gpus: Iterable[str], cores: int, free_memory: Callable[[str], int] | None = None) -> None:
        self.gpus, self.cores = list(gpus), cores
        self.all = Needs(len(self.gpus), cores)
        self.free_memory = free_memory or free_bytes
        self.of_kind: dict[str, int] = {}  # the bytes that a job of a kind takes
        self.capacity: dict[str, int] = {}  # the bytes of each GPU that is shared
        self.taken: dict[str, list[int]] = {}  # the bytes of its jobs

    @classmethod
    def of_machine(cls) -> Self:
        """The devices that this process may use. Asks NVML and not CUDA, after which no process could be forked."""
        from lockstep.runtime.host import cores  # imports torch

        return cls(visible_gpus(), cores())

    def take(self, needs: Needs) -> Share | None:
        """The devices for a job, which are then not free; None if too few are.

        A job that wants more than the machine has gets all: its own check says what it lacks.
        """
        if self.all.gpus and needs.gpus:
            if needs.gpus == 1 and needs.kind in self.of_kind:
                return self._take_part(self.of_kind[needs.kind])
            number = min(needs.gpus, self.all.gpus)
            if number > len(self.gpus):
                return None
            taken, self.gpus = self.gpus[:number], self.gpus[number:]
            return Share(gpus=tuple(taken))
        number = min(needs.cores, self.all.cores)
        if number > self.cores:
            return None
        self.cores -= number
        return Share(cores=number)

    def _take_part(self, memory: int) -> Share | None:
        """A part of a GPU: of the fullest one that has room."""
        room = {gpu: self.capacity[gpu] - sum(parts) for gpu, parts in self.taken.items()}
        fitting = [gpu for gpu in room if room[gpu] >= memory]
        if not fitting and not self.gpus:
            return None
        if fitting:
            gpu = min(fitting, key=room.__getitem__)
        else:
            gpu = self.gpus.pop(0)
            self.capacity[gpu], self.taken[gpu] = self.free_memory(gpu), []
            memory = min(memory, self.capacity[gpu])  # alone, it has what there is
        self.taken[gpu].append(memory)
        return Share(gpus=(gpu,), memory=memory)

    def give_back(self, share: Share, kind: str = "", measured: int | None = None) -> None:
        """Free the devices of a job; `measured`: the bytes that it took of its GPU, if they are known."""
        if kind and measured is not None:
            self.of_kind[kind] = max(measured, self.of_kind.get(kind, 0))
        if share.memory is not None:
            (gpu,) = share.gpus
            self.taken[gpu].remove(share.memory)
            if self.taken[gpu]:
                return
            del self.taken[gpu]
        self.gpus += share.gpus
        self.cores += share.cores


def visible_gpus() -> Sequence[str]:
    """The GPUs that this process may use, by their UUIDs, or as `CUDA_VISIBLE_DEVICES` names them."""
    if VISIBLE in os.environ:
        return [
            name.strip() for name in os.environ[VISIBLE].split(",") if name.strip() not in ("", "-1", "NoDevFiles")
        ]
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # there is no driver, so there is no GPU
        return []
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
    finally:
        pynvml.nvmlShutdown()


def free_bytes(gpu: str) -> int:
    """The memory of a GPU that nobody uses now."""
    import pynvml

    pynvml.nvmlInit()
    try:
        by_name = pynvml.nvmlDeviceGetHandleByIndex if gpu.isdigit() else pynvml.nvmlDeviceGetHandleByUUID
        return int(pynvml.nvmlDeviceGetMemoryInfo(by_name(int(gpu) if gpu.isdigit() else gpu)).free)
    finally:
        pynvml.nvmlShutdown()
