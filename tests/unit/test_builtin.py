"""The data sets: their content, how they are read, and how a missing one is downloaded."""

import gzip
import hashlib
import http.server
import json
import os
import pickle
import shutil
import struct
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision import datasets

from helpers import ROOT, forks, result
from lockstep.core.errors import InputError
from lockstep.data.datasets import builtin
from lockstep.data.datasets.builtin import CIFAR10, CIFAR100, MNIST, Digits, Fake, FashionMNIST, Published

REAL = ROOT.parent / "shared" / "data"
NAMES = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")


def idx(array: np.ndarray) -> bytes:
    """An array of bytes in the format of MNIST's files."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def small_mnist() -> dict[str, np.ndarray]:
    """Twelve training images and four to evaluate; image i has grey level i."""
    images = np.broadcast_to(np.arange(12, dtype=np.uint8)[:, None, None], (12, 28, 28))
    labels = (np.arange(12) % 10).astype(np.uint8)
    return dict(zip(NAMES, (images, labels, images[:4], labels[:4]), strict=True))


def write_mnist(root: Path, **changed: np.ndarray) -> Path:
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for name, array in {**small_mnist(), **{key.replace("_", "-"): value for key, value in changed.items()}}.items():
        (raw / f"{name}-ubyte").write_bytes(idx(array))
    return root


def test_digits_is_every_image_of_scikit_learn_once_a_fifth_held_out() -> None:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    ours = torch.cat([Digits().train().images, Digits().eval().images]).flatten(1).tolist()
    theirs = (bunch.images * (255 / 16)).astype(np.uint8).reshape(len(bunch.images), -1).tolist()
    assert Counter(map(tuple, ours)) == Counter(map(tuple, theirs))
    train, val = (torch.bincount(split.labels) for split in (Digits().train(), Digits().eval()))
    assert torch.equal(val, (train + val) // 5)


def test_digits_has_the_mean_and_deviation_of_its_split_read_once() -> None:
    pixels = Digits().train().images.double() / 255
    assert pixels.mean().item() == pytest.approx(Digits.mean[0], abs=2e-3)
    assert pixels.std().item() == pytest.approx(Digits.std[0], abs=2e-3)
    assert Digits().train() is Digits().train() is Digits(input_size=12).train()


@pytest.mark.skipif(not REAL.is_dir(), reason="the real files of MNIST are not beside this checkout")
def test_mnist_reads_the_real_files(tmp_path: Path) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in NAMES:
        with gzip.open(REAL / f"{name}-ubyte.gz") as packed, (raw / f"{name}-ubyte").open("wb") as file:
            shutil.copyfileobj(packed, file)
    source = MNIST(root=str(tmp_path))
    source.prepare()
    train, val = source.train(), source.eval()
    assert train.images.shape == (60_000, 1, 28, 28)
    assert val.images.shape == (10_000, 1, 28, 28)
    assert train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    pixels = train.images.double() / 255
    assert pixels.mean().item() == pytest.approx(MNIST.mean[0], abs=1e-4)
    assert pixels.std().item() == pytest.approx(MNIST.std[0], abs=1e-4)


@pytest.mark.parametrize(("name", "shape"), [("train_labels_idx1", 5), ("train_images_idx3", (12, 20, 20))])
def test_files_that_do_not_fit_each_other_are_refused(tmp_path: Path, name: str, shape: Any) -> None:
    changed = {name: np.zeros(shape, dtype=np.uint8)}
    with pytest.raises(InputError, match=r"has images \(12, .*, expected one for each label, \(\d+, 1, 28, 28\)"):
        MNIST(root=str(write_mnist(tmp_path, **changed))).train()


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_mnist_is_read_packed_or_not_and_is_not_unpacked(tmp_path: Path, suffix: str) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for stem, array in small_mnist().items():
        (raw / f"{stem}-ubyte{suffix}").write_bytes(gzip.compress(idx(array)) if suffix else idx(array))
    if not suffix:  # links are read, and a file is read before the packed one beside it
        linked = raw / f"{NAMES[0]}-ubyte"
        linked.rename(tmp_path / "elsewhere")
        linked.symlink_to(tmp_path / "elsewhere")
        linked.with_name(f"{linked.name}.gz").write_bytes(b"no gzip")
    before = sorted(tmp_path.rglob("*"))
    source = MNIST(root=str(tmp_path))
    source.prepare()
    assert source.train().images[:, 0, 0, 0].tolist() == list(range(12))
    assert source.eval().labels.tolist() == [0, 1, 2, 3]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "content",
    [
        *(gzip.compress(bytes(5000))[:-9], b"\x1f\x8b\x08 no gzip", b"no idx"),
        *(gzip.compress(idx(small_mnist()[NAMES[0]]) + more) for more in (b"\0", bytes(28 * 28))),
    ],
    ids=[
        "cut short",
        "no gzip",
        "no idx",
        "a byte too many",
        "an image too many",
    ],  # not the bytes: gzip writes the time into them
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    (write_mnist(tmp_path) / "MNIST" / "raw" / "train-images-idx3-ubyte").unlink()
    (tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte.gz").write_bytes(content)
    with pytest.raises(InputError, match=r"data_root: MNIST cannot be read from .*put train-images-idx3-ubyte\.gz"):
        MNIST(root=str(tmp_path)).train()


def cifar_files(monkeypatch: pytest.MonkeyPatch, folder: Path, kind: Any) -> list[np.ndarray]:
    """Small files in the original pickle format, three images each; torchvision is told their md5.

    Returns the rows of the images in the order of the files, those of the evaluation split last.
    """
    folder.mkdir()
    generator, rows = np.random.default_rng(0), []
    key = "labels" if kind is datasets.CIFAR10 else "fine_labels"

    def written(name: str, content: dict[str, Any]) -> str:
        data = pickle.dumps(content, protocol=2)
        (folder / name).write_bytes(data)
        return hashlib.md5(data).hexdigest()

    for attribute in ("train_list", "test_list"):
        sums = []
        for name, _ in getattr(kind, attribute):
            rows.append(generator.integers(0, 256, (3, 3072), dtype=np.uint8))
            sums.append([name, written(name, {"data": rows[-1], key: [0, 1, 2]})])
        monkeypatch.setattr(kind, attribute, sums)
    names = written(kind.meta["filename"], {kind.meta["key"]: ["a", "b", "c"]})
    monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": names})
    return rows


@pytest.mark.parametrize("source", [CIFAR10, CIFAR100])
@pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "archive"])
def test_cifar_is_read_unpacked_or_from_its_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: type[CIFAR10], packed: bool
) -> None:
    kind = getattr(datasets, source.factory)
    rows = cifar_files(monkeypatch, tmp_path / source.unpacked, kind)
    if packed:
        with tarfile.open(tmp_path / source.archive, "w:gz") as tar:
            tar.add(tmp_path / source.unpacked, source.unpacked)
        shutil.rmtree(tmp_path / source.unpacked)
        monkeypatch.setattr(kind, "tgz_md5", hashlib.md5((tmp_path / source.archive).read_bytes()).hexdigest())
    dataset = source(root=str(tmp_path))
    dataset.prepare()
    expected = torch.from_numpy(np.concatenate(rows).reshape(-1, 3, 32, 32))
    assert torch.equal(torch.cat([dataset.train().images, dataset.eval().images]), expected)
    assert dataset.train().images.is_contiguous()
    assert dataset.train().labels.tolist() == [0, 1, 2] * (len(rows) - 1)
    assert dataset.eval().labels.tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["data_batch_3", "batches.meta"])
def test_a_pickle_of_cifar_that_is_not_the_published_one_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = tmp_path / CIFAR10.unpacked
    cifar_files(monkeypatch, folder, datasets.CIFAR10)
    (folder / name).write_bytes(b"cos\nsystem\n(S'touch " + os.fsencode(tmp_path / "ran") + b"'\ntR.")
    monkeypatch.setattr(datasets.CIFAR10, "url", "file:///nowhere/cifar.tar.gz")
    for read in (CIFAR10.train, CIFAR10.prepare):  # also where it cannot be downloaded again
        with pytest.raises(
            InputError, match=r"CIFAR10 cannot be read from .* not the published one by its md5\); put"
        ):
            read(CIFAR10(root=str(tmp_path)))
    assert not (tmp_path / "ran").exists()


def test_fake_images_are_the_same_every_time() -> None:
    source = Fake(examples=20, classes=3, channels=2, size=4)
    source.prepare()
    assert source.train().images.shape == (20, 2, 4, 4)
    assert source.eval().images.shape == (5, 2, 4, 4)
    assert torch.equal(source.train().images, source.train().images)
    assert not torch.equal(source.train().images[:5], source.eval().images)
    assert set(source.train().labels.tolist()) == {0, 1, 2}
    assert len(source.mean) == len(source.std) == 2
    assert [len(Fake(examples=number, size=1).eval()) for number in (1, 3, 4, 7, 8)] == [1, 1, 1, 1, 2]


@pytest.mark.parametrize("targets", ["classes", "labels", "values"])
def test_fake_data_depend_on_nothing_but_their_options(targets: str) -> None:
    source, splits = Fake(examples=900, classes=3, channels=1, size=4, targets=targets), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        builtin._random.cache_clear()
        splits.append([part for split in (source.train(), source.eval()) for part in (split.images, split.labels)])
    for one, other in zip(*splits, strict=True):
        assert torch.equal(one, other)
    images, labels, evaluated, _ = splits[0]
    assert images.unique().tolist() == [*range(256)]
    assert source.generated_bytes == images.numel() + evaluated.numel() == 900 * 16 + 225 * 16
    expected = {"classes": (1, 2 / 3), "labels": (0.3, 0.21), "values": (0, 1)}[targets]
    moments = labels.double().mean().item(), labels.double().var().item()
    assert moments == (pytest.approx(expected[0], abs=0.05), pytest.approx(expected[1], abs=0.07))
    assert labels.shape == ((900,) if targets == "classes" else (900, 3))
    assert Fake(channels=2).mean == (0.5, 0.5)
    assert Fake(channels=2).std == (0.25, 0.25)


def test_an_oblong_size_is_a_height_and_a_width() -> None:
    """As everywhere: `[height,width]`."""
    fake = Fake(size=[8, 6], examples=4)
    assert (fake.image_shape, fake.train().fetch([0]).shape) == ((3, 8, 6), (1, 3, 8, 6))
    assert Digits(input_size=[12, 9]).input_shape == (1, 12, 9)
    assert CIFAR10(input_size=[48, 40]).input_shape == (3, 48, 40)


class Mirror:
    """A web server for the packed files of a small MNIST, which records the requested files.

    It answers only after all processes that need the data have started, so that they really compete.
    """

    def __init__(self, arrivals: Path, expected: int) -> None:
        self.files = {f"{name}-ubyte.gz": gzip.compress(idx(array)) for name, array in small_mnist().items()}
        self.requests: list[str] = []
        mirror = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.rpartition("/")[2]
                if self.headers.get("Method") != "HEAD":  # with HEAD torchvision asks for redirections
                    mirror.requests.append(name)
                end = time.monotonic() + 240
                while len(list(arrivals.iterdir())) < expected and time.monotonic() < end:
                    time.sleep(0.02)
                self.send_response(200 if name in mirror.files else 404)
                self.end_headers()
                self.wfile.write(mirror.files.get(name, b""))

            def log_message(self, *args: object) -> None:
                """Print nothing."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/"

    @property
    def resources(self) -> list[tuple[str, str]]:
        return [(name, hashlib.md5(data).hexdigest()) for name, data in self.files.items()]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[Mirror]:
    (tmp_path / "arrivals").mkdir()
    server = Mirror(tmp_path / "arrivals", expected=2)
    yield server
    server.close()


