"""The projects of docs/examples: small, and the same run on one and two ranks and through a kill."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path

import pytest
import torch

from helpers import ROOT, Done, forked, records, weights
from lockstep.core.run import Run

EXAMPLES = ROOT / "docs" / "examples"
EXTENDING = (ROOT / "docs" / "extending.md").read_text()
MOST_LINES = 60
KILL = '''
import os
import signal

import lockstep


@lockstep.option("callback")
class Kill(lockstep.Callback):
    """Kills its rank after the fifth step, once."""

    def step_end(self, run):
        mark = run.folder / "killed"
        if run.step == 5 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
'''
JOB = ("precision=fp64", "device=cpu", "logger=jsonl", "telemetry.report=never", "checkpoint.every=2")
HIGHEST = "callback.lr_finder.high=1000"  # a linear model bears a high rate
SGD = ("optimizer=sgd", "optimizer.lr=0.01")  # Adam divides by tiny gradients, and makes differences larger
SEGMENTS = ("callback.lr_segments.steps=2", "callback.lr_segments.epochs=[1]", "steps=14")  # a kill is within a test
WORDS = {
    "label_noise": ("experiment=sam_digits", "model.width=8", "dataset.limit=120", "batch=30", "steps=8"),
    "lr_finder": ("experiment=find_lr", "model=linear", "dataset.limit=120", "batch=31", "steps=40", HIGHEST),
    "lr_segments": ("experiment=segments", *SGD, "model=linear", "dataset.limit=120", "batch=40", *SEGMENTS),
    "patients": ("experiment=ct", *SGD, "model.width=8", "steps=8"),
    "r_drop": ("experiment=r_drop_digits", *SGD, "model.width=8", "dataset.limit=120", "batch=31", "steps=8"),
}
TWO = ("strategy=ddp", "launcher.ranks=2", "launcher.threads=1")


def projects() -> list[str]:
    return sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir())


def train(folder: Path, project: str, name: str, *words: str) -> Done:
    own = f"{project}," if project.startswith("lr_") else ""
    kills = [f"callback=[{own}kill]"] if "killed" in name else []
    overrides = (*WORDS[project], *JOB, f"hydra.run.dir={name}", *kills, *words)
    return forked(str(folder / "train.py"), *overrides, cwd=folder)


@pytest.mark.slow
@pytest.mark.numerics
@pytest.mark.parametrize("project", projects())
def test_an_example_is_the_same_run_on_two_ranks_and_through_a_kill(project: str, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    shutil.copytree(EXAMPLES / project, folder)
    (folder / "kill").mkdir()
    (folder / "kill" / "__init__.py").write_text(KILL)
    program = (folder / "train.py").read_text()
    (folder / "train.py").write_text(program.replace(f'["{project}"]', f'["{project}", "kill"]'))
    if project == "patients":
        assert forked(str(ROOT / "docs" / "scans.py"), cwd=folder).code == 0
    for name, words in {"one": (), "two": TWO}.items():
        whole = train(folder, project, name, *words)
        assert whole.code == 0, whole.err
        assert train(folder, project, f"{name}-killed", *words).code != 0
        resumed = train(folder, project, f"{name}-killed", *words)
        assert resumed.code == 0, resumed.err
        own, other = weights(folder / name), weights(folder / f"{name}-killed")
        assert all(torch.equal(tensor, other[key]) for key, tensor in own.items())
    one, two = weights(folder / "one"), weights(folder / "two")
    assert max(float((tensor - two[key]).abs().max()) for key, tensor in one.items()) < 1e-12
    if project == "r_drop":
        assert all(line["r_drop/kl"] > 0 for line in records(folder / "one") if "r_drop/kl" in line)
    if project == "lr_finder":
        rates = [line["lr_finder/rate"] for line in records(folder / "one") if "lr_finder/rate" in line]
        assert rates == sorted(rates)
        assert "the loss explodes at" in str(Run(folder / "one").summary["stopped_early"])
    if project == "lr_segments":
        factors = [line["lr_segments/factor"] for line in records(folder / "one") if "lr_segments/factor" in line]
        assert factors == [3.0]
    if project == "patients":
        assert "test" in Run(folder / "one").summary


def test_each_example_is_short_and_in_the_document() -> None:
    text = (EXAMPLES / "README.md").read_text()
    for project in projects():
        lines = sum(len(path.read_text().splitlines()) for path in (EXAMPLES / project).rglob("*.py"))
        assert lines <= MOST_LINES, project
        assert f"[{project}]({project}/{project}/__init__.py)" in text
    assert projects() == sorted(WORDS)


def lines_of_code(text: str, *, imports: bool) -> int:
    """The lines of Python without empty lines, comments and docstrings, and perhaps without imports."""
    omitted = set[int]()
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or (not imports and isinstance(node, ast.Import | ast.ImportFrom)):
            omitted |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    lines = enumerate(text.splitlines(), 1)
    return sum(bool(re.match(r"\s*[^\s#]", line)) and number not in omitted for number, line in lines)


def rows(heading: str) -> dict[str, list[str]]:
    """The cells of the table behind a heading of docs/extending.md, by the first one."""
    part = EXTENDING.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    table = part.partition("\n|---")[2].partition("\n\n")[0].splitlines()[1:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in table]
    return {first: further for first, *further in cells}


def test_the_table_of_a_project_moved_over_has_the_lines_of_a_new_project() -> None:
    template = ROOT / "src" / "lockstep" / "template"
    files = [template / "train.py", *(template / "my_project").rglob("*.py"), *template.rglob("conf/*/*.yaml")]
    configs = [line for path in files if path.suffix == ".yaml" for line in path.read_text().splitlines()]
    lines = sum(lines_of_code(path.read_text(), imports=True) for path in files if path.suffix == ".py")
    lines += sum(bool(re.match(r"\s*[^\s#]", line)) for line in configs)
    table = rows("A project moved over")
    *parts, together = table.values()
    assert together == ["16 files", "186", f"{len(files)} files", str(lines)]
    assert [sum(int(part[column]) for part in parts) for column in (1, 3)] == [186, lines]


def test_the_table_of_extensions_has_the_lines_of_its_blocks() -> None:
    blocks = re.findall(r"^```python\n# mine/(\w+)\.py\n(.*?)^```", EXTENDING, re.MULTILINE | re.DOTALL)
    lines = {name: lines_of_code(text, imports=False) for name, text in blocks}
    table = {row: int(cells[0].split()[0]) for row, cells in rows("Twelve extensions, counted").items()}
    shown = {"flat": "a model", "squared": "a loss", "worst": "a metric", "invert": "an augmentation"}
    shown |= {"adamax": "an optimizer", "triangle": "a schedule", "bell": "a logger"}
    shown |= {"noisy": "a callback with state"}
    assert {name: table[row] for name, row in shown.items()} == {name: lines[name] for name in shown}
    assert len(table) == 12
