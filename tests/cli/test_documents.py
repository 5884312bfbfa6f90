"""The documents: every command in them runs, every table agrees with the code. test_site.py checks the links.

Each command in a `bash` block is typed as it stands into a folder that looks like a checkout, in the order of the
document, so that a later one finds what an earlier one left. A command that trains gets `steps=N` behind it, with an
N that grows by each command that may go on with a run, so that it has something to do. A `resnet18` gets fewer
channels. What cannot be run here is in CHECKS, with the reason, and is checked in another way.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from forks import Fork
from helpers import ROOT, Done, built, command, forked, forks
from lockstep.core.errors import BY_EXIT_CODE, LockstepError
from lockstep.core.tags import FIGURES
from lockstep.telemetry.tensorboard import curve_of

DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/before.md",
    "docs/clusters.md",
    "docs/configuration.md",
    "docs/data.md",
    *sorted(f"docs/course/{path.name}" for path in (ROOT / "docs" / "course").glob("*.md")),
    "docs/distributed.md",
    "docs/examples/README.md",
    "docs/extending.md",
    "docs/fine_tuning.md",
    "docs/formats.md",
    "docs/performance.md",
    "docs/quickstart.md",
    "docs/reliability.md",
    "docs/resuming.md",
    "docs/scale.md",
    "docs/sweeps.md",
    "docs/tasks.md",
    "docs/troubleshooting.md",
    "docs/use.md",
)
CI = (ROOT / ".ci" / "run").read_text()
EXTENDING = (ROOT / "docs" / "extending.md").read_text()
USE = (ROOT / "docs" / "use.md").read_text()


@dataclass(frozen=True)
class Command:
    """A command of a document, where it stands among the commands of that document, and its steps if it trains."""

    document: str
    number: int
    steps: int
    text: str


def commands_of(document: str) -> Iterator[Command]:
    """The commands of a document; a line that ends with a backslash goes on in the next."""
    number, steps = itertools.count(1), 1
    for block in re.findall(r"^```bash\n(.*?)^```", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if text := re.sub(r"(^|\s+)#\s.*", "", line).strip():
                steps += bool(re.search(r"\b(resume|hydra\.run\.dir)=", text))
                yield Command(document, next(number), steps, text)


def found() -> Iterator[Command]:
    """Every command of every document, once: where it stands first."""
    texts = set()
    for documented in itertools.chain.from_iterable(map(commands_of, DOCUMENTS)):
        if documented.text not in texts:
            texts.add(documented.text)
            yield documented


COMMANDS = list(found())


def composes(text: str) -> None:
    """The job that the command asks for builds."""
    built(*shlex.split(text.partition("train.py")[2]))


def installs(text: str) -> None:
    """CI installs in the same way and place, and runs at least the same program; or the default job runs."""
    make, install, *program = text.split(" && ")
    assert make in CI
    assert install.startswith(".venv/bin/pip install -r requirements")
    assert (ROOT / install.split()[-1]).is_file()
    assert "-r requirements.txt" in (ROOT / "requirements-dev.txt").read_text()
    assert install.replace("-r requirements.txt", "-r requirements-dev.txt").replace("install", "install -q") in CI
    assert not program or program[0].removesuffix(' -m "not slow"') in CI or program == [".venv/bin/python train.py"]


def is_in_ci(text: str) -> None:
    """CI runs the same line, with the program of its environment."""
    settings, program = re.findall(r"((?:[A-Z_]+=\S+ )*)(.+)", text)[0]
    assert f"{settings}.venv/bin/{program}\n" in CI


def is_declared(text: str) -> None:
    """The marker, or the folder, that the command selects exists."""
    selected = shlex.split(text)[-1]
    if "/" in selected:
        assert (ROOT / selected).is_dir()
    else:
        assert f'"{selected.removeprefix("not ")}: ' in (ROOT / "pyproject.toml").read_text()


def is_executable(text: str) -> None:
    assert os.access(ROOT / text.split()[0], os.X_OK)


def is_a_script(text: str) -> None:
    """The script that the command runs exists; test_course.py runs those of the course."""
    assert (ROOT / text.split()[1]).is_file()


def proves(text: str) -> None:
    """The job that is to be proved, or to climb the ladder, builds."""
    built(*(word for word in text.split()[2:] if "=" in word))


Check = Callable[[str], object]
VENV = "python3 -m venv .venv && .venv/bin/pip install -r"
QUICK = '-n 3 --dist loadfile -m "not slow"'
ATEN = "ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2"
ELASTIC = "python train.py launcher=elastic launcher.nodes=2 launcher.rendezvous"
# The checks of the commands that cannot run here, or that another test runs.
CHECKS: dict[Check, tuple[str, ...]] = {
    installs: (
        f"{VENV} requirements.txt && .venv/bin/python train.py",
        f"{VENV} requirements-dev.txt && .venv/bin/python -m pytest {QUICK}",
        f"{VENV} requirements-dev.txt",
    ),
    is_in_ci: (
        *("ruff check .", "ruff format --check .", "mypy"),
        "sphinx-build -M html . build -c docs -W --keep-going -q",
        f'{ATEN} python -m pytest -n 3 --dist loadfile -m "numerics and not slow"',
    ),
    is_executable: (".ci/run", ".ci/release python3.11 python3.14"),
    is_declared: (
        *("python -m pytest tests/unit", "python -m pytest -m slow", "python -m pytest tests/gpu"),
        f"python -m pytest {QUICK}",
    ),
    # They download, or need two machines or SLURM; test_launchers.py, test_machines.py and test_slurm.py have those.
    composes: (
        "torchrun --standalone --nproc-per-node 2 train.py",
        "torchrun --standalone --nproc-per-node 2 train.py epochs=2",
        "python train.py experiment=cifar10_resnet34_modern",
        "python train.py experiment=mnist_tutorial seed=1",
        "python train.py train.patience=3 epochs=100",
        "python train.py experiment=photos dataset.path=photos",
        "python train.py dataset=folder dataset.path=photos model=resnet50.a1_in1k model.pretrained=true",
        "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 train.py "
        "experiment=cifar10_resnet34 batch=2048",
        f"{ELASTIC}=10.0.0.1:29500",
        *(f"{ELASTIC}=127.0.0.1:29500 launcher.ranks=1 launcher.node_rank={rank} epochs=2" for rank in range(2)),
        "python train.py launcher=slurm launcher.nodes=2 launcher.gpus=8 launcher.partition=gpu launcher.time=4h",
        "srun --nodes=2 --ntasks-per-node=8 --gpus-per-task=1 python train.py experiment=cifar10_resnet34 batch=2048",
    ),
    # They run for minutes; test_prove.py and test_ladder.py run a part.
    proves: (
        *("lockstep prove", "lockstep prove --ranks 2 --steps 6", "lockstep prove model=resnet18 dataset=cifar10"),
        "lockstep ladder dataset=digits model=digitnet epochs=2 --repeat 1",
    ),
    # test_course.py runs them, and the photos are there before the first command.
    is_a_script: (
        *(f"python docs/course/{path.name}" for path in (ROOT / "docs" / "course").glob("pitfall_*.py")),
        *("python docs/photos.py", "python docs/digits.py", "python docs/scans.py", "python docs/course/figures.py"),
        "python docs/photos.py bands 5",
    ),
    # The environment is not installed here; test_course.py types the second, and test_slurm.py the third.
    bool: (
        ". .venv/bin/activate",
        "python train.py epochs=2 resume=outputs/whole/checkpoints/step-00000030",
        "python train.py -m launcher=slurm launcher.gpus=1 seed=1,2,3",
    ),
}
ELSEWHERE = {text: check for check, texts in CHECKS.items() for text in texts}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything of this one but its outputs and data, and some photos, digits and scans."""
    folder = tmp_path_factory.mktemp("checkout")
    for script, *arguments in (("photos.py",), ("photos.py", "bands", "5"), ("digits.py",), ("scans.py",)):
        done = forked(str(ROOT / "docs" / script), *arguments, cwd=folder)
        assert done.code == 0, done.err
    (folder / "flowers").symlink_to(folder / "photos" / "train")
    for name in ("train.py", "conf", "src", "docs", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def typed(text: str, folder: Path) -> Done:
    """What a shell does with `text` in `folder`, with this interpreter's commands.

    Where it would do no more than start one of ours, that is a copy of an interpreter that has imported torch.
    """
    if ours := re.match(r"(?:cd (\w+) && )?(python [\w/]+\.py\b[^$|<>;&*]*|lockstep\b[^$|<>;&*]*)$", text):
        return forked(*shlex.split(ours[2].removeprefix("python ")), cwd=folder / (ours[1] or "."))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return command("bash", "-euo", "pipefail", "-c", text, cwd=folder, PATH=path, OMP_WAIT_POLICY="passive")


def shortened(documented: Command) -> str:
    """The command with few steps, jobs and channels if it trains, else as it stands."""
    trains = "train.py" in documented.text and not re.search(r"train\.py.* (--help|--cfg|-sc)\b", documented.text)
    text = documented.text.replace("n_trials=8", "n_trials=2").replace("fold=0,1,2,3,4", "fold=0,4")
    text = re.sub(r"^lockstep doctor .*model=resnet18.*", r"\g<0> batch=8", text)
    if "experiment=" not in text:  # a recipe has published weights
        text = re.sub(r" model=resnet18\b", r"\g<0> +model.options.channels=[8,8,8,8]", text)
    return f"{text} steps={documented.steps}" if trains else text


@pytest.mark.slow
@pytest.mark.parametrize(
    "documented", COMMANDS, ids=lambda documented: f"{Path(documented.document).stem}-{documented.number}"
)
def test_a_command_of_the_documents_works(documented: Command, checkout: Path, tmp_path: Path) -> None:
    if documented.text in ELSEWHERE:
        ELSEWHERE[documented.text](documented.text)
        return
    if documented.text.startswith("tensorboard "):
        assert_serves(documented.text, checkout)
        return
    if documented.text.startswith("lockstep new "):
        checkout = tmp_path
    elif documented.document == "docs/extending.md":
        write_project(checkout)
    if "latest" in documented.text and not (checkout / "outputs" / "latest").exists():
        typed("python train.py steps=1", checkout)  # the test was run on its own
    if documented.text.startswith(("lockstep demo ", "lockstep watch ")):
        assert_shows(documented.text, forks().start(*shlex.split(documented.text), cwd=checkout))
        return
    done = typed(shortened(documented), checkout)
    assert done.code == 0, done.out + done.err
    assert done.out or "eval" in documented.text


def write_project(folder: Path) -> None:
    """The project of docs/extending.md in `folder`, with every block of Python or YAML in the file that it names."""
    if (folder / "mine").exists():
        return
    assert typed("lockstep new mine", folder).code == 0
    for block in re.findall(r"^```(?:python|yaml)\n(.*?)^```", EXTENDING, re.MULTILINE | re.DOTALL):
        file = folder / "mine" / re.findall(r"^# (\S+\.(?:py|yaml))$", block, re.MULTILINE)[0]
        file.parent.mkdir(exist_ok=True)
        file.write_text(block)


def assert_serves(text: str, folder: Path) -> None:
    """TensorBoard, at a free port, shows the runs of its folder."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    with subprocess.Popen(
        [*shlex.split(text), "--port", "0"], cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stderr is not None
            address = next(match[1] for line in server.stderr if (match := re.search(r" at (http://\S+)", line)))
            runs = urllib.request.urlopen(f"{address}data/runs", timeout=60).read()
        finally:
            server.terminate()
    assert runs.startswith(b"[")


def assert_shows(text: str, server: Fork | subprocess.Popen[bytes]) -> None:
    """The page of a model or a run is where the command says."""
    try:
        assert server.stdout is not None
        page = urllib.request.urlopen(server.stdout.readline().split()[0].decode(), timeout=60).read()
    finally:
        server.terminate()
        server.communicate(timeout=60)
    assert (b"What is on this photo?" if " demo " in text else b"<h2>Summary</h2>") in page


@pytest.mark.slow
def test_the_python_of_the_document_on_use_runs_behind_its_commands(checkout: Path) -> None:
    pytest.importorskip("onnxruntime")
    for documented in COMMANDS:
        needed = documented.text.startswith("python train.py") or "--out pets." in documented.text
        if documented.document == "docs/use.md" and needed and not (checkout / "pets.pt2").exists():
            assert typed(shortened(documented), checkout).code == 0  # the test was run on its own
    blocks = re.findall(r"^```python\n(.*?)^```", USE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        done = forked("-c", block, cwd=checkout)
        assert done.code == 0, done.err
        assert done.out


def test_what_is_not_run_is_in_the_documents() -> None:
    assert not set(ELSEWHERE) - {documented.text for documented in COMMANDS}


def rows(document: str, first: str) -> list[list[str]]:
    """The rows of the table whose first heading is `first`, without the rule under the headings."""
    text = (ROOT / document).read_text()
    table = re.search(rf"^\| {first} \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert table is not None, f"{document} has no table of {first}"
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table[1].splitlines()]


def test_the_exit_codes_are_those_of_the_exceptions() -> None:
    codes = {int(row[0]) for row in rows("docs/configuration.md", "code")}
    assert codes == {0, LockstepError.exit_code, *BY_EXIT_CODE}


def test_the_documented_tags_are_the_table_of_figures() -> None:
    documented = {tag for row in rows("docs/configuration.md", "tag") for tag in re.findall(r"`([^`]+)`", row[0])}
    of_tensorboard = {curve_of(figure.tag, "")[1] for figure in FIGURES}
    assert not [figure.tag for figure in FIGURES if not any(map(figure.covers, documented))]
    assert not [tag for tag in documented - of_tensorboard if not any(figure.covers(tag) for figure in FIGURES)]


def test_the_map_of_the_tree_is_the_tree() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where things are")[2]
    entries = re.findall(r"^( *)(\S+)", text.split("```")[1], re.MULTILINE)
    here = ROOT
    for indent, name in entries:
        path = (here if indent else ROOT) / name
        assert path.exists(), f"{path} is in the map but not in the tree"
        here = here if indent else path


def test_every_test_file_that_the_evidence_names_exists() -> None:
    files = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    rows = re.findall(r"(?m)^\|.*\|([^|]+)\|$", (ROOT / "docs" / "evidence" / "tests.md").read_text())
    named = re.findall(r"\btest_\w+", "".join(rows))
    assert len(set(named)) > 70
    assert set(named) - files == set()