def point_at(url: str, resources: list[tuple[str, str]]) -> None:
    """Have torchvision's MNIST fetch its files from `url`."""
    os.environ["no_proxy"] = "127.0.0.1"
    datasets.MNIST.mirrors = [url]
    datasets.MNIST.resources = resources


def prepare_in_a_process(arrival: str, root: str, url: str, resources: str) -> None:
    """Prepare the data as one of several ranks on different machines that share a data folder."""
    point_at(url, json.loads(resources))
    Path(arrival).touch()
    source = MNIST(root=root)
    source.prepare()
    assert len(source.train()) == 12


def test_two_processes_that_want_a_missing_data_set_at_once_download_it_once(tmp_path: Path, mirror: Mirror) -> None:
    places = (tmp_path / "data", mirror.url, json.dumps(mirror.resources))
    function, arrivals = f"{__name__}:prepare_in_a_process", [str(tmp_path / "arrivals" / name) for name in "ab"]
    processes = [forks().start(function, arrival, *map(str, places)) for arrival in arrivals]
    assert [result(process).code for process in processes] == [0, 0]
    assert sorted(mirror.requests) == sorted(mirror.files)


def test_a_data_set_that_cannot_be_downloaded_is_an_error_that_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.MNIST, "mirrors", ["file:///nowhere/"])
    root = tmp_path / "data"
    with pytest.raises(InputError) as caught:
        MNIST(root=str(root)).prepare()
    assert "/data (there is no train-images-idx3-ubyte) and cannot be downloaded (" in str(caught.value)
    files = ", ".join(f"{name}-ubyte.gz" for name in NAMES)
    assert f"; put {files} (compressed or not) into {root}/MNIST/raw, or name another folder" in str(caught.value)
    assert not root.exists()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("one mirror failed\nanother failed"), "another failed"),
        (TimeoutError(" \n"), "TimeoutError"),
        (None, None),
    ],
    ids=["of two lines", "without a text", "none"],
)
def test_a_missing_data_set_is_downloaded_whole_and_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None, reason: str | None
) -> None:
    fetched, root = [], tmp_path / "deep" / "data"

    def fetch(root: str, train: bool, download: bool) -> None:
        fetched.append((train, download))
        assert Path(root, ".FashionMNIST.lock").is_file(), "other processes wait"
        if error is not None:
            raise error
        if "written" in root:
            shutil.copytree(write_mnist(tmp_path / "mnist") / "MNIST", Path(root, "FashionMNIST"), dirs_exist_ok=True)

    monkeypatch.setattr(datasets, "FashionMNIST", fetch)
    with pytest.raises(InputError) as caught:
        FashionMNIST(root=str(root)).prepare()
    if reason is not None:
        assert f"(there is no train-images-idx3-ubyte) and cannot be downloaded ({reason}); put" in str(caught.value)
        assert fetched == [(True, True)]
    else:
        assert "FashionMNIST cannot be read from" in str(caught.value), "the download has brought no file"
        assert fetched == [(True, True), (False, True)]
        source = FashionMNIST(root=str(tmp_path / "written"))
        source.prepare()
        assert (len(source.train()), len(source.eval())) == (12, 4)
        assert [path.name for path in Path(source.root).iterdir()] == ["FashionMNIST"], "the lock is gone"
    assert not root.exists()


