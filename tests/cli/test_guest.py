"""Lockstep in other people's programs.

A call leaves the caller's process as it was (`test_notebook.py` has the one in a kernel), and other Hydra apps do not
notice that Lockstep is installed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import ROOT
from lockstep.sweep.ledger import Ledger

pytestmark = pytest.mark.slow

CONFIG = """
defaults: [{model: small}, _self_]
home: ${oc.env:HOME}
twice: ${twice:3}
"""
APP = """
import hydra
from omegaconf import OmegaConf

OmegaConf.register_resolver("twice", lambda number: 2 * number)
OmegaConf.register_resolver("oc.env", lambda name: name.lower(), replace=True)

@hydra.main(config_path="conf", config_name="config")
def main(config):
    print(OmegaConf.to_yaml(config, resolve=True))

main()
"""
# Functions of the library, one after another, each between two photographs. `RUNS` is a folder.
CALLS = """
import sys
sys.path.insert(0, TESTS)
import os, tempfile, torch
os.environ["TMPDIR"] = tempfile.tempdir = TMP
import lockstep
import photograph

torch.set_num_threads(2)
photograph.photograph()  # to look at some attributes imports modules
words = ["device=cpu", "steps=2", "batch=8", "model=linear", "telemetry.report=never", f"output_root={RUNS}"]
first = []

def predict():
    lockstep.load(first[0].folder).predict(torch.zeros(1, 1, 8, 8, dtype=torch.uint8))

CASES = {
    "train": lambda: first.append(lockstep.train(words)),
    "again": lambda: lockstep.train(words),
    "resume": lambda: lockstep.train([f"resume={first[0].folder}", f"output_root={RUNS}", "steps=3"]),
    "strict": lambda: lockstep.train([*words, "repro=strict"]),
    "workers": lambda: lockstep.train([*words, "loader=streaming", "loader.workers=1", "launcher.threads=1"]),
    "two ranks": lambda: lockstep.train(words, ranks=2),
    "wrong key": lambda: lockstep.train([*words, "nosuch=1"]),
    "wrong value": lambda: lockstep.train([*words, "batch=1000000000"]),
    "no such folder": lambda: lockstep.load("nowhere"),
    "compose": lambda: lockstep.compose(words),
    "compose strict": lambda: lockstep.compose([*words, "repro=strict", "precision=bf16"]),
    "wrong part": lambda: lockstep.compose(["model=nosuch"]),
    "load": predict,
}

def changed(names):
    found = {}
    for name in names or CASES:
        before = photograph.photograph()
        try:
            CASES[name]()
        except lockstep.InputError:
            assert "wrong" in name or "no such" in name, name
        else:
            assert "wrong" not in name, name
        if lines := photograph.changes(before, photograph.photograph()):
            found[name] = lines
    return found
"""
FEW = ["train", "again", "wrong key", "compose", "load"]
# How a program uses Hydra itself; `app` runs the calls inside.
FRESH = "print(json.dumps(changed([])))"
IN_MAIN = """
import hydra
from omegaconf import OmegaConf

@hydra.main(config_path=CONF, config_name="config")
def main(config):
    own = lambda: OmegaConf.to_yaml(hydra.compose("config"), resolve=True)
    before = own()
    found = changed(FEW)
    assert own() == before
    assert "conf/model" not in before and hydra.core.hydra_config.HydraConfig.get().job.config_name == "config"
    print(json.dumps(found))

OmegaConf.register_resolver("twice", lambda number: 2 * number)
sys.argv = ["app.py", f"hydra.run.dir={RUNS}/app"]
main()
"""
IN_CONTEXT = """
import hydra
from omegaconf import OmegaConf

OmegaConf.register_resolver("twice", lambda number: 2 * number)
with hydra.initialize_config_dir(CONF):
    before = OmegaConf.to_yaml(hydra.compose("config"), resolve=True)
    found = changed(FEW)
    assert OmegaConf.to_yaml(hydra.compose("config"), resolve=True) == before
with hydra.initialize_config_dir(CONF):  # and once more after all these calls
    assert OmegaConf.to_yaml(hydra.compose("config"), resolve=True) == before
