"""What the server of `lockstep demo` answers to its page. `tests/cli/test_demo.py` has the page in a browser."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.core.errors import InputError
from lockstep.data.datasets.folder import SUFFIXES
from lockstep.inference import demo
from lockstep.inference.demo import DemoServer
from lockstep.inference.predictor import Prediction
from lockstep.runtime.local_server import HTML, JSON, Refused


class Predicts:
    """A predictor of so many outputs, whose log-odds fall by one from `first` on."""

    def __init__(self, number: int = 7, first: float = 3.0, **card: Any) -> None:
        usual = {"targets": "classes", "probabilities": "softmax", "input_shape": (1, 8, 6), "score": "91 % top-1"}
        model = {"_target_": "lockstep.models.Timm", "name": "resnet18"}
        self.card = SimpleNamespace(**{"model": model, "classes": number, "step": 12, **usual, **card})
        self.names = tuple("abcdefghij"[:number])
        self.odds = first - torch.arange(number, dtype=torch.float64)
        self.seen, self.running, self.most = list[bytes](), 0, 0

    def predict(self, photo: bytes) -> list[Prediction]:
        self.seen.append(photo)
        self.running += 1
        self.most = max(self.most, self.running)
        time.sleep(0.001)
        self.running -= 1
        return [Prediction(label=0, names=self.names, probabilities=self.odds.sigmoid(), log_odds=self.odds)]

    def values(self, photo: bytes) -> torch.Tensor:
        return torch.tensor([[0.1, -2.5, 1e-7]])


@pytest.fixture
def server() -> Iterator[DemoServer]:
    server = DemoServer(Predicts(), 0)  # type: ignore[arg-type]
    with server.socket:
        yield server


def asked(server: DemoServer, request: str, *chunks: bytes, **headers: str | None) -> tuple[str, str]:
    """The answer to a request with the headers of the page itself, changed by `headers`, and a body in chunks."""
    own = {"origin": server.url[:-1], "content-length": str(sum(map(len, chunks))), **headers}
    left = [{"body": chunk, "more_body": at < len(chunks)} for at, chunk in enumerate(chunks, start=1)]

    async def receive() -> dict[str, Any]:
        return left.pop(0)

    sent = {name.replace("_", "-"): value for name, value in own.items() if value is not None}
    return asyncio.run(server.respond(request, sent, receive))


def shares(predictor: Predicts, number: int) -> list[dict[str, Any]]:
    pairs = zip(predictor.names, predictor.odds.sigmoid().tolist(), strict=True)
    return [{"name": name, "probability": share} for name, share in pairs][:number]


@pytest.mark.parametrize(
    ("predictor", "rows", "predicted"),
    [
        (Predicts(), 5, 1),
        (Predicts(3), 3, 1),
        (Predicts(targets="labels"), 5, 3),
        (Predicts(first=-1, targets="labels"), 5, 0),
        (Predicts(10, first=5.5, targets="labels"), 6, 6),
    ],
    ids=["classes", "few classes", "three labels", "no label", "six labels"],
)
def test_the_likeliest_classes_and_all_predicted_labels_are_shown(
    server: DemoServer, predictor: Any, rows: int, predicted: int
) -> None:
    server.predictor = predictor
    kind, text = asked(server, "POST /predict", b"pho", b"to")
    assert (kind, predictor.seen) == (JSON, [b"photo"])
    assert json.loads(text) == {"classes": shares(predictor, rows), "predicted": predicted}


def test_values_have_the_digits_of_their_own_format(server: DemoServer) -> None:
    server.predictor = Predicts(3, targets="values")  # type: ignore[assignment]
    _, text = asked(server, "POST /predict", b"photo")
    values = [("a", 0.1), ("b", -2.5), ("c", 1e-7)]
    assert json.loads(text) == {"values": [{"name": name, "value": value} for name, value in values]}


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("probabilities", ["softmax", "sigmoid"])
def test_the_page_is_told_what_the_model_is(server: DemoServer, channels: int, probabilities: str) -> None:
    server.predictor = Predicts(probabilities=probabilities, input_shape=(channels, 8, 6))  # type: ignore[assignment]
    assert asked(server, "GET /") == (HTML, Path(demo.__file__).with_name("demo.html").read_text())
    kind, text = asked(server, "GET /model")
    assert kind == JSON
    assert json.loads(text) == {
        "model": "Timm",
        "name": "resnet18",
        "classes": 7,
        "targets": "classes",
        "input": f"{channels}x8x6",
        "files": ",".join(sorted(SUFFIXES)) if channels != 4 else ".npy,.tif,.tiff",
        "score": "91 % top-1",
        "independent": probabilities == "sigmoid",
        "step": 12,
    }


def test_a_model_that_is_its_class_has_no_name(server: DemoServer) -> None:
    server.predictor = Predicts(model={"_target_": "mine.nets.Net", "width": 8})  # type: ignore[assignment]
    about = json.loads(asked(server, "GET /model")[1])
    assert (about["model"], about["name"]) == ("Net", None)


@pytest.mark.parametrize("request_line", ["GET /predict", "POST /", "POST /model", "GET /x", "HEAD /"])
def test_there_is_no_other_page(server: DemoServer, request_line: str) -> None:
    with pytest.raises(Refused) as caught:
        asked(server, request_line)
    assert caught.value.args == (HTTPStatus.NOT_FOUND, "there is no such page")


def test_photos_are_taken_from_the_page_itself_alone(server: DemoServer) -> None:
    port = server.port
    for origin in (f"http://127.0.0.1:{port}", f"http://localhost:{port}"):
        asked(server, "POST /predict", b"photo", origin=origin)
    seen = len(server.predictor.seen)  # type: ignore[attr-defined]
    for other in (
        None,
        "null",
        f"127.0.0.1:{port}",
        f"https://localhost:{port}",
        "http://localhost",
        "http://a.example",
    ):
        with pytest.raises(Refused, match="photos are taken from the page itself only") as caught:
            asked(server, "POST /predict", b"photo", origin=other)
        assert caught.value.args[0] == HTTPStatus.FORBIDDEN
    assert len(server.predictor.seen) == seen == 2  # type: ignore[attr-defined]


def test_a_photo_of_the_most_bytes_is_taken_and_one_more_is_refused_however_it_comes(
    server: DemoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Refused, match="the photo has 34 MB, expected at most 32") as caught:
        asked(server, "POST /predict", content_length=str(34 * 2**20))
    assert caught.value.args[0] == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    monkeypatch.setattr(demo, "LARGEST", 10)
    for length in ("10", None):
        asked(server, "POST /predict", b"1234", b"", b"567890", content_length=length)
    assert server.predictor.seen == [b"1234567890"] * 2  # type: ignore[attr-defined]
    for chunks, length in (((), "11"), ((b"1234", b"5678901"), None), ((b"1234", b"5678901"), "5")):
        with pytest.raises(Refused, match="expected at most"):
            asked(server, "POST /predict", *chunks, content_length=length)
    endless = ({"body": b"123", "more_body": True} for _ in range(4))  # no more is read than may be

    async def receive() -> dict[str, Any]:
        return next(endless)

    with pytest.raises(Refused, match="expected at most"):
        asyncio.run(server.respond("POST /predict", {"origin": server.url[:-1]}, receive))
    assert next(endless, None) is None


def test_one_photo_is_predicted_at_a_time(server: DemoServer) -> None:
    async def receive() -> dict[str, Any]:
        return {"body": b"photo"}

    async def several() -> list[tuple[str, str]]:
        headers = {"origin": server.url[:-1]}
        return await asyncio.gather(*(server.respond("POST /predict", headers, receive) for _ in range(8)))

    assert len({*asyncio.run(several())}) == 1
    assert (len(server.predictor.seen), server.predictor.most) == (8, 1)  # type: ignore[attr-defined]


def test_the_page_is_answered_while_a_photo_is_predicted(server: DemoServer) -> None:
    answered, in_time = threading.Event(), list[bool]()

    async def receive() -> dict[str, Any]:
        return {"body": b"photo"}

    async def both() -> None:
        photo = server.respond("POST /predict", {"origin": server.url[:-1]}, receive)
        await asyncio.gather(photo, page())

    async def page() -> None:
        await server.respond("GET /model", {}, receive)
        answered.set()

    predict = server.predictor.predict
    server.predictor.predict = lambda photo: in_time.append(answered.wait(5)) or predict(photo)  # type: ignore[method-assign, func-returns-value]
    asyncio.run(both())
    assert in_time == [True]


def test_the_command_serves_the_weights_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[Any] = []
    predictor = Predicts(targets="labels")
    monkeypatch.setattr(demo, "find_weights", lambda path: Path(path, "model.safetensors"))
    monkeypatch.setattr(demo, "load_predictor", lambda file, device: steps.append((file, device)) or predictor)
    monkeypatch.setattr(demo, "say_which", lambda file, card: steps.append((file, card)))
    monkeypatch.setattr(DemoServer, "serve_until_signal", lambda server, what: steps.append((server, what)))
    demo.demo("run", port=0, device="cuda:3")
    server, purpose = steps.pop()
    server.socket.close()
    assert (server.predictor, purpose) == (predictor, "shows the labels of a photo")
    assert steps == [(Path("run/model.safetensors"), "cuda:3"), (Path("run/model.safetensors"), predictor.card)]
    with pytest.raises(InputError, match=r"^--port is 70000, but no server can listen there"):
        demo.demo("run", port=70_000, device=None)