@pytest.mark.parametrize(
    ("source", "place"),
    [
        (MNIST, "MNIST/raw/train-images-idx3-ubyte.gz"),
        (CIFAR10, "cifar-10-python.tar.gz"),
        (CIFAR10, "cifar-10-batches-py/data_batch_1"),
        (CIFAR100, "cifar-100-python"),
    ],
)
def test_nothing_is_downloaded_through_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: type[Published], place: str
) -> None:
    def download(*_: Any, **__: Any) -> None:
        raise AssertionError("a download")

    monkeypatch.setattr(source, "fetch", download)
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=f"{place} is a symbolic link, which leads elsewhere"):
        source(root=str(tmp_path)).prepare()


@pytest.mark.parametrize("source", [CIFAR10, CIFAR100])
def test_an_archive_belongs_into_the_folder_where_its_files_are_looked_for(
    tmp_path: Path, source: type[CIFAR10]
) -> None:
    assert source(root=str(tmp_path)).remedy == f"put {source.archive} into {tmp_path}, where it is unpacked"


# As papers and libraries publish them, for pixels from 0 to 1.
PUBLISHED: dict[type[Published], tuple[Any, Any, str]] = {
    MNIST: ((0.1307,), (0.3081,), "shift"),
    FashionMNIST: ((0.2860,), (0.3530,), "crop_flip"),
    CIFAR10: ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), "crop_flip"),
    CIFAR100: ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), "crop_flip"),
}