print(json.dumps(found))
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """The folder of a Hydra app of somebody else, with a group of the same name as one of ours."""
    model = tmp_path / "conf" / "model"
    model.mkdir(parents=True)
    (tmp_path / "conf" / "config.yaml").write_text(CONFIG)
    (model / "small.yaml").write_text("size: 1\n")
    (model / "large.yaml").write_text("size: 2\n")
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


def script(folder: Path, body: str) -> str:
    """A program that makes the calls of `CALLS` the way `body` does."""
    names = {"TESTS": str(ROOT / "tests"), "RUNS": str(folder / "runs"), "CONF": str(folder / "conf"), "FEW": FEW}
    (folder / "tmp").mkdir()
    names["TMP"] = str(folder / "tmp")
    return "\n".join(["import json", *(f"{name} = {value!r}" for name, value in names.items()), CALLS, body])


@pytest.mark.parametrize("body", [FRESH, IN_MAIN, IN_CONTEXT], ids=["fresh", "in hydra.main", "in a context"])
def test_a_call_leaves_the_process_as_it_was(app: Path, body: str) -> None:
    (app / "script.py").write_text(script(app, body))
    environment = {**os.environ, "HYDRA_FULL_ERROR": "1"}
    done = subprocess.run(
        [sys.executable, str(app / "script.py")],
        cwd=app,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {}


# Runs an app with or without Lockstep on the import path: an editable install puts its source there.
RUN = """
import runpy, sys
source, installed, *sys.argv = sys.argv[1:]
if installed != "True":
    sys.path[:] = [path for path in sys.path if path != source]
    sys.modules["lockstep"] = None
runpy.run_path(sys.argv[0], run_name="__main__")
"""
COMMANDS = [
    [],
    ["--help"],
    ["--cfg", "all"],
    ["--info", "searchpath"],
    ["model=digitnet"],
    ["+nosuch.a=1"],
    ["-m", "model=small,large"],
    ["--nosuch"],
    ["model=res", "-sc", "query=bash"],
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_another_app_says_the_same_without_lockstep(app: Path, words: list[str]) -> None:
    outputs = []
    for installed in (True, False):
        line = f"python app.py {words[0]}" if "-sc" in words else ""
        command = [sys.executable, "-c", RUN, str(ROOT / "src"), str(installed), "app.py"]
        command += words[1:] if line else words
        done = subprocess.run(
            command, cwd=app, env={**os.environ, "COMP_LINE": line}, capture_output=True, text=True, check=False
        )
        text = re.sub(r"\d{4}-\d\d-\d\d.\d\d-\d\d-\d\d|\[\d{4}-.*?\]", "TIME", done.stdout + done.stderr)
        outputs.append((done.returncode, text))
    assert outputs[0] == outputs[1]
    assert outputs[0][1] or words in ([], ["model=res", "-sc", "query=bash"])


# An app that can import nothing of Lockstep that trains.
SEARCHED = """
import sys
sys.modules |= {f"lockstep.{name}": None for name in UNKNOWN}
import hydra

@hydra.main(config_path="conf", config_name="config")
def main(config):
    return config.model.size + config.get("x", 0.0)

main()
"""
UNKNOWN = ("training", "job", "inference", "data", "models", "strategy", "optim", "losses", "metrics", "checkpoint")


@pytest.mark.parametrize(
    "words",
    [["model=small,large"], ["+x=interval(0,1)", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=2"]],
    ids=str,
)
def test_another_app_uses_the_pool_and_the_search_where_no_trainer_can_be_imported(
    app: Path, words: list[str]
) -> None:
    (app / "app.py").write_text(SEARCHED.replace("UNKNOWN", repr(UNKNOWN)))
    command = [sys.executable, "app.py", "-m", *words, "hydra/launcher=pool", f"hydra.sweep.dir={app}/sweep"]
    environment = {key: value for key, value in os.environ.items() if "BLAS" not in key}
    done = subprocess.run(command, cwd=app, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    scores = [record.objective for record in Ledger(app / "sweep").records()]
    assert [score is not None and score >= 1 for score in scores] == [True, True]
