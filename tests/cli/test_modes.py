"""Every file and folder that Lockstep or a library writes has the permissions that the umask asks for."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers import forked, photos_of_two_classes
from lockstep.core.safe_write import locked, make_folder, replacing, usual_mode, write_atomic

UMASKS = (0o022, 0o002, 0o077)
PHOTOS = ("dataset=folder", "dataset.path=photos", "dataset.decode_size=32")
SMALL = ("batch=16", "steps=4", "device=cpu", "telemetry.report=always")
LOGGERS = "logger=[jsonl,tensorboard,mlflow,wandb]"
# In this order: the commands after the first ones use the newest run.
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("train", *PHOTOS, *SMALL, "model=test_resnet", "checkpoint.every=2", "train.ema=0.9", LOGGERS, "name=one"),
    ("evaluate", "latest"),
    ("predict", "latest", "photos/val", "--csv", "--out", "predictions.csv"),
    ("export", "latest", "--out", "one.onnx"),
    ("export", "latest", "--to", "torch", "--out", "one.pt2"),
    ("export", "latest", "--to", "timm", "--out", "folder"),
    ("pack", "packed", *PHOTOS),
    ("show", *PHOTOS),
    ("lr-find", "--steps", "4", "device=cpu"),
    ("new", "mine"),
    ("train", "steps=20", "device=cpu", "telemetry.profile=true", "telemetry.samples=true"),
    ("train", "-m", *SMALL, "hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "optimizer.lr=interval(0.001,0.1)"),
    ("report", "latest"),
)


def usual(umask: int, path: Path) -> bool:
    """Whether a file, which may be executable, or a folder has the permissions that the umask leaves."""
    mode = stat.S_IMODE(path.lstat().st_mode)
    return mode == 0o777 & ~umask if path.is_dir() else mode & ~0o111 == 0o666 & ~umask


def written(folder: Path) -> Iterator[Path]:
    """What is below a folder, but no link: it has no permissions of its own."""
    return (path for path in folder.rglob("*") if not path.is_symlink())


@pytest.mark.slow
def test_every_file_of_runs_sweeps_and_exports_follows_the_umask(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    umask = 0o026  # nobody writes 0o640 by himself, unlike 0o600, 0o644, 0o664 and 0o666
    photos_of_two_classes(tmp_path, 40, "png")
    photos = {*written(tmp_path)}
    for words in COMMANDS:
        code = f"import os, sys; os.umask({umask}); sys.argv[:] = ['lockstep', *sys.argv[1:]]"
        call = "from lockstep.cli.main import main; sys.orig_argv[1:] = ['-m', *sys.argv]; main()"
        done = forked("-c", f"{code}; {call}", *words, cwd=tmp_path, WANDB_MODE="offline", timeout=590)
        assert done.code == 0, f"{words}\n{done.err}"
    paths = {*written(tmp_path)} - photos
    names = {path.name for path in paths}
    assert {"model.safetensors", "ema.safetensors", "optuna.log", "mlflow.db", "one.onnx", "one.pt2"} <= names
    assert {"trace.json.gz", "report.html", "predictions.csv", "train.images"} <= names
    assert [f"{path} {path.lstat().st_mode:o}" for path in sorted(paths) if not usual(umask, path)] == []


def private(path: Path) -> None:
    """Write a file as safetensors does: another one, for nobody else, is renamed."""
    (other := path.with_name("other")).touch(mode=0o600)
    other.replace(path)


def replaced(path: Path) -> None:
    with replacing(path) as temporary:
        private(temporary)


def by_library(path: Path) -> None:
    with usual_mode(path):
        private(path)


def lock(path: Path) -> None:
    with locked(path):
        pass


@pytest.mark.parametrize("write", [lambda path: write_atomic(path, "text"), replaced, by_library, lock, make_folder])
@pytest.mark.parametrize("umask", UMASKS, ids=oct)
def test_every_way_to_write_follows_the_umask(tmp_path: Path, umask: int, write: Callable[[Path], object]) -> None:
    before = os.umask(umask)
    try:
        write(tmp_path / "new")
    finally:
        os.umask(before)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert usual(umask, tmp_path / "new")
