"""A file is on the disk before it gets its name, and a full disk is reported with one sentence."""

import errno
import os
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from lockstep.checkpoint.writing import Checkpointer
from lockstep.core import safe_write
from lockstep.core.errors import InputError, StorageError
from lockstep.core.figures import Predictions
from lockstep.core.model_card import ModelCard
from lockstep.core.run import Run, State
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_write import absent, check_out, remove_empty, write_atomic
from lockstep.data.datasets.folder import Folder
from lockstep.data.datasets.packed import pack_source
from lockstep.data.transforms.augment import NoAugment
from lockstep.data.transforms.device import DeviceTransforms
from lockstep.inference import export
from lockstep.inference.predictor import Predictor
from lockstep.precision import FP32
from lockstep.records.ledger import Identity, Ledger
from lockstep.report.run_page import write_report
from lockstep.report.sweep_page import write_sweep_report
from lockstep.telemetry.sinks import JsonLines


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The fsync and rename calls in order, as ("sync" or "name", file name); a temporary file is called `.tmp`."""
    recorded: list[tuple[str, str]] = []
    fsync, replace, rename = os.fsync, os.replace, os.rename

    def synced(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        recorded.append(("sync", re.sub(r"^\.[0-9a-f]{16}", "", name)))
        fsync(descriptor)

    def named(source: Path, target: Path) -> None:
        recorded.append(("name", Path(target).name))
        (replace if Path(target).is_file() else rename)(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", named)
    monkeypatch.setattr(os, "rename", named)
    return recorded


def test_a_file_is_on_disk_before_and_a_folder_with_its_name(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    write_atomic(tmp_path / "file", "content")
    assert calls == [("sync", ".tmp"), ("name", "file")]
    calls.clear()
    RunDir.at(tmp_path / "run")
    assert calls == [("sync", "run"), ("sync", tmp_path.name)]


def test_a_checkpoint_is_on_the_disk_with_its_log_before_it_counts_and_then_the_weights(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    run = RunDir.at(tmp_path / "run")
    run.metrics.write_text("")
    calls.clear()
    model = nn.Linear(2, 2)
    target = Checkpointer(run_dir=run, fingerprint={"monitor": "top1"}, keep=3, keep_best=1, writes=True)
    progress = {"step": 1, "scores": [(1, 50.0)], "figures": {"top1": 50.0}, "best": 50.0, "best_step": 1}
    optimizer, scaler = torch.optim.SGD(model.parameters()), torch.amp.GradScaler("cpu", enabled=False)
    target.save(model=model, ema=None, optimizer=optimizer, scaler=scaler, progress={**progress, "window": None})
    target.close()
    named = calls.index(("name", "step-00000001"))
    before = {name for call, name in calls[:named] if call == "sync"}
    files = {"facts.json", "manifest.json", "model.safetensors", "state.pt"}
    assert before == {"metrics.jsonl", ".hydra", "run", ".step-00000001.tmp", *files}
    assert calls[named + 1] == ("sync", "checkpoints")
    weights = calls.index(("name", "model.safetensors"))
    assert calls[weights - 1 :: 2] == [("sync", ".tmp"), ("sync", "run")]


@pytest.fixture
def unflushed(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """For each file or folder that was renamed, by its new name, what of it had changed since its last fsync."""
    flushed: dict[int, int] = {}
    named: dict[str, list[str]] = {}
    replace, rename = os.replace, os.rename

    def synced(descriptor: int) -> None:
        status = os.fstat(descriptor)
        flushed[status.st_ino] = status.st_mtime_ns

    def checked(source: Path, target: Path) -> None:
        parts = {path: path.stat() for path in (Path(source), *Path(source).rglob("*"))}
        named[Path(target).name] = [
            part.name for part, of in parts.items() if flushed.get(of.st_ino) != of.st_mtime_ns
        ]
        (replace if Path(target).is_file() else rename)(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", checked)
    monkeypatch.setattr(os, "rename", checked)
    return named


def write_ledger(place: Path) -> None:
    ledger = Ledger(place / "sweep")
    ledger.create(Identity(figure="top1"))
    (record,) = ledger.enter([(("seed=1",), "seed=1")])
    (ledger.folder / record.folder).mkdir()
    ledger.end(ledger.start(record), State.done, objective=1.0)
    write_sweep_report(ledger)


def write_pack(place: Path) -> None:
    for name in ("train/a/1.png", "train/b/2.png", "val/a/3.png", "val/b/4.png"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(place / name)
    pack_source(Folder(path=str(place), decode_size=8), place / "packed", threads=1, advanced=lambda number: None)


def write_run(place: Path) -> None:
    run = RunDir.at(place / "run")
    run.write_summary(status="completed")
    write_report(Run(run.path))
    facts = {
        "names": ["a"],
        "examples": [1],
        "predicted": [1],
        "hits": [1],
        "confusion": [],
        "curves": [],
        "worst": [],
    }
    Predictions(step=1, **facts).write(run.validation)
    JsonLines(run.metrics, 0.0).close()


def write_exports(place: Path) -> None:
    """A program of any format, and a folder of timm's, of a network that is not trained."""
    parts = {"model": "models.Timm", "precision": "precision.FP32", "loss": "losses.CrossEntropy"}
    facts: dict[str, Any] = {part: {"_target_": f"lockstep.{name}"} for part, name in parts.items()}
    facts |= {"classes": 2, "class_names": ("a", "b"), "image_shape": (3, 32, 32), "input_shape": (3, 32, 32)}
    facts |= {"eval_crop": 1.0, "mean": (0.5,) * 3, "std": (0.5,) * 3, "eval_views": 1, "eval_batch": 8}
    card = ModelCard(**facts, trained_on={"_target_": "lockstep.data.datasets.Folder"}, lockstep="1")
    options: dict[str, Any] = {"device": torch.device("cpu"), "precision": FP32()}
    predictor = Predictor(
        card=card,
        model=timm.create_model("test_resnet", num_classes=2).eval(),
        memory_format=torch.contiguous_format,
        transforms=DeviceTransforms.of(card, NoAugment(), seed=0, **options),
        **options,
    )
    export.export_folder(predictor, None, place / "timm")
    images = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    export.write_export(predictor, images, place / "model.file", kind="test", floats=False)


