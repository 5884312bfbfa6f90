"""`lockstep demo` and `lockstep watch`: web pages of this machine, about a photo, and about a run or a sweep.

The server is uvicorn, listens on the loopback address only, and answers only requests that address it by that name.
So a page of another site in the same browser can neither call it nor read its answers.
"""

import asyncio
import errno
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from lockstep.cli.sweep_report import sweep_page
from lockstep.core import log
from lockstep.core.errors import InputError, escaped
from lockstep.core.model_card import LABELS, SIGMOID, VALUES
from lockstep.core.run import Run, State
from lockstep.core.safe_read import MB
from lockstep.data.datasets.folder import suffixes_of
from lockstep.inference.predictor import THRESHOLD, Predictor, load, say_which
from lockstep.launcher.addresses import LOOPBACK, loopback_server
from lockstep.records.ledger import Ledger
from lockstep.records.runs import existing, run_folders
from lockstep.report.run_page import run_page
from lockstep.runtime.signals import leave, listen
from lockstep.training.trained import find_weights

JSON, HTML = "application/json", "text/html; charset=utf-8"
PAGE = Path(__file__).parent / "demo.html"
LARGEST = 32 * MB  # the most bytes of a photo
SHOWN = 5  # the most classes in an answer
REFRESH_S = 5
UNFINISHED = (State.waiting, State.running)
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
        log.console.file.flush()
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


def demo(path: str, *, port: int, device: str | None) -> None:
    """Serve the page of a model until a signal ends it."""
    predictor = load(file := find_weights(path), device=device)
    say_which(file, predictor.card)
    DemoServer(predictor, port).serve_until_signal(f"shows the {predictor.card.targets} of a photo")


class DemoServer(LocalServer):
    def __init__(self, predictor: Predictor, port: int) -> None:
        self.predictor, self.page = predictor, PAGE.read_text()
        self.model = asyncio.Lock()  # a model computes with all threads
        super().__init__(port)

    def about(self) -> dict[str, Any]:
        card = self.predictor.card
        return {
            "model": str(card.model["_target_"]).rpartition(".")[2],
            "name": card.model.get("name"),
            "classes": card.classes,
            "targets": card.targets,
            "input": "x".join(map(str, card.input_shape)),
            "files": ",".join(sorted(suffixes_of(card.input_shape[0]))),
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
            pairs = zip(self.predictor.names, self.predictor.values(photo)[0].numpy(), strict=True)
            return {"values": [{"name": name, "value": float(str(value))} for name, value in pairs]}
        (prediction,) = self.predictor.predict(photo)
        predicted = len(prediction.above(THRESHOLD)) if targets == LABELS else 1
        rows = prediction.top(max(SHOWN, predicted))
        return {
            "classes": [{"name": name, "probability": share} for _, name, share in rows],
            "predicted": predicted,
        }

    async def respond(self, request: str, headers: Mapping[str, str], receive: Receive) -> tuple[str, str]:
        match request:
            case "GET /":
                return HTML, self.page
            case "GET /model":
                return JSON, json.dumps(self.about())
            case "POST /predict":
                photo = await self._photo(headers, receive)
                async with self.model:
                    return JSON, json.dumps(await asyncio.to_thread(self.predicted, photo))
        raise Refused(HTTPStatus.NOT_FOUND, "there is no such page")

    async def _photo(self, headers: Mapping[str, str], receive: Receive) -> bytes:
        # A browser says which page a request comes from, and a page cannot change that.
        if headers.get("origin") not in {f"http://{host}" for host in self.hosts}:
            raise Refused(HTTPStatus.FORBIDDEN, "photos are taken from the page itself only")
        photo, more, length = bytearray(), True, int(headers.get("content-length", 0))
        while more and max(length, len(photo)) <= LARGEST:
            message = await receive()
            photo += message.get("body", b"")
            more = message.get("more_body", False)
        if (size := max(length, len(photo))) > LARGEST:
            text = f"the photo has {size / MB:,.0f} MB, expected at most {LARGEST // MB}"
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)
        return bytes(photo)


def watch(path: str, *, port: int) -> None:
    """Serve the page of a run, a sweep, or the newest one of a folder, until a signal ends it."""
    server = WatchServer(existing(path), port)
    server.serve_until_signal(f"shows {newest(server.root)}")


def newest(root: Path) -> Path:
    """The run or sweep itself, or the newest one in a folder; a job of a sweep is a part of it."""
    folders = [folder for folder in run_folders(root) if folder == root or not Ledger(folder.parent).exists]
    if not folders:
        raise InputError(f"{root} has no run in it; name a run, a sweep, or a folder of them: lockstep watch outputs")
    return root if root in folders else max(folders, key=lambda folder: folder.stat().st_mtime)


class WatchServer(LocalServer):
    """The server of the pages of a run or a sweep and its jobs, made anew from their files for each request."""

    def __init__(self, root: Path, port: int) -> None:
        self.root = root
        newest(root)
        super().__init__(port)

    async def respond(self, request: str, headers: Mapping[str, str], receive: Receive) -> tuple[str, str]:
        method, _, path = request.partition(" ")
        if method != "GET":
            raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, "pages are read with GET")
        return HTML, await asyncio.to_thread(self.page, path)

    def page(self, path: str) -> str:
        """The page at `/`, or of a job of the sweep at `/FOLDER/` or `/FOLDER/report.html`."""
        folder = newest(self.root)
        ledger = Ledger(folder)
        if path != "/":
            names = [record.folder for record in ledger.records()] if ledger.exists else []
            if (name := path.removesuffix("report.html").strip("/")) not in names:
                raise Refused(HTTPStatus.NOT_FOUND, "there is no such page")
            folder = folder / name
        elif ledger.exists:
            running = any(record.present_state in UNFINISHED for record in ledger.records())
            return sweep_page(ledger, refresh=REFRESH_S if running else None)
        run = Run(folder)
        return run_page(run, refresh=REFRESH_S if run.state in UNFINISHED else None)
