"""`lockstep doctor`: planted faults are told, with what mends them, and nothing is written."""

from __future__ import annotations

import io
import json
import re
import shutil
import socket
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from helpers import forked
from lockstep.core.errors import INSTALL, InputError
from lockstep.data.datasets import packed
from lockstep.data.datasets import photos as decode_photos
from lockstep.data.datasets.folder import Folder
from lockstep.diagnostics import examination, inspection, settings
from lockstep.diagnostics.doctor import Checkup
from lockstep.diagnostics.inspection import Level
from lockstep.diagnostics.settings import Gain
from lockstep.diagnostics.verdict import WORTH

JOB = ("device=cpu", "launcher.threads=1", "model=linear", "batch=4", "epochs=2")
SIZE = "dataset.decode_size=16"
CLASSES = ("cat", "dog", "eel")
IMAGES = 4  # of each class in each split


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Photos in class folders, no two of them equal."""
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in CLASSES:
            (tmp_path / "photos" / split / name).mkdir(parents=True)
            for number in range(IMAGES):
                pixels = Image.fromarray(rng.integers(0, 256, (20, 20, 3), dtype=np.uint8))
                pixels.save(tmp_path / "photos" / split / name / f"{number}.jpg")
    return tmp_path / "photos"


@pytest.fixture(autouse=True)
def _no_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trying other settings takes most of an examination; the command does it in one of the tests."""
    monkeypatch.setattr(settings, "tried", lambda *arguments, **options: {})


def examined(*words: str, multirun: bool = False, **options: Any) -> Checkup:
    checkup = Checkup(**options)
    checkup.examine([*JOB, *words], multirun=multirun)
    return checkup


def of_photos(photos: Path, *words: str, **options: Any) -> Checkup:
    output = f"output_root={photos.parent / 'outputs'}"
    return examined("dataset=folder", f"dataset.path={photos}", SIZE, output, *words, **options)


def problems(checkup: Checkup) -> dict[str, tuple[str, str]]:
    """The level and the text of the last problem of each check."""
    levels = (Level.warning, Level.error)
    return {item.check: (item.level, item.text) for item in checkup.findings if item.level in levels}


