"""`lockstep watch`: a page that follows a run or a sweep, for this machine alone."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import os
import re
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from helpers import Done, forks, result, train_here
from lockstep.core.errors import InputError
from lockstep.core.run import State
from lockstep.core.run_dir import RunDir
from lockstep.records.ledger import Identity, Ledger
from lockstep.report import watch
from lockstep.report.watch import WatchServer
from lockstep.runtime import local_server
from lockstep.runtime.addresses import loopback_server
from lockstep.runtime.local_server import LocalServer, Message, Receive, Refused
from processes import wait_for


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    words = ("steps=2", "train.eval_every=1", "model=linear", "telemetry.report=never")
    return train_here(tmp_path_factory.mktemp("watched") / "run", *words)


@contextmanager
def serving(folder: Path) -> Iterator[WatchServer]:
    server = WatchServer(folder, 0)
    thread = threading.Thread(target=server.run, args=([server.socket],))
    thread.start()
    wait_for(lambda: server.started)
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join()
        server.socket.close()


class Greeting(LocalServer):
    async def respond(self, request: str, headers: Mapping[str, str], receive: Receive) -> tuple[str, str]:
        return "text/plain", "café ±"


def test_an_answer_is_as_long_as_it_says() -> None:
    async def send(message: Message) -> None:
        sent.append(message)

    sent, server = list[Message](), Greeting(0)
    request = {"headers": [(b"host", f"127.0.0.1:{server.port}".encode())], "method": "GET", "path": "/"}
    with closing(server.socket):
        asyncio.run(server.answer(request, cast(Any, None), send))
    start, end = sent
    assert dict(start["headers"])[b"Content-Length"] == str(len(end["body"])).encode()
    assert end["body"].decode() == "café ±"


# What keeps a page out of other pages, and its content from other sites, caches and guesses of a browser.
KEPT_APART = {
    b"Content-Security-Policy": b"frame-ancestors 'none'",
    b"Cache-Control": b"no-store",
    b"Cross-Origin-Resource-Policy": b"same-origin",
    b"Referrer-Policy": b"no-referrer",
    b"X-Content-Type-Options": b"nosniff",
}


@pytest.mark.parametrize(
    ("host", "error", "status", "kind", "text"),
    [
        ("127.0.0.1:{}", None, 200, "text/plain", "café ±"),
        ("localhost:{}", None, 200, "text/plain", "café ±"),
        ("localhost", None, 403, "application/json", '{"error": "this page is at {} only"}'),
        ("example.org:{}", None, 403, "application/json", '{"error": "this page is at {} only"}'),
        ("127.0.0.1:{}", Refused(404, "no page"), 404, "application/json", '{"error": "no page"}'),
        ("127.0.0.1:{}", InputError("odd \x1b[2J"), 400, "application/json", '{"error": "odd \\\\x1b[2J"}'),
    ],
)
def test_every_answer_is_for_this_machine_alone_and_an_error_is_a_sentence(
    host: str, error: Exception | None, status: int, kind: str, text: str
) -> None:
    class Asked(Greeting):
        async def respond(self, request: str, headers: Mapping[str, str], receive: Receive) -> tuple[str, str]:
            assert (request, headers["x-word"]) == ("POST /a", "é")
            if error is not None:
                raise error
            return await super().respond(request, headers, receive)

    async def send(message: Message) -> None:
        sent.append(message)

    sent, server = list[Message](), Asked(0)
    headers = [(b"host", host.format(server.port).encode()), (b"x-word", "é".encode("latin-1"))]
    with closing(server.socket):
        asyncio.run(server.answer({"headers": headers, "method": "POST", "path": "/a"}, cast(Any, None), send))
    start, end = sent
    fields = dict(start["headers"])
    assert (start["status"], fields.pop(b"Content-Type").decode()) == (status, kind)
    assert end["body"].decode() == text.replace("{}", server.url)
    assert fields == {**KEPT_APART, b"Content-Length": str(len(end["body"])).encode()}
    assert server.url == f"http://127.0.0.1:{server.port}/"


def test_a_server_says_where_it_is_at_once_and_a_signal_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done, pipe, server = list[Any](), io.BytesIO(), Greeting(0)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(pipe))
    monkeypatch.setattr(local_server, "listen", lambda handler: done.append(handler))
    monkeypatch.setattr(local_server, "leave", lambda code: done.append(code))
    monkeypatch.setattr(server, "run", lambda sockets: done.extend([sockets, pipe.getvalue().decode()]))
    with closing(server.socket):
        server.serve_until_signal("shows a run")
    assert done == [server.handle_exit, [server.socket], f"{server.url} shows a run; Ctrl-C ends it\n"]
    server.handle_exit(signal.SIGTERM, None)
    assert done[3:] == [0]
    assert not server.config.server_header


@pytest.mark.parametrize(("port", "fits"), [(-1, False), (1, True), (65_535, True), (65_536, False)])
def test_a_port_is_one_that_there_is(port: int, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_server, "loopback_server", lambda port: loopback_server())  # it may be in use
    if fits:
        with closing(Greeting(port).socket) as socket:
            assert socket.getsockname()[0] == "127.0.0.1", "other machines cannot reach it"
        return
    with pytest.raises(InputError, match=f"--port is {port}, but no server can listen there .*: --port 0"):
        Greeting(port)


def answer(server: WatchServer, path: str = "/", method: str = "GET", host: str | None = None) -> tuple[int, str]:
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)) as connection:
        connection.request(method, path, headers={"Host": host} if host else {})
        response = connection.getresponse()
        return response.status, response.read().decode()


def test_the_page_of_a_run_renews_itself_until_the_run_has_ended(trained: RunDir, tmp_path: Path) -> None:
    run = RunDir(Path(shutil.copytree(trained.path, tmp_path / "run")))
    whole = run.metrics.read_text()
    run.metrics.write_text(whole.splitlines(keepends=True)[0])
    done = json.loads(run.summary.read_text())
    with serving(tmp_path) as server:
        run.summary.write_text(json.dumps({**done, "status": "waiting", "step": 1}))
        status, page = answer(server)
        assert (status, 'http-equiv="refresh"' in page, "<svg" in page) == (200, True, False)
        run.metrics.write_text(whole)
        run.summary.write_text(json.dumps(done))
        status, page = answer(server)
        assert (status, 'http-equiv="refresh"' in page, "<svg" in page) == (200, False, True)
    assert not run.report.exists(), "nothing is written"


def test_the_page_of_a_sweep_leads_to_the_pages_of_its_jobs(trained: RunDir, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "outputs" / "sweep")
    ledger.create(Identity(base={}, swept=("seed",), words=("seed=1,2",)))
    first, _ = ledger.enter([((f"seed={seed}",), f"seed={seed}") for seed in (1, 2)])
    shutil.copytree(trained.path, ledger.folder / first.folder)
    ledger.end(ledger.start(first), State.done, objective=50.0)
    with serving(tmp_path / "outputs") as server:
        _, page = answer(server)
        assert 'http-equiv="refresh"' in page, "a job waits"
        links = re.findall('href="(.*?)"', page)
        assert len(links) == 2
        assert "Linear" in answer(server, f"/{links[0]}")[1]
        assert answer(server, f"/{links[0]}report.html")[0] == 200


def test_the_page_of_a_folder_is_that_of_its_newest_run_at_each_time(trained: RunDir, tmp_path: Path) -> None:
    shutil.copytree(trained.path, tmp_path / "first")
    with closing((server := WatchServer(tmp_path, 0)).socket):
        assert f"{tmp_path}/first" in server.page("/")
        shutil.copytree(trained.path, tmp_path / "second")
        os.utime(tmp_path / "second", (2e9, 2e9))
        assert f"{tmp_path}/second" in server.page("/")


def test_only_this_machine_reads_pages_and_only_pages(trained: RunDir) -> None:
    with serving(trained.path) as server:
        assert answer(server)[0] == 200
        assert answer(server, host="lockstep.example")[0] == 403
        assert answer(server, method="POST")[0] == 405
        for path in ("/config.yaml", "/../run/", "/%2e%2e/", "//", "/report"):
            assert answer(server, path)[0] == 404, path


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no run in it"):
        WatchServer(tmp_path, 0)


# A page that is being made for ever, of the run at the end of the line; `asked` is then in the folder.
ENDLESS = """
import pathlib, sys, time
from lockstep.cli import main
from lockstep.report import watch
def endless(run, refresh):
    pathlib.Path(run.path, "asked").touch()
    time.sleep(10**6)
