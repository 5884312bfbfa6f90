"""What earlier versions of Lockstep wrote gives the same results for ever; what a later one wrote is refused."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from helpers import ROOT, Done, forked, tree
from kept_formats import SAME, numbers
from lockstep.core.formats import FORMAT_NUMBERS, FileFormat
from lockstep.core.model_card import ModelCard
from lockstep.core.run_dir import NUMBERS, TABLES, TEXTS
from lockstep.data.datasets.packed import Manifest
from lockstep.records.ledger import Identity
from lockstep.records.record import Record

VERSIONS = sorted((ROOT / "tests" / "data").iterdir())
ADVICE = ("verdict", "learning", "checklist")
NEWER = {"format": 2, "lockstep": "9.8.7"}


@pytest.fixture(params=VERSIONS, ids=lambda path: path.name)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the files of a version."""
    return Path(shutil.copytree(request.param, tmp_path / "files"))


def typed(command: str, folder: Path) -> Done:
    return forked("lockstep", *shlex.split(command), cwd=folder)


def shown(command: str, folder: Path) -> str:
    done = typed(command, folder)
    assert done.code == 0, f"{command}: {done.out}{done.err}"
    return done.out


def check_equal(recorded: Any, present: Any, place: str = "") -> None:
    """A later version may say more. Another CPU rounds otherwise."""
    if isinstance(recorded, dict):
        for key, value in recorded.items():
            check_equal(value, present[key], f"{place}/{key}")
    elif isinstance(recorded, list):
        assert len(recorded) == len(present), place
        for number, (value, other) in enumerate(zip(recorded, present, strict=True)):
            check_equal(value, other, f"{place}/{number}")
    elif isinstance(recorded, float):
        assert present == pytest.approx(recorded, rel=1e-3, abs=1e-4), place
    else:
        assert recorded == present, place


@pytest.mark.slow
@pytest.mark.numerics
def test_the_files_give_the_numbers_that_they_gave(folder: Path) -> None:
    recorded = json.loads((folder / "numbers.json").read_text())
    del recorded["sweep"]
    check_equal(recorded, numbers(lambda command: shown(command, folder), folder))


@pytest.mark.slow
def test_the_line_of_a_sweep_trains_nothing_anew(folder: Path) -> None:
    jobs = [*(folder / "sweep").glob("0*")]
    before = [tree(job) for job in jobs]
    shown(json.loads((folder / "numbers.json").read_text())["sweep"], folder)
    assert [tree(job) for job in jobs] == before
    assert len([*(folder / "sweep" / "jobs").glob("*.json")]) == len(jobs) == 2


@pytest.mark.slow
def test_pages_are_written_and_checkpoints_go(folder: Path) -> None:
    for page in ("run", "sweep"):
        assert f"wrote {page}/report.html" in shown(f"report {page}", folder)
    page = (folder / "run" / "report.html").read_text()
    assert "damaged" not in page
    assert "another version" not in page
    assert "removed 2 checkpoints" in shown("clean sweep --yes", folder)
    assert shown("runs sweep", folder).count("done") == 2


def documented(head: str) -> set[str]:
    """The keys in the first column of the table of docs/formats.md with this head."""
    page = (ROOT / "docs" / "formats.md").read_text()
    table = page.partition(f"| {head} |")[2].partition("\n\n")[0]
    return {key for line in table.splitlines()[2:] for key in re.findall(r"`([^`]+)`", line.split(" | ")[0])}


def test_the_page_has_the_numbers_of_all_formats() -> None:
    page = (ROOT / "docs" / "formats.md").read_text()
    numbers_of_page = re.findall(r"^\| ([a-z ]+) \| (\d+) \| ", page, re.MULTILINE)
    assert numbers_of_page == [(str(kind), str(number)) for kind, number in FORMAT_NUMBERS.items()]


