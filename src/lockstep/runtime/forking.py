"""Forking this process into ranks, or into the jobs of a sweep.

A fork takes milliseconds, because everything is imported already, and a fresh interpreter seconds. It needs a process
with one thread: the fork would wait forever for a lock that another thread holds. `core.native_threads` imports the
native libraries such that they start no threads.
"""

import atexit
import gc
import importlib
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import ForkProcess
from pathlib import Path

import torch

from lockstep.config import components, extensions
from lockstep.config.schema import Job
from lockstep.core.observer import listeners
from lockstep.runtime import environment, signals


def keep_one_thread() -> None:
    """Have torch compute in this thread alone; each rank sets its own number of threads."""
    torch.set_num_threads(1)


def can_fork() -> bool:
    """Whether this process has one thread."""
    return len(list(Path("/proc/self/task").glob("*"))) == 1  # none without Linux


def import_for_ranks(job: Job) -> None:
    """Import what each rank would import, and ask what it would ask, before ranks are forked from this process."""
    environment.own_source()
    for package in environment.PACKAGES:
        environment.version_of(package)
    if extensions.active() or extensions.of_program():
        from lockstep.runtime import user_code  # few jobs have code of the user

        user_code.code_of(components.plain(job))
    parts = (job.model, job.strategy, *job.callback.values(), *job.logger.values())
    modules = {name for part in parts for name in part.imports}
    modules |= {"torch._dynamo"} if job.model.compile else set()
    modules |= {"sklearn.metrics"} if job.metric else set()
    for name in sorted(modules):
        importlib.import_module(name)
    listeners()


class Fork(ForkProcess):
    """A fork of this process, which ends with it."""

    def __init__(self, target: Callable[[], object]) -> None:
        super().__init__(target=target)
        self.parent = os.getpid()

    def run(self) -> None:
        gc.freeze()  # what is inherited stays: a collection that looks through it would copy its pages
        signals.begin(self.parent)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)  # instead of the handler of `forwarding`
        atexit._clear()  # what the parent has to do at its end, such as removing its temporary folders, is not ours
        super().run()

    def send_signal(self, number: int) -> None:
        if self.exitcode is None and self.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)
