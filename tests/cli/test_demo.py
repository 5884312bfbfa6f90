"""`lockstep demo`: the page in a real browser, and what its server refuses."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import lockstep
from browser import CHROMIUM, DRIVER, browser
from helpers import FAKE, NARROW, forked, forks, result, train_here
from lockstep.core.errors import InputError
from lockstep.core.run_dir import RunDir
from lockstep.inference.demo import LARGEST, DemoServer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos of two classes, one of which has a name that would be markup on a page, and a run on them."""
    folder = tmp_path_factory.mktemp("demo")
    for split, (label, level) in ((s, c) for s in ("train", "val") for c in (("<b>cat & dog", 60), ("zebra", 190))):
        for number in range(8):
            path = folder / "photos" / split / label / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng(number).integers(level - 50, level + 50, (240, 320, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path)
    data = ("dataset=folder", f"dataset.path={folder / 'photos'}", "dataset.decode_size=24", "dataset.input_size=16")
    train_here(folder / "run", *data, NARROW, "steps=20", "batch=8", "augment=none", "optimizer.lr=0.01")
    return folder


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[DemoServer]:
    with serving(RunDir(place / "run").path) as server:
        yield server


@contextmanager
def serving(run: Path) -> Iterator[DemoServer]:
    server = DemoServer(lockstep.load(run, device="cpu"), 0)
    with server.socket:
        thread = threading.Thread(target=server.run, args=([server.socket],))
        thread.start()
        try:
            yield server
        finally:
            server.should_exit = True
            thread.join()


def asked(
    server: DemoServer, method: str, path: str, body: bytes | None = None, **headers: str | None
) -> tuple[int, Any]:
    """The status of an answer and its content, for the headers of the page itself, changed by `headers`."""
    own: dict[str, str | None] = {"Host": server.url[7:-1]}
    if method == "POST":
        own |= {
            "Origin": server.url[:-1],
            "Content-Type": "application/octet-stream",
            "Content-Length": str(len(body or b"")),
        }
    sent_headers = {**own, **{name.replace("_", "-"): value for name, value in headers.items()}}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in sent_headers.items():
        if value is not None:
            connection.putheader(name, value)
    connection.endheaders(body)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    json_type = answer.headers["Content-Type"] == "application/json"
    return answer.status, json.loads(content) if json_type else content.decode()


def photo(place: Path, label: str) -> Path:
    return place / "photos" / "val" / label / "3.png"


@pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromium-driver are not installed")
def test_a_photo_that_is_dropped_is_shown_with_its_classes(place: Path, server: DemoServer, tmp_path: Path) -> None:
    texts = "return [...document.querySelectorAll('#classes .name')].map((each) => each.textContent)"
    with browser(tmp_path / "profile") as page:
        page.open(server.url)
        about = page.until("return document.getElementById('about').textContent")
        assert about.startswith("DigitNet, 2 classes, sees 3x16x16, ")
        page.choose("#file", photo(place, "zebra"))
        assert page.until(f"const found = (() => {{ {texts} }})(); return found.length && found") == [
            "zebra",
            "<b>cat & dog",
        ]
        page.until("return document.getElementById('photo').naturalWidth === 320")
        page.screenshot(Path(os.environ.get("SCREENSHOTS", tmp_path)) / "demo.png")
        (tmp_path / "torn.png").write_bytes(b"torn")
        page.choose("#file", tmp_path / "torn.png")
        error = page.until("return document.getElementById('error').textContent")
        assert "cannot be read as an image" in error
        assert page.run(texts) == []
        drop = (
            "const sent = new DataTransfer(); const canvas = document.createElement('canvas');"
            "canvas.width = canvas.height = 40; const ink = canvas.getContext('2d');"
            "ink.fillStyle = 'rgb(60, 60, 60)'; ink.fillRect(0, 0, 40, 40);"
            "canvas.toBlob((blob) => { sent.items.add(new File([blob], 'dark.png'));"
            "document.getElementById('drop').dispatchEvent(new DragEvent('drop', { dataTransfer: sent })); });"
        )
        page.run(drop)
        assert page.until(f"const found = (() => {{ {texts} }})(); return found.length && found")[0] == "<b>cat & dog"
        assert page.run("return document.querySelectorAll('#classes b').length") == 0
        assert page.run("return document.getElementById('error').hidden")
        assert page.run("return document.getElementById('note').textContent") == "dark.png"
        page.run(drop.replace("sent.items.add(", "sent.items.add(new File([blob], 'first.png')); sent.items.add("))
        note = "first.png, the first of 2: one photo at a time"
        page.until(f"return document.getElementById('note').textContent === '{note}'")
        blocked = [message for message in page.messages() if "400" not in message]
        assert blocked == []


def test_a_hundred_requests_at_once_are_answered_with_what_the_predictor_says(
    place: Path, server: DemoServer
) -> None:
    content = photo(place, "zebra").read_bytes()
    with ThreadPoolExecutor(100) as pool:
        answers = list(pool.map(lambda _: asked(server, "POST", "/predict", content), range(100)))
    (prediction,) = server.predictor.predict(content)
    expected = {
        "classes": [{"name": name, "probability": share} for _, name, share in prediction.top(5)],
        "predicted": 1,
    }
    assert answers == [(200, expected)] * 100


@pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromium-driver are not installed")
@pytest.mark.parametrize("task", ["multilabel", "regression"])
def test_the_page_shows_the_labels_and_the_values_of_the_predictor(task: str, tmp_path: Path) -> None:
    data = (*FAKE, "dataset.classes=7", "dataset.examples=40")
    run = train_here(tmp_path / "run", *data, "model=linear", "steps=4", "batch=8", "augment=none", f"task={task}")
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    predictor = lockstep.load(run.path, device="cpu")
    if task == "multilabel":
        (prediction,) = predictor.predict(tmp_path / "a.png")
        above = prediction.above(0.5)
        rows = [[name, f"{100 * share:.1f} %"] for _, name, share in prediction.top(max(5, len(above)))]
        assert above
    else:
        (values,) = predictor.values(tmp_path / "a.png").tolist()
        rows = [[str(number), str(np.float32(value))] for number, value in enumerate(values)]
        above = []
    texts = "[...document.querySelectorAll('#classes li')].map((row) => [...row.querySelectorAll('.name, .share')]"
    bold = "return [...document.querySelectorAll('#classes .predicted .name')].map((each) => each.textContent)"
    with serving(run.path) as server, browser(tmp_path / "profile") as page:
        page.open(server.url)
        about = page.until("return document.getElementById('about').textContent")
        assert f"7 {'labels' if task == 'multilabel' else 'values'}, sees 1x8x8" in about
        page.choose("#file", tmp_path / "a.png")
        actual = page.until(f"const r = {texts}.map((each) => each.textContent)); return r.length && r")
        page.screenshot(Path(os.environ.get("SCREENSHOTS", tmp_path)) / f"demo-{task}.png")
        assert (actual, page.run(bold)) == (rows, [name for _, name, _ in above])


REFUSED: dict[str, tuple[str, str, bytes | None, dict[str, str | None], int]] = {
    "another name": ("GET", "/", None, {"Host": "evil.example"}, 403),
    "no name": ("GET", "/", None, {"Host": None}, 400),
    "another page": ("GET", "/../../etc/passwd", None, {}, 404),
    "another site": ("POST", "/predict", b"x", {"Origin": "http://evil.example"}, 403),
    "no site": ("POST", "/predict", b"x", {"Origin": None}, 403),
    "too much": ("POST", "/predict", None, {"Content_Length": str(LARGEST + 1)}, 413),
    "no photo": ("POST", "/predict", b"no photo", {}, 400),
}


@pytest.mark.parametrize(("method", "path", "body", "headers", "status"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_asked_by_the_page_itself_is_refused(
    server: DemoServer, method: str, path: str, body: bytes | None, headers: dict[str, str | None], status: int
) -> None:
    actual, answer = asked(server, method, path, body, **headers)
    assert actual == status
    # What is no HTTP, uvicorn refuses itself.
    assert answer == "Invalid HTTP request received." or set(answer) == {"error"}


def test_a_port_that_is_taken_is_one_sentence(server: DemoServer) -> None:
    with pytest.raises(InputError, match=r"--port is \d+, but no server can listen there \(.*\): --port 0"):
        DemoServer(server.predictor, server.port)
    with pytest.raises(InputError, match="--port is 70000, but no server can listen there"):
        DemoServer(server.predictor, 70000)


def test_a_server_that_is_not_installed_is_one_sentence() -> None:
    code = (
        "import importlib.util, sys; importlib.util.find_spec = lambda name: None; sys.argv[1:] = ['demo', 'latest']"
    )
    done = forked("-c", f"{code}; from lockstep.cli.main import main; main()")
    assert done.code == 2
    assert "needs the package uvicorn" in done.err
    assert "pip install 'lockstep[demo]'" in done.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_the_command_says_its_address_and_ends_with_a_signal(place: Path, number: int) -> None:
    process = forks().start("lockstep", "demo", str(place / "run"), "--port", "0")
    address = re.match(r"http://127\.0\.0\.1:(\d+)/ ", process.stdout.readline().decode())
    assert address is not None
    urllib.request.urlopen(f"http://127.0.0.1:{address[1]}/model", timeout=60).close()
    process.send_signal(number)
    done = result(process, timeout=60)
    assert (done.code, done.out, done.err.partition(": ")[2][:8]) == (0, "", "DigitNet")
