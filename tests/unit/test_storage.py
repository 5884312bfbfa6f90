"""What the system cannot read, as a network file system at times, is no damaged image: exit code 74.

No machine of the tests has a network file system that fails. So the reads of one file have its errors, where the
readers ask the system for bytes.
"""

from __future__ import annotations

import errno
import os
import pickle
import struct
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import command, photos_of_two_classes, preprocessing
from lockstep.cli.pack import pack
from lockstep.core import safe_read
from lockstep.core.errors import BrokenImage, LockstepError, StorageError
from lockstep.core.run import Run
from lockstep.core.safe_read import UnreadableStorage
from lockstep.core.world import World
from lockstep.data.datasets import CSV, MNIST, Folder, Packed, WebDataset, builtin, decode
from lockstep.data.datasets.files import FileSplit
from lockstep.data.loading.reading import decode_all, read_images
from lockstep.inference.images import stored_image

ERRNOS = ("EIO", "ESTALE", "EAGAIN", "ETIMEDOUT", "ENOTCONN", "EHOSTDOWN", "ENODEV")
# The errors of a path, of too many open files, and of a library, which has no number.
LASTING = ("EACCES", "EPERM", "EROFS", "ENAMETOOLONG", "ENOTDIR", "EISDIR", "ENOENT", "ELOOP", "EMFILE", "ENFILE", "")
Faults = Callable[..., list[str]]


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    monkeypatch.setattr(safe_read, "PAUSES_S", (0, 0, 0))

    def install(ending: str, name: str, times: int = 10**6) -> list[str]:
        """Have the first reads of the file with such a name fail; returns the failures so far."""
        failures: list[str] = []
        number, real = getattr(errno, name), safe_read.stored

        def stored(read: Callable[[], Any], place: object) -> Any:
            def attempt() -> Any:
                if str(place).endswith(ending) and len(failures) < times:
                    failures.append(str(place))
                    raise OSError(number, os.strerror(number), str(place))
                return read()

            return real(attempt, place)

        for module in (safe_read, decode, builtin):
            monkeypatch.setattr(module, "stored", stored)
        return failures

    return install


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The photos of two classes as a folder, a table, a tar file and packed; and MNIST's files with a few images."""
    root = tmp_path_factory.mktemp("storage")
    photos = photos_of_two_classes(root, 32, "png") / "photos"
    files = sorted(photos.rglob("*.png"))
    rows = [f"{file},{file.parent.name},{'train' if number % 2 else 'val'}" for number, file in enumerate(files)]
    (root / "list.csv").write_text("\n".join(["path,label,split", *rows]))
    (root / "shards").mkdir()
    for split in ("train", "val"):
        with tarfile.open(root / "shards" / f"{split}.tar", "w") as archive:
            for number, file in enumerate(files):
                (root / "label").write_text(file.parent.name)
                archive.add(root / "label", f"{number}.cls")
                archive.add(file, f"{number}.png")
    pack([str(photos), str(root / "packed")], decode_size="8")
    (raw := root / "MNIST" / "raw").mkdir(parents=True)
    for split in ("train", "t10k"):
        (raw / f"{split}-images-idx3-ubyte").write_bytes(struct.pack(">4I", 0x803, 10, 28, 28) + bytes(7840))
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x801, 10) + bytes(10))
    (root / "data").symlink_to(root)
    return root


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "a photo of a folder": (
        "0.png",
        lambda root: read_images(Folder(path=str(root / "photos"), decode_size=8, skip=99).train(), [*range(10)]),
    ),
    "all photos of a folder": (
        "0.png",
        lambda root: decode_all(
            Folder(path=str(root / "photos"), decode_size=8, skip=99).train(), World.solo(), threads=2
        ),
    ),
    "a table": ("list.csv", lambda root: CSV(path=str(root / "list.csv")).list_files()),
    "a photo of a table": (
        "0.png",
        lambda root: read_images(CSV(path=str(root / "list.csv"), decode_size=8, skip=99).train(), [*range(10)]),
    ),
    "a shard": ("train.tar", lambda root: WebDataset(path=str(root / "shards")).list_files()),
    "a photo of a shard": (
        "0.png",
        lambda root: read_images(WebDataset(path=str(root / "shards"), decode_size=8, skip=99).train(), [*range(10)]),
    ),
    "a packed data set": ("manifest.json", lambda root: Packed(path=str(root / "packed")).train()),
    "MNIST": ("train-images-idx3-ubyte", lambda root: MNIST(root=str(root)).prepare()),
    "a folder of torchvision": ("data", lambda root: MNIST(root=str(root / "data")).prepare()),
    "a photo to predict": (
        "0.png",
        lambda root: stored_image(next((root / "photos").rglob("*0.png")), preprocessing(8, 8)),
    ),
}


