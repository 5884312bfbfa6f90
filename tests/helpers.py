"""Shared by many tests: compose a job, run it here or in a gang of ranks, read its files."""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
import json
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from packaging.requirements import Requirement
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from forks import Fork, Forks
from lockstep.config import components, composition, messages
from lockstep.config.composition import Invocation
from lockstep.config.hydra_versions import initialize_config_dir
from lockstep.config.schema import GROUPS, Job
from lockstep.core import world
from lockstep.core.errors import InputError, Stopped
from lockstep.core.model_card import Preprocessing
from lockstep.core.protocols import Entry
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_write import Lock
from lockstep.data.datasets.decode import ImageFile
from lockstep.job import resolve, worker
from lockstep.job.prepare import create_run
from lockstep.job.resume import decide_resume
from lockstep.launcher.spawn import Spawn
from lockstep.records.ledger import Ledger
from lockstep.runtime.commands import Command, running
from lockstep.runtime.signals import StopRequest
from lockstep.sweeps.view import SweepView
from lockstep.training import experiment
from lockstep.training.resolved_job import ResolvedJob, load_job

ROOT = Path(__file__).parent.parent
CHOICES = (*GROUPS, "experiment")
# A small, quick, real job: the bundled digits, with a log line for every step.
QUICK = ("name=test", "telemetry.interval=1", "logger=jsonl", "device=cpu")
# A quarter of the default model's channels. A CPU without bfloat16 instructions needs 2.4 s for a step of the default
# model over 300 digits in bf16, and 0.15 s for a step of this one.
NARROW = "model.width=8"
# Random images in place of the digits, as many as a test asks for: 1,442 take most of the time of a short run.
FAKE = ("dataset=fake", "dataset.classes=10", "dataset.channels=1", "dataset.size=8", "augment=shift")


@functools.cache
def chosen(*choices: str) -> DictConfig:
    """The config with these options of its groups."""
    with initialize_config_dir(str(ROOT / "conf")):
        return compose("config", overrides=list(choices))


def composed(*overrides: str) -> dict[str, Any]:
    """A plain config as `train.py` would compose it.

    Hydra composes each option of a group once, which takes 0.1 s. Options and all other keys are set in a copy of
    the default config. An experiment or a task changes more than one group.
    """
    parsed = OverridesParser.create().parse_overrides(["name=test", *overrides])
    groups = [
        bool(re.match(r"hydra|.*/", word.key_or_group))
        or word.key_or_group in CHOICES
        or word.is_delete()
        or word.is_sweep_override()
        for word in parsed
    ]
    words = list(zip(groups, parsed, strict=True))
    options = {word.key_or_group: str(word.input_line) for group, word in words if group}
    plain = options.keys() <= {*GROUPS} - {"task"} and all(re.match(r"\w+=", line) for line in options.values())
    if plain and len(options) == sum(groups):
        config = copy.deepcopy(chosen())
        for name, line in options.items():
            config[name] = chosen(line)[name]
    else:
        config = copy.deepcopy(chosen(*(str(word.input_line) for group, word in words if group)))
    try:
        for override in (word for group, word in words if not group):
            OmegaConf.update(config, override.key_or_group, override.value(), force_add=override.is_add())
    except OmegaConfBaseException:  # Hydra has its own sentence for it
        return composition.to_dict(chosen(*(str(word.input_line) for word in parsed)))
    return composition.to_dict(config)


def built(*overrides: str) -> Job:
    """A job as `train.py` would compose it, with every group built."""
    return components.build_job(composed(*overrides))


def resolved(*overrides: str) -> ResolvedJob:
    """A job as its ranks get it."""
    return resolve.resolve(built(*overrides), sweep=False)


def run_dir(path: Path, *overrides: str) -> RunDir:
    """A run folder with a resolved config in it, ready for its ranks."""
    run = RunDir.at(path)
    words = [*QUICK, f"output_root={path.parent}", *overrides]
    job = composed(*words)
    run.config.write_text(components.dump(components.plain(resolve.resolve(components.build_job(job), sweep=False))))
    (run.hydra / "config.yaml").write_text(components.dump(job))
    run.overrides.write_text(components.dump(words))
    return run


