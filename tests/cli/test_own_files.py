"""Lockstep removes only what the same process has made, and writes to no name that it has not made."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers import forked, photos_of_two_classes, train

# No server answers there, so every download fails at once.
OFFLINE = {f"{scheme}_proxy": "http://127.0.0.1:9" for scheme in ("http", "https")}
BY_A_RANK = ("train.freeze=[no_such_layer]", "device=cpu")
MNIST = ("experiment=mnist_tutorial",)
# What the user has, folders with a slash at their end, and the words that are refused.
REFUSED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no data": ((), MNIST),
    "empty folders for the data": (("data/MNIST/raw/",), MNIST),
    "a folder for the data": (("data/",), MNIST),
    "data elsewhere": (("mine/deep/",), (*MNIST, "data_root=mine/deep/data")),
    "one of the files": (("data/MNIST/raw/notes.txt",), MNIST),
    "a lock in the data": (("data/.MNIST.lock",), MNIST),
    "CIFAR": (("data/CIFAR10/raw/",), ("experiment=cifar10_tutorial",)),
    "a run folder": (("runs/x/",), ("hydra.run.dir=runs/x", "batch=0")),
    "a run folder with folders": (("runs/x/logs/", "runs/x/.hydra/"), ("hydra.run.dir=runs/x", *MNIST)),
    "a new run folder": (("runs/",), ("hydra.run.dir=runs/new/deep", "batch=0")),
    "a run folder of files": (("runs/x/notes.txt",), ("hydra.run.dir=runs/x",)),
    "a lock of another program": (("runs/x/.lock",), ("hydra.run.dir=runs/x", "batch=0")),
    "files of a run": (("x/train.log", "x/env.json", "x/logs/rank0.log"), ("hydra.run.dir=x", "batch=0")),
    "a new run that a rank refuses": (("runs/",), (*BY_A_RANK, "output_root=runs/new")),
    "a run folder, by a rank": (("x/logs/", "x/checkpoints/"), (*BY_A_RANK, "hydra.run.dir=x")),
    "files of a run, by a rank": (("x/train.log", "x/logs/rank0.log"), (*BY_A_RANK, "hydra.run.dir=x")),
    "a sweep": (("s/jobs/", "s/multirun.yaml", "s/optuna.log"), ("-m", "hydra.sweep.dir=s", "batch=0,-1")),
    "a new sweep": (("s/",), ("-m", "hydra.sweep.dir=s/new/deep", "batch=0,-1")),
    "a search": (("s/optuna.log",), ("-m", "hydra/sweeper=optuna", "hydra.sweep.dir=s", "batch=32")),
}


def entries(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def make(folder: Path, names: tuple[str, ...]) -> dict[str, bytes | None]:
    """Put files and folders of the user there."""
    for name in names:
        (folder / name if name.endswith("/") else (folder / name).parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            (folder / name).write_text("precious")
    return entries(folder)


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_command_removes_nothing_of_the_user_and_leaves_nothing_of_its_own(
    tmp_path: Path, case: str
) -> None:
    names, words = REFUSED[case]
    before = make(tmp_path, names)
    done = train(*words, cwd=tmp_path, **OFFLINE)
    assert (done.code, "Traceback" in done.err) == (2, False), done.err
    assert entries(tmp_path) == before


@pytest.mark.parametrize("names", [(), ("x/",), ("x/logs/", "x/notes/")])
def test_a_refused_call_from_python_leaves_a_folder_as_it_was(tmp_path: Path, names: tuple[str, ...]) -> None:
    before = make(tmp_path, names)
    call = "import lockstep; lockstep.train(['hydra.run.dir=x', 'train.freeze=[no_such_layer]'])"
    done = forked("-c", call, cwd=tmp_path)
    assert "InputError" in done.err
    assert entries(tmp_path) == before


# What a stranger, or the user, has put in the place of a file.
TRAPS: dict[str, Callable[[Path, Path], object]] = {
    "a link": lambda path, secret: path.symlink_to(secret),
    "a link to nothing": lambda path, secret: path.symlink_to(secret.with_name("new")),
    "a hard link": lambda path, secret: path.hardlink_to(secret),
    "a link to the standard output": lambda path, secret: path.symlink_to("/proc/self/fd/1"),
    "a pipe": lambda path, secret: os.mkfifo(path),
}
QUICK = ("steps=1", "device=cpu", "name=test")
SWEEP = ("-m", *QUICK, "hydra.sweep.dir=mine")
OPTUNA = (*SWEEP, "hydra/sweeper=optuna", "hydra.sweeper.n_trials=1", "optimizer.lr=interval(0.001,0.1)")
TRACKED = (*QUICK, "output_root=mine", "logger=[jsonl,mlflow,wandb]")
MNIST_THERE = ("experiment=mnist_tutorial", "data_root=mine")
# Paths in a folder that somebody else has written, and a command that would write there, or has a library do so.
WRITTEN: dict[str, tuple[str, ...]] = {
    "optuna.log": OPTUNA,
    "optuna.log.lock": OPTUNA,
    "sweep.json": (*SWEEP, "seed=1,2"),
    "jobs": (*SWEEP, "seed=1,2"),
    "jobs/000.log": (*SWEEP, "seed=1,2"),
    "000-seed=1": (*SWEEP, "seed=1,2"),
    "000-seed=1/train.log": (*SWEEP, "seed=1,2", "hydra/job_logging=default"),
    "multirun.yaml": (*SWEEP, "seed=1,2", "hydra/sweeper=basic", "hydra/launcher=basic"),
    "report.html": (*SWEEP, "seed=1,2", "telemetry.report=always"),
    "train.log": (*QUICK, "hydra.run.dir=mine", "hydra/job_logging=default"),
    "metrics.jsonl": (*QUICK, "hydra.run.dir=mine"),
    "logs/rank0.log": (*QUICK, "hydra.run.dir=mine"),
    ".lock": (*QUICK, "hydra.run.dir=mine"),
    "mlflow": TRACKED,
    "mlflow/mlflow.db": TRACKED,
    "mlflow/mlflow.db-journal": TRACKED,
    "mlflow/.mlflow.lock": TRACKED,
    "wandb": TRACKED,
    "MNIST/raw/train-images-idx3-ubyte.gz": MNIST_THERE,
    ".MNIST.lock": MNIST_THERE,
}


def trapped(path: Path, trap: str, secret: Path) -> os.stat_result:
    secret.parent.mkdir(exist_ok=True)
    secret.write_text("precious")
    path.parent.mkdir(parents=True, exist_ok=True)
    TRAPS[trap](path, secret)
    return path.lstat()


@pytest.mark.slow
@pytest.mark.parametrize("trap", ["a link to nothing", "a hard link", "a pipe"])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_command_that_would_write_through_a_strangers_name_is_refused(tmp_path: Path, name: str, trap: str) -> None:
    path, secret = tmp_path / "mine" / name, tmp_path / "elsewhere" / "secret"
    before = trapped(path, trap, secret)
    done = train(*WRITTEN[name], cwd=tmp_path, WANDB_MODE="offline", **OFFLINE)
    assert (done.code in (2, 74), "Traceback" in done.err, name.rpartition("/")[2] in done.err) == (True, False, True)
    assert os.path.samestat(path.lstat(), before)
    assert entries(secret.parent) == {"secret": b"precious"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with photos and a run in `run`."""
    folder = photos_of_two_classes(tmp_path_factory.mktemp("trained"), 40, "png")
    photos = ("dataset=folder", "dataset.path=photos", "dataset.decode_size=32", "batch=16", "model=test_resnet")
    assert train(*photos, *QUICK, "hydra.run.dir=run", cwd=folder).code == 0
    return folder


