"""`lockstep.sweep`: the sweeps of the command line, started by a program, with its objects."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from test_sweep import LONG, SHORT, started, states

import lockstep
from helpers import forked
from lockstep.core.errors import Stopped
from processes import background, ended, processes, wait_for

pytestmark = pytest.mark.slow

# The classes and the loss are of `__main__`, as in the cells of a notebook.
SCRIPT = f"""
import json, torch
import lockstep
from lockstep.models.nets import DigitNet, Network

def my_loss(logits, targets):
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none")

class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.net = DigitNet(width=width).build(10, (1, 8, 8))

    def forward(self, images):
        return self.net(images)

@lockstep.option("model")
class OwnNet(Network):
    width: int = 8

    def build(self, classes, input_shape):
        return Net(self.width)

short = {[*SHORT]}
"""
SWEPT = """
torch.manual_seed(0)
net = Net(width=8)

def losses(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss/train"] for line in lines if "loss/train" in line]

rows = lockstep.sweep([*short, "seed=1,2"], model=net, loss=my_loss)
more = lockstep.sweep([*short, "seed=1,2,3"], model=net, loss=my_loss, verbose=False)
alone = lockstep.train([*short, "seed=2"], model=net, loss=my_loss, verbose=False)
options = lockstep.sweep([*short, "model=own_net,digitnet", "model.width=8"], verbose=False)
print(json.dumps({
    "rows": rows, "listed": lockstep.runs(rows.folder), "more": more, "same folder": more.folder == rows.folder,
    "losses": [losses(rows.folder / row["name"]) for row in rows], "alone": losses(alone.folder),
    "options": [losses(options.folder / row["name"]) for row in options],
}))
"""
REFUSED = """
answers = []
for words in json.loads(WORDS):
    try:
        lockstep.sweep([*short, *words])
    except lockstep.LockstepError as error:
        answers.append((error.exit_code, type(error).__module__, str(error)))
print(json.dumps(answers))
"""
WRONG = (
    ["optimizer.lr=0.1,-1"],  # a job
    ["seed=1,2", "nosuch=3"],  # the line
    ["seed=1,2", "train.teacher=nowhere", "task=distilled"],
    ["optimizer=sgd", "optimizer.lr=0.1,1e6"],  # one job fails
)
INTERRUPTED = f"""
try:
    lockstep.sweep({["seed=1,2", *LONG]} + ["output_root=ROOT"])
except lockstep.LockstepError as error:
    print(type(error).__name__, error)
    raise SystemExit(error.exit_code)
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("swept")
    (folder / "script.py").write_text(SCRIPT + SWEPT)
    done = forked(str(folder / "script.py"), cwd=folder)
    assert done.code == 0, done.err
    return {**json.loads(done.out.splitlines()[-1]), "out": done.out}


def test_the_jobs_of_a_sweep_with_objects_are_the_runs_that_they_are_alone(swept: dict[str, Any]) -> None:
    first, second = swept["losses"]
    assert len(first) == 3
    assert second == swept["alone"] != first


def test_the_same_call_resumes_the_sweep_and_adds_values(swept: dict[str, Any]) -> None:
    assert swept["same folder"]
    assert [row["state"] for row in swept["more"]] == ["done"] * 3
    assert [(row["name"], row["when"]) for row in swept["more"][:2]] == [
        (r["name"], r["when"]) for r in swept["rows"]
    ]


def test_the_rows_of_a_sweep_are_those_of_its_folder_and_its_lines_are_shown(swept: dict[str, Any]) -> None:
    assert swept["listed"] == swept["more"]
    assert swept["out"].count("sweep in outputs/sweeps/") == 1, "verbose=False shows none"


def test_classes_of_a_program_are_swept_by_name(swept: dict[str, Any]) -> None:
    own, digitnet = swept["options"]
    assert own == digitnet


def test_a_refusal_and_a_failure_have_the_sentences_and_codes_of_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT + REFUSED.replace("WORDS", repr(json.dumps(WRONG))))
    done = forked(str(tmp_path / "script.py"), cwd=tmp_path)
    assert done.code == 0, done.err
    for (code, module, text), words in zip(json.loads(done.out.splitlines()[-1]), WRONG, strict=True):
        typed = forked("lockstep", "train", "-m", *SHORT, *words, "sweep.resume=new", cwd=tmp_path)
        sentences = [
            line.removeprefix("lockstep: ") for line in typed.err.splitlines() if line.startswith("lockstep: ")
        ]
        assert (code, module, text.splitlines()[: len(sentences)]) == (typed.code, "lockstep.core.errors", sentences)
    assert text.splitlines()[-1].startswith('all jobs are rows of lockstep.runs("')
    assert [row["state"] for row in lockstep.runs(text.splitlines()[-1].split('"')[1])] == ["done", "failed"]


def test_an_interrupt_saves_the_jobs_and_is_an_exception(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT + INTERRUPTED.replace("ROOT", str(tmp_path)))
    process = background(tmp_path, sys.executable, str(tmp_path / "script.py"), cwd=tmp_path)
    wait_for(functools.partial(started, tmp_path, 0))
    os.kill(process.pid, signal.SIGINT)
    code, _ = ended(process)
    assert code == Stopped.exit_code
    assert states(tmp_path)[0] == "stopped"
    assert processes(tmp_path) == set()


def test_flags_are_no_words_of_a_sweep() -> None:
    with pytest.raises(lockstep.InputError, match="'--cfg' is a flag, expected KEY=VALUE"):
        lockstep.sweep(["seed=1,2", "--cfg", "job"])


# A cell as IPython runs it: its text is in `linecache`, and its module has no file.
NOTEBOOK = """
import json, linecache
from pathlib import Path

CELL = '''
import torch, lockstep

def flat(images):
    return images.flatten(1)

class Net(torch.nn.Linear):
    def forward(self, images):
        return super().forward(flat(images))

job = {"model": Net(64, 10), "verbose": False}
swept = lockstep.sweep([*SHORT, "seed=1,2"], **job)
alone = lockstep.train([*SHORT, "seed=2"], **job)
'''
del __file__
linecache.cache["cell"] = (len(CELL), None, CELL.splitlines(True), "cell")
exec(compile(CELL, "cell", "exec"), globals())
folders = [alone.folder, *(swept.folder / row["name"] for row in swept)]
print(json.dumps([json.loads((folder / "env.json").read_text())["code"]["__main__"]["files"] for folder in folders]))
"""


def test_the_jobs_of_a_notebooks_sweep_record_the_code_of_the_cells_that_a_run_alone_records(tmp_path: Path) -> None:
    (tmp_path / "notebook.py").write_text(f"SHORT = {[*SHORT]}\n{NOTEBOOK}")
    done = forked("notebook.py", cwd=tmp_path)
    assert done.code == 0, done.err
    alone, *jobs = json.loads(done.out)
    assert (sorted(alone), jobs) == (["Net", "flat"], [alone, alone])
