"""The structure of the source: which module may import which, and which may test for main, read files, and so on.

If a test fails here, change the code, or change the rule here and give the reason.
"""

import ast
import dataclasses
import functools
import importlib
import os
import re
import runpy
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from types import FrameType

import pytest

from helpers import ROOT, command, forked
from lockstep.cli.main import COMMANDS
from lockstep.config.options import classes_of, modules_of
from lockstep.config.schema import BLOCKS, GROUPS, Job
from lockstep.core.tags import PAGES

PACKAGE = ROOT / "src" / "lockstep"
PLUGINS = ROOT / "src" / "hydra_plugins"

# Modules with names of modules in strings, which they import at run time, and why.
NAMES_MODULES: dict[str, str] = {
    "config.options": "what stands for the objects of a user's program, of which few jobs have any",
    "config.schema": "the groups, whose classes a config names; they are imported when one is built",
    "core.observer": "those who read every run, if their packages are there",
}

# Packages that read runs or start them, each by itself. A copy of the source without them trains (`test_heart.py`).
RIM = frozenset({"sweeps", "inference", "report", "diagnostics"})
# What may use all of them.
ABOVE = frozenset({"cli", "api"})

# Modules that may test whether this rank is main (or which rank it is), and why.
ASKS_FOR_MAIN: dict[str, str] = {
    "core.world": "defines it",
    "core.log": "one voice on the terminal",
    "core.launch_env": "tells a rank that follows from its main",
    "training.experiment": "gives main its writer of checkpoints",
    "training.run_record": "shows and writes the run",
    "training.build_data": "has one process of each machine prepare the files",
    "training.train_state": "lets main tell of a compilation",
    "training.build_observers": "gives main its observers",
    "scores": "counts the predictions of all ranks on main",
    "launcher.elastic": "main's machine is the one where the others meet",
}

# The lines of ours that an import of the training step may load.
MOST_LINES_OF_STEP = 3_297
# What the default job may load, and how many files its start may run.
MOST_OF_JOB = {"modules": 127, "lines": 21_652, "files of its start": 97}

# Modules outside the strategies that ask whether a tensor is on the meta device, as other stages of a pipeline are.
ASKS_FOR_META: dict[str, str] = {
    "core.model": "this rank's tensors, for everybody",
    "models.zoo": "a network that is built for its sizes alone",
    "stochastic.numbers": "draws nothing where nothing is computed",
}

# Where files are written otherwise than by `core.safe_write`, and why.
WRITES_FILES: dict[str, str] = {
    "lockstep.core.safe_write": "defines how",
    "lockstep.core.terminal": "the null device",
    "lockstep.checkpoint.writing": "files of a new folder, which gets its name when it is complete",
    "lockstep.data.datasets.packed": "files of a new folder with a random name",
    "lockstep.cli.new": "files of a new folder with a random name",
    "lockstep.runtime.pickled": "a file of a new folder with a random name",
}


def writes(node: ast.Call) -> bool:
    """Whether a call opens a file to write by its path."""
    name = ast.unparse(node.func).rpartition(".")[2]
    texts = [ast.unparse(value) for value in (*node.args, *(keyword.value for keyword in node.keywords))]
    if name != "open":
        return name in ("write_text", "write_bytes")
    return any(re.fullmatch("'[rb]*[wax+][rwaxbt+]*'", text) or re.search("O_(CREAT|WRONLY)", text) for text in texts)


def sources(*roots: Path) -> list[Path]:
    paths = sorted(path for root in roots for path in root.rglob("*.py"))
    return [path for path in paths if PACKAGE / "template" not in path.parents]


def module(path: Path) -> str:
    """The dotted name of a file's module below `lockstep`; a package has its own name."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> Iterator[str]:
    """The dotted names of everything that a file imports, at its top or in a function."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


MODULES = {module(path): path for path in sources(PACKAGE) if module(path) not in ("", "__main__")}


@functools.cache
def modules_imported(path: Path) -> set[str]:
    """The modules of ours that a file imports, or from which it imports something."""
    names = (name.removeprefix("lockstep.") for name in imports(path) if name.startswith("lockstep."))
    return {name if name in MODULES else name.rpartition(".")[0] for name in names}


def modules_named(path: Path) -> set[str]:
    """The modules of ours whose names are strings in a file, so that it could import them at run time."""
    texts = [node.value for node in ast.walk(parsed(path)) if isinstance(node, ast.Constant)]
    ours = [text for text in texts if isinstance(text, str) and text.startswith("lockstep.")]
    return {name for text in ours if (name := text.removeprefix("lockstep.")) in MODULES}