watch.run_page = endless
main.main()
"""


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP"])
def test_a_stop_ends_it_without_a_word_while_pages_are_made_and_while_nobody_reads_one(
    trained: RunDir, tmp_path: Path, name: str
) -> None:
    shutil.copytree(trained.path, tmp_path / "run")
    process = forks().start("-c", ENDLESS, "watch", str(tmp_path / "run"), "--port", "0")
    port = int(process.stdout.readline().decode().partition("//127.0.0.1:")[2].partition("/")[0])
    with closing(socket.create_connection(("127.0.0.1", port))) as reader:
        reader.sendall(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
        wait_for((tmp_path / "run" / "asked").exists)
        process.send_signal(getattr(signal, f"SIG{name}"))
        assert result(process, timeout=60) == Done(0, "", "")


@pytest.mark.parametrize("state", State)
def test_the_page_of_a_sweep_renews_itself_while_a_job_may_change(state: State, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.create(Identity(swept=("a",), words=("a=1",)))
    (record,) = ledger.enter([(("a=1",), "a")])
    (tmp_path / record.folder).mkdir()
    record = ledger.start(record) if state is State.running else record
    dead = {"host": socket.gethostname(), "pid": 1, "born": "another"}  # the process had this number once
    written = State.running if state is State.killed else state
    ledger.write(replace(record, state=written, **(dead if state is State.killed else {})))
    server = WatchServer(tmp_path, 0)
    with closing(server.socket):
        assert ('http-equiv="refresh"' in server.page("/")) == (state in (State.waiting, State.running))


@pytest.mark.parametrize("status", ["completed", "failed", "stopped", "pruned"])
def test_the_page_of_a_job_that_has_ended_renews_itself_no_more(status: str, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.create(Identity(swept=("a",), words=("a=more,less",)))
    ended, _ = (ledger.start(record) for record in ledger.enter([((f"a={a}",), f"a={a}") for a in ("more", "less")]))
    RunDir.at(tmp_path / ended.folder).write_summary(status=status)
    with closing((server := WatchServer(tmp_path, 0)).socket):
        pages = [server.page(path) for path in ("/", f"/{ended.folder}/", f"/{ended.folder}/report.html")]
    assert ['http-equiv="refresh"' in page for page in pages] == [True, False, False], "the sweep goes on"


def test_a_job_of_a_sweep_is_a_part_of_it_also_if_it_is_the_newest(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "sweep")
    ledger.create(Identity(swept=("a",), words=("a=1",)))
    (record,) = ledger.enter([(("a=1",), "a")])
    for number, folder in enumerate((tmp_path / "alone", ledger.folder / record.folder)):
        RunDir.at(folder).overrides.write_text("[]")
        os.utime(folder, (2e9 + number, 2e9 + number))
    assert watch.newest(tmp_path) == tmp_path / "alone"
    os.utime(ledger.folder, (2e9 + 9, 2e9 + 9))
    assert watch.newest(tmp_path) == ledger.folder
    assert watch.newest(ledger.folder) == ledger.folder
    assert watch.newest(ledger.folder / record.folder) == ledger.folder / record.folder


def test_the_command_says_what_it_shows_at_the_port_that_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[str, int]] = []
    RunDir.at(tmp_path / "runs" / "one").overrides.write_text("[]")
    monkeypatch.setattr(
        WatchServer, "serve_until_signal", lambda self, what: shown.append((what, self.port)) or self.socket.close()
    )
    with closing(loopback_server()) as other:
        port = other.getsockname()[1]
    watch.watch(str(tmp_path / "runs"), port=port)
    assert shown == [(f"shows {tmp_path / 'runs' / 'one'}", port)]
    with closing((server := WatchServer(tmp_path, 0)).socket):
        assert 'http-equiv="refresh" content="5"' in server.page("/"), "it waits"


def test_what_is_no_page_and_no_reading_is_refused_with_its_reason(tmp_path: Path) -> None:
    RunDir.at(tmp_path / "one").overrides.write_text("[]")
    with closing((server := WatchServer(tmp_path, 0)).socket):
        for path in ("/one/", "/report.html", "/.", ""):
            with pytest.raises(Refused) as raised:
                server.page(path)
            assert raised.value.args == (404, "there is no such page")
        with pytest.raises(Refused) as raised:
            asyncio.run(server.respond("HEAD /", {}, cast(Any, None)))
        assert raised.value.args == (405, "pages are read with GET")
        kind, page = asyncio.run(server.respond("GET /", {}, cast(Any, None)))
        assert (kind, str(tmp_path / "one") in page) == ("text/html; charset=utf-8", True)


def test_a_port_that_is_in_use_is_said_to_be() -> None:
    with closing(loopback_server()) as used:
        port = used.getsockname()[1]
        says = rf"^--port is {port}, but no server can listen there \(Address already in use.*: --port 0$"
        with pytest.raises(InputError, match=says):
            Greeting(port)
    with pytest.raises(InputError, match=r"^--port is 65536, .* \(ports end at 65535\): --port 0$"):
        Greeting(65_536)
