"""`lockstep demo`: a page of this machine that shows what a model predicts for a photo."""

import asyncio
import json
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from lockstep.core.model_card import LABELS, SIGMOID, VALUES
from lockstep.core.safe_read import MB
from lockstep.data.datasets.folder import suffixes_of
from lockstep.inference.predictor import THRESHOLD, Predictor, load_predictor, say_which
from lockstep.runtime.local_server import HTML, JSON, LocalServer, Receive, Refused
from lockstep.training.trained import find_weights

PAGE = Path(__file__).parent / "demo.html"
LARGEST = 32 * MB  # the most bytes of a photo
SHOWN = 5  # the most classes in an answer


def demo(path: str, *, port: int, device: str | None) -> None:
    """Serve the page of a model until a signal ends it."""
    predictor = load_predictor(file := find_weights(path), device=device)
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
