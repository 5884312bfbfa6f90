"""Lockstep in other people's programs.

A call leaves the caller's process as it was (`test_notebook.py` has the one in a kernel), and other Hydra apps do not
notice that Lockstep is installed.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import ROOT, command, forked
from lockstep.records.ledger import Ledger

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
import gc, os, tempfile, torch
gc.unfreeze()  # in a fork, whose imports are frozen
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
    "two ranks": lambda: lockstep.train([*words, "strategy=allreduce", "optimizer=sgd"], ranks=2),
    "wrong key": lambda: lockstep.train([*words, "nosuch=1"]),
    "wrong value": lambda: lockstep.train([*words, "batch=1000000000"]),
    "no such folder": lambda: lockstep.load("nowhere"),
    "compose": lambda: lockstep.compose(words),
    "compose strict": lambda: lockstep.compose([*words, "repro=strict", "precision=bf16"]),
    "wrong part": lambda: lockstep.compose(["model=nosuch"]),
    "load": predict,
}

def changed(names):
    found, before = {}, photograph.photograph()
    for name in names or CASES:
        try:
            CASES[name]()
        except lockstep.InputError:
            assert "wrong" in name or "no such" in name, name
        else:
            assert "wrong" not in name, name
        after = photograph.photograph()
        if lines := photograph.changes(before, after):
            found[name] = lines
        before = after
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
    run = functools.partial(command, sys.executable) if body is FRESH else forked
    done = run(str(app / "script.py"), cwd=app, HYDRA_FULL_ERROR="1")
    assert done.code == 0, done.out + done.err
    assert json.loads(done.out.splitlines()[-1]) == {}


# Runs an app in forks, each with a line of words, with or without Lockstep on the import path: an editable install
# puts its source there.
RUN = """
import json, os, runpy, sys
source, installed, lines = sys.argv[1:]
if installed != "True":
    sys.path[:] = [path for path in sys.path if path != source]
    sys.modules["lockstep"] = None
sys.path.insert(0, os.getcwd())
for words in json.loads(lines):
    if os.fork():
        print("\\nends with", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
        continue
    if "-sc" in words:
        os.environ["COMP_LINE"] = f"python app.py {words.pop(0)}"
    sys.argv = ["app.py", *words]
    runpy.run_path("app.py", run_name="__main__")
    sys.exit()
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


def test_another_app_says_the_same_without_lockstep(app: Path) -> None:
    outputs = []
    for installed in (True, False):
        words = ("-c", RUN, str(ROOT / "src"), str(installed), json.dumps(COMMANDS))
        done = subprocess.run([sys.executable, *words], cwd=app, stdout=-1, stderr=subprocess.STDOUT, text=True)
        text = re.sub(r"\d{4}-\d\d-\d\d.\d\d-\d\d-\d\d|\[\d{4}-.*?\]", "TIME", done.stdout)
        outputs.append(re.split(r"\nends with", text)[: len(COMMANDS)])
    for words, with_it, without in zip(COMMANDS, *outputs, strict=True):
        assert with_it == without, words
        assert with_it or words in ([], ["model=res", "-sc", "query=bash"])


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
