"""The shape of the source: who may import whom, and who may ask what.

A rule that fails here is changed here, with its reason, or the code is.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import ROOT, command

PACKAGE = ROOT / "src" / "lockstep"
PLUGINS = ROOT / "src" / "hydra_plugins"

# A unit (a module, or a package as a whole) may import from the layers above its own line only.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"errors", "fields", "files", "storage", "catalog", "signals", "terminal", "threads", "child"}),
    frozenset(
        {
            "config",
            "hydra_policy",
            "lock",
            "refusals",
            "rundir",
            "world",
            "plan",
            "protocols",
            "network",
            "log",
            "rng",
            "closing",
        }
    ),
    # The groups: none of them knows another one.
    frozenset(
        {"strategy", "precision", "optim", "schedule", "checkpoint", "data", "models", "telemetry", "environment"}
        | {"stochastic", "health", "watchdog", "claim", "resume"}
    ),
    frozenset({"trainer", "evaluate"}),
    frozenset(
        {"experiment", "build_data", "build_model", "build_observers", "run_record"}
        | {"report", "identity", "checks", "incident", "memory", "trial", "compiling"}
    ),
    frozenset({"launcher", "resolve"}),
    frozenset({"worker", "sweep", "cli"}),
)

# Steps within a layer, each with its reason.
WITHIN: dict[tuple[str, str], str] = {
    ("files", "errors"): "a file that cannot be read is the user's to mend",
    ("storage", "errors"): "and one that cannot be written the disk's",
    ("config", "hydra_policy"): "Hydra composes with our loader",
    ("config", "refusals"): "an error of the config is put into words there",
    ("signals", "errors"): "a stop ends a job with an error",
    ("child", "signals"): "a rank is tied to its parent before anything else",
    ("protocols", "plan"): "a strategy and a schedule are given the plan",
    ("protocols", "rundir"): "a launcher is given the run folder",
    ("protocols", "world"): "a strategy is given the world",
    ("network", "protocols"): "a micro-batch has keys",
    ("log", "rundir"): "the log is a file of the run",
    ("closing", "log"): "what else goes wrong at the end of a run is said",
    ("trainer", "evaluate"): "the loop evaluates",
    ("experiment", "build_data"): "the root has the data made",
    ("experiment", "build_model"): "and the model",
    ("experiment", "build_observers"): "and what watches both",
    ("experiment", "run_record"): "and says and writes what the run is",
    ("experiment", "memory"): "the root says what would have fitted",
    ("build_data", "identity"): "the data is part of what a run is",
    ("build_data", "memory"): "micro-batches are chosen with the data beside them",
    ("build_data", "trial"): "what the loader has to feed is found by trying",
    ("build_model", "compiling"): "a model is compiled where it is made",
    ("build_observers", "report"): "TensorBoard shows the hyperparameters that the report has",
    ("run_record", "build_data"): "the banner shows the data",
    ("run_record", "report"): "and is the report's",
    ("run_record", "incident"): "what is needed to look at bad numbers is kept",
    ("memory", "trial"): "what fits is found by trying",
    ("report", "identity"): "the banner describes components as the identity does",
    ("resolve", "launcher"): "what `launcher=auto` becomes is decided there",
}

# Who may ask "am I main?" (or which rank am I), and why.
ASKS_FOR_MAIN: dict[str, str] = {
    "world": "defines it",
    "log": "one voice on the terminal",
    "experiment": "gives main its writer of checkpoints",
    "build_data": "has one process of each machine prepare the files",
    "build_model": "lets main tell of a compilation",
    "build_observers": "gives main its sinks",
    "run_record": "gives main its record",
    "launcher": "one run folder and one summary for ranks that exist already",
}


def sources(*roots: Path) -> list[Path]:
    return sorted(path for root in roots for path in root.rglob("*.py"))


def unit(path: Path) -> str:
    """The module or package of `lockstep` that a file belongs to; empty for `lockstep` itself."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def imports(path: Path) -> Iterator[str]:
    """The dotted name of everything that a file imports, wherever it does."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def units_imported(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imports(path) if name.startswith("lockstep.")}


def layer(name: str) -> int:
    found = [number for number, units in enumerate(LAYERS) if name in units]
    assert len(found) == 1, f"lockstep.{name} has no layer of its own in this test"
    return found[0]


def asks_for_main(tree: ast.AST) -> bool:
    """Whether code reads `is_main`, or compares something called a rank with 0."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "is_main":
            return True
        if isinstance(node, ast.Compare):
            numbers = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
            if 0 in numbers and "rank" in ast.unparse(node):
                return True
    return False


