"""Mistakes of a first hour: each is answered with a line that works when it is pasted.

Lines of training are composed here, as `train.py` composes them; lines of other commands are run.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from helpers import ROOT, Done, composed, forked, train_here
from lockstep.config import components


def rows(text: str) -> list[tuple[str, ...]]:
    return [tuple(row.split(" -> ")) for row in text.strip().splitlines()]


# What is typed, and what the answer proposes in the place of the mistake. `test_other_words.py` has the words of
# other programs.
TRAINING = rows("""
--lr 0.01 -> optimizer.lr=0.01
--batch-size 32 -> batch=32
epochs 3 -> epochs=3
model = linear -> model=linear
epochs=1e3 -> epochs=1000
modle=linear -> model=linear
trian.ema=0.4 -> train.ema=0.4
optimizr.momentum=0.5 -> optimizer=sgd optimizer.momentum=0.5
train.pretrained=true -> model=resnet50d model.pretrained=true
optimizer.lr=1e-3x -> optimizer.lr=1e-3
telemetry.gpu=maybe -> telemetry.gpu=true
checkpoint.every=often -> checkpoint.every=1ep
train.freeze=backbone -> train.freeze=[backbone]
model=resnet18,resnet34 -> -m model=resnet18,resnet34
--cfg -> --cfg job
train.freeze_until=2ep -> train.freeze=[backbone]
budget.usd=5 -> budget.hours
metric=[f1, auroc] -> 'metric=[f1, auroc]'
train.freeze=[ layer1, layer2 ] -> 'train.freeze=[ layer1, layer2 ]'
'optimizer.lr=1e-3 epochs=2' -> optimizer.lr=1e-3 epochs=2
""")
# Misspelt names: the answer names them in quotes.
NAMES = rows("""
model=resnt18 -> model=resnet18
-m model=digitnet,resnet188 -> -m model=digitnet,resnet18
""")
# Whole lines: a mistake, the proposal, and the right line. `run` is a run folder, and `photo.png` an image.
COMMANDS = rows("""
lockstep evalute run -> lockstep evaluate -> lockstep evaluate run
lockstep model=linear -> lockstep train model=linear -> lockstep train model=linear --cfg job
lockstep predict run photo.png --top two -> --top 3 -> lockstep predict run photo.png --top 3
lockstep predict run photo.png --jsn -> --json -> lockstep predict run photo.png --json
lockstep runs . --sort scor -> --sort score -> lockstep runs . --sort score
lockstep train resume=latst -> latest -> lockstep train resume=latest --cfg job
lockstep train init_from=outputs/latst -> outputs/latest -> lockstep train init_from=outputs/latest --cfg job
lockstep report outptus/latest -> latest -> lockstep report outputs/latest
lockstep compare ruin -> run -> lockstep compare run
lockstep evaluate outputs -> such as outputs/latest -> lockstep evaluate outputs/latest
""")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two steps in it, and an image."""
    from PIL import Image

    place = tmp_path_factory.mktemp("first_hour")
    train_here(place / "run", "model=linear", "steps=2", "batch=50")
    shutil.copytree(place / "run", place / "outputs" / "1-run")
    (place / "outputs" / "latest").write_text("1-run\n")
    (place / "train.py").symlink_to(ROOT / "train.py")
    Image.new("L", (8, 8), 128).save(place / "photo.png")
    return place


def typed(line: str, folder: Path) -> Done:
    return forked(*shlex.split(line), cwd=folder)


def answered(line: str, folder: Path) -> str:
    """The answer to a mistake: one sentence without a traceback, and exit code 2."""
    done = typed(line, folder)
    assert done.code == 2, done.out + done.err
    assert "Traceback" not in done.err
    assert done.err.startswith("lockstep: ")
    assert len(done.err.splitlines()) == 1
    return done.err


def assert_composes(words: str) -> None:
    """A line of training is composed with the words; of a sweep, each value of its key."""
    if words == "--cfg job":
        return
    key, sign, values = words.removeprefix("-m ").partition("=")
    for value in values.split(",") if words.startswith("-m ") else [values]:
        components.build_job(composed(*shlex.split(f"{key}{sign}{value}")))


@pytest.mark.parametrize(("mistake", "proposal"), TRAINING)
def test_a_mistake_in_a_line_of_training_is_answered_with_what_to_type(
    mistake: str, proposal: str, folder: Path
) -> None:
    answer = answered(f"train.py {mistake}", folder)
    assert proposal in answer
    if "freeze_until" in mistake:
        proposal = f"{mistake} {proposal}"
    if proposal == "budget.hours":
        proposal = "budget.hours=5"
    assert_composes(proposal)


def test_pretrained_weights_are_those_of_the_model_that_the_line_has(folder: Path) -> None:
    answer = answered("train.py model=resnet18 train.pretrained=true", folder)
    assert "Did you mean model.pretrained=true?" in answer
    assert_composes("model=resnet18 model.pretrained=true")


@pytest.mark.parametrize(("mistake", "meant"), NAMES)
def test_a_misspelt_name_is_answered_with_the_right_one(mistake: str, meant: str, folder: Path) -> None:
    key, _, _ = mistake.partition("=")
    name = meant.rpartition(",")[2].rpartition("=")[2] if meant.startswith(key) else meant.partition("=")[0]
    assert f"'{name}'" in answered(f"train.py {mistake}", folder)
    assert_composes(meant)


@pytest.mark.parametrize(("mistake", "proposal", "line"), COMMANDS)
def test_a_mistake_in_another_command_is_answered_with_what_to_type(
    mistake: str, proposal: str, line: str, folder: Path
) -> None:
    assert proposal in answered(mistake, folder)
    done = typed(line, folder)
    assert done.code == 0, done.out + done.err


@pytest.mark.slow
def test_no_command_line_ends_in_a_traceback_or_leaves_something_behind() -> None:
    done = forked("benchmarks/reliability/fuzz_command_line.py", "--overrides", "60", "--seed", "0")
    assert done.code == 0, done.out + done.err
    counts = re.match(r"(\d+) overrides in (\d+) command lines, .* 0 end otherwise\n$", done.out)
    assert counts is not None, done.out
    assert int(counts[1]) >= 60