@pytest.mark.parametrize(
    ("write", "names"),
    [
        (write_ledger, {"sweep.json", "000.json", "best", "report.html"}),
        (write_pack, {"packed"}),
        (write_run, {"summary.json", "report.html", "validation.json", "metrics.jsonl"}),
        (write_exports, {"timm", "model.file"}),
    ],
)
def test_all_of_what_gets_a_name_is_on_the_disk_before(
    tmp_path: Path,
    unflushed: dict[str, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[[Path], None],
    names: set[str],
) -> None:
    def write_program(module: Any, example: Any, metadata: dict[str, str], path: Path) -> None:
        path.write_text("a program")

    form = export.Format(".file", write_program, lambda path: lambda images: torch.zeros(len(images), 2))
    monkeypatch.setitem(export.EXPORT_FORMATS, "test", form)
    monkeypatch.setattr(export, "LARGEST_SHARE", 2.0)  # it has other logits
    write(tmp_path)
    assert names <= unflushed.keys()
    assert {name: parts for name, parts in unflushed.items() if parts} == {}


def test_a_disk_without_room_is_one_sentence_with_a_remedy(tmp_path: Path, full_disk: Any) -> None:
    with full_disk(10), pytest.raises(StorageError) as caught:
        write_atomic(tmp_path / "file", "x" * 100)
    says = f"{tmp_path}/file cannot be written (File too large); free disk space there, and rerun the command"
    assert str(caught.value) == says
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_the_place_of_a_file_is_a_storage_error_and_stays(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(StorageError, match=r"file cannot be written \(Is a directory\)"):
        write_atomic(tmp_path / "file", "x")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_folders_that_were_absent_are_removed_again_unless_somebody_uses_them(tmp_path: Path) -> None:
    paths = [tmp_path / "runs" / "sweeps" / "one", tmp_path / "runs" / "other"]
    for user, left in (
        (None, []),
        (tmp_path / "runs" / "sweeps" / "file", ["runs", "runs/sweeps", "runs/sweeps/file"]),
    ):
        new = absent(*paths)
        for path in paths:
            path.mkdir(parents=True)
        if user is not None:
            user.touch()
        remove_empty(new)
        assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == left


def test_only_what_a_full_disk_raises_becomes_a_storage_error(tmp_path: Path) -> None:
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        with pytest.raises(StorageError, match=str(tmp_path)), safe_write.full_disk(tmp_path):
            raise OSError(number, os.strerror(number))
    with pytest.raises(FileNotFoundError), safe_write.full_disk(tmp_path):
        raise FileNotFoundError(errno.ENOENT, "gone")


def test_a_file_that_a_user_names_is_new_or_a_plain_one(tmp_path: Path) -> None:
    (tmp_path / "folder.onnx").mkdir()
    (tmp_path / "old.onnx").write_text("")
    for name in ("new.onnx", "old.onnx"):
        check_out(tmp_path / name, ".onnx")
    for name in ("folder.onnx", "new.png", "none/new.onnx"):
        with pytest.raises(InputError, match=r"--out is .*, expected a file whose name ends with \.onnx in a folder"):
            check_out(tmp_path / name, ".onnx")


def test_a_full_disk_is_one_sentence_also_where_safetensors_writes(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        sentence = r"timm cannot be written \(File too large\); free disk space there"
        with pytest.raises(StorageError, match=sentence), safe_write.storing(tmp_path / "timm"):
            save_file({"weight": torch.zeros(1000)}, tmp_path / "a.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(ValueError, match="of no system"), safe_write.storing(tmp_path):
        raise ValueError("of no system")