def created(*overrides: str, folder: Path | None = None) -> tuple[RunDir, ResolvedJob]:
    """The run folder that `python train.py OVERRIDES` would make, and the job that it would launch."""
    values = composed(*overrides)
    with initialize_config_dir(str(ROOT / "conf")):
        called = Invocation(overrides=overrides, sweep=False, folder=folder, hydra="")
        with closing(Lock()) as lock:
            folder, job = create_run(decide_resume(values, called), lock)
            with folder as run:
                return run, job


def refusal(output_root: Path, *overrides: str) -> str:
    """The sentence that `python train.py OVERRIDES` ends with; nothing is made."""
    with pytest.raises(Exception) as raised:  # noqa: PT011, Hydra's errors have no base of their own
        created(f"output_root={output_root}", *overrides)
    error = messages.translate(raised.value) or messages.translate_before_job(raised.value)
    assert isinstance(error, InputError), repr(raised.value)
    assert not output_root.exists()
    return str(error)


def view_of(ledger: Ledger) -> SweepView:
    """The view of a call that ran all jobs of a sweep."""
    view = SweepView(ledger)
    view.enter(ledger.records(), [])
    return view


def train_here(path: Path, *overrides: str, stop_at: int | None = None, stop_in: int | None = None) -> RunDir:
    """Train a job as the one rank of this process, or go on with it; stop it as `StopAfter` says."""
    run = run_dir(path, *overrides)
    torch.set_num_threads(1)
    run_until(world.World.solo(), run, stop_at, stop_in)
    return run


class StopAfter(StopRequest):
    """A stop request, as a signal makes one, after a step, or within a step or an evaluation.

    Args:
        step: the request is seen at the end of this step only, counted from the start of this process.
        place: the request is seen at this check within a step or an evaluation, counted from 1.
    """

    def __init__(self, step: int | None, place: int | None = None) -> None:
        self.place, self.places = place, itertools.count(1)
        super().__init__()
        self.step, self.steps = step, itertools.count(1)

    def requested_after_step(self) -> bool:
        return next(self.steps) == self.step

    @property
    def requested(self) -> bool:
        return next(self.places) == self.place

    @requested.setter
    def requested(self, value: bool) -> None:
        """Ignore the base class, which sets it to False."""


def run_until(joined: world.World, run: RunDir, stop_at: int | None, stop_in: int | None = None) -> None:
    """Run a job as a rank, to its end or to a stop (as for `StopAfter`)."""
    try:
        experiment.run(load_job(run.config), run, joined, stop=StopAfter(stop_at, stop_in))
    except Stopped:
        assert stop_at is not None or stop_in is not None or joined.size > 1


@dataclass(frozen=True)
class Case:
    """A job for a gang: its run folder, its overrides, and when it is asked to stop.

    `stop_at` and `stop_in` are the `step` and `place` of `StopAfter`. Only the last rank gets `stop_in`.
    """

    path: Path
    overrides: tuple[str, ...]
    stop_at: int | None = None
    stop_in: int | None = None