def test_a_job_that_fits_has_no_problem_and_leaves_nothing(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(photos.parent)
    before = {path: path.stat().st_mtime_ns for path in photos.parent.rglob("*")}
    checkup = of_photos(photos)
    assert not problems(checkup)
    checks = {item.check for item in checkup.findings}
    assert checks >= {"keys", "devices", "port", "classes", "images", "twice", "batch", "memory", "time", "disk"}
    assert 0 < next(item.amount for item in checkup.findings if item.check == "time") < 60
    assert {path: path.stat().st_mtime_ns for path in photos.parent.rglob("*")} == before


def broken(photos: Path) -> None:
    file = photos / "train" / "cat" / "0.jpg"
    file.write_bytes(file.read_bytes()[:200])


def in_both_splits(photos: Path) -> None:
    shutil.copy(photos / "train" / "cat" / "0.jpg", photos / "val" / "cat" / "copy.jpg")


def copied(target: str) -> Callable[[Path], object]:
    return lambda photos: shutil.copy(photos / "train" / "cat" / "0.jpg", photos / target)


def removed(folder: str) -> Callable[[Path], object]:
    return lambda photos: shutil.rmtree(photos / folder)


@pytest.mark.parametrize(
    ("plant", "words", "level", "check", "says"),
    [
        (broken, (), "error", "images", "use dataset.skip=1"),
        (broken, ("dataset.skip=1",), "warning", "images", "dataset.skip=1 skips them"),
        (in_both_splits, (), "warning", "twice", "val/cat/copy.jpg and "),
        (copied("train/cat/copy.jpg"), (), "warning", "twice", "1 twice in one split, such as "),
        (copied("train/dog/copy.jpg"), (), "warning", "twice", "1 twice with two labels, such as "),
        (removed("val/dog"), (), "warning", "classes", "1 of 3 classes have no image in the evaluation split"),
        (removed("train/dog"), (), "error", "data", "val/dog is a class that "),
    ],
)
def test_what_is_wrong_with_the_data_is_told(
    plant: Callable[[Path], object], words: tuple[str, ...], level: str, check: str, says: str, photos: Path
) -> None:
    plant(photos)
    planted = problems(of_photos(photos, *words))
    assert [check] == [name for name in planted if name != "batch"]  # the last batch may have one image
    assert planted[check][0] == level
    assert says in planted[check][1]


def test_broken_images_are_told_by_reason_and_a_missing_package_is_no_reason_to_skip(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(package: str, user: str, extra: str = "") -> None:
        raise InputError(f"{user} needs the package {package}, which is not installed; {INSTALL} 'lockstep[{extra}]'")

    monkeypatch.setattr(decode_photos, "check_installed", without)  # it may be installed here
    broken(photos)
    for number in (1, 2):
        (photos / f"train/dog/{number}.jpg").write_bytes(b"\0\0\0\x18ftypheic" + bytes(40))
    for words, level in (((), "error"), (("dataset.skip=3",), "warning")):
        heic, torn = (item for item in of_photos(photos, *words).findings if item.check == "images")
        assert heic.text.startswith("2 of 24 images broken, such as ")
        assert heic.text.endswith("install it with pip install 'lockstep[photos]')")
        assert heic.paths == tuple(str(photos / f"train/dog/{number}.jpg") for number in (1, 2))
        assert torn.paths == (str(photos / "train/cat/0.jpg"),)
        assert {heic.level, torn.level} == {level}
        assert torn.text.endswith("dataset.skip=3 skips them" if words else "or use dataset.skip=1")


def test_what_a_person_would_warn_of_is_told(photos: Path) -> None:
    for number in range(IMAGES * 10):
        shutil.copy(photos / "train/cat/0.jpg", photos / f"train/cat/{10 + number}.jpg")
    shutil.rmtree(photos / "val/eel")
    for number in (1, 2, 3):
        (photos / f"val/dog/{number}.jpg").unlink()
    words = ("dataset.decode_size=64", "batch=12")
    texts = [item.text for item in of_photos(photos, *words).findings if item.check == "classes"]
    for sentence in (
        "the files are at most about 32 pixels high or wide, and are enlarged to 64: dataset.input_size=32 "
        "dataset.decode_size=32 is 4 times less work",
        "the evaluation split has 5 images, so a score says little; more to evaluate say more",
        "dog has 4 of 52 images to train on, the largest class 44: train.sampling=balanced or loss.balanced=true has "
        "each class count alike",
    ):
        assert sentence in texts
    balanced = of_photos(photos, *words, "train.sampling=balanced").findings
    assert not any("the largest class" in item.text for item in balanced)


@pytest.mark.slow
def test_of_a_step_that_takes_long_a_few_images_are_tried_and_lighter_work_is_named(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "LONG_CPU_STEP_S", 0.0)
    monkeypatch.setattr(examination, "micro_batches_that_fit", None)  # is not called
    findings = of_photos(photos, "dataset.decode_size=64", "batch=12").findings
    texts = {item.check: item.text for item in findings}
    assert re.match(r"a step in micro-batches of 12 images takes about \d+ s: it was not tried \(", texts["memory"])
    assert texts["time"].startswith("the run takes about 0:0")
    assert re.search(r": model=mobilenetv3_small_100 \d+x, dataset.input_size=32 dataset.decode", texts["speed"])


def as_csv(photos: Path) -> tuple[str, ...]:
    rows = [f"{file.relative_to(photos)},{file.parts[-2]},{file.parts[-3]}" for file in photos.rglob("*.jpg")]
    (photos / "table.csv").write_text("\n".join(["path,label,split", *rows]))
    return "dataset=csv", f"dataset.path={photos / 'table.csv'}", SIZE


def as_packed(photos: Path) -> tuple[str, ...]:
    packed.pack_source(
        Folder(path=str(photos), decode_size=16), photos / "packed", threads=1, advanced=lambda images: None
    )
    return "dataset=packed", f"dataset.path={photos / 'packed'}"


def as_shards(photos: Path) -> tuple[str, ...]:
    for split in ("train", "val"):
        with tarfile.open(photos / f"{split}.tar", "w") as tar:
            for number, file in enumerate(sorted((photos / split).rglob("*.jpg"))):
                for suffix, content in (("jpg", file.read_bytes()), ("cls", file.parts[-2].encode())):
                    member = tarfile.TarInfo(f"{number}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return "dataset=webdataset", f"dataset.path={photos}", SIZE


@pytest.mark.parametrize("stored", [as_csv, as_packed, as_shards])
def test_every_kind_of_data_set_tells_an_image_that_is_in_both_splits(
    stored: Callable[[Path], tuple[str, ...]], photos: Path
) -> None:
    in_both_splits(photos)
    planted = problems(examined(*stored(photos), f"output_root={photos}"))
    assert [*planted] == ["twice"]
    assert planted["twice"][1].startswith("1 twice in two splits")


def test_without_time_it_says_how_many_images_it_has_looked_at(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "INSPECTION_CHUNK", 1)
    monkeypatch.setattr(inspection, "cores", lambda: 1)
    ticks = iter(range(100))
    monkeypatch.setattr(inspection.time, "monotonic", lambda: next(ticks))
    texts = {item.check: item.text for item in of_photos(photos, look_s=14).findings}
    assert texts["images"] == "6 of 24 images (--all looks at all) can be decoded"
    assert texts["twice"] == "none, among 6 of 24 images (--all looks at all)"


@pytest.mark.parametrize(
    ("words", "level", "check", "says"),
    [
        (("batch=5", "train.micro_batches=2"), "warning", "batch", "which batch=4 avoids"),
        (("batch=11", "train.micro_batches=11"), "warning", "batch", "has 1 images for 11 micro-batches"),
        (("batch=11",), "warning", "batch", "has one image, which counts as much as a whole batch"),
        (("batch=13",), "error", "plan", "use batch=12"),
        (("model=resnet_18",), "error", "keys", "Did you mean"),
        (("seed=1,2",), "error", "keys", "names several values"),
        (("resume=latest",), "error", "keys", "no run has been started"),
        (("budget.hours=1e-9",), "warning", "time", "budget.hours=1e-09 ends it before"),
        (("launcher.ranks=2", "launcher.threads=8"), "warning", "devices", "launcher.threads=auto"),
    ],
)
def test_what_is_wrong_with_a_job_is_told(
    words: tuple[str, ...], level: str, check: str, says: str, photos: Path
) -> None:
    planted = problems(of_photos(photos, *words))
    assert [*planted] == [check]
    assert planted[check][0] == level
    assert says in planted[check][1]


@pytest.mark.parametrize(
    ("gains", "says"),
    [
        ({}, ["no other setting was tried: steps of this job take too long for 5 s"]),
        (
            {"precision=fp32": Gain(8.0, 0.5), "launcher.threads=2": Gain(1.7, 0.9)},
            ["precision=fp32 8.00x +- 0.50 the images per second in 5 turns (another batch or precision: anot"],
        ),
        (
            {"batch=8": Gain(WORTH, 0.05), "launcher.threads=2": Gain(WORTH - 0.001, 0.05)},
            ["batch=8 1.10x +- 0.05 the images per second in 5 turns"],
        ),
        (
            {"batch=8": Gain(1.7, 0.9), "launcher.threads=2": Gain(1.05, 0.01)},
            ["no other setting is faster by more than its 5 turns differ: batch=8 1.70x +- 0.90, launcher.threads=2"],
        ),
    ],
)
def test_another_setting_is_named_where_it_is_faster_by_more_than_its_turns_differ(
    photos: Path, monkeypatch: pytest.MonkeyPatch, gains: dict[str, Gain], says: list[str]
) -> None:
    monkeypatch.setattr(settings, "tried", lambda *arguments, **options: gains)
    texts = [item.text for item in of_photos(photos).findings if item.check == "speed"]
    assert [text[: len(start)] for text, start in zip(texts, says, strict=True)] == says


@pytest.mark.parametrize(
    ("key", "values"), [("launcher.threads", ("1", "999")), ("dataset.limit", ("6", "9")), ("batch", ("4", "11"))]
)
def test_a_job_of_a_sweep_has_the_findings_that_it_has_alone(
    key: str, values: tuple[str, ...], photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "step", lambda job: iter([]))
    together = of_photos(photos, f"{key}={','.join(values)}", multirun=True)
    for number, value in enumerate(values):
        own = {item.text for item, jobs in together.findings.items() if number in jobs and item.check != "disk"}
        alone = {item.text for item in of_photos(photos, f"{key}={value}").findings if item.check != "disk"}
        assert own == alone


def test_a_full_disk_is_told_before_it_is_full(photos: Path) -> None:
    assert not problems(of_photos(photos, free=lambda path: 2e7))
    planted = problems(of_photos(photos, "seed=1,2", multirun=True, free=lambda path: 2e7))
    assert [*planted] == ["disk"]
    assert "20 MB free, the runs take up to 21 MB: free disk space, or use checkpoint.keep=1" in planted["disk"][1]


def test_a_folder_that_cannot_be_written_is_told(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(examination.tempfile, "TemporaryDirectory", refuse)
    planted = problems(of_photos(photos))
    assert planted["disk"] == (
        "error",
        f"{photos.parent} cannot be written (Permission denied): output_root=FOLDER names another",
    )


def test_a_clock_that_differs_from_that_of_the_disk_is_told(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time
    monkeypatch.setattr(examination.time, "time", lambda: now() - 60)
    assert "is +60 s off this machine's" in problems(of_photos(photos))["clock"][1]


def test_a_port_that_is_in_use_is_told(photos: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        machines = ("launcher=elastic", "launcher.nodes=2", f"launcher.rendezvous={endpoint}")
        level, text = problems(of_photos(photos, *machines))["port"]
        assert level == "error"
        assert f"cannot listen at {endpoint}" in text
    assert not problems(of_photos(photos, *machines))
    assert problems(of_photos(photos, *machines[:2]))["port"][1].endswith("launcher.rendezvous=10.0.0.1:29500")


@pytest.mark.parametrize(
    ("fitting", "says"), [(4, "train.micro_batches=4 fits"), (None, "use a smaller model or dataset.input_size")]
)
def test_a_step_that_does_not_fit_into_memory_is_told(
    fitting: int | None, says: str, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "micro_batches_that_fit", lambda job, world, least: fitting)
    level, text = problems(of_photos(photos))["memory"]
    assert level == "error"
    assert text.endswith(says)


def test_every_job_of_a_sweep_is_examined(photos: Path) -> None:
    checkup = of_photos(photos, "model=linear,resnet_18", "batch=4,12", multirun=True)
    assert len(checkup.jobs) == 4
    (error,) = [item for item in checkup.findings if item.level is Level.error]
    assert "resnet_18" in error.text
    assert checkup.findings[error] == [2, 3]
    assert [jobs for item, jobs in checkup.findings.items() if item.check == "memory"] == [[0], [1]]
    assert checkup.named([2, 3]) == " (jobs 2, 3)"
    assert " model=resnet_18 batch=4)" in checkup.named([2])


@pytest.mark.parametrize(
    ("words", "jobs"),
    [
        (("optimizer.lr=choice(0.1,0.2)", "seed=1,2,3"), 6),
        (("hydra/sweeper=optuna", "optimizer.lr=tag(log,interval(0.001,0.1))", "batch=int(interval(2,4))"), 4),
    ],
)
def test_the_jobs_of_a_line_are_those_of_hydra(words: tuple[str, ...], jobs: int, photos: Path) -> None:
    checkup = of_photos(photos, *words, multirun=True)
    assert len(checkup.jobs) == jobs
    assert not problems(checkup)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("optimizer.lr=interval(0.1,1)",), "use hydra/sweeper=optuna, or values with commas"),
        (("hydra/launcher=nope",), "nope"),
        (("resume=latest",), "cannot be combined with a sweep"),
    ],
)
def test_what_is_wrong_with_the_line_of_a_sweep_is_told(words: tuple[str, ...], says: str, photos: Path) -> None:
    planted = problems(of_photos(photos, *words, multirun=True))
    assert [*planted] == ["keys"]
    assert says in planted["keys"][1]


def test_data_that_a_run_would_download_is_no_error_and_is_not_downloaded(tmp_path: Path) -> None:
    planted = problems(examined("dataset=mnist", f"data_root={tmp_path / 'data'}"))
    assert [*planted] == ["data"]
    assert planted["data"][0] == "warning"
    assert not list(tmp_path.iterdir())


def test_a_job_for_another_machine_is_examined_without_its_devices(photos: Path) -> None:
    broken(photos)
    planted = problems(of_photos(photos, "launcher=slurm", "launcher.nodes=2", "launcher.gpus=8"))
    assert [*planted] == ["devices", "images"]
    assert planted["devices"][0] == "warning"


def test_the_exit_code_says_whether_a_run_would_start(photos: Path) -> None:
    words = (*JOB, "dataset=folder", f"dataset.path={photos}", SIZE)
    done = forked("lockstep", "doctor", "-m", *words, "seed=1,2", cwd=photos.parent)
    assert done.code == 0, done.err
    assert "ok       batch    4 = 1 rank x 1 micro-batch x 4; 3 steps an epoch, the last of 4, 6 in all\n" in done.out
    broken(photos)
    done = forked("lockstep", "doctor", *words, "--json", cwd=photos.parent)
    assert done.code == 2
    assert "a run would not start: 1 error" in done.err
    report = json.loads(done.out)
    assert [item["check"] for item in report["findings"] if item["level"] == "error"] == ["images"]
    assert report["jobs"] == [[*words]]


# The last layers of this model have one value per channel of an image.
SIXTEEN = ("dataset=fake", "dataset.classes=2", "dataset.channels=3", "dataset.size=16")
POOLED = (*SIXTEEN, "model=test_resnet", "epochs=1")


@pytest.mark.parametrize(
    "words",
    [
        ("dataset.examples=9", "batch=4"),
        ("dataset.examples=9", "batch=4", "strategy=ddp", "launcher.ranks=2"),
        ("dataset.examples=9", "batch=4", "strategy=ddp", "launcher.ranks=2", "strategy.sync_batchnorm=false"),
    ],
    ids=" ".join,
)
def test_a_batch_that_leaves_batch_norm_one_example_is_an_error_and_no_proposal_does(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    words = (*POOLED, *words, f"output_root={tmp_path}")
    checkup = examined(*words)
    assert "too few for the batch norm" in problems(checkup)["plan"][1]
    proposals = {match for item in checkup.findings for match in re.findall(r"batch=\d+", item.text)}
    assert proposals
    for proposal in proposals:
        assert "error" not in {level for level, _ in problems(examined(*words, proposal)).values()}, proposal


def test_a_micro_batch_of_one_example_is_timed_where_batch_norm_counts_over_all_ranks(tmp_path: Path) -> None:
    ranks = ("dataset.examples=8", "batch=2", "strategy=ddp", "launcher.ranks=2", f"output_root={tmp_path}")
    checkup = examined(*POOLED, *ranks)
    assert "error" not in {level for level, _ in problems(checkup).values()}
    assert "time" in {item.check for item in checkup.findings}