def packages_imported(*paths: Path) -> set[str]:
    return {package_of(name) for path in paths for name in modules_imported(path)}


def package_of(name: str) -> str:
    return name.partition(".")[0]


def layers() -> dict[str, int]:
    """The layer of each package, from the table of CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ((?:`\w+` ?)+)\|", text, re.MULTILINE)
    return {name: int(layer) for layer, names in rows for name in re.findall(r"\w+", names)}


def asks_for_main(tree: ast.AST) -> bool:
    """Whether code reads `is_main`, or compares something with `rank` in its name with 0."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "is_main":
            return True
        if isinstance(node, ast.Compare):
            numbers = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
            if 0 in numbers and "rank" in ast.unparse(node):
                return True
    return False


def test_the_table_of_the_documentation_has_every_package_once() -> None:
    assert layers().keys() == {package_of(name) for name in MODULES}


def test_imports_go_downward() -> None:
    layer = layers()
    edges = [(name, there) for name, path in MODULES.items() for there in modules_imported(path)]
    between = [(name, there) for name, there in edges if package_of(name) != package_of(there)]
    assert not [(name, there) for name, there in between if layer[package_of(there)] >= layer[package_of(name)]]


def test_training_knows_nobody_who_reads_it_and_those_do_not_know_each_other() -> None:
    assert not [
        (name, there)
        for name, path in MODULES.items()
        for there in modules_imported(path)
        if package_of(there) in RIM - {package_of(name)} and package_of(name) not in ABOVE
    ]


def test_no_two_modules_import_each_other_not_even_in_a_circle() -> None:
    # An `__init__.py` imports from the modules of its package; this circle is harmless.
    packages = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    graph = {name: modules_imported(path) - packages for name, path in MODULES.items() if name not in packages}
    list(TopologicalSorter(graph).static_order())  # raises CycleError


def test_modules_are_named_in_strings_where_a_config_chooses_among_them_only() -> None:
    assert {name for name, path in MODULES.items() if modules_named(path)} == NAMES_MODULES.keys()