class Gang:
    """Real ranks over gloo that train job after job, whenever they are asked to, until the context ends."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder, self.ranks = folder, ranks
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("done", *map(str, range(ranks))):
            os.mkfifo(folder / name)

    def __enter__(self) -> Gang:
        self.to_ranks = [os.open(self.folder / str(rank), os.O_RDWR) for rank in range(self.ranks)]
        words = ("helpers:gang_here", str(self.folder), str(self.ranks))
        if sys.platform == "linux":
            self.process: Fork | subprocess.Popen[str] = forks().start(*words)
        else:
            fresh = "import forks, sys; forks.run(sys.path, *sys.argv[1:])"
            self.process = subprocess.Popen([sys.executable, "-c", fresh, *words], cwd=ROOT / "tests", text=True)
        self.done = (self.folder / "done").open("rb")
        return self

    def __exit__(self, *_: object) -> None:
        self._tell(None)
        code = self.process.wait(240)
        for end in self.to_ranks:
            os.close(end)
        self.done.close()
        if isinstance(self.process, Fork):
            self.process.close()
        assert code == 0, (self.folder / "output").read_text()

    def train(self, case: Case) -> None:
        """Have the ranks train a job, and wait until they have."""
        run_dir(case.path, f"launcher.ranks={self.ranks}", "launcher.threads=1", *case.overrides)
        self._tell((str(case.path), case.stop_at, case.stop_in))
        assert self.done.read(self.ranks) == b"." * self.ranks, (self.folder / "output").read_text()

    def _tell(self, case: tuple[object, ...] | None) -> None:
        for end in self.to_ranks:
            os.write(end, json.dumps(case).encode() + b"\n")


def gang(folder: Path, ranks: int, cases: list[Case]) -> None:
    """Train many jobs one after another in one gang of real ranks over gloo."""
    with Gang(folder, ranks) as started:
        for case in cases:
            started.train(case)


@functools.cache
def forks() -> Forks:
    """The interpreter from which commands and gangs are forked. The first use starts it."""
    return forks_of(sys.executable)


def forks_of(python: str) -> Forks:
    """A new interpreter of the environment of `python`, which has imported what commands need."""
    commands = ("job.worker", "job.prepare", "sweeps.sweepers", "sweeps.pool", "inference.evaluate")
    commands += ("cli.main", "cli.train", "cli.run", "cli.needs", "cli.callbacks")
    parts = ("optim.schedule", "data.datasets.folder", "models.zoo", "tasks", "telemetry.loggers")
    parts += ("telemetry.tensorboard", "diagnostics.listener", "report.listener")
    ours = [f"lockstep.{name}" for name in (*commands, *parts)]
    # An optimizer wants `torch._dynamo`. The libraries come with a metric, a log in TensorBoard, a folder of images.
    scores = ("sklearn.metrics", "scipy.special", "scipy.stats")
    written = ("torch.utils.tensorboard", "torch.utils.serialization.config")
    written += tuple(f"tensorboard.plugins.{name}" for name in ("custom_scalar.summary", "hparams.metadata"))
    # Every command imports Hydra's plugins, and a fork that calls a function of a test file imports pytest.
    plugins = [f"hydra_plugins.lockstep.{name}" for name in ("named_options", "sweeps")]
    hydra = ("basic_launcher", "basic_sweeper", "importlib_resources_config_source", "file_config_source")
    hydra += ("structured_config_source", "bash_completion", "fish_completion", "zsh_completion")
    plugins += [f"hydra._internal.core_plugins.{name}" for name in hydra]
    images = ("torchvision.io", *(f"PIL.{kind}ImagePlugin" for kind in ("Bmp", "Gif", "Jpeg", "Ppm", "Png")))
    libraries = ("timm", "torch._dynamo", "torchvision", *scores, *images, *written, "pytest")
    return Forks(*ours, *plugins, *libraries, python=python)


def launch(entry: Callable[[Path], None], folder: Path, ranks: int) -> None:
    """Run `exit_as_rank` of the module of `entry` as ranks under `launcher=spawn`.

    The tests' process has threads, so its ranks would be fresh interpreters, and each would import torch for seconds.
    Here a process with one thread, which has already imported torch, forks the ranks.
    """
    if sys.platform != "linux":
        Spawn(ranks=ranks, threads=1).run(Entry(entry), RunDir.at(folder))
        return
    done = forked("helpers:launch_here", entry.__module__, str(folder), str(ranks), timeout=580)
    assert done.code == 0, done.out + done.err


def launch_here(module: str, folder: str, ranks: str) -> None:
    entry = Entry(importlib.import_module(module).exit_as_rank)
    Spawn(ranks=int(ranks), threads=1).run(entry, RunDir.at(Path(folder)))


def gang_here(folder: str, ranks: str) -> None:
    """Start the ranks of a `Gang`, and wait for their end."""
    with Path(folder, "done").open("wb"), Path(folder, "output").open("wb") as output:
        for stream in (1, 2):  # nobody reads a pipe while the ranks work
            os.dup2(output.fileno(), stream)
        launch_here("helpers", folder, ranks)


def exit_as_rank(folder: Path) -> None:
    """What a rank of a `Gang` does: each case that it is told. The spawn launcher calls this."""
    with (
        worker.join(device="cpu", backend="gloo", timeout=240, threads=1) as joined,
        (folder / str(joined.rank)).open() as cases,
        (folder / "done").open("wb", buffering=0) as done,
    ):
        while case := json.loads(cases.readline()):
            path, stop_at, stop_in = case
            run_until(joined, RunDir(Path(path)), stop_at, stop_in if joined.rank == joined.size - 1 else None)
            done.write(b".")
    sys.exit(0)


def on_a_terminal(*overrides: str) -> tuple[int, str]:
    """`python train.py ...` with a pseudo-terminal of 100 columns for its output."""
    main, end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "train.py", *overrides],
        cwd=ROOT,
        stdout=end,
        stderr=end,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(end)
    seen = b""
    while True:
        try:
            read = os.read(main, 65536)
        except OSError:  # how Linux says that the other end is closed
            break
        if not read:
            break
        seen += read
    os.close(main)
    return process.wait(), seen.decode()


def records(run: RunDir | Path) -> list[dict[str, Any]]:
    """The lines of a run's `metrics.jsonl`."""
    path = run.metrics if isinstance(run, RunDir) else run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its content."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def losses(run: RunDir | Path) -> list[float]:
    """The training loss of each step."""
    return [line["loss/train"] for line in records(run) if "loss/train" in line]


