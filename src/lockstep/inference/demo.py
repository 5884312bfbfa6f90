"""A local web page: the user drops a photo on it and sees the model's prediction.

The server listens on the loopback address only, and answers only requests that address it by that name. So a page of
another site in the same browser can neither call it nor read its answers.
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
NONCE = "NONCE"  # the mark of the page's own script and style; each answer replaces it by the nonce of its header
IMAGE, JSON, HTML = "application/octet-stream", "application/json", "text/html; charset=utf-8"
LARGEST = 32 * MB  # the most bytes of a photo
SHOWN = 5  # the most classes in an answer
WAIT_S = 20  # the longest wait for a browser that sends nothing
POLICY = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; connect-src 'self'; "
    "img-src blob:; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'"
)


class Refused(Exception):
    """A request that the server refuses. Its arguments are the status and a sentence."""


class DemoServer(ThreadingHTTPServer):
    """The server of the page for one model.

    Args:
        predictor: the model.
        port: the port to listen on; 0 is any free port.

    Raises:
        InputError: the port is taken.
    """

    daemon_threads = True

    def __init__(self, predictor: Predictor, port: int) -> None:
        self.predictor, self.page = predictor, PAGE.read_text()
        self.model_lock = threading.Lock()  # a model computes with all threads
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"--port is {port}, but no server can listen there ({reason}): --port 0") from error

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/"

    @property
    def hosts(self) -> frozenset[str]:
        """The names of the server that a request may use."""
        return frozenset({f"{ADDRESS}:{self.server_port}", f"localhost:{self.server_port}"})

    def about(self) -> dict[str, Any]:
        """The facts about the model that the page shows."""
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
        """The model's prediction for an image file. Raises InputError if it is not one."""
        with self.model_lock:
            (prediction,) = self.predictor.predict(photo)
        return {"classes": [{"name": name, "probability": share} for _, name, share in prediction.top(SHOWN)]}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore it: a browser that closes its connection is no error."""


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
        """The photo in a request. Checks the headers first."""
        if self.headers.get("Origin") not in {f"http://{host}" for host in self.server.hosts}:
            raise Refused(HTTPStatus.FORBIDDEN, "photos are taken from the page itself only")
        # Before a page of another site sends this type, the browser asks the server, which does not allow it.
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

    def _answer(self, respond: Any) -> None:
        """Send the answer that `make` returns, or the sentence of its error."""
        status: HTTPStatus = HTTPStatus.OK
        try:
            hosts = self.headers.get_all("Host", [])
            if len(hosts) != 1 or hosts[0] not in self.server.hosts:
                raise Refused(HTTPStatus.FORBIDDEN, f"this page is at {self.server.url} only")
            kind, text = respond()
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
        """No log: the terminal shows only the address of the page."""
