"""A real browser, driven over the WebDriver protocol: chromium or Chrome, where one is installed."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

DRIVER = shutil.which("chromedriver")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--window-size=900,900"),
)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element in the protocol


class Browser:
    """One window of a browser."""

    def __init__(self, driver: str, profile: Path) -> None:
        self.driver = driver
        options = {"binary": CHROMIUM, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        capabilities = {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}}
        self.session = ""
        self.session = f"/session/{self.call('/session', capabilities=capabilities)['sessionId']}"

    def call(self, path: str, **values: Any) -> Any:
        """Send a command to the driver: a POST with these values, or a GET without any. Returns its answer."""
        data = json.dumps(values).encode() if values else None
        request = urllib.request.Request(f"{self.driver}{self.session}{path}", data)
        return json.loads(urllib.request.urlopen(request, timeout=120).read())["value"]

    def open(self, url: str) -> None:
        self.call("/url", url=url)

    def run(self, script: str, *arguments: Any) -> Any:
        """Run the body of a JavaScript function; returns its result."""
        return self.call("/execute/sync", script=script, args=list(arguments))

    def choose(self, selector: str, path: Path) -> None:
        """Choose a file in a file input."""
        element = self.call("/element", using="css selector", value=selector)[ELEMENT]
        self.call(f"/element/{element}/value", text=str(path))

    def until(self, script: str, *arguments: Any, timeout: float = 60) -> Any:
        """Run a script again and again until its result is true; returns that result."""
        end = time.monotonic() + timeout
        while not (result := self.run(script, *arguments)):
            assert time.monotonic() < end, f"waited {timeout} s for {script}"
            time.sleep(0.05)
        return result

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("/screenshot")))

    def messages(self) -> list[str]:
        """The lines of the browser's console since the last call: mostly errors."""
        return [line["message"] for line in self.call("/se/log", type="browser")]


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with a new profile. It is closed at the end of the context."""
    assert DRIVER is not None
    with subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout is not None
            port = next(
                match[1] for line in driver.stdout if (match := re.search(r"successfully on port (\d+)", line))
            )
            opened = Browser(f"http://127.0.0.1:{port}", profile)
            try:
                yield opened
            finally:
                with suppress(OSError):
                    end = urllib.request.Request(f"{opened.driver}{opened.session}", method="DELETE")
                    urllib.request.urlopen(end, timeout=30)
        finally:
            driver.terminate()
