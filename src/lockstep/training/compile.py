"""torch.compile for the model. It can take as long as a short run, so the user is told, and may stop it."""

import os
import time
from contextlib import ExitStack
from typing import Any

from torch import nn

from lockstep.core import log
from lockstep.core.world import World
from lockstep.runtime.host import cores
from lockstep.runtime.signals import StopRequest
from lockstep.training.resolved_job import ResolvedJob

# A rank has a few shapes of batches: full and last ones, cut unevenly into shards and micro-batches, in training and
# in evaluation. Beyond torch's default of 8 shapes a model would run uncompiled.
SHAPES = 32
# Seconds of compiling after which the user is told again.
AGAIN_S = 10.0


def interrupts_compiling(job: ResolvedJob, world: World) -> bool:
    """Whether a stop may interrupt a compilation.

    Not with several ranks: each compiles at its own time, and all have to act on a stop at the same place.
    """
    return job.model.compile and world.size == 1


def compile_model(model: nn.Module, job: ResolvedJob, world: World, stop: StopRequest) -> None:
    """Compile `model` in place, if the job asks for it, for each shape of batch when it first comes.

    Dynamic shapes, which torch turns on at the second size, are off: kernels would depend on the batches before, and
    a resumed run would round differently.
    """
    if not job.model.compile:
        return
    # Imported here, because they are slow. torch has no public hook for the start and end of a compilation.
    from torch._dynamo import callback
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        inductor.compile_threads = max(1, cores() // world.local_size)  # by default all cores, in each rank
    dynamo.recompile_limit = max(dynamo.recompile_limit, SHAPES)
    callback.callback_handler.clear()  # callbacks of an earlier run in this process
    words, context = CompileTime(speaks=world.is_main), ExitStack()

    def start(_: Any) -> None:
        words.start()
        context.enter_context(stop.interrupting(interrupts_compiling(job, world)))

    def end(_: Any) -> None:
        context.close()
        words.end()

    callback.on_compile_start(start)
    callback.on_compile_end(end)
    model.compile(mode=job.model.compile_mode.replace("_", "-"), dynamic=False)


class CompileTime:
    """Tells the user when compiling begins, and while it takes long. The log has the time of each compilation.

    There can be many short ones: a layer that is not compiled cuts the model into parts.
    """

    def __init__(self, speaks: bool) -> None:
        self.speaks = speaks
        self.began = self.seconds = self.said = 0.0

    def start(self) -> None:
        if not self.seconds and self.speaks:
            log.say("compiling the model: the first batch of each shape takes about a minute, less the next time")
        self.began = time.monotonic()

    def end(self) -> None:
        seconds = time.monotonic() - self.began
        log.logger.info("compiled in %.1f s", seconds)
        self.seconds += seconds
        if self.speaks and self.seconds >= self.said + AGAIN_S:
            log.say(f"compiling: {self.seconds:.0f} s so far")
            self.said = self.seconds
