"""The site of the documents: built as CI builds it, where a warning, such as a link to nowhere, is an error."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
import threading
import zlib
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

import lockstep
from browser import CHROMIUM, DRIVER, browser
from helpers import ROOT

PROJECT_DOCUMENTS = ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY", "CODE_OF_CONDUCT")
CI = (ROOT / ".ci" / "run").read_text()


def build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of the checkout `source` with the command of CI."""
    line = re.search(r"^\.venv/bin/sphinx-build (-M html) \. build (-c) docs (.*)$", CI, re.MULTILINE)
    assert line is not None
    words = [*line[1].split(), str(source), str(target), line[2], str(source / "docs"), *line[3].split()]
    return subprocess.run([sys.executable, "-m", "sphinx", *words], capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = build(ROOT, folder)
    assert built.returncode == 0, built.stderr
    assert not built.stderr
    return folder / "html"


def documents() -> set[str]:
    """The names of all documents, without their suffixes."""
    paths = [path for path in (ROOT / "docs").rglob("*") if path.suffix in (".md", ".ipynb")]
    return {*PROJECT_DOCUMENTS, *(path.relative_to(ROOT).with_suffix("").as_posix() for path in paths)}


@pytest.mark.slow
def test_the_navigation_has_every_document(site: Path) -> None:
    page = (site / "index.html").read_text()
    sidebar = page.partition('class="sidebar-tree"')[2].partition("</aside>")[0]
    assert documents() - {"README"} == set(re.findall(r'href="([^"#]+)\.html"', sidebar))


@pytest.mark.slow
def test_the_reference_has_every_public_name(site: Path) -> None:
    """Those of the package, and those that the documents and the template import or name."""
    texts = [path.read_text() for path in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]]
    code = [path.read_text() for path in (ROOT / "src" / "lockstep" / "template").rglob("*.py")]
    code += [block for text in texts for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]
    names = {f"lockstep.{name}" for name in lockstep.__all__}
    for block in code:
        for module, imported in re.findall(r"^from (lockstep[\w.]*) import (.+)$", block, re.MULTILINE):
            names |= {f"{module}.{name}" for name in imported.split(", ")}
    names |= {name for text in texts for name in re.findall(r"\| `(lockstep\.[\w.]+)`", text)}
    assert len(names) > len(lockstep.__all__) + 5
    inventory = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    assert names <= {line.split()[0] for line in inventory.splitlines() if " py:" in line}


@pytest.mark.slow
def test_a_page_loads_nothing_from_the_network(site: Path) -> None:
    loads = r"<(?:script|img|iframe|source|video)[^>]* src=\"(?:https?:)?//|<link[^>]* href=\"(?:https?:)?//"
    for page in site.rglob("*.html"):
        assert not re.search(loads, page.read_text()), page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"@import|url\([\"']?(?:https?:)?//", sheet.read_text()), sheet


@pytest.mark.slow
@pytest.mark.skipif(DRIVER is None or CHROMIUM is None, reason="needs chromium and its driver")
def test_a_browser_searches_it_and_loads_nothing_from_elsewhere(site: Path, tmp_path: Path) -> None:
    handler = functools.partial(SilentHandler, directory=site)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, browser(tmp_path) as window:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        window.open(f"{address}search.html?q=rendezvous")
        links = window.until(
            "const links = [...document.querySelectorAll('#search-results li a')].map(a => a.href);"
            "return links.some(link => link.includes('/docs/clusters.html')) && links"
        )
        for page in (links[0], f"{address}index.html", f"{address}docs/python.html"):
            window.open(page)
            resources = window.run("return performance.getEntriesByType('resource').map(entry => entry.name)")
            assert resources
            assert all(name.startswith(address) for name in resources)
            assert not [message for message in window.messages() if "favicon.ico" not in message]
        server.shutdown()


class SilentHandler(SimpleHTTPRequestHandler):
    """Serves files and logs nothing."""

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_link_to_nowhere_fails_the_build(tmp_path: Path) -> None:
    """Each is named, since the build goes on behind the first; a link to a heading is none of them."""
    to_nowhere = ("docs/nothing.md", "#nothing-here", "docs/use.md#nothing-there", "nothing.png")
    links = "".join(f"[x]({target}) " for target in ("docs/use.md#a-heading", *to_nowhere[:3])) + "![x](nothing.png)"
    (tmp_path / "docs").mkdir()
    for name in ("conf.py", "signatures.py", "site.css"):
        shutil.copy(ROOT / "docs" / name, tmp_path / "docs")
    for name in documents():
        path = tmp_path / f"{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n\n## A heading\n\n[x](#a-heading)\n")
    with (tmp_path / "README.md").open("a") as readme:
        readme.write(links)
    built = build(tmp_path, tmp_path / "build")
    assert built.returncode == 1
    warnings = built.stderr.splitlines()
    assert len(warnings) == len(to_nowhere), built.stderr
    names = [target.rpartition("#")[2] for target in to_nowhere]
    assert all(any(name in line for line in warnings) for name in names), built.stderr


def test_pre_commit_runs_the_checks_of_ci() -> None:
    """With the programs of the environment, so that there is one version of each, that of requirements-dev.txt."""
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert {hook["language"] for hook in hooks} == {"system"}
    assert [hook["entry"] for hook in hooks] == ["ruff check", "ruff format", "mypy"]
    assert all(f".venv/bin/{hook['entry']}" in CI for hook in hooks)