DEFAULT_JOB = """
import atexit, runpy, sys
atexit.register(lambda: print(*sorted(name for name in sys.modules if name.startswith("lockstep")), file=sys.stderr))
sys.argv = ["train.py", "device=cpu", "steps=1", "telemetry.report=never", "output_root={}"]
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.mark.slow
def test_the_default_job_imports_the_modules_of_its_own_options_alone(tmp_path: Path) -> None:
    done = command(sys.executable, "-c", DEFAULT_JOB.format(tmp_path), cwd=ROOT)
    assert done.code == 0, done.err
    loaded = {name.removeprefix("lockstep.") for name in done.err.splitlines()[-1].split()} - {"lockstep"}
    of_options = {name.removeprefix("lockstep.") for group in GROUPS for name in modules_of(group).values()}
    own = {"models.nets", "data.datasets.builtin", "data.loading.loaders", "data.transforms.augment", "strategy.base"}
    own |= {"tasks", "precision", "launcher.inline", "optim.optimizers", "optim.schedule", "losses"}
    assert loaded & of_options == own | {"telemetry.loggers"}
    # Of those that read or start runs, it has the two that listen to each run.
    of_rim = {name for name in loaded if package_of(name) in {*RIM, "records"} and "." in name}
    assert {name for name in of_rim if package_of(name) != "diagnostics"} == {"report.listener"}


@pytest.mark.slow
def test_the_default_job_takes_no_more_of_the_source_than_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    figures = importlib.import_module("house").of_job()
    assert figures["job"]["modules"] <= MOST_OF_JOB["modules"]
    assert figures["job"]["lines"] <= MOST_OF_JOB["lines"]
    assert figures["start"]["files"] <= MOST_OF_JOB["files of its start"]


# Attributes of torch, timm, Pillow, datasets and Python that only some versions or objects have.
OF_OTHERS = {"CSafeDumper", "CSafeLoader", "SIGRTMAX", "SIGRTMIN", "act", "buffer"}
OF_OTHERS |= {"all_gather_single", "drop", "feature", "int2str", "iowait", "length", "names", "no_weight_decay"}
OF_OTHERS |= {"pretrained_cfg", "raw", "reason", "tag_v2", "tile"}
# Of a Dataset of torch, of torchvision or of Hugging Face.
OF_OTHERS |= {"classes", "column_names", "features", "group"}
# Of what an option of the user may build without a class of ours: a split, and a score as torchmetrics has them.
OF_OTHERS |= {"higher_is_better", "mapped", "takes_log_odds"}
# Of other launchers of Hydra, and of the task of another app.
OF_OTHERS |= {"identify", "lock", "needs"}


def test_what_is_asked_of_an_option_has_its_default_in_the_protocol() -> None:
    calls = [node for path in MODULES.values() for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)]
    arguments = [call.args for call in calls if ast.unparse(call.func) == "getattr" and len(call.args) == 3]
    assert {name.value for _, name, _ in arguments if isinstance(name, ast.Constant)} == OF_OTHERS


def test_an_init_has_no_code() -> None:
    plain = (ast.ImportFrom, ast.Assign, ast.Expr)
    for path in sources(PACKAGE, PLUGINS):
        if path.name == "__init__.py":
            tree = parsed(path)
            assert ast.get_docstring(tree)
            assert all(isinstance(node, plain) for node in tree.body), path


def trace(source: str, root: str, *landmarks: str) -> None:
    """Print the files of ours on the stack where the default job is checked, its parts are built and it steps."""
    way, left = dict[str, None](), {*landmarks}

    def called(frame: FrameType | None, event: str, _: object) -> None:
        assert frame is not None
        place = f"{frame.f_code.co_filename.removeprefix(source)}:{frame.f_code.co_name}"
        if event != "call" or place not in left:
            return
        left.remove(place)
        stack = []
        while frame is not None:
            stack.append(frame.f_code.co_filename)
            frame = frame.f_back
        way.update(dict.fromkeys(file for file in reversed(stack) if file.startswith(source)))
        if not left:
            print(*way, sep="\n", flush=True)
            os._exit(0)

    sys.argv = ["train.py", "logger=jsonl", f"output_root={root}"]
    sys.setprofile(called)
    runpy.run_path("train.py", run_name="__main__")


@pytest.mark.slow
def test_the_step_is_read_without_the_rest_of_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    assert importlib.import_module("house").of_step()["lines"] <= MOST_LINES_OF_STEP


LANDMARKS = (
    *("job/prepare.py:create_run", "config/components.py:build_job", "job/resolve.py:resolve"),
    *("job/validate.py:check_job", "training/build_data.py:build_data", "training/train_state.py:build_state"),
    "training/train_step.py:__call__",
)


def test_the_tour_of_the_source_is_the_way_of_the_default_job(tmp_path: Path) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## From the command to the step")[2]
    tour = re.findall(r"^\d+\. `([^`]+)`", text.partition("\n## ")[0], re.MULTILINE)
    done = forked("test_architecture:trace", f"{PACKAGE}/", str(tmp_path), *LANDMARKS, cwd=ROOT)
    assert len(tour) <= 16
    way = [line for line in done.out.splitlines() if line.startswith(str(PACKAGE))]
    assert way == [str(ROOT / file) for file in tour], done.err


@pytest.mark.parametrize(
    "title", ["A resume, from the command to the state", "A swept key, from the line to the job"]
)
def test_the_functions_of_a_walk_are_where_it_says(title: str) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    walk = re.findall(r"^\d+\. `([\w/]+\.py)`:((?:.|\n   )*)", text, re.MULTILINE)
    assert 9 <= len(walk) <= 10
    for file, words in walk:
        tree = parsed(next(path for root in (PACKAGE, PLUGINS.parent) if (path := root / file).is_file()))
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        first = re.search(r"`(\w+)`", words)
        assert first is not None, file
        assert first[1] in functions, f"{file}:{first[1]}"


def test_only_modules_that_write_or_show_ask_who_is_main() -> None:
    asking = {name for name, path in MODULES.items() if asks_for_main(parsed(path))}
    assert asking == ASKS_FOR_MAIN.keys()


def test_a_pipeline_is_known_to_its_strategy() -> None:
    asking = {name for name, path in MODULES.items() if ".is_meta" in path.read_text()}
    assert {name for name in asking if package_of(name) != "strategy"} == ASKS_FOR_META.keys()


def test_launchers_sweeps_and_the_trainer_know_nothing_of_what_they_run() -> None:
    assert packages_imported(*sources(PACKAGE / "launcher")) == {"core", "config", "runtime", "launcher"}
    assert packages_imported(*sources(PACKAGE / "records")) == {"core", "config", "runtime", "records"}
    known = packages_imported(*sources(PACKAGE / "sweeps", PLUGINS))
    assert known == {"core", "config", "runtime", "records", "launcher", "telemetry", "sweeps"}
    loop = [MODULES[f"training.{name}"] for name in ("trainer", "train_step", "evaluate")]
    known = {name for path in loop for name in modules_imported(path)}
    assert not {package_of(name) for name in known} & {"config", "strategy", "precision", "models", "launcher"}
    assert not known & {"optim.schedule", "core.run_dir", "core.log"}


def test_hydra_and_omegaconf_stay_at_the_border() -> None:
    packages = sources(PACKAGE / "config", PACKAGE / "sweeps", PLUGINS)
    border = {MODULES["cli.train"], MODULES["cli.callbacks"], MODULES["runtime.program"], *packages}
    beyond = {
        path
        for path in {ROOT / "train.py", *sources(PACKAGE, PLUGINS)}
        if {name.split(".")[0] for name in imports(path)} & {"hydra", "omegaconf"}
    }
    assert beyond <= border


@pytest.mark.parametrize("name", ["training.trainer", "training.train_step", "training.evaluate"])
def test_the_training_loop_has_no_rank_test_no_path_and_no_device_by_name(name: str) -> None:
    tree = parsed(MODULES[name])
    words = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    docstrings = {ast.get_docstring(node, clean=False) for node in functions}
    assert not asks_for_main(tree)
    assert not any("rank" in ast.unparse(node) for node in ast.walk(tree) if isinstance(node, (ast.If, ast.IfExp)))
    assert not {name.split(".")[0] for name in imports(MODULES[name])} & {"pathlib", "os", "shutil", "io"}
    assert not any("cuda" in word or "cpu" in word for word in words if word not in docstrings)
    assert not any(isinstance(node, ast.Attribute) and node.attr in ("cuda", "type") for node in ast.walk(tree))


# Names that say nothing about what they hold. Functions of one line (`lambda`) may be short about their argument.
EMPTY_NAMES = frozenset({"asked", "each", "found", "given", "kept", "made", "took", "wanted"})
# More of them, which the package itself still has.
MORE_EMPTY_NAMES = EMPTY_NAMES | {"others", "rest", "said", "taken", "told", "what"}


def names_bound(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The variables, attributes and arguments that code binds, with their lines."""
    of_lambdas = set[int]()
    for node in ast.walk(tree):  # a node comes before those in it
        if isinstance(node, ast.Lambda):
            of_lambdas |= {id(arg) for arg in node.args.args}
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr, node.lineno
        elif isinstance(node, ast.arg) and id(node) not in of_lambdas:
            yield node.arg, node.lineno


