"""A text of others in every medium: shown as it is, it marks, links, runs and hides nothing."""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import markdown
import pytest
import yaml
from markdown_it import MarkdownIt
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from helpers import FAKE, train_here
from lockstep.checkpoint.weights import read_card
from lockstep.core import log
from lockstep.core.errors import InputError, escaped, masked
from lockstep.core.figures import csv_row
from lockstep.core.model_card import ModelCard
from lockstep.core.plan import Plan
from lockstep.core.run_dir import RunDir
from lockstep.core.table import Column, show_rows, show_table
from lockstep.inference.export import readme
from lockstep.report.run_page import rendered
from lockstep.telemetry.sinks import CsvTable
from lockstep.telemetry.tensorboard import EventFile

PASSWORD = "s3cr3t"
HOSTILE = {
    "script": "</title></pre><script>alert(1)</script><img src=x onerror=alert(1)>",
    "attribute": "\" onmouseover='alert(1)' x=\"",
    "link": "[cat](javascript:alert(1)) ![x](http://evil.example/x.png)",
    "reference": "[cat][1]\n\n[1]: http://evil.example",
    "address": "http://evil.example <http://evil.example> www.evil.example //evil.example a@evil.example",
    "marks": "**bold** _it_ ~~no~~ `code` \\[x] &lt;b&gt; $x^2$ # head",
    "fence": "```\n# head\n~~~\n<b>\n````",
    "front matter": "x\n---\nlicense: mit\n---\n# head",
    "cells": "a | b || c",
    "terminal": "cat\x1b[2J\x1b]0;title\x07\x9b31m\r\b\x7f\x00",
    "lines": "a\nb\r\nc\v\f\x1c\x85\u2028d",
    "formula": '=HYPERLINK("http://evil.example")',
    "wide formula": "\uff0b1+1",
    "LaTeX": r"\input{/etc/passwd} $x$ % & # _ ~ ^ {",
    "password": f"https://me:{PASSWORD}@host/x",
    "password in a path": str(Path(f"https://me:{PASSWORD}@host/x")),
    "token in a path": str(Path(f"https://host/x?token={PASSWORD}")),
}
CONTROLS = r"[\x00-\x08\x0b-\x1f\x7f-\x9f]"
PASSWORDS = [name for name in HOSTILE if re.search("password|token", name)]