MODULES = [path for path in sources(PACKAGE) if unit(path)]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downward(path: Path) -> None:
    here = unit(path)
    for there in units_imported(path) - {here}:
        down = layer(there) < layer(here)
        assert down or (here, there) in WITHIN, f"lockstep.{here} imports lockstep.{there}"


def test_the_tour_of_the_source_names_ten_files_that_there_are() -> None:
    tour = (
        (ROOT / "CONTRIBUTING.md").read_text().partition("## From the command to the step")[2].partition("\n## ")[0]
    )
    files = re.findall(r"^\d+\. `([^`]+)`", tour, re.MULTILINE)
    assert len(files) == 10
    assert not [each for each in files if not (ROOT / each).is_file()]


def test_every_exception_is_needed() -> None:
    used = {(unit(path), there) for path in MODULES for there in units_imported(path)}
    assert used >= WITHIN.keys()
    asking = {unit(path) for path in MODULES if asks_for_main(ast.parse(path.read_text()))}
    assert asking == ASKS_FOR_MAIN.keys()


def test_a_launcher_does_not_know_what_it_launches() -> None:
    known = {there for path in sources(PACKAGE / "launcher") for there in units_imported(path)}
    parts = {"launcher", "errors", "fields", "files", "log", "plan", "protocols", "rundir", "signals", "world"}
    assert known <= parts | {"child"}


def test_the_trainer_knows_no_concrete_strategy_precision_or_model() -> None:
    known = units_imported(PACKAGE / "trainer.py") | units_imported(PACKAGE / "evaluate.py")
    assert not known & {"strategy", "precision", "models", "schedule", "config", "rundir", "launcher", "log"}


def test_hydra_and_omegaconf_stay_at_the_border() -> None:
    modules = {PACKAGE / name for name in ("config.py", "hydra_policy.py", "refusals.py")}
    border = {ROOT / "train.py", *modules, *sources(PACKAGE / "sweep", PLUGINS)}
    beyond = {
        path
        for path in {ROOT / "train.py", *sources(PACKAGE, PLUGINS)}
        if {name.split(".")[0] for name in imports(path)} & {"hydra", "omegaconf"}
    }
    assert beyond <= border


@pytest.mark.parametrize("name", ["trainer.py", "evaluate.py"])
def test_the_training_loop_has_no_rank_test_no_path_and_no_device_by_name(name: str) -> None:
    tree = ast.parse((PACKAGE / name).read_text())
    words = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    docstrings = {
        ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
    }
    assert not asks_for_main(tree)
    assert not any("rank" in ast.unparse(node) for node in ast.walk(tree) if isinstance(node, (ast.If, ast.IfExp)))
    assert not {name.split(".")[0] for name in imports(PACKAGE / name)} & {"pathlib", "os", "shutil", "io"}
    assert not any("cuda" in word or "cpu" in word for word in words if word not in docstrings)
    assert not any(isinstance(node, ast.Attribute) and node.attr in ("cuda", "type") for node in ast.walk(tree))


def test_the_entry_point_stays_a_table_of_contents() -> None:
    assert len((ROOT / "train.py").read_text().splitlines()) < 50


@pytest.mark.parametrize(
    "module",
    [
        "lockstep",
        *("lockstep.config", "lockstep.fields", "lockstep.rundir", "lockstep.errors"),
        *("lockstep.signals", "lockstep.child"),
    ],
)
def test_what_composing_a_config_needs_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert command(sys.executable, "-c", code).code == 0


# Who reads a file without the guarded reader, and why its content needs no guard.
READS: dict[str, str] = {
    "files": "is the reader",
    "storage": "opens what it has the disk hold, and reads nothing of it",
    "config": "the help's text, which is part of the program",
    "catalog": "timm's own source",
    "watchdog": "the kernel's /proc",
    "memory": "the kernel's /proc",
    "data": "images, whose decoders refuse what is none; the kernel's /proc",
    "cli": "what `lockstep prove` has had written just now",
}


def reads(tree: ast.AST) -> bool:
    """Whether code opens a file to read it."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        function, arguments = ast.unparse(call.func), ", ".join(map(ast.unparse, call.args))
        name = function.rpartition(".")[2]
        if name in ("read_text", "read_bytes") and function not in (name, f"files.{name}"):
            return True
        if name == "open" and not re.search(r"'[awx]b?'|O_WRONLY|O_CREAT", arguments):
            return True
    return False


def test_every_file_is_read_by_the_guarded_reader() -> None:
    reading = {unit(path) for path in MODULES if reads(ast.parse(path.read_text()))}
    assert reading == READS.keys()
