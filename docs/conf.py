"""The site of the documents: `sphinx-build -M html . build -c docs -W`, then open build/html/index.html.

The source is the whole checkout, so that a link between documents leads to the same place here and on GitHub. The
front page is README.md. Of the folders in docs/, each becomes a part of the navigation by itself.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

import lockstep

sys.path.insert(0, str(Path(__file__).parent))  # Sphinx runs this file from elsewhere
import signatures

ROOT = Path(__file__).parents[1]
SUFFIXES = (".md", ".ipynb")
EXAMPLES = "docs/examples/README"  # this document has the files of its folder behind it
# The documents in the order of the navigation. The first part also has those that are not named here.
PARTS = {
    "Start": ("docs/quickstart", "docs/before", "docs/fine_tuning", "docs/use"),
    "Train": ("docs/data", "docs/tasks", "docs/resuming", "docs/sweeps", "docs/clusters", "docs/troubleshooting"),
    "Reference": ("docs/configuration", "docs/recipes", "docs/extending", "docs/notebook", "docs/python"),
    "How it works": ("docs/distributed", "docs/formats", "docs/reliability", "docs/performance", "docs/scale"),
    "The project": ("CONTRIBUTING", "CHANGELOG", "SECURITY", "CODE_OF_CONDUCT"),
}

project = "Lockstep"
author = "The Lockstep authors"
release = lockstep.__version__
root_doc = "README"
source_suffix = dict.fromkeys(SUFFIXES, "markdown")
include_patterns = ["README.md", *(f"{name}.md" for name in PARTS["The project"]), "docs/**"]
exclude_patterns = [path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "docs"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
default_role = "code"  # in docstrings `x` is code
highlight_language = "text"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80
napoleon_custom_sections = [("Fields", "Attributes")]
napoleon_use_ivar = True
napoleon_attr_annotations = False  # the signature has the types

html_theme = "furo"
html_title = f"Lockstep {release}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False


def navigation() -> Iterator[str]:
    """The lists of documents of all parts, as MyST writes them; each folder in docs/ is a part before the last."""
    named = {name for names in PARTS.values() for name in names}
    (first, names), *parts, last = PARTS.items()
    folders = sorted(path for path in (ROOT / "docs").iterdir() if path.is_dir() and documents(path))
    yield from part(first, [*names, *(name for name in documents(ROOT / "docs") if name not in named)])
    for title, names in parts:
        yield from part(title, names)
    for folder in folders:
        yield from part(folder.name.replace("_", " ").capitalize(), documents(folder))
    yield from part(*last)


def part(title: str, names: Iterable[str]) -> Iterator[str]:
    yield from ("```{toctree}", ":hidden:", f":caption: {title}", "", *names, "```", "")


def documents(folder: Path) -> list[str]:
    """The names of the documents in a folder; its README first."""
    paths = [path.relative_to(ROOT).with_suffix("") for path in folder.iterdir() if path.suffix in SUFFIXES]
    return [path.as_posix() for path in sorted(paths, key=lambda path: (path.name not in ("README", "index"), path))]


def cells(notebook: str) -> Iterator[str]:
    """The cells of a notebook as Markdown."""
    for cell in json.loads(notebook)["cells"]:
        text = "".join(cell["source"])
        yield f"```python\n{text}\n```" if cell["cell_type"] == "code" else text


def listings(folder: Path) -> Iterator[str]:
    """The files of the projects in a folder as Markdown."""
    for path in sorted(path for suffix in ("py", "yaml") for path in folder.rglob(f"*.{suffix}")):
        yield f"### {path.relative_to(folder)}\n\n```{path.suffix[1:].replace('py', 'python')}\n{path.read_text()}```"


def read_source(app: Sphinx, name: str, source: list[str]) -> None:
    if name == "docs/python":
        source[0] = signatures.as_directives(source[0])
    if name == EXAMPLES:
        source[0] = "\n\n".join([source[0], "## The files", *listings((ROOT / name).parent)])
    if name == root_doc:
        source[0] += "\n\n" + "\n".join(navigation())
    elif app.env.doc2path(name).suffix == ".ipynb":
        source[0] = "\n\n".join(cells(source[0]))


def class_signature(app: Sphinx, kind: str, name: str, value: Any, *_: Any) -> tuple[str, None] | None:
    """A protocol is not called, so it has no arguments."""
    return ("", None) if getattr(value, "_is_protocol", False) else None


def finish(app: Sphinx, error: Exception | None) -> None:
    if error is None:
        shutil.copy(app.outdir / f"{root_doc}.html", app.outdir / "index.html")


def setup(app: Sphinx) -> None:
    app.connect("source-read", read_source)
    app.connect("autodoc-process-signature", class_signature)
    app.connect("build-finished", finish)
