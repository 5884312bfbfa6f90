"""`lockstep demo`: a local web page, on which the user drops a photo and sees the model's prediction.

The server is uvicorn. It listens on the loopback address only, and answers only requests that address it by that
name. So a page of another site in the same browser can neither call it nor read its answers.
"""

import asyncio
import errno
import json
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

import uvicorn

from lockstep.core import log
from lockstep.core.errors import InputError, escaped
from lockstep.core.model_card import LABELS, SIGMOID, VALUES
from lockstep.core.safe_read import MB
from lockstep.inference.predictor import THRESHOLD, Predictor, find_weights, load, say_which
from lockstep.runtime.signals import listen

ADDRESS = "127.0.0.1"
PAGE = Path(__file__).parent / "demo.html"
NONCE = "NONCE"  # the mark of the page's own script and style; each answer replaces it by the nonce of its header
IMAGE, JSON, HTML = "application/octet-stream", "application/json", "text/html; charset=utf-8"
LARGEST = 32 * MB  # the most bytes of a photo
SHOWN = 5  # the most classes in an answer
POLICY = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; connect-src 'self'; "
    "img-src blob:; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'"
)
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def demo(path: str, *, port: int, device: str | None) -> None:
    """Serve the page of a model until a signal ends it.

    Raises:
        InputError: the weights cannot be loaded or the port is in use.
    """
    predictor = load(file := find_weights(path), device=device)
    say_which(file, predictor.card)
    server = DemoServer(predictor, port)
    listen(server.handle_exit)  # uvicorn sets it for SIGINT and SIGTERM only
    with server.socket:
        log.show(f"{server.url} shows the {predictor.card.targets} of a photo; Ctrl-C ends it")
        log.console.file.flush()
        server.run([server.socket])


class Refused(Exception):
    """A request that the server refuses. Its arguments are the status and a sentence."""


class DemoServer(uvicorn.Server):
    """The server of the page for one model.

    Args:
        port: the port to listen on; 0 is any free port.

    Raises:
        InputError: the port is taken.
    """

    def __init__(self, predictor: Predictor, port: int) -> None:
        self.predictor, self.page = predictor, PAGE.read_text()
        self.model = asyncio.Lock()  # a model computes with all threads
        try:
            if not 0 <= port <= 65_535:
                raise OSError(errno.EDOM, "ports end at 65535")
            self.socket = socket.create_server((ADDRESS, port), backlog=1024)
        except OSError as error:
            reason = f"no server can listen there ({error.strerror})"
            raise InputError(f"--port is {port}, but {reason}: --port 0") from error
        self.port = self.socket.getsockname()[1]
        plain: dict[str, Any] = {"interface": "asgi3", "http": "h11", "ws": "none", "lifespan": "off"}
        # The terminal shows only the address of the page, and a defect of this program.
        quiet: dict[str, Any] = {"log_config": None, "log_level": "error", "server_header": False}
        super().__init__(uvicorn.Config(self.answer, **plain, **quiet, timeout_graceful_shutdown=1))

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.port}/"

    @property
    def hosts(self) -> frozenset[str]:
        return frozenset({f"{ADDRESS}:{self.port}", f"localhost:{self.port}"})

    def about(self) -> dict[str, Any]:
        card = self.predictor.card
        return {
            "model": str(card.model["_target_"]).rpartition(".")[2],
            "name": card.model.get("name"),
            "classes": card.classes,
            "targets": card.targets,
            "input": "x".join(map(str, card.input_shape)),
            "score": card.score,
            "independent": card.probabilities == SIGMOID,
            "step": card.step,
        }

    def predicted(self, photo: bytes) -> dict[str, Any]:
        """The values of an image file; or its most probable classes or labels, and how many of these are predicted.

        Raises InputError if it is not one.
        """
        targets = self.predictor.card.targets
        if targets == VALUES:
            (values,) = self.predictor.values(photo).tolist()
            pairs = zip(self.predictor.names, values, strict=True)
            return {"values": [{"name": name, "value": value} for name, value in pairs]}
        (prediction,) = self.predictor.predict(photo)
        predicted = len(prediction.above(THRESHOLD)) if targets == LABELS else 1
        rows = prediction.top(max(SHOWN, predicted))
        return {
            "classes": [{"name": name, "probability": share} for _, name, share in rows],
            "predicted": predicted,
        }

    async def answer(self, scope: Message, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        status: HTTPStatus = HTTPStatus.OK
        try:
            if headers.get("host") not in self.hosts:
                raise Refused(HTTPStatus.FORBIDDEN, f"this page is at {self.url} only")
            kind, text = await self._respond(f"{scope['method']} {scope['path']}", headers, receive)
        except Refused as error:
            status, kind, text = error.args[0], JSON, json.dumps({"error": error.args[1]})
        except InputError as error:
            status, kind, text = HTTPStatus.BAD_REQUEST, JSON, json.dumps({"error": escaped(str(error))})
        nonce = secrets.token_urlsafe(16)
        content = (text.replace(NONCE, nonce) if kind == HTML else text).encode()
        fields = {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Content-Security-Policy": POLICY.format(nonce=nonce),
            "Cache-Control": "no-store",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        encoded = [(name.encode(), value.encode()) for name, value in fields.items()]
        await send({"type": "http.response.start", "status": int(status), "headers": encoded})
        await send({"type": "http.response.body", "body": content})

    async def _respond(self, request: str, headers: Mapping[str, str], receive: Receive) -> tuple[str, str]:
        """The type and the text of the answer to `METHOD PATH`."""
        match request:
            case "GET /":
                return HTML, self.page
            case "GET /model":
                return JSON, json.dumps(self.about())
            case "POST /predict":
                self._check_photo(headers)
                photo = await self._photo(receive)
                async with self.model:
                    return JSON, json.dumps(await asyncio.to_thread(self.predicted, photo))
        raise Refused(HTTPStatus.NOT_FOUND, "there is no such page")

    def _check_photo(self, headers: Mapping[str, str]) -> None:
        """Refuse a photo by the headers of its request."""
        if headers.get("origin") not in {f"http://{host}" for host in self.hosts}:
            raise Refused(HTTPStatus.FORBIDDEN, "photos are taken from the page itself only")
        # Before a page of another site sends this type, the browser asks the server, which does not allow it.
        if headers.get("content-type") != IMAGE:
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"a photo is sent as {IMAGE}")
        if "content-length" not in headers or "transfer-encoding" in headers:
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "the length of the photo is missing")
        if (length := int(headers["content-length"])) > LARGEST:
            raise Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the photo has {length / MB:,.0f} MB, expected at most {LARGEST // MB}",
            )

    async def _photo(self, receive: Receive) -> bytes:
        """The photo in a request, which has the length that its headers say."""
        photo, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refused(HTTPStatus.BAD_REQUEST, "the photo is cut off")
            photo += message.get("body", b"")
            more = message.get("more_body", False)
        return bytes(photo)