def test_the_page_has_every_key_of_the_files() -> None:
    own, newest = {"format", "lockstep"}, VERSIONS[-1]
    of_classes = {
        "key of the card": {*(field.name for field in fields(ModelCard)), *own},
        "key of `sweep.json`": {*(field.name for field in fields(Identity)), "hash", *own},
        "key of a record": {field.name for field in fields(Record)},
        "key of `manifest.json`": {*(field.name for field in fields(Manifest)), *own},
        "key of `summary.json`": {*TEXTS, *NUMBERS, *TABLES, "exit_code", "directions", *ADVICE, *own},
        "key of `evaluation.json`": {*json.loads((newest / "numbers.json").read_text())["evaluate"], "lockstep"},
    }
    for head, keys in of_classes.items():
        assert documented(head) == keys, head
    written = json.loads((newest / "run" / "summary.json").read_text())
    assert written.keys() <= documented("key of `summary.json`")


def newer_weights(path: Path) -> None:
    """Write the number of a later version into the card, in as many bytes."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"] = {"lockstep": json.dumps({**json.loads(header["__metadata__"]["lockstep"]), **NEWER})}
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    path.write_bytes(content[:8] + text + content[8 + length :])


def newer_json(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **NEWER}))


STEP = "run/checkpoints/step-00000012"
START = f"train model=digitnet model.width=8 dataset=folder dataset.path=photos dataset.channels=1 steps=1{SAME}"
# The file with the number of each format, what changes it, and the commands that read the files behind it.
READERS: dict[FileFormat, tuple[str, Callable[[Path], None], tuple[str, ...]]] = {
    FileFormat.run: (
        "run/summary.json",
        newer_json,
        (
            *("evaluate run", "predict run photos", "export run --to torch", "report run", "runs run", "compare run"),
            *("clean run --yes", "train resume=run steps=16", f"train hydra.run.dir=run steps=16 {SAME}"),
            *("demo run --port 0", "watch run --port 0", f"{START} init_from=run", "evaluate run/../run"),
        ),
    ),
    FileFormat.checkpoint: (
        f"{STEP}/manifest.json",
        newer_json,
        (
            *("train resume=run steps=16", f"train resume={STEP} steps=16", f"evaluate {STEP}"),
            f"{START} init_from={STEP}",
        ),
    ),
    FileFormat.weights: (
        "run/model.safetensors",
        newer_weights,
        (
            *("evaluate run", "predict run photos", "export run --to torch", "demo run --port 0"),
            *(f"{START} init_from=run", f"{START} init_from=run/model.safetensors"),
            f"{START} task=distill task.teacher=run",
        ),
    ),
    FileFormat.sweep: (
        "sweep/sweep.json",
        newer_json,
        (
            *("compare sweep", "runs sweep", "evaluate sweep", "report sweep", "clean sweep --yes", "watch sweep"),
            *(f"train -m optimizer.lr=1,2 hydra.sweep.dir=sweep{SAME}", f"train -m sweep.resume=sweep{SAME}"),
        ),
    ),
    FileFormat.packed: (
        "packed/manifest.json",
        newer_json,
        (f"train dataset=packed dataset.path=packed steps=1{SAME}", "pack --check packed"),
    ),
}


def test_the_number_of_every_format_that_is_read_is_checked() -> None:
    """Nothing reads an evaluation."""
    assert READERS.keys() == FORMAT_NUMBERS.keys() - {FileFormat.evaluation}


@pytest.mark.slow
@pytest.mark.parametrize("kind", READERS)
def test_a_file_of_a_later_version_is_refused_in_one_sentence_and_stays_as_it_is(
    folder: Path, kind: FileFormat
) -> None:
    name, change, commands = READERS[kind]
    change(folder / name)
    before = tree(folder)
    for command in commands:
        done = typed(command, folder)
        refusal = [line for line in done.err.splitlines() if line.startswith("lockstep: ")]
        assert (done.code, len(refusal)) == (2, 1), f"{command}: {done.out}{done.err}"
        assert f"has format 2 of a {kind}, and Lockstep " in refusal[0], command
        assert refusal[0].endswith("use Lockstep 9.8.7 or later: pip install 'lockstep>=9.8.7'"), command
        assert {name for name in tree(folder) if not name.endswith(".lock")} == {*before}, command
        assert all(tree(folder)[name] == before[name] for name in before), command
