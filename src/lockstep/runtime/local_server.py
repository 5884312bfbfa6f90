"""A server of web pages for this machine alone.

It is uvicorn, listens on the loopback address only, and answers only requests that address it by that name. So a page
of another site in the same browser can neither call it nor read its answers.
"""

import errno
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from types import FrameType
from typing import Any

import uvicorn

from lockstep.core import log
from lockstep.core.errors import InputError, escaped
from lockstep.runtime.addresses import LOOPBACK, loopback_server
from lockstep.runtime.signals import leave, listen

JSON, HTML = "application/json", "text/html; charset=utf-8"
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Refused(Exception):
    """A request that the server refuses. Its arguments are the status and a sentence."""


class LocalServer(uvicorn.Server, ABC):
    """The base class of the servers, at any free port for port 0; a subclass answers in `respond`."""

    def __init__(self, port: int) -> None:
        try:
            if not 0 <= port <= 65_535:
                raise OSError(errno.EDOM, "ports end at 65535")
            self.socket = loopback_server(port)
        except OSError as error:
            reason = f"no server can listen there ({error.strerror})"
            raise InputError(f"--port is {port}, but {reason}: --port 0") from error
        self.port = self.socket.getsockname()[1]
        plain: dict[str, Any] = {"interface": "asgi3", "http": "h11", "ws": "none", "lifespan": "off"}
        # The terminal shows only the address of the page, and a defect of this program.
        quiet: dict[str, Any] = {"log_config": None, "log_level": "error", "server_header": False}
        super().__init__(uvicorn.Config(self.answer, **plain, **quiet))

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}/"

    @property
    def hosts(self) -> frozenset[str]:
        return frozenset({f"{LOOPBACK}:{self.port}", f"localhost:{self.port}"})

    def serve_until_signal(self, what: str) -> None:
        """Say where the pages are and what they do, and serve them until a signal."""
        listen(self.handle_exit)  # uvicorn sets it for SIGINT and SIGTERM only
        log.show(f"{self.url} {what}; Ctrl-C ends it")
        sys.stdout.flush()
        self.run([self.socket])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End the process at a signal: uvicorn would wait for pages that are being made, or that nobody reads."""
        leave(0)

    @abstractmethod
    async def respond(self, request: str, headers: Mapping[str, str], receive: Receive) -> tuple[str, str]:
        """The type and the text of the answer to `METHOD PATH`. Raises Refused, or InputError with a sentence."""

    async def answer(self, scope: Message, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        status: HTTPStatus = HTTPStatus.OK
        try:
            if headers.get("host") not in self.hosts:
                raise Refused(HTTPStatus.FORBIDDEN, f"this page is at {self.url} only")
            kind, text = await self.respond(f"{scope['method']} {scope['path']}", headers, receive)
        except Refused as error:
            status, kind, text = error.args[0], JSON, json.dumps({"error": error.args[1]})
        except InputError as error:
            status, kind, text = HTTPStatus.BAD_REQUEST, JSON, json.dumps({"error": escaped(str(error))})
        content = text.encode()
        fields = {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Content-Security-Policy": "frame-ancestors 'none'",
            "Cache-Control": "no-store",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        encoded = [(name.encode(), value.encode()) for name, value in fields.items()]
        await send({"type": "http.response.start", "status": int(status), "headers": encoded})
        await send({"type": "http.response.body", "body": content})