@pytest.mark.parametrize("cls", PUBLISHED)
def test_a_published_data_set_has_its_published_figures(cls: type[Published]) -> None:
    mean, std, augment = PUBLISHED[cls]
    source = cls(root="nowhere")
    assert (source.mean, source.std, source.usual_augment) == (mean, std, augment)
    assert source.classes == (100 if cls is CIFAR100 else 10)
    assert source.image_shape == ((1, 28, 28) if len(mean) == 1 else (3, 32, 32))
    assert source.factory == cls.__name__
    assert source.downloads


def test_a_missing_archive_is_named_by_its_folder_and_put_where_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(self: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(CIFAR10, "fetch", offline)
    with pytest.raises(InputError) as caught:
        CIFAR100(root=str(tmp_path)).prepare()
    assert str(caught.value) == (
        f"data_root: CIFAR100 cannot be read from {tmp_path} (there is no cifar-100-python) and cannot be downloaded "
        f"(no network); put cifar-100-python.tar.gz into {tmp_path}, where it is unpacked, or name another folder "
        "with data_root=FOLDER"
    )
    with pytest.raises(
        InputError, match=r"\(FileNotFoundError: there is no cifar-100-python\); put cifar-100-python"
    ):
        CIFAR100(root=str(tmp_path)).train()


@pytest.mark.parametrize("is_there", [False, True])
def test_a_lock_that_was_there_before_a_download_stays_for_those_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    def offline(self: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(MNIST, "fetch", offline)
    if is_there:
        (tmp_path / ".MNIST.lock").touch()
    with pytest.raises(InputError, match="no network"):
        MNIST(root=str(tmp_path)).prepare()
    assert [path.name for path in tmp_path.iterdir()] == [".MNIST.lock"] * is_there


def test_images_that_are_made_have_no_facts_to_compare() -> None:
    assert Fake(examples=8, size=2).fingerprint() == {"train": {}, "val": {}}
    assert Digits().fingerprint()["train"].keys() == {"images", "labels"}
