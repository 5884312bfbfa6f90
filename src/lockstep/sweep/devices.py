"""The devices of this machine, and which of them each job of a sweep has."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Needs:
    """What a job takes. `cores` counts on a machine without GPUs only: there is nothing else to share out."""

    gpus: int = 0
    cores: int = 1


@dataclass(frozen=True)
class Share:
    """The devices of one job: GPUs as `CUDA_VISIBLE_DEVICES` names them, and a number of cores."""

    gpus: tuple[str, ...] = ()
    cores: int = 0

    @property
    def environment(self) -> dict[str, str]:
        return {VISIBLE: ",".join(self.gpus)} if self.gpus else {}


class Devices:
    """The devices that are free. With GPUs, a job takes GPUs; without any, it takes cores."""

    def __init__(self, gpus: Iterable[str], cores: int) -> None:
        self.gpus, self.cores = list(gpus), cores
        self.all = Needs(len(self.gpus), cores)

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

    def give_back(self, share: Share) -> None:
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