def own_project(folder: Path, package: str) -> Path:
    """Make `folder` a project with a package `own` of this code, which its `train.py` names as an extension."""
    (folder / "own").mkdir(parents=True)
    (folder / "own" / "__init__.py").write_text(package)
    (folder / "train.py").write_text("import lockstep\nlockstep.main(extensions=['own'])\n")
    return folder


def train_in(project: Path, name: str, *words: str, code: int = 0) -> Done:
    """Train in the folder `name` of a project, and check the exit code."""
    done = forked("train.py", *words, f"hydra.run.dir={name}", cwd=project)
    assert done.code == code, done.out + done.err
    return done


def largest_difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """The largest absolute difference between the tensors of one name."""
    return max(float((first[name] - second[name]).detach().abs().max()) for name in first)


def weights(run: RunDir | Path) -> dict[str, Tensor]:
    """The model's weights in the newest checkpoint."""
    folder = (run.path if isinstance(run, RunDir) else run) / "checkpoints"
    return load_file(folder / (folder / "last").read_text() / "model.safetensors")


def decoded(file: ImageFile, share: float = 1.0) -> tuple[np.ndarray, int]:
    """The pixels (H, W, 3) of a file as they are decoded, before they are resized, and the scale in eighths.

    The one place of the tests that reaches behind `square` and `box`: what they resize shows neither.
    """
    return file._decoded(share)


@dataclass(frozen=True)
class Done:
    """A finished command."""

    code: int
    out: str
    err: str


