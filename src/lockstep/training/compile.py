"""torch.compile for the model. It can take as long as a short run, so the user is told, and may stop it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import nn

from lockstep.core import log

# A rank has a few shapes of batches: full and last ones, cut unevenly into shards and micro-batches, in training and
# in evaluation. Beyond torch's default of 8 shapes a model would run uncompiled.
SHAPES = 32
# Seconds of compiling after which the user is told again.
AGAIN_S = 10.0


def compile_model(
    model: nn.Module,
    mode: str,
    *,
    threads: int,
    speaks: bool,
    interrupting: Callable[[], AbstractContextManager[None]],
) -> None:
    """Compile `model` in place, for each shape of batch when it first comes.

    Dynamic shapes, which torch turns on at the second size, are off: kernels would depend on the batches before, and
    a resumed run would round differently.

    Args:
        model: the network.
        mode: torch.compile's.
        threads: for Inductor to compile with, unless the environment sets them. Its default is all cores, per rank.
        speaks: whether to tell the user.
        interrupting: the context for each compilation, which lets a stop interrupt it.
    """
    # Imported here, because they are slow. torch has no public hook for the start and end of a compilation.
    from torch._dynamo import callback
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        inductor.compile_threads = threads
    dynamo.recompile_limit = max(dynamo.recompile_limit, SHAPES)
    callback.callback_handler.clear()  # callbacks of an earlier run in this process
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
    """Tells the user when compiling begins, and while it takes long. The log has the time of each compilation.

    There can be many short ones: a layer that is not compiled cuts the model into parts.
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
        seconds = time.monotonic() - self.began
        log.logger.info("compiled in %.1f s", seconds)
        self.seconds += seconds
        if self.speaks and self.seconds >= self.said + AGAIN_S:
            log.say(f"compiling: {self.seconds:.0f} s so far")
            self.said = self.seconds
