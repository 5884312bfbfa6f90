"""A file is on the disk before it gets its name, and a full disk is reported with one sentence."""

import errno
import os
import re
import resource
from collections.abc import Callable
from contextlib import nullcontext
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


def test_the_name_of_a_packed_data_set_is_on_the_disk_too(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    write_pack(tmp_path)
    assert calls[-2:] == [("name", "packed"), ("sync", tmp_path.name)]


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
        says = r"^named cannot be written .*; free disk space there, and rerun"
        with pytest.raises(StorageError, match=says), safe_write.full_disk(tmp_path):
            raise OSError(number, os.strerror(number), "named")
    says = r"^file cannot be written \(Permission denied\)$"
    with pytest.raises(StorageError, match=says), safe_write.storing(Path("file")):
        raise PermissionError(errno.EACCES, "refused")
    with pytest.raises(FileNotFoundError), safe_write.full_disk(tmp_path):
        raise FileNotFoundError(errno.ENOENT, "gone")


def test_a_file_that_a_user_names_is_new_or_a_plain_one(tmp_path: Path) -> None:
    (tmp_path / "folder.onnx").mkdir()
    (tmp_path / "old.onnx").write_text("")
    for name in ("new.onnx", "old.onnx"):
        check_out(tmp_path / name, ".onnx")
    os.mkfifo(tmp_path / "pipe.onnx")
    (tmp_path / "link.onnx").symlink_to("old.onnx")
    (tmp_path / "dangling.onnx").symlink_to("nothing.onnx")
    (tmp_path / "hard.onnx").hardlink_to(tmp_path / "old.onnx")
    wrong = {"folder.onnx": ", a folder", "pipe.onnx": ", a pipe", "hard.onnx": ", a hard link"}
    wrong |= dict.fromkeys(("link.onnx", "dangling.onnx"), ", a symbolic link")
    for name, kind in {**wrong, "new.png": "", "none/new.onnx": ""}.items():
        for suffix, says in ((".onnx", "a file whose name ends with .onnx"), ("", "a file")):
            if name == "new.png" and not suffix:
                check_out(tmp_path / name)
                continue
            with pytest.raises(InputError) as caught:
                check_out(tmp_path / name, suffix)
            expected = f"--out is {tmp_path / name}{kind}, expected {says} in a folder that exists"
            assert str(caught.value) == expected


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


def test_a_refused_file_leaves_no_descriptor_open(tmp_path: Path) -> None:
    (foreign := tmp_path / "foreign").write_text("of another program")
    (busy := tmp_path / "busy").touch()
    (other := tmp_path / "other").touch()
    (tmp_path / "hard").hardlink_to(other)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("foreign")
    attempts: list[Callable[[], Any]] = [
        lambda: safe_write.append(tmp_path / "hard"),
        lambda: safe_write.append(Path("/dev/null")),
        lambda: safe_write.append(tmp_path / "pipe"),
        lambda: safe_write.append(tmp_path / "link"),
        lambda: safe_write.append(tmp_path / "link", "ab"),
        lambda: safe_write.append(tmp_path / "hard", "r+b"),
        lambda: safe_write.open_locked(busy),
        lambda: safe_write.Lock().take(busy),
        lambda: safe_write.Lock().take(foreign),
        lambda: safe_write.sync(tmp_path / "none"),
        lambda: write_atomic(tmp_path, "x"),
    ]
    with safe_write.locked(busy):
        before = len([*Path("/dev/fd").iterdir()])
        for attempt in attempts:
            with pytest.raises((OSError, InputError, StorageError)):
                attempt()
            assert len([*Path("/dev/fd").iterdir()]) == before


def test_a_file_that_somebody_has_put_in_the_place_of_a_temporary_one_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda size: "0" * 2 * size)
    (precious := tmp_path / "precious").write_text("precious")
    place = tmp_path / f".{'0' * 16}.tmp"
    for put in (place.symlink_to, place.hardlink_to):
        put(precious)
        with pytest.raises(StorageError, match=r"file cannot be written \(File exists\)"):
            write_atomic(tmp_path / "file", "x")
        assert precious.read_text() == place.read_text() == "precious"
        place.unlink()
    assert [*tmp_path.iterdir()] == [precious]


def test_a_text_is_utf8_and_bytes_of_a_name_that_are_no_unicode_are_shown(tmp_path: Path) -> None:
    for text, written in (("aé漢\n", "aé漢\n"), (os.fsdecode(b"caf\xe9"), r"caf\udce9"), ("", "")):
        write_atomic(tmp_path / "text", text)
        assert (tmp_path / "text").read_bytes() == written.encode()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_a_folder_that_a_file_system_cannot_flush_is_no_error_and_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refused(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    before = len([*Path("/dev/fd").iterdir()])
    safe_write.sync(tmp_path)
    monkeypatch.setattr(os, "fsync", refused)
    with nullcontext() if number == errno.EINVAL else pytest.raises(OSError, match="nput/output error"):
        safe_write.sync(tmp_path)
    assert len([*Path("/dev/fd").iterdir()]) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("odd"), SystemExit(3)], ids=repr)
