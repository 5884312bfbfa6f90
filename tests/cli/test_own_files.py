"""Lockstep removes only what the same process has made: after a refusal, everything of the user is as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers import forked, train

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
