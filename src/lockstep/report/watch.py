"""`lockstep watch`: the page of a run or a sweep while it trains, on this machine."""

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path

from lockstep.core.errors import InputError
from lockstep.core.run import Run, State
from lockstep.records.ledger import Ledger
from lockstep.records.runs import existing, run_folders
from lockstep.report.run_page import run_page
from lockstep.report.sweep_page import sweep_page
from lockstep.runtime.local_server import HTML, LocalServer, Receive, Refused

PAGE_REFRESH_S = 5
UNFINISHED = (State.waiting, State.running)


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
            return sweep_page(ledger, refresh=PAGE_REFRESH_S if running else None)
        run = Run(folder)
        return run_page(run, refresh=PAGE_REFRESH_S if run.state in UNFINISHED else None)
