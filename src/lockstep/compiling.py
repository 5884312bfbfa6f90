"""The words of a run while torch compiles its model, which takes about as long as a short run."""

from __future__ import annotations

import time
from typing import Any

from lockstep import log


def say_when_compiling() -> None:
    """From now on, say when this process begins to compile, and how long it took.

    torch compiles when a batch of a new shape arrives for the first time: a training batch and its backward pass, a
    short last batch, a block of an evaluation. What an earlier process has compiled comes out of its cache.
    """
    # Only what compiles pays for this import. torch has no other place that tells of a compilation.
    from torch._dynamo import callback

    began = time.monotonic()

    def start(_: Any) -> None:
        nonlocal began
        began = time.monotonic()
        log.say("compiling the model for batches of a new shape: this takes about a minute")

    def end(_: Any) -> None:
        log.say(f"compiled in {time.monotonic() - began:.0f} s")

    callback.callback_handler.clear()  # of an earlier run of this process
    callback.on_compile_start(start)
    callback.on_compile_end(end)
