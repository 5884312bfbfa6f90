"""`lockstep demo`: a page on this machine for trying a model by hand."""

from lockstep.core import log
from lockstep.core.errors import check_installed
from lockstep.inference.load import find_weights, load, say_which
from lockstep.runtime.signals import listen


def demo(path: str, *, port: int, device: str | None) -> None:
    """Serve the page of a model until a signal ends it.

    Raises:
        InputError: the weights cannot be loaded, the port is in use, or the server is not installed.
    """
    check_installed("uvicorn", "lockstep demo", extra="demo")
    from lockstep.inference.demo import DemoServer

    predictor = load(file := find_weights(path), device=device)
    say_which(file, predictor.card)
    server = DemoServer(predictor, port)
    listen(server.handle_exit)  # uvicorn sets it for SIGINT and SIGTERM only
    with server.socket:
        log.show(f"{server.url} shows the classes of a photo; Ctrl-C ends it")
        log.console.file.flush()
        server.run([server.socket])
