"""`lockstep demo`: a page on this machine for trying a model by hand."""

from lockstep.core import log
from lockstep.core.errors import check_installed
from lockstep.inference.load import load, named_weights
from lockstep.runtime.signals import listen


def demo(path: str, *, port: int, device: str | None) -> None:
    """Serve the page of a model until a signal ends it.

    Raises:
        InputError: the weights cannot be loaded, the port is in use, or the server is not installed.
    """
    check_installed("uvicorn", "lockstep demo", extra="demo")
    from lockstep.inference.demo import DemoServer

    server = DemoServer(load(named_weights(path), device=device), port)
    listen(server.handle_exit)  # uvicorn sets it for SIGINT and SIGTERM only
    with server.socket:
        log.show(f"{server.url} shows the classes of a photo; Ctrl-C ends it")
        log.console.file.flush()
        server.run([server.socket])