class Tags(HTMLParser):
    """The tags of HTML, their attributes, and the text of each."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = [""]
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.texts.append("")

    def handle_data(self, data: str) -> None:
        self.texts[-1] += data


def is_calm(text: str) -> bool:
    """Whether a text has no secret, and no control character but ends of lines."""
    return PASSWORD not in text and not [c for c in text if unicodedata.category(c) == "Cc" and c not in "\n\t"]


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    return read_card(train_here(tmp_path_factory.mktemp("run") / "run", *FAKE, "model=linear", "steps=1").weights)


@pytest.fixture(params=HOSTILE)
def text(request: pytest.FixtureRequest) -> str:
    return HOSTILE[request.param]


Show = Callable[[str], None]
TABLE = {form: lambda text, form=form: show_table([Column(text, [text, "0.5"])], form) for form in ("table", "latex")}
TERMINAL: dict[str, Show] = {
    **TABLE,
    **{form: lambda text, form=form: show_rows([{text: text}], form) for form in ("csv", "json")},
    "show": log.show,
    "warning": log.show_warning,
    "say": log.say,
    "row": lambda text: log.say_row(text, text),
    "error": lambda text: log.show(str(InputError(text))),
}


@pytest.mark.parametrize("medium", TERMINAL)
def test_a_terminal_gets_no_controls_and_no_secrets(
    text: str, medium: str, capsys: pytest.CaptureFixture[str]
) -> None:
    TERMINAL[medium](text)
    shown = capsys.readouterr().out
    assert is_calm(shown) or (
        medium == "json" and "\x1b" not in shown
    )  # JSON has values unchanged, as JSON escapes them
    assert medium in ("table", "latex", "csv", "json") or shown.count("\n") == 1


def test_a_table_in_latex_has_no_command_of_the_text(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    show_table([Column("head", [text, "0.5"])], "latex")
    (row,) = re.findall(r"\\midrule\n(.*) \\\\\n", capsys.readouterr().out.partition("0.5")[0])
    words = re.sub(r"\\[&%$#_{}]|\\text(backslash|asciitilde|asciicircum)\{\}", "", row)
    assert not re.search(r"[\\&%$#_{}~^]", words)


def test_a_table_in_markdown_has_the_text_and_nothing_else(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    show_table([Column(text, [text, "0.5"], best=(1,)), Column("second", [text, text])], "markdown")
    written = capsys.readouterr().out
    assert is_calm(written)
    for dialect in ("gfm-like", "commonmark"):
        html = Tags(MarkdownIt(dialect, {"html": True}).enable("table").render(written))
        assert {*html.tags} == {"table", "thead", "tbody", "tr", "th", "td", "strong"}
        expected = " ".join(escaped(text, keep="").split())
        cells = [" ".join(cell.split()) for cell in html.texts if cell.strip()]
        assert cells == [expected, "second", expected, expected, "0.5", expected]


def test_a_model_card_has_its_own_parts_alone(text: str, card: ModelCard, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.overrides.parent.mkdir(parents=True)
    run.overrides.write_text(yaml.safe_dump([f"name={text}", text]))
    run.config.write_text(yaml.safe_dump({"dataset": {"path": text}}))
    hostile = replace(
        card,
        model={"_target_": f"x.{text}", "name": text},
        trained_on={"_target_": text.replace(".", ""), "images": {text: text}},
        lockstep=text[:100],
        scores={text: 0.5},
        class_names=(text,) * card.classes,
    )
    base = {"hf_hub_id": "timm/x", "license": text, "origin_url": text}
    page = readme(hostile, run, text, ["this model takes one"], base)
    plain = readme(
        replace(card, scores={"top1": 0.5}, trained_on={"images": {"train": 5}}),
        run,
        "x",
        ["this model takes one"],
        base,
    )
    assert is_calm(page)
    (_, head, body), (_, _, expected) = (re.split(r"^---$", of, maxsplit=2, flags=re.M) for of in (page, plain))
    assert [*yaml.safe_load(head)] == ["library_name", "pipeline_tag", "tags", "base_model"]
    for dialect in ("gfm-like", "commonmark"):
        tags, plain_tags = (Tags(MarkdownIt(dialect, {"html": True}).render(of)).tags for of in (body, expected))
        assert tags == plain_tags


def test_a_page_shows_the_text_and_has_no_tag_or_attribute_of_it(text: str) -> None:
    facts: dict[str, Any] = {"headline": text, "folder": text, "weights": text, "curves": []}
    page, plain = (rendered("result.html", **facts), rendered("result.html", **dict.fromkeys(facts, "")))
    html = Tags(page)
    assert is_calm(page)
    assert (html.tags, html.attributes) == (Tags(plain).tags, Tags(plain).attributes)
    assert [" ".join(of.split()) for of in html.texts].count(
        " ".join(re.sub(CONTROLS, lambda control: f"\\x{ord(control[0]):02x}", masked(text)).split())
    ) == 3


def test_a_spreadsheet_computes_no_cell_and_no_heading(text: str, tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    plan = Plan(examples=8, batch=4, total_steps=2, micro_batches=1, log_every=1, eval_every=1, save_every=1)
    table = CsvTable(tmp_path / "metrics" / "metrics.csv", plan, 0, {}, (f"metric/{text}",))
    table.close()
    header = (tmp_path / "metrics" / "metrics.csv").read_text()
    for line in (csv_row([text, text]), header):
        assert is_calm(line)
        (cells,) = csv.reader(io.StringIO(line))
        assert cells[-1].removeprefix("'") == escaped(text, keep="")
        assert not [cell for cell in cells if re.match("[=+@\uff0b\uff1d\uff20-]", cell)]


def test_a_text_in_tensorboard_is_a_block_of_code(text: str, tmp_path: Path) -> None:
    with closing(EventFile(tmp_path)) as file:
        file.add_text("note", text, 1)
    events = EventAccumulator(str(tmp_path)).Reload()
    (event,) = events.Tensors("run/note/text_summary")
    written = event.tensor_proto.string_val[0].decode()
    assert is_calm(written)
    html = Tags(markdown.markdown(written, extensions=["tables"]))
    assert html.tags == ["pre", "code"]


@pytest.mark.parametrize("name", PASSWORDS)
@pytest.mark.parametrize("form", ["{}", "'{}'", "weights {}: there is no such file", "{}/a:b@c", "/home/me/{}"])
def test_a_secret_of_an_address_is_hidden_also_where_it_became_a_path(name: str, form: str) -> None:
    shown = escaped(form.format(HOSTILE[name]))
    assert PASSWORD not in shown
    assert "***" in shown
