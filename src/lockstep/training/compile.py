"""Compiling the model, with a word while it lasts, and a stop that ends it: it takes about as long as a short run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import nn

from lockstep.core import log

# A rank meets a few shapes of batches: those of the training split and its last short one, cut unevenly into shards
# and micro-batches, and as many of an evaluation. torch's own limit is 8, behind which a model is not compiled.
SHAPES = 32
# Compiling for so long is worth another word.
AGAIN_S = 10.0


def compile_model(
    model: nn.Module,
    mode: str,
    *,
    threads: int,
    speaks: bool,
    interrupting: Callable[[], AbstractContextManager[None]],
) -> None:
    """Have `model` compiled in place for each shape of batch that it meets, when it meets it.

    Not for batches of any size, as torch would do at the second one: the kernels of a batch would then depend on what
    came before it, and a resumed run would round in another way.

    Args:
        model: the network.
        mode: torch.compile's.
        threads: that Inductor may compile with, unless the environment says so; by itself each rank takes all cores.
        speaks: whether to tell the user.
        interrupting: the context of a compilation, in which a stop may interrupt it.
    """
    # Only who compiles pays for these imports. torch has no other place that tells of a compilation.
    from torch._dynamo import callback
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        inductor.compile_threads = threads
    dynamo.recompile_limit = max(dynamo.recompile_limit, SHAPES)
    callback.callback_handler.clear()  # of an earlier run of this process
    words, context = _Words(speaks), ExitStack()

    def start(_: Any) -> None:
        words.start()
        context.enter_context(interrupting())

    def end(_: Any) -> None:
        context.close()
        words.end()

    callback.on_compile_start(start)
    callback.on_compile_end(end)
    model.compile(mode=mode, dynamic=False)


class _Words:
    """What is said when a compilation begins, and while it takes long. Each one's time is in the log.

    A layer that is not compiled, as a synchronised batch norm, leaves many short compilations around it.
    """

    def __init__(self, speaks: bool) -> None:
        self.speaks = speaks
        self.began: float | None = None
        self.seconds = self.said = 0.0

    def start(self) -> None:
        if self.began is None and self.speaks:
            log.say("compiling the model: the first batch of each shape takes about a minute, less the next time")
        self.began = time.monotonic()

    def end(self) -> None:
        assert self.began is not None
        took = time.monotonic() - self.began
        log.logger.info("compiled in %.1f s", took)
        self.seconds += took
        if self.speaks and self.seconds >= self.said + AGAIN_S:
            log.say(f"compiling: {self.seconds:.0f} s so far")
            self.said = self.seconds