def test_a_name_says_what_it_holds() -> None:
    elsewhere = sources(*(ROOT / folder for folder in ("tests", "benchmarks", "docs")))
    for paths, empty in ((sources(PACKAGE, PLUGINS), EMPTY_NAMES), (elsewhere, MORE_EMPTY_NAMES)):
        suspect = re.compile(rf"\b({'|'.join(empty)})\b *(=|,|:|\)|\]| in |[-+*/|&]=)")  # to parse fewer files
        paths = [path for path in paths if suspect.search(path.read_text())]
        bound = ((path, line, name) for path in paths for name, line in names_bound(parsed(path)))
        assert not [f"{path}:{line}: {name}" for path, line, name in bound if name in empty]


# Classes with one name, and why. Options of several groups may share a name that the user types, such as `linear`.
SHARES_NAME: dict[str, str] = {
    "Listener": "what each of the packages named in `core.observer` adds to a run",
    "Precision": "the protocol of a group, and a metric",
}


def defined(kind: type[ast.ClassDef | ast.FunctionDef]) -> list[tuple[str, str]]:
    """The classes or functions at the top of modules, each with its file."""
    trees = ((str(path.relative_to(ROOT / "src")), parsed(path)) for path in sources(PACKAGE, PLUGINS))
    return [(node.name, name) for name, tree in trees for node in tree.body if isinstance(node, kind)]


def twice(names: Iterable[str]) -> set[str]:
    return {name for name, count in Counter(names).items() if count > 1}


def test_no_two_classes_share_a_name() -> None:
    options = {(cls.__name__, cls.__module__) for group in GROUPS for cls in classes_of(group).values()}
    classes = defined(ast.ClassDef)
    shared = twice(name for name, _ in classes)
    no_options = [name for name, file in classes if (name, file.removesuffix(".py").replace("/", ".")) not in options]
    assert shared & {*no_options} == SHARES_NAME.keys()