def test_a_file_that_was_not_finished_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    (tmp_path / "file").write_text("old")
    names: list[str] = []
    with pytest.raises(type(error)), safe_write.replacing(tmp_path / "file") as temporary:
        raise names.append(temporary.name) or error
    assert re.fullmatch(r"\.[0-9a-f]{16}\.tmp", names[0]), (
        "TensorBoard reads what has the name of an event file in it"
    )
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]


def test_all_paths_of_all_patterns_are_looked_at_the_first_by_name_and_what_is_gone_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "b.csv").symlink_to("a.txt")
    (tmp_path / "a.txt").touch()
    (tmp_path / "folder.csv").mkdir()
    safe_write.check_names(tmp_path, "*.txt", "folder.csv")
    for patterns in (("*.csv",), ("*.csv", "*.txt"), ("*.txt", "*.csv"), ("**/*",)):
        with pytest.raises(
            InputError, match=r"b\.csv is a symbolic link, which leads elsewhere; remove it, or use a"
        ):
            safe_write.check_names(tmp_path, *patterns)
    os.mkfifo(tmp_path / "aa.csv")
    for patterns in (("a*.csv", "b*.csv"), ("b*.csv", "a*.csv")):
        with pytest.raises(InputError, match=r"aa\.csv is a pipe"):
            safe_write.check_names(tmp_path, *patterns)

    def gone(path: Path) -> None:
        raise FileNotFoundError(errno.ENOENT, "gone")

    monkeypatch.setattr(Path, "lstat", gone)
    safe_write.check_names(tmp_path, "*.csv")


def test_only_the_error_of_the_system_is_one_of_storage() -> None:
    errors = {OSError(5, "x"): 5, ValueError("x (os error 28)"): 28, ValueError("x"): None, OSError("x"): None}
    assert {error: safe_write.system_error(error) for error in errors} == errors


def test_a_link_to_nothing_is_there_and_folders_are_removed_up_to_the_one_in_use(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nothing")
    assert absent(tmp_path / "link") == []
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "c").mkdir()
    (tmp_path / "a" / "b" / "file").touch()
    remove_empty([tmp_path / "a" / "b", tmp_path / "none", tmp_path / "c"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "link"]


@pytest.mark.parametrize("content", ["a\nb", b"a\nb", [b"a\n", b"b"], (part for part in (b"a", b"\nb"))], ids=type)
def test_a_text_bytes_and_parts_are_written_as_they_are(tmp_path: Path, content: Any) -> None:
    for before in (None, "an older and longer text"):
        if before is not None:
            (tmp_path / "file").write_text(before)
        write_atomic(tmp_path / "file", content if isinstance(content, (str, bytes, list)) else [b"a", b"\nb"])
        assert (tmp_path / "file").read_bytes() == b"a\nb"


def test_a_link_in_the_place_of_a_folder_and_a_second_name_are_told(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(InputError) as caught:
        safe_write.make_folder(tmp_path / "link")
    assert str(caught.value) == f"{tmp_path}/link is a symbolic link, expected a folder; replace it by its target"
    (tmp_path / "file").touch()
    (lock := tmp_path / "lock").hardlink_to(tmp_path / "file")
    with pytest.raises(OSError, match="it is a hard link, expected a plain file") as refused:
        safe_write.append(lock)
    assert (refused.value.errno, refused.value.filename) == (errno.EINVAL, str(lock))
    with pytest.raises(InputError) as caught:
        safe_write.Lock().take(lock)
    says = (
        "cannot be locked (it is a hard link, expected a plain file); choose another folder with output_root=FOLDER"
    )
    assert str(caught.value) == f"output_root: {lock} {says}"
    with pytest.raises(InputError) as caught:
        safe_write.check_names(tmp_path, "lock")
    says = "is a hard link, which leads elsewhere; remove it, or use a copy (cp -rL)"
    assert str(caught.value) == f"{lock} {says}"


def test_paths_that_are_absent_come_the_deepest_first_with_those_above_them(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    a, b = tmp_path / "a", tmp_path / "there" / "b"
    assert absent(a / "x" / "y", b, a / "z") == [b, a / "z", a / "x" / "y", a / "x", a]
    assert absent(tmp_path, tmp_path / "there") == []


def test_a_lock_ends_with_the_context_also_after_an_error(tmp_path: Path) -> None:
    before = len([*Path("/dev/fd").iterdir()])
    with safe_write.locked(tmp_path / "lock"), pytest.raises(BlockingIOError):
        safe_write.open_locked(tmp_path / "lock")
    with pytest.raises(ValueError, match="odd"), safe_write.locked(tmp_path / "lock"):
        raise ValueError("odd")
    assert len([*Path("/dev/fd").iterdir()]) == before
    os.close(safe_write.open_locked(tmp_path / "lock"))


def test_what_is_appended_is_behind_what_was_there_and_a_new_file_is_made(tmp_path: Path) -> None:
    for text in ("one\n", "two\n"):
        with safe_write.append(tmp_path / "log", encoding="utf-8") as file:
            file.write(text)
    with safe_write.append(tmp_path / "log", "r+b") as file:
        assert file.read() == b"one\ntwo\n"