# Each command that writes to `--out`, with the name that is in the way.
OUT: dict[str, tuple[str, ...]] = {
    "out.csv": ("predict", "run", "photos/val", "--csv"),
    "out.onnx": ("export", "run"),
    "out.pt2": ("export", "run", "--to", "torch"),
    "preprocess.py": ("export", "run", "--to", "torch"),
    "folder": ("export", "run", "--to", "timm"),
    "out.png": ("show",),
    "out.svg": ("lr-find", "--steps", "2"),
    "evaluation.json": ("evaluate", "run"),
    "predictions.csv": ("evaluate", "run"),
}


@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.parametrize("name", OUT)
def test_no_out_replaces_or_follows_a_link_a_pipe_or_a_device(
    trained: Path, tmp_path: Path, name: str, trap: str
) -> None:
    path, secret = tmp_path / name, tmp_path / "elsewhere" / "secret"
    before = trapped(path, trap, secret)
    out = tmp_path if OUT[name][0] == "evaluate" else tmp_path / "out.pt2" if name == "preprocess.py" else path
    done = forked("lockstep", *OUT[name], "--out", str(out), cwd=trained)
    assert (done.code, "Traceback" in done.err) == (2, False), done.err
    assert f"--out is {path}" in done.err
    assert os.path.samestat(path.lstat(), before)
    assert entries(secret.parent) == {"secret": b"precious"}
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted([name, "elsewhere"])
