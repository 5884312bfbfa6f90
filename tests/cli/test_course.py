"""The course: each experiment shows its damage, its page shows what it prints, and each figure can be drawn."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from helpers import ROOT, forked

COURSE = ROOT / "docs" / "course"
PITFALLS = sorted(COURSE.glob("pitfall_*.py"))
PAGES = sorted(COURSE.glob("[01]*.md"))
NUMBER = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"


def shown() -> dict[str, str]:
    """What the pages show as the output of each experiment, by the name of its file."""
    pattern = r"^```bash\npython docs/course/(pitfall_\w+\.py)\n```\n\n```\n(.*?)^```"
    return dict(match for page in PAGES for match in re.findall(pattern, page.read_text(), re.MULTILINE | re.DOTALL))


def drawn_texts(folder: Path) -> dict[str, list[str]]:
    """The texts of each figure in `folder`: titles, labels, and the numbers in bars and at axes."""
    return {path.name: re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text()) for path in folder.glob("*.svg")}


@pytest.mark.slow
@pytest.mark.parametrize("script", PITFALLS, ids=lambda path: path.stem)
def test_an_experiment_shows_its_damage_and_the_right_way_has_none(script: Path, tmp_path: Path) -> None:
    done = forked(str(script), cwd=tmp_path)
    assert done.code == 0, done.err
    damage: dict[str, list[float]] = {name: [] for name in ("wrong", "right")}
    for name, number in re.findall(rf"^(wrong|right)  .*: ({NUMBER})$", done.out, re.MULTILINE):
        damage[name].append(float(number))
    assert damage["wrong"]
    assert damage["right"]
    assert all(number > 1 for number in damage["wrong"]), done.out
    assert set(damage["right"]) == {0}, done.out
    assert re.sub(NUMBER, "N", shown()[script.name]) == re.sub(NUMBER, "N", done.out)
    numbers, expected = (re.findall(NUMBER, text) for text in (shown()[script.name], done.out))
    assert [float(number) for number in numbers] == pytest.approx([float(number) for number in expected], rel=0.01)
    assert not list(tmp_path.iterdir())


def test_the_table_of_the_pitfalls_has_the_numbers_of_the_pages() -> None:
    table: dict[str, list[list[str]]] = {}
    for script, *numbers in re.findall(
        rf"`(pitfall_\w+\.py)` \| [^|]+ \| ({NUMBER}) \| ({NUMBER}) \|", (COURSE / "pitfalls.md").read_text()
    ):
        table.setdefault(script, []).append(numbers)
    printed = {
        script: [re.findall(rf"^{name}  .*: ({NUMBER})$", text, re.MULTILINE) for name in ("wrong", "right")]
        for script, text in shown().items()
    }
    assert set(table) == set(printed)
    for script, rows in table.items():
        assert [row[0] for row in rows] == printed[script][0]
        assert {row[1] for row in rows} == set(printed[script][1])


@pytest.mark.slow
def test_the_resume_of_page_1_ends_as_the_run_that_was_not_stopped(tmp_path: Path) -> None:
    """It starts in the middle of an epoch; the losses of that epoch are equal to the bit."""
    commands = re.findall(r"^python (train\.py .*outputs/whole.*)$", PAGES[0].read_text(), re.MULTILINE)
    assert len(commands) == 2
    ends = []
    for line in commands:
        done = forked(str(ROOT / "train.py"), *line.split()[1:], cwd=tmp_path)
        assert done.code == 0, done.err
        folder = tmp_path / "outputs" / (tmp_path / "outputs" / "latest").read_text().strip()
        ends.append(json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1]))
    whole, resumed = ({key: end[key] for key in ("step", "loss/train_epoch", "loss/val")} for end in ends)
    assert folder.name != "whole"
    assert whole == resumed


def test_every_experiment_is_on_a_page_and_every_page_has_a_figure() -> None:
    assert set(shown()) == {script.name for script in PITFALLS}
    figures = [name for page in PAGES for name in re.findall(r"!\[[^]]+\]\((\w+\.svg)\)", page.read_text())]
    assert sorted(figures) == sorted(path.name for path in COURSE.glob("*.svg"))
    assert len(figures) == len(PAGES)


def test_the_figures_are_those_that_the_script_draws(tmp_path: Path) -> None:
    done = forked(str(COURSE / "figures.py"), str(tmp_path))
    assert done.code == 0, done.err
    assert drawn_texts(tmp_path) == drawn_texts(COURSE)
