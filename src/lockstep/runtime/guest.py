"""What a call of the library does to the process of its caller, undone when the call ends.

What nothing can undo (`mallopt`, the threads of native libraries) is set in processes of ours only, see
`own_process`.
"""

import logging
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import Any

import numpy as np
import torch
from PIL import Image

Setting = tuple[Callable[[], Any], Callable[[Any], object]]  # how it is read, and how it is written
TORCH: Any = torch.backends
# All of torch's number formats of float32 products: the older names (of `precision`) change several of these.
NUMBER_FORMATS: tuple[Any, ...] = (TORCH, TORCH.cudnn, TORCH.cudnn.conv, TORCH.cudnn.rnn, TORCH.cuda.matmul)
NUMBER_FORMATS += (TORCH.mkldnn, TORCH.mkldnn.conv, TORCH.mkldnn.rnn, TORCH.mkldnn.matmul)
# Runs hush these.
LOGGERS = [logging.getLogger(name) for name in ("matplotlib", "mlflow", "torch.distributed.elastic")]


def attribute(owner: Any, name: str) -> Setting:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def older_formats() -> Any:
    """What the older names of torch's number formats say; None where a program has used the newer ones alone."""
    with suppress(RuntimeError):
        return torch.get_float32_matmul_precision(), TORCH.cudnn.allow_tf32
    return None


def set_older_formats(values: Any) -> None:
    if values is not None:
        torch.set_float32_matmul_precision(values[0])
        TORCH.cudnn.allow_tf32 = values[1]


def set_environment(variables: dict[str, str]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


SETTINGS: tuple[Setting, ...] = (
    (lambda: dict(os.environ), set_environment),
    (lambda: [*sys.path], lambda value: sys.path.__setitem__(slice(None), value)),
    (
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        lambda held: signal.pthread_sigmask(signal.SIG_SETMASK, held),
    ),
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    attribute(torch.utils.deterministic, "fill_uninitialized_memory"),
    (older_formats, set_older_formats),
    *(attribute(part, "fp32_precision") for part in NUMBER_FORMATS),
    attribute(TORCH.cudnn, "benchmark"),
    attribute(Image, "MAX_IMAGE_PIXELS"),
    *(
        setting
        for logger in LOGGERS
        for setting in (attribute(logger, "propagate"), (attribute(logger, "level")[0], logger.setLevel))
    ),
)


@contextmanager
def guest() -> Iterator[None]:
    """A context after which the process has the settings from before."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    before = [read() for read, _ in SETTINGS]
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices):
            yield
    finally:
        for (read, write), value in zip(SETTINGS, before, strict=True):
            if repr(read()) != repr(value):  # writing may be slow: deterministic algorithms import the compiler
                write(value)


@contextmanager
def sleeping_soon() -> Iterator[None]:
    """The context in which waiting threads of torch sleep soon, unless a variable says when.

    libgomp reads its variables when it is loaded, and the program may have imported torch long ago. There is no other
    way then: libgomp has its threads sleep almost at once while they are more than the cores. A thread that has used
    its own team of them, and sleeps until the end, makes them so many.
    """
    if {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys() or not sys.platform.startswith("linux"):
        yield
        return
    has_team, ended = Event(), Event()

    def hold_team() -> None:
        torch.set_num_threads(1 + len(os.sched_getaffinity(0)))  # of this thread; a rank sets its own number later
        torch.zeros(2**20).add_(1)
        has_team.set()
        ended.wait()

    thread = Thread(target=hold_team, name="sleeping soon", daemon=True)
    thread.start()
    has_team.wait()
    try:
        yield
    finally:
        ended.set()
        thread.join()
