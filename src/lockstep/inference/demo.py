"""A page on this machine, on which one drops a photo and sees what a model says of it.

The server listens on the loopback address only, and answers requests only that were made to it by that name: a page
of another site that a browser has open can neither call it nor read its answers.
"""

from __future__ import annotations

import json
import secrets
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from lockstep.core.errors import InputError, escaped
from lockstep.core.model_card import SIGMOID
from lockstep.core.safe_read import MB
from lockstep.inference.predictor import Predictor

ADDRESS = "127.0.0.1"
PAGE = Path(__file__).parent / "demo.html"
NONCE = "NONCE"  # in the page, where its own script and style are marked with the word of the answer's header
IMAGE, JSON, HTML = "application/octet-stream", "application/json", "text/html; charset=utf-8"
LARGEST = 32 * MB  # bytes of a photo
SHOWN = 5  # classes in an answer
WAIT_S = 20  # for a browser that sends nothing
POLICY = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; connect-src 'self'; "
    "img-src blob:; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'"
)


class Refused(Exception):
    """A request that is not answered. Its arguments: the status, and a sentence."""


class DemoServer(ThreadingHTTPServer):
    """The server of the page of one model.

    Args:
        predictor: the model.
        port: to listen on; 0 is any that is free.

    Raises:
        InputError: the port is taken.
    """

    daemon_threads = True

    def __init__(self, predictor: Predictor, port: int) -> None:
        self.predictor, self.page = predictor, PAGE.read_text()
        self.one_at_a_time = threading.Lock()  # a model computes with all threads
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"--port is {port}, which cannot be listened on ({reason}): --port 0") from error

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/"

    @property
    def hosts(self) -> frozenset[str]:
        """The names by which the page may be asked for."""
        return frozenset({f"{ADDRESS}:{self.server_port}", f"localhost:{self.server_port}"})

    def about(self) -> dict[str, Any]:
        """What the page says of the model."""
        card = self.predictor.card
        return {
            "model": str(card.model["_target_"]).rpartition(".")[2],
            "name": card.model.get("name"),
            "classes": card.classes,
            "input": "x".join(map(str, card.input_shape)),
            "top1": card.top1,
            "independent": card.probabilities == SIGMOID,
            "step": card.step,
        }

    def classes(self, photo: bytes) -> dict[str, Any]:
        """What the model says of an image file. Raises InputError if it is none."""
        with self.one_at_a_time:
            (prediction,) = self.predictor.predict(photo)
        return {"classes": [{"name": name, "probability": share} for _, name, share in prediction.top(SHOWN)]}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that has gone away is no error."""


class _Handler(BaseHTTPRequestHandler):
    server: DemoServer
    timeout = WAIT_S
    server_version, sys_version = "lockstep", ""

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _get(self) -> tuple[str, str]:
        match self.path:
            case "/":
                return HTML, self.server.page
            case "/model":
                return JSON, json.dumps(self.server.about())
        raise Refused(HTTPStatus.NOT_FOUND, "there is no such page")

    def _post(self) -> tuple[str, str]:
        if self.path != "/predict":
            raise Refused(HTTPStatus.NOT_FOUND, "there is no such page")
        return JSON, json.dumps(self.server.classes(self._body()))

    def _body(self) -> bytes:
        """The photo of a request, after its headers are checked."""
        if self.headers.get("Origin") not in {f"http://{host}" for host in self.server.hosts}:
            raise Refused(HTTPStatus.FORBIDDEN, "photos are taken from the page itself only")
        # A page of another site cannot send this type without asking first, which is not answered.
        if self.headers.get("Content-Type") != IMAGE:
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"a photo is sent as {IMAGE}")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit() and len(length) < 20) or "Transfer-Encoding" in self.headers:
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "the length of the photo is missing")
        if int(length) > LARGEST:
            raise Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the photo has {int(length) / MB:,.0f} MB, expected at most {LARGEST // MB}",
            )
        photo = self.rfile.read(int(length))
        if len(photo) != int(length):
            raise Refused(HTTPStatus.BAD_REQUEST, "the photo is cut off")
        return photo

    def _answer(self, make: Any) -> None:
        """Send what `make` returns, or the sentence of its error."""
        status: HTTPStatus = HTTPStatus.OK
        try:
            hosts = self.headers.get_all("Host", [])
            if len(hosts) != 1 or hosts[0] not in self.server.hosts:
                raise Refused(HTTPStatus.FORBIDDEN, f"this page is at {self.server.url} only")
            kind, text = make()
        except Refused as error:
            status, kind, text = error.args[0], JSON, json.dumps({"error": error.args[1]})
        except InputError as error:
            status, kind, text = HTTPStatus.BAD_REQUEST, JSON, json.dumps({"error": escaped(str(error))})
        nonce = secrets.token_urlsafe(16)
        content = (text.replace(NONCE, nonce) if kind == HTML else text).encode()
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Content-Security-Policy": POLICY.format(nonce=nonce),
            "Cache-Control": "no-store",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """The terminal has the address of the page, and stays quiet."""