def build_wheel(folder: Path, source: Path | None = None) -> Path:
    """Build a wheel in `folder` from `source`, by default a copy of the project, in which a build leaves files."""
    if source is None:
        source = copied_source(folder / "source")
    words = ("--no-build-isolation", "--check-build-dependencies")  # nothing is downloaded
    done = command(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", *words, "-w", str(folder), str(source))
    assert done.code == 0, done.err
    (wheel,) = folder.glob("*.whl")
    return wheel


def copied_source(folder: Path) -> Path:
    """What the project's distributions are built from, in a new folder, without what a build leaves."""
    for name in ("conf", "src"):
        ignored = shutil.ignore_patterns("*.egg-info", "__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def installed(folder: Path, *words: str) -> Path:
    """The interpreter of a new environment in `folder`, after `pip install WORDS`, without what they depend on.

    It takes all other packages from the environment of the tests, but not what that one has as an editable copy.
    """
    assert command(sys.executable, "-m", "venv", "--without-pip", str(folder)).code == 0
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "packages.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("site-packages")))
    python = folder / "bin" / "python"
    quiet = ("-q", "--no-deps", "--no-index", "--no-build-isolation")
    done = command(sys.executable, "-m", "pip", "--python", str(python), "install", *quiet, *words)
    assert done.code == 0, done.err
    return python


def not_installed(folder: Path) -> Path:
    """The interpreter of a new environment in `folder` that has the source on its path, but not installed.

    Of the packages of the tests' environment it has what a run depends on, and what runs the tests.
    """
    assert command(sys.executable, "-m", "venv", "--without-pip", str(folder)).code == 0
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "source.pth").write_text(f"{ROOT / 'src'}\n")
    queue, linked = ["lockstep", "pytest", "pytest-timeout", "pytest-xdist"], set()
    while queue:
        package = metadata.distribution(queue.pop())
        if package.name in linked:
            continue
        linked.add(package.name)
        requirements = map(Requirement, package.requires or ())
        queue += [word.name for word in requirements if word.marker is None or word.marker.evaluate({"extra": ""})]
        for name in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            if package.name != "lockstep" and not (site / name).exists():
                (site / name).symlink_to(package.locate_file(name))
    return folder / "bin" / "python"


def origin(python: Path) -> Path:
    """The folder from which an interpreter imports Lockstep."""
    code = "import importlib.util; print(importlib.util.find_spec('lockstep').origin)"
    return Path(command(str(python), "-P", "-c", code, cwd=python.parent, PYTHONPATH="").out.strip()).parent


def photos_of_two_classes(folder: Path, side: int, kind: str) -> Path:
    """The folder, in which `photos` has 54 images of mugs and lamps to train on, and 10 to evaluate."""
    for number in range(64):
        name = f"{'train' if number < 54 else 'val'}/{'mug' if number % 2 else 'lamp'}/{number}.{kind}"
        path = folder / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # No two pixels are alike: a box, a size or a mirror shows.
        rows = Image.linear_gradient("L").resize((side, side))
        Image.merge("RGB", (Image.new("L", (side, side), 4 * number), rows, rows.rotate(90))).save(path)
    return folder


def first_on_path(folder: Path) -> str:
    """PYTHONPATH with a folder before what it has, which may be the source under test."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def command(*arguments: str, cwd: Path | None = None, timeout: float = 240, **environment: str) -> Done:
    """Run a command as a user would, in the project's folder unless told otherwise."""
    done = subprocess.run(
        arguments,
        cwd=cwd or ROOT,
        # Ranks and tests share few cores here: a thread that waits must not spin.
        env={**os.environ, "OMP_WAIT_POLICY": "passive", **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def result(process: Fork, timeout: float = 240) -> Done:
    """Wait for a command to end; it is killed after `timeout` seconds."""
    try:
        out, err = process.communicate(timeout)
        return Done(process.wait(), out, err)
    finally:
        process.close()


def forked(*words: str, cwd: Path | None = None, timeout: float = 240, **environment: str) -> Done:
    """Run a command as a fork of an interpreter that has imported torch; `Forks.start` describes the words."""
    return result(forks().start(*words, cwd=cwd, **environment), timeout)


@contextmanager
def running_fork(words: list[str], *, capture: bool = False) -> Iterator[Fork | Command]:
    """`processes.running`, with `python -m lockstep` as a fork of an interpreter that has imported torch."""
    if words[:3] != [sys.executable, "-m", "lockstep"] or sys.platform != "linux":
        with running(words, capture=capture) as fresh:
            yield fresh
        return
    process = forks().start(*words[2:], HYDRA_FULL_ERROR="0")
    try:
        yield process
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.close()


def as_ranks(*words: str, ranks: int = 2) -> list[Done]:
    """Run `train.py` as each of the ranks that torchrun would start; rank 0 serves the store."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_RUN_ID": "none"}
    store_address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [
        forks().start(str(ROOT / "train.py"), *words, **sizes, **store_address, RANK=str(rank), LOCAL_RANK=str(rank))
        for rank in range(ranks)
    ]
    return [result(process) for process in started]


def train(*overrides: str, cwd: Path | None = None, **environment: str) -> Done:
    """Run `python train.py ...` as a fork of an interpreter that has imported torch."""
    if sys.platform != "linux":
        return train_afresh(*overrides, cwd=cwd, **environment)
    return forked(str(ROOT / "train.py"), *overrides, cwd=cwd, **environment)


def train_afresh(*overrides: str, cwd: Path | None = None, **environment: str) -> Done:
    """Run `python train.py ...` in a fresh interpreter."""
    return command(sys.executable, str(ROOT / "train.py"), *overrides, cwd=cwd, **environment)


def preprocessing(height: int, width: int, channels: int = 3, **options: Any) -> Preprocessing:
    """Files that are stored with this size and seen whole, with black frames."""
    shape = (channels, height, width)
    usual: dict[str, Any] = {"eval_crop": 1.0, "mean": (0.0,) * channels, "std": (1.0,) * channels}
    return Preprocessing(image_shape=shape, input_shape=shape, **usual | options)
