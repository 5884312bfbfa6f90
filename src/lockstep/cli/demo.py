"""`lockstep demo`: a page on this machine for trying a model by hand."""

from __future__ import annotations

from contextlib import suppress

from lockstep.core import log
from lockstep.inference.demo import DemoServer
from lockstep.inference.load import load
from lockstep.runtime.signals import StopNow


def demo(path: str, *, port: int, device: str | None) -> None:
    """Serve the page of a model until a signal ends it.

    Raises:
        InputError: the weights cannot be loaded, or the port is in use.
    """
    with DemoServer(load(path, device=device), port) as server, suppress(StopNow):
        log.show(f"{server.url} shows the classes of a photo; Ctrl-C ends it")
        log.console.file.flush()
        server.serve_forever()