def test_no_two_public_functions_share_a_name() -> None:
    """The user types the names of commands and of the Python interface: other functions may have them, too."""
    modules = {name.replace("-", "_"): f"lockstep/{package}" for name, package in COMMANDS.items()}
    typed = {(name, f"{package}/{name}.py") for name, package in modules.items()}
    functions = [(name, file) for name, file in defined(ast.FunctionDef) if (name, file) not in typed]
    # A copy of the last file stands alone, beside an exported model.
    interfaces = ("lockstep/api.py", "lockstep/cli/main.py", "lockstep/data/datasets/preprocess.py")
    assert not twice(name for name, file in functions if not name.startswith("_") and file not in interfaces)


def test_no_two_constants_of_modules_share_a_name() -> None:
    """Type variables and the private constants of a module may."""
    statements = [node for path in sources(PACKAGE, PLUGINS) for node in parsed(path).body]
    assigned = [node for node in statements if isinstance(node, ast.Assign | ast.AnnAssign)]
    values = [node for node in assigned if "TypeVar(" not in ast.unparse(node)]
    targets = [target for node in values for target in getattr(node, "targets", None) or [vars(node)["target"]]]
    assert not twice(name for target in targets for name, _ in names_bound(target) if not name.startswith("_"))


def test_no_line_is_broken_where_there_is_no_terminal() -> None:
    """Rich breaks what it prints at 80 columns without one, so nothing prints a table of its."""
    prints = [
        (name, call)
        for name, path in MODULES.items()
        for call in ast.walk(parsed(path))
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(("terminal.print", "console.print"))
    ]
    assert len(prints) > 5
    assert not [name for name, call in prints if "soft_wrap=True" not in ast.unparse(call)]


def test_a_shown_percentage_has_a_space_in_front_of_its_sign_which_one_function_writes() -> None:
    pattern = r".*(?::\.\d%\}|\{100 \* .* %).*"
    texts = {str(path): re.findall(pattern, path.read_text()) for path in sources(PACKAGE)}
    assert texts.pop(str(PACKAGE / "core" / "errors.py")) == ['    return f"{100 * share:{form}} %"']
    assert {name: lines for name, lines in texts.items() if lines} == {}, "`percent`; only what a user types is 5%"


def test_the_entry_point_stays_a_table_of_contents() -> None:
    assert len((PACKAGE / "cli" / "train.py").read_text().splitlines()) <= 72


def test_modules_for_composing_a_config_do_not_import_torch() -> None:
    names = ["", *(f".{name}" for name in MODULES if package_of(name) == "config")]
    names += [".core.run_dir", ".runtime.signals", ".runtime.child", ".runtime.program"]
    code = (
        "import importlib, sys\n"
        f"for name in {names}:\n"
        "    importlib.import_module(f'lockstep{name}')\n"
        "    if 'torch' in sys.modules: sys.exit(f'lockstep{name} imports torch')\n"
    )
    done = command(sys.executable, "-c", code)
    assert done.code == 0, done.err


# Modules that read files without the guarded reader, and why their content needs no guard.
READS: dict[str, str] = {
    "core.safe_read": "is the reader",
    "core.safe_write": "opens what it locks or has the disk hold, and reads nothing of it",
    "core.terminal": "opens /dev/null in the place of a closed stream",
    "cli.sweep": "what the process that it has started wrote, in a folder of its own",
    "config.extensions": "what pip has installed",
    "config.help_page": "the help's text, which is part of the program",
    "config.options": "the YAML of its own options, which is part of the program, and timm's own source",
    "runtime.host": "the kernel's /proc and /sys",
    "runtime.pickled": "what its parent process has written, in a folder of its own",
    "telemetry.hardware": "the kernel's counters of energy",
    "training.dry_run": "the kernel's /proc",
    "core.run": "the kernel's /proc; the files of runs are read by the guarded reader",
    "data.datasets.decode": "images, whose decoders refuse what is none",
    "data.datasets.photos": "images, from bytes that were read",
    "data.datasets.preprocess": "photos, in a copy beside an exported model, which needs nothing of ours",
    "data.datasets.webdataset": "images in shards, as those in folders; the index is read by the guarded reader",
    "telemetry.pictures": "images, from bytes that were read",
    "inference.demo": "its page, which is part of the program",
    "cli.new": "the template, which is part of the program",
    "diagnostics.prove": "the files that `lockstep prove` has just had written",
}