def forget() -> None:
    """Forget what this process has listed."""
    from lockstep.data.datasets import files, packed

    files.LISTINGS.clear()
    packed.read_manifest.cache_clear()
    packed.map_split.cache_clear()
    builtin._arrays.cache_clear()


@pytest.mark.parametrize("name", ERRNOS)
@pytest.mark.parametrize("kind", READERS)
def test_what_the_system_cannot_read_ends_with_74_in_every_reader(
    root: Path, faults: Faults, kind: str, name: str
) -> None:
    ending, read = READERS[kind]
    forget()
    failures = faults(ending, name)
    with pytest.raises(
        StorageError, match=rf"{root}/\S*{ending} cannot be read \({os.strerror(getattr(errno, name))}"
    ) as caught:
        read(root)
    assert caught.value.exit_code == 74
    assert not isinstance(caught.value, BrokenImage)
    assert len(failures) % 4 == 0
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value), "for other ranks"


def test_storage_that_fails_is_no_reason_to_download_anew(
    root: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = list[str]()
    monkeypatch.setattr(MNIST, "fetch", lambda source: fetched.append(source.root))
    forget()
    faults("train-images-idx3-ubyte", "EIO")
    with pytest.raises(StorageError, match="cannot be read"):
        MNIST(root=str(root)).prepare()
    assert not fetched


@pytest.mark.parametrize("kind", READERS)
def test_what_can_be_read_at_the_fourth_attempt_is_read(root: Path, faults: Faults, kind: str) -> None:
    ending, read = READERS[kind]
    forget()
    failures = faults(ending, "ESTALE", times=3)
    read(root)
    assert len(failures) == 3


@pytest.mark.parametrize("kind", ["a photo of a folder", "a photo of a table", "a photo of a shard"])
def test_short_reads_are_put_together(root: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    _, read = READERS[kind]
    forget()
    expected, broken = read(root)
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, offset: pread(file, min(size, 7), offset))
    images, broken = read(root)
    assert torch.equal(images, expected)
    assert not broken


def test_a_photo_that_is_shorter_than_it_was_said_is_not_damaged(tmp_path: Path, faults: Faults) -> None:
    faults("no file", "EIO")
    source = WebDataset(path=str(tmp_path), val_share=0.5, decode_size=8, skip=9)
    with tarfile.open(tmp_path / "train.tar", "w") as archive:
        for number in range(4):
            for suffix, content in ((".cls", b"%d" % (number % 2)), (".jpg", b"x" * 5000)):
                (tmp_path / "member").write_bytes(content)
                archive.add(tmp_path / "member", f"{number}{suffix}")
    split = source.train()
    os.truncate(tmp_path / "train.tar", 3000)
    with pytest.raises(StorageError, match=r"train.tar:\d.jpg cannot be read \(it ends after [\d,]+ of 5,000 bytes"):
        read_images(split, [0, 1])


@pytest.mark.parametrize("kind", ["gone", "not ours"])
def test_a_photo_of_a_list_that_cannot_be_opened_is_not_damaged(tmp_path: Path, monkeypatch: Any, kind: str) -> None:
    path = tmp_path / "a.png"
    if kind == "not ours":  # root may read every file

        def denied(*_: object) -> int:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

        monkeypatch.setattr(os, "open", denied)
    with pytest.raises(StorageError, match=r"a.png is an image of the data set and cannot be read \("):
        read_images(FileSplit([path], torch.zeros(1), preprocessing(8, 8), skip=1), [0])
    with pytest.raises(safe_read.InputError, match=r"a.png(: there is no| cannot be read as an image \(Perm)"):
        stored_image(path, preprocessing(8, 8))


def test_a_file_of_a_run_that_cannot_be_read_is_damage_of_the_run(tmp_path: Path, faults: Faults) -> None:
    (tmp_path / "summary.json").write_text("{}")
    faults("summary.json", "EIO")
    assert "summary.json cannot be read (Input/output error" in Run(tmp_path).problem


PROGRAM = """
import errno, os, sys
import lockstep
from lockstep.core import safe_read
pread, opening, ending = os.pread, safe_read._open, sys.argv.pop(1)
def check(path):
    if str(path).endswith(ending):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
def faulty(file, size, offset):
    check(os.readlink(f"/proc/self/fd/{file}"))
    return pread(file, size, offset)
def faulty_opening(path, links):
    check(path)
    return opening(path, links)
os.pread, safe_read._open = faulty, faulty_opening
lockstep.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["0.png", "list.csv", "train.tar", "manifest.json"])
def test_a_run_with_a_file_that_cannot_be_read_ends_with_74_whatever_it_may_skip(
    root: Path, tmp_path: Path, ending: str
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    words = {
        "0.png": ("dataset=folder", f"dataset.path={root}/photos", "dataset.skip=99", "dataset.decode_size=8"),
        "list.csv": ("dataset=csv", f"dataset.path={root}/list.csv", "dataset.skip=99", "dataset.decode_size=8"),
        "train.tar": (
            "dataset=webdataset",
            f"dataset.path={root}/shards",
            "dataset.skip=99",
            "dataset.decode_size=8",
        ),
        "manifest.json": ("dataset=packed", f"dataset.path={root}/packed"),
    }[ending]
    job = ("model=linear", "steps=1", "batch=8", "device=cpu", "launcher=inline")
    done = command(sys.executable, "program.py", ending, *words, *job, cwd=tmp_path)
    assert done.code == 74, done.err
    assert f"{ending} cannot be read (Stale file handle, also when it was read again); check its disk" in done.err
    assert len(done.err.strip().splitlines()) == 1


@pytest.mark.parametrize("name", [*ERRNOS, *LASTING])
def test_only_an_error_that_may_pass_is_tried_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)

    def fail() -> None:
        raise OSError(getattr(errno, name), "fault") if name else OSError("fault")

    with pytest.raises(OSError if name in LASTING else UnreadableStorage, match="fault"):
        safe_read.stored(fail, "place")
    assert pauses == ([] if name in LASTING else [0.1, 0.4, 1.2, 0]), "longer and longer, and none at the end"


@pytest.mark.parametrize("name", [*ERRNOS, *LASTING])
@pytest.mark.parametrize("path", ["a/path", None])
def test_only_an_error_of_a_path_that_cannot_be_used_is_the_mistake_of_who_named_it(
    name: str, path: str | None
) -> None:
    is_mistake = path is not None and name in LASTING[:6]
    error = OSError(getattr(errno, name), "fault", path) if name else OSError("fault")
    with pytest.raises(safe_read.UnreadableFile if is_mistake else OSError) as caught, safe_read.unusable_paths():
        raise error
    assert str(caught.value) == "a/path cannot be used (fault)" if is_mistake else caught.value is error


def test_a_file_that_takes_more_memory_than_there_is_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    sentence = r"^out of memory while .*file was read \(MemoryError\); allow more"
    with pytest.raises(LockstepError, match=sentence), safe_read.open_plain(tmp_path / "file"):
        raise MemoryError
