"""The devices of this machine, and which of them each job of a sweep has."""

import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from lockstep.core import log
from lockstep.core.errors import InputError
from lockstep.runtime.host import CORES, VISIBLE, cores


@dataclass(frozen=True)
class Needs:
    """What a job takes, and what it is."""

    gpus: int = 0
    cores: int = 1  # counts on a machine without GPUs only: there is nothing else to share out
    kind: str = ""  # jobs of one kind take as much memory as another; once it is known, they share a GPU
    submits: bool = False  # itself to a cluster, and takes nothing here
    identity: Hashable = None  # jobs of one identity are one job; None is not known
    monitor: str = ""  # its score, which is one of `figures`; empty is not known
    figures: Sequence[str] = ()  # what its evaluations log


@dataclass(frozen=True)
class Share:
    gpus: tuple[str, ...] = ()  # as `CUDA_VISIBLE_DEVICES` names them
    cores: int = 0
    memory: int | None = None  # the bytes of its GPU that it has; None is the whole GPU
    alone: bool = False  # whether it may use all cores

    @property
    def environment(self) -> dict[str, str]:
        visible = {VISIBLE: ",".join(self.gpus)} if self.gpus else {}
        return visible if self.alone or not self.cores else {**visible, CORES: str(self.cores)}


class Devices:
    """The devices that are free. With GPUs, a job takes GPUs, and cores in proportion; without any, it takes cores.

    Jobs share a GPU by their memory: the first one of a kind has a GPU for itself, and how much it took is what the
    others of its kind get. `free_memory` is the bytes of a GPU that nobody uses. `others` are the processes of others
    on each GPU; such a GPU is not used.
    """

    def __init__(
        self,
        gpus: Iterable[str],
        cores: int,
        free_memory: Callable[[str], int] = lambda gpu: 0,
        others: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        visible, self.others = list(gpus), others or {}
        self.gpus, self.cores = [gpu for gpu in visible if not self.others.get(gpu)], cores
        self.in_use = [f"GPU {i} (process {self.others[g][0]})" for i, g in enumerate(visible) if self.others.get(g)]
        self.all = Needs(len(self.gpus) or len(visible), cores)
        self.free_memory = free_memory
        self.of_kind: dict[str, int] = {}  # the bytes that a job of a kind takes
        self.capacity: dict[str, int] = {}  # the bytes of each GPU that is shared
        self.taken: dict[str, list[int]] = {}  # the bytes of its jobs

    @classmethod
    def of_machine(cls) -> Self:
        """The devices that this process may use: all that `CUDA_VISIBLE_DEVICES` names, whoever else uses them."""
        from lockstep.runtime.gpus import free_bytes, processes_on, visible_gpus  # imports torch

        gpus = visible_gpus()
        others = {} if VISIBLE in os.environ else {gpu: processes_on(gpu) for gpu in gpus}
        return cls(gpus, cores(), free_bytes, others)

    def check(self, needs: Iterable[Needs]) -> None:
        """If jobs need GPUs, say which are skipped because others use them. Raises InputError if all are."""
        if not self.in_use or not any(need.gpus for need in needs):
            return
        names, self.in_use = ", ".join(self.in_use), []  # said once
        if not self.gpus:
            raise InputError(
                f"others use all GPUs of this machine: {names}; wait for their end, name GPUs to use all the same "
                f"with {VISIBLE}=0, or use device=cpu"
            )
        log.show(f"skipped, because others use them: {names}; {VISIBLE} names GPUs to use all the same")

    def take(self, needs: Needs) -> Share | None:
        """The devices for a job, which are then not free; None if too few are. No job gets more than there are."""
        if self.all.gpus and needs.gpus:
            if needs.gpus == 1 and needs.kind in self.of_kind:
                return self._take_part(self.of_kind[needs.kind])
            number = min(needs.gpus, self.all.gpus)
            if number > len(self.gpus):
                return None
            taken, self.gpus = self.gpus[:number], self.gpus[number:]
            return Share(gpus=tuple(taken), cores=self._cores_beside(number))
        number = min(needs.cores, self.all.cores)
        if number > self.cores:
            return None
        self.cores -= number
        return Share(cores=number)

    def _take_part(self, memory: int) -> Share | None:
        """A part of a GPU: of the fullest one with enough free memory."""
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
        part = memory / self.capacity[gpu] if self.capacity[gpu] else 1.0
        return Share(gpus=(gpu,), cores=self._cores_beside(part), memory=memory)

    def _cores_beside(self, gpus: float) -> int:
        """The cores of a job with so many GPUs, such that jobs on all of them share the cores of the machine."""
        return max(1, int(self.all.cores * gpus / self.all.gpus))

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
        self.cores += 0 if share.gpus else share.cores