# Where keys are listed outside the schema, and why: none is about what makes another run, which roles say.
LISTS_KEYS: dict[str, str] = {
    "diagnostics.ladder.OF_RUNGS": "what a rung sets itself",
    "diagnostics.lr_find.OF_TEST": "what the test sets itself",
    "diagnostics.prove.OF_RUNS": "what the runs of the proof set themselves",
    "config.commands.STARTS": "keys with paths of runs, quoted for Hydra before any class of an option is imported",
    "config.commands.FOLDERS": "the keys with other paths",
    "data.datasets.sizes.SIZES": "what `auto` chooses by the weights",
    "report.compare.DATA": "facts of checkpoints, not keys",
    "inference.export.INPUT, OUTPUT, BATCH": "names in exported files",
    "data.datasets.composed.TARGET_NAMES": "names in the items of a user's Dataset",
    "core.model_card.FITS": "values of a key",
    "core.run.SEED, FOLD": "two keys by name, for those who ask for their values",
}


def listed_keys(node: ast.expr, keys: set[str]) -> bool:
    """Whether an expression has a list, tuple or set of two texts or more of which at least half are keys."""
    for part in ast.walk(node):
        if isinstance(part, ast.Tuple | ast.List | ast.Set):
            texts = [str(item.value) for item in part.elts if isinstance(item, ast.Constant)]
            listed = sum(text.rstrip(".") in keys for text in texts)
            if listed >= 2 and 2 * listed >= len(texts):
                return True
    return False


def test_keys_are_listed_in_the_schema_alone() -> None:
    keys, found_in = {field.name for field in dataclasses.fields(Job)}, set()
    for block, cls in BLOCKS.items():
        keys |= {name for field in dataclasses.fields(cls) for name in (field.name, f"{block}.{field.name}")}
    for group in GROUPS:
        names = {field.name for cls in classes_of(group).values() for field in dataclasses.fields(cls)}
        keys |= {*names, *(f"{group}.{name}" for name in names)}
    for name, path in MODULES.items():
        for node in parsed(path).body if name != "config.schema" else ():
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                found_in |= {f"{name}.{ast.unparse(target).strip('()')}"} if listed_keys(node.value, keys) else set()
    assert found_in == LISTS_KEYS.keys()
    assert listed_keys(ast.parse('{"seed", "train.ema."}', mode="eval").body, keys)


def reads(tree: ast.AST) -> bool:
    """Whether code opens a file to read it."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        function, arguments = ast.unparse(call.func), ", ".join(map(ast.unparse, call.args))
        name = function.rpartition(".")[2]
        if name in ("read_text", "read_bytes") and function not in (name, f"safe_read.{name}"):
            return True
        if name in ("open", "_PatientFile") and not re.search(r"'[awx]b?'|O_WRONLY|O_CREAT", arguments):
            return True
    return False


def test_every_file_is_read_by_the_guarded_reader() -> None:
    reading = {name for name, path in MODULES.items() if reads(parsed(path))}
    assert reading == READS.keys()


def test_files_are_written_and_locks_taken_in_one_way() -> None:
    """A folder may be somebody else's, with links in the place of files."""
    found_in = set()
    for path in sources(PACKAGE, PLUGINS):
        if any(isinstance(node, ast.Call) and writes(node) for node in ast.walk(parsed(path))):
            found_in.add(".".join(path.relative_to(ROOT / "src").with_suffix("").parts))
    assert found_in == WRITES_FILES.keys()
    assert [name for name, path in MODULES.items() if "fcntl" in imports(path)] == ["core.safe_write"]


# Modules that name figures of a run otherwise than by `core.tags`, and why.
NAMES_FIGURES: dict[str, str] = {
    "core.tags": "is the table",
    "cli.arguments": "an example in the help",
}


def test_figures_are_named_in_one_table() -> None:
    """A figure's tag, words, chart and column are a row of `core.tags`; other modules use its constants."""
    heads = "|".join(PAGES)
    tag = re.compile(rf"(?<![\w.])({heads})/([a-z]|$)")
    naming = set()
    for name, path in MODULES.items():
        tree = parsed(path)
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = [
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docstrings
        ]
        if any(isinstance(text, str) and tag.search(text) for text in texts):
            naming.add(name)
    assert naming == NAMES_FIGURES.keys()
