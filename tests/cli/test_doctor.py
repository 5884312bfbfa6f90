"""`lockstep doctor`: planted faults are told, with what mends them, and nothing is written."""

from __future__ import annotations

import io
import json
import math
import os
import random
import re
import shutil
import socket
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from helpers import forked, resolved
from lockstep.core.errors import INSTALL, BrokenImage, InputError
from lockstep.core.world import World
from lockstep.data.datasets import packed
from lockstep.data.datasets import photos as decode_photos
from lockstep.data.datasets.folder import Folder
from lockstep.diagnostics import doctor as doctor_module
from lockstep.diagnostics import examination, inspection, settings
from lockstep.diagnostics.doctor import Checkup, doctor
from lockstep.diagnostics.inspection import Level
from lockstep.diagnostics.settings import Gain
from lockstep.diagnostics.verdict import WORTH
from lockstep.telemetry.progress import format_duration

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
    monkeypatch.setattr(settings, "WORTH", 0.0)
    monkeypatch.setattr(examination, "micro_batches_that_fit", None)  # is not called
    findings = of_photos(photos, "dataset.decode_size=64", "batch=12").findings
    texts = {item.check: item.text for item in findings}
    assert re.match(r"a step in micro-batches of 12 images takes about \d+ s: it was not tried \(", texts["memory"])
    assert texts["time"].startswith("the run takes about 0:0")
    assert re.search(r": model=mobilenetv3_small_100 [\d.]+x, dataset.input_size=32 dataset.decode", texts["speed"])


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
    both = of_photos(photos, "seed=1,2", multirun=True, free=lambda path: 2e7)
    planted = problems(both)
    assert [*planted] == ["disk"]
    assert "20 MB free, the runs take up to 21 MB: free disk space, or use checkpoint.keep=1" in planted["disk"][1]
    assert [jobs for item, jobs in both.findings.items() if item.check == "disk"] == [[0, 1]]


def test_a_folder_that_cannot_be_written_is_told(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(examination.tempfile, "TemporaryDirectory", refuse)
    planted = problems(of_photos(photos))
    assert planted["disk"] == (
        "error",
        f"{photos.parent} cannot be written (Permission denied): output_root=FOLDER names another",
    )
    looked_at = [finding.check for finding in examination.folder(photos, 1.0, lambda root: 2.0)]
    assert looked_at == ["disk", "disk"], "nothing is known of its clock"


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


def test_each_job_of_a_sweep_has_its_own_port() -> None:
    checkup, job = Checkup(), ("model=linear", "dataset=folder", "dataset.path=nowhere", "device=cpu")
    with socket.create_server(("127.0.0.1", 0)) as server:
        machines = (
            "launcher=elastic",
            "launcher.nodes=2",
            f"launcher.rendezvous=127.0.0.1:{server.getsockname()[1]}",
        )
        for number in (0, 1):  # the machine of main has to listen there
            checkup.examine_job(number, [*job, *machines, f"launcher.node_rank={number}"], sweep=True)
    levels = {finding.level: jobs for finding, jobs in checkup.findings.items() if finding.check == "port"}
    assert levels == {Level.error: [0], Level.ok: [1]}


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
        (("schedule=glob(co*)",), 2),
        (("hydra/sweeper=optuna", "optimizer.lr=tag(log,interval(0.001,0.1))", "batch=int(interval(2,4))"), 4),
    ],
)
def test_the_jobs_of_a_line_are_those_of_hydra(words: tuple[str, ...], jobs: int, photos: Path) -> None:
    checkup = of_photos(photos, *words, multirun=True)
    assert len(checkup.jobs) == jobs
    assert not any(word.startswith("hydra") for of_job in checkup.jobs for word in of_job)
    assert not problems(checkup)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("optimizer.lr=interval(0.1,1)",), "use hydra/sweeper=optuna, or values with commas"),
        (("hydra/launcher=nope",), "nope"),
        (("hydra.run.dir=x",), "hydra.run.dir=x has no effect with -m; name a folder with hydra.sweep.dir=FOLDER"),
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


def test_each_job_for_another_machine_is_noted() -> None:
    checkup = Checkup()
    for number in range(2):
        checkup.examine_job(number, (*JOB, "dataset=fake", "launcher=slurm", f"seed={number}"), sweep=True)
    noted = {item.check: jobs for item, jobs in checkup.findings.items() if item.level == Level.warning}
    assert noted["devices"] == [0, 1]
    checks = [item.check for item in checkup.findings]
    assert (checks.count("devices"), {"port", "step"} & {*checks}) == (1, set()), "nothing of this machine"


@pytest.mark.parametrize("submits", [True, False])
def test_a_job_for_other_machines_is_taken_for_one_rank_here(submits: bool) -> None:
    launcher = ("launcher=slurm", "launcher.gpus=8") if submits else ("launcher=spawn",)
    words = ("device=cpu", "dataset=fake", "model=linear", "strategy=ddp", "launcher.ranks=8", *launcher)
    job, resume, elsewhere = doctor_module._composed(words, sweep=False)
    assert elsewhere is submits
    here = ("Inline", 1, "Single") if submits else ("Spawn", 8, "DDP")
    assert (type(job.launcher).__name__, job.launcher.ranks, type(job.strategy).__name__) == here
    assert resume.overrides == words
    assert resume.values["launcher"]["ranks"] == here[1], "however many GPUs are here"


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


class Images:
    """A split of files: the content of each, or why it cannot be decoded."""

    def __init__(self, name: str, *contents: bytes | str, skip: int = 0, images: Any = None) -> None:
        self.prefix, self.contents, self.skip, self.images = name, contents, skip, images
        self.labels = torch.zeros(len(contents), dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.contents)

    def name(self, index: int) -> str:
        return f"{self.prefix}/{index}"

    def fetch(self, indices: list[int]) -> None:
        (index,) = indices
        if isinstance(reason := self.contents[index], str):
            raise BrokenImage(index, self.name(index), reason)

    def content(self, index: int) -> bytes:
        content = self.contents[index]
        if isinstance(content, str):
            raise {"no file": OSError, "no image": ValueError}[content](content)
        return content


def texts_of(findings: Iterable[Any]) -> list[tuple[str, str]]:
    return [(item.level, item.text) for item in findings]


def test_an_inspection_looks_at_the_same_images_each_time_and_draws_from_a_generator_of_its_own() -> None:
    split, state = Images("train", *[b"x"] * 50), random.getstate()
    order = inspection._shuffled(split)  # type: ignore[arg-type]
    assert order == inspection._shuffled(split)  # type: ignore[arg-type]
    assert [index for _, index in order] != sorted(index for _, index in order) == [*range(50)]
    assert random.getstate() == state


def test_images_that_are_there_twice_are_told_by_where_they_are() -> None:
    train, val = Images("train", b"a", b"b", b"a", b"c", "no file"), Images("val", b"b", b"d", "no image")
    train.labels[2] = 1
    every = [(split, index) for split in (train, val) for index in range(len(split))]
    assert texts_of(inspection._repeated(every, 60)) == [  # type: ignore[arg-type]
        ("warning", "1 twice in two splits, such as train/1 and val/0: the score is too good; remove one of each"),
        ("warning", "1 twice in one split, such as train/0 and train/2: they count twice; remove one of each"),
        ("warning", "1 twice with two labels, such as train/0 and train/2: one is wrong; remove one of each"),
    ]
    train.labels[2], val.labels[0] = 0, 1
    assert [text for _, text in texts_of(inspection._repeated(every, 60))][2:] == [  # type: ignore[arg-type]
        "1 twice with two labels, such as train/1 and val/0: one is wrong; remove one of each"
    ], "also where one is in each split"
    test = Images("test", b"a")
    test.labels[0] = 1
    alike: Any = [every[0], (test, 0)]
    assert [text for _, text in texts_of(inspection._repeated(alike, 60))][1:] == [
        "1 twice with two labels, such as train/0 and test/0: one is wrong; remove one of each"
    ], "also where both have the same number"
    begun_alike = Images("train", bytes(100_000) + b"a", bytes(100_000) + b"b")
    apart: Any = [(begun_alike, 0), (begun_alike, 1)]
    assert texts_of(inspection._repeated(apart, 60)) == [("ok", "none, among 2 images")]
    unread = [(val, 2), (train, 4), (val, 1)]
    assert texts_of(inspection._repeated(unread, 60)) == [("ok", "none, among 3 images")]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("skip", "level", "remedy"),
    [
        (0, "error", "; remove or replace them, or use dataset.skip=3"),
        (2, "error", "; remove or replace them, or use dataset.skip=3"),
        (3, "warning", "; dataset.skip=3 skips them"),
    ],
)
def test_broken_images_are_told_the_most_frequent_reason_first(skip: int, level: str, remedy: str) -> None:
    reasons = ("cut at byte 17", b"", "no header in 'a'", "no header in 'b'")
    splits: Any = [Images("train", *reasons, skip=skip), Images("val", b"", skip=0), Images("packed", "x", images=1)]
    first, second = inspection._broken(splits, 60)
    assert (first.level, second.level) == (level, level)
    assert first.text.startswith("2 of 5 images broken, such as image ")
    assert first.text.endswith(f"({reasons[int(first.text[len('2 of 5 images broken, such as image ')])]}){remedy}")
    assert (
        second.text == f"1 of 5 images broken, such as image 0, train/0, cannot be decoded (cut at byte 17){remedy}"
    )
    assert first.paths == ("train/2", "train/3")
    packed: Any = [Images("packed", *[b""] * 1200, images=1)]
    (only,) = inspection._broken(packed, 60)
    assert only.text == "1,200 in memory or packed, nothing to decode"


def test_a_part_of_the_images_stands_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five images, the first four are looked at: one of them is broken, so two of all may be."""
    monkeypatch.setattr(inspection, "INSPECTION_CHUNK", 2)
    monkeypatch.setattr(inspection, "cores", lambda: 0)
    ticks = iter([0.0, 1.0, 2.0, 3.0])
    monkeypatch.setattr(inspection.time, "monotonic", lambda: next(ticks))
    monkeypatch.setattr(inspection, "_shuffled", lambda *splits: [(split, n) for split in splits for n in range(5)])
    (finding,) = inspection._broken([Images("train", "cut", *[b""] * 4, skip=1)], 3.0)  # type: ignore[list-item]
    assert finding.text.startswith("1 of 4 of 5 images (--all looks at all) broken, such as image 0")
    assert (finding.level, finding.text.partition("; ")[2]) == (
        "error",
        "remove or replace them, or use dataset.skip=2",
    )


def test_images_are_looked_at_in_a_random_order_and_each_once() -> None:
    split: Any = Images("train", *[b""] * 50)
    order = [index for _, index in inspection._shuffled(split)]
    assert order != sorted(order)
    assert sorted(order) == [*range(50)]


@pytest.mark.parametrize("number", [7, 8, 9])
def test_eight_labels_or_values_are_named(number: int) -> None:
    names = [f"n{column}" for column in range(number)]
    more = f", and {number - 8} more" * (number > 8)
    labels = torch.ones(1200, number)
    labels[:, 0] = 0
    shown = inspection._columns(names, labels, "labels")
    assert shown == "n0 0, " + ", ".join(f"n{column} 1,200" for column in range(1, min(8, number))) + more
    values = torch.tensor([0.0, 1.0, 5.0])[:, None].expand(3, number)
    shown = inspection._columns(names, values, "values")
    assert shown == ", ".join(f"n{column} 0 to 5 (mean 2)" for column in range(min(8, number))) + more


class Source:
    """A data set with a test split, and labels of another kind."""

    targets, classes, class_names, downloads = "labels", 2, ("a", "b"), False

    def __init__(self, **facts: Any) -> None:
        vars(self).update(facts)

    def split(self, name: str) -> Images:
        split = Images(name, *(name.encode() + bytes([number]) for number in range(3)))
        split.labels = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        return split

    def train(self) -> Images:
        return self.split("train")

    def eval(self) -> Images:
        return self.split("val")

    def test(self) -> Images:
        return self.split("test")

    def notes(self) -> list[str]:
        return ["a note", "a note"]


def test_labels_of_images_are_counted_and_each_note_is_told_once() -> None:
    source: Any = Source()
    shown = [(item.check, item.level, item.text) for item in inspection.inspect(source, 60)]
    assert shown[0] == ("labels", "warning", "a note")
    assert [item for item in shown if item[1] == "warning" and "note" in item[2]] == shown[:1]
    assert ("labels", "ok", "a 2, b 2: 3 to train on, 3 to evaluate, 3 to test") in shown
    assert ("images", "ok", "9 images can be decoded") in shown
    assert shown[-1] == ("twice", "ok", "none, among 9 images")
    nameless: Any = Source(class_names=())
    texts = [item.text for item in inspection.inspect(nameless, 60)]
    assert "0 2, 1 2: 3 to train on, 3 to evaluate, 3 to test" in texts
    wrong: Any = Source(classes=3, class_names=())
    with pytest.raises(InputError, match="the training split"):
        [*inspection.inspect(wrong, 60)]
    wide = source.split("val")
    wide.labels = torch.ones(3, 3)
    with pytest.raises(InputError, match="the evaluation split"):
        [*inspection.inspect(Source(eval=lambda: wide), 60)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("free", "need", "level"), [(100.0, 100.0, "ok"), (100.0, 100.1, "error"), (100.0, 99.0, "ok")]
)
def test_a_disk_with_just_enough_room_has_enough(free: float, need: float, level: str, tmp_path: Path) -> None:
    asked_of: list[Path] = []
    disk, clock = examination.folder(tmp_path / "a" / "b", need, lambda path: asked_of.append(path) or free)
    assert (disk.level, clock.level) == (level, "ok")
    assert asked_of == [tmp_path]
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(("skew", "level"), [(60.0, "warning"), (-60.0, "warning"), (1.0, "ok"), (-1.0, "ok")])
def test_a_clock_may_be_late_or_early(
    skew: float, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time
    monkeypatch.setattr(examination.time, "time", lambda: now() - skew)
    *_, clock = examination.folder(tmp_path, 0.0, lambda path: 1.0)
    assert clock.level == level
    assert f"{skew:+.0f} s off" in clock.text or level == "ok"


def test_a_check_that_fails_is_a_finding_for_each_line_and_a_shared_one_is_made_once() -> None:
    checkup, calls = Checkup(), list[int]()
    checkup.jobs = [["a"], ["b"], ["c"]]

    def fails() -> Iterator[Any]:
        calls.append(1)
        yield inspection.Finding("data", "seen")
        raise InputError("one", "two")

    for number in (0, 1):
        checkup.check([number], "data", fails, "key")
    checkup.check([2], "data", fails)
    assert len(calls) == 2
    shown = {(item.check, item.text, item.level): jobs for item, jobs in checkup.findings.items()}
    assert shown == {
        ("data", "seen", "ok"): [0, 1, 2],
        ("data", "one", "error"): [0, 1, 2],
        ("data", "two", "error"): [0, 1, 2],
    }

    def breaks() -> Iterator[Any]:
        raise ZeroDivisionError("of a model")
        yield

    (finding,) = checkup.check([1], "step", breaks)
    assert ("of a model" in finding.text, finding.level) == (True, "error")


def test_the_jobs_of_a_finding_are_named_unless_they_are_all() -> None:
    checkup = Checkup()
    checkup.jobs = [["batch=1", "seed=1"], ["batch=1", "seed=2"], ["batch=1", "seed=3 4"]]
    assert checkup.named([0, 1, 2]) == ""
    assert checkup.named([0, 2]) == " (jobs 0, 2)"
    assert checkup.named([2]) == " (job 2: 'seed=3 4')"
    checkup.jobs = [["batch=1"]]
    assert checkup.named([0]) == ""


@pytest.mark.parametrize("failing", [None, 3])
def test_copies_between_gpus_are_tried_in_both_directions(
    failing: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[tuple[int, int, int]] = []

    def copies(source: int, target: int, values: torch.Tensor) -> bool:
        tries.append((source, target, int(values[0])))
        return len(tries) - 1 != failing

    monkeypatch.setattr(examination, "_copies", copies)
    monkeypatch.setattr(examination, "name_in_nvml", str)
    monkeypatch.setattr(examination, "path_between", lambda first, second: "NVLink" if first == "0" else "PCIe")
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    shown = [(item.check, item.level, item.text) for item in examination._between_gpus(3, with_nccl=False)]
    ways = [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert tries == [(*way, number) for number, way in enumerate(ways)], "other values for each"
    assert shown[:2] == [
        ("topology", "ok", "NVLink (see nvidia-smi topo -m) between GPUs 0-1, 0-2"),
        ("topology", "ok", "PCIe (see nvidia-smi topo -m) between GPUs 1-2"),
    ]
    if failing is None:
        assert shown[2:] == [("copies", "ok", "numbers that are copied between 3 GPUs arrive as they were")]
        assert [*examination._between_gpus(1, with_nccl=False)] == []
        return
    ((check, level, text),) = shown[2:]
    assert (check, level) == ("copies", "error")
    assert text.startswith("numbers that are copied from GPU 1 to 2 arrive changed: set NCCL_P2P_DISABLE=1")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    tries.clear()
    assert [*examination._between_gpus(3, with_nccl=False)][-1].level == "warning"


@pytest.mark.parametrize(("result", "says"), [(0.0, "adds over 2 GPUs"), (1.0, "adds wrong over 2 GPUs: set NCCL")])
def test_nccl_adds_right_or_is_said_not_to(result: float, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def add(tensors: list[torch.Tensor]) -> None:
        total = sum(tensors)
        for number, tensor in enumerate(tensors):
            tensor.copy_(total + result * number)

    to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: self if "cuda" in str(device) else to(self, device))
    monkeypatch.setattr(examination, "_copies", lambda *values: True)
    monkeypatch.setattr(examination, "name_in_nvml", str)
    monkeypatch.setattr(examination, "path_between", lambda first, second: "NVLink")
    monkeypatch.setattr(torch.cuda.nccl, "all_reduce", add)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27))
    *_, finding = examination._between_gpus(2, with_nccl=True)
    assert (finding.check, says in finding.text, finding.level) == ("nccl", True, "error" if result else "ok")

    def refuse(tensors: list[torch.Tensor]) -> None:
        raise RuntimeError("no NCCL")

    monkeypatch.setattr(torch.cuda.nccl, "all_reduce", refuse)
    *_, finding = examination._between_gpus(2, with_nccl=True)
    assert finding.text == "does not work here (no NCCL); launcher.backend=gloo works without"
    assert finding.level == "error"
    monkeypatch.setattr(examination, "_copies", lambda *values: False)
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    assert [item.check for item in examination._between_gpus(2, with_nccl=True)] == ["topology", "copies"]


@pytest.mark.parametrize("first", [90.0, 0.5])
def test_the_time_of_a_step_is_the_median_without_the_first_one(
    first: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(examination.time, "perf_counter", lambda: now)
    reads, steps = iter([5.0, 1.0, 2.0, 3.0, 4.0, 6.0, 9.0, 9.0]), iter([first, 4.0, 1.0, 3.0, 2.0, 5.0, 9.0, 9.0])

    def groups() -> Iterator[Any]:
        nonlocal now
        for number in range(99):
            short = number == 1  # the end of an epoch, which counts nowhere
            now += 100.0 if short else next(reads)
            yield SimpleNamespace(indices=[0] * (1 if short else 4))

    def take(shard: Any) -> None:
        nonlocal now
        now += next(steps)

    parts: Any = SimpleNamespace(
        loader=SimpleNamespace(train=lambda after: groups()),
        model=torch.nn.Identity(),
        plan=SimpleNamespace(batch=4),
        transforms=SimpleNamespace(train=lambda groups: groups),
        loss_of_step=take,
    )
    monkeypatch.setattr(examination, "MOST_TRIAL_S", 1e6)
    assert examination._seconds_of_step(parts) == (4.0, 3.0), "of six steps, the first of which is not judged"
    monkeypatch.setattr(examination, "MOST_TRIAL_S", 0.0)
    reads, steps = iter([5.0, 1.0, 7.0]), iter([first, 4.0, 7.0])
    assert examination._seconds_of_step(parts) == (5.0, 4.0), "two steps at least"


FAKE_JOB = ("device=cpu", "dataset=fake", "dataset.examples=64", "model=linear", "batch=32", "epochs=2")
TIMED = (*FAKE_JOB, "train.eval_every=1ep", "launcher.threads=1")


@pytest.mark.parametrize(
    ("words", "ranks", "facts"),
    [
        ((), 1, ""),
        (("launcher.ranks=2", "strategy=ddp"), 2, ", without communication"),
        (("budget.hours=1e-9",), 1, "; budget.hours=1e-09 ends it before"),
        (("cost.usd_per_gpu_hour=2",), 1, ""),
    ],
)
def test_the_time_of_a_run_is_that_of_its_steps_and_its_evaluations(
    words: tuple[str, ...], ranks: int, facts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four steps of half a second, or of a quarter on each of two ranks, and two evaluations."""
    monkeypatch.setattr(examination, "cores", lambda: 2)
    seen: list[Any] = []
    monkeypatch.setattr(examination, "_seconds_of_step", lambda parts: seen.append(parts) or (9.0, 0.5 / ranks))
    monkeypatch.setattr(examination, "_seconds_of_evaluated_image", lambda parts, most: 0.25)
    job = resolved(*TIMED, *words)
    finding = examination._time(job, World.solo())
    evaluation = 0.25 * len(job.dataset.eval()) / ranks
    assert finding.amount == pytest.approx(4 * 0.5 / ranks + 2 * evaluation)
    step = f"{500 / ranks:.1f} ms a step, {evaluation:,.1f} s an evaluation{facts}"
    assert finding.text == f"the run takes about {format_duration(finding.amount)}: {step}"
    assert finding.level == ("warning" if "budget" in facts else "ok")
    (parts,) = seen
    plan = parts.plan
    assert (plan.batch, plan.micro_batches, plan.total_steps) == (32 // ranks, 1, 12), (
        "six steps, also in short epochs"
    )
    few = examination._time(job, World.solo(), most=8)
    assert few.amount == pytest.approx(4 * (0.5 / ranks) * (32 / ranks) / 8 + 2 * evaluation)
    assert seen[1].plan.batch == 8
    monkeypatch.setattr(examination, "cores", lambda: 1)
    assert examination._time(job, World.solo()).amount == pytest.approx(finding.amount * ranks), "they share a core"
    monkeypatch.setattr(examination, "LONG_RUN_S", finding.amount - 1e-6)
    assert examination._time(job, World.solo()).level == "warning"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_on_gpus_costs_their_hours(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPUs are pretended: what is built for the trial is built on the CPU."""
    for name in ("build_data", "configure_torch"):
        build = getattr(examination, name)
        monkeypatch.setattr(examination, name, lambda job, world, build=build: build(job, World.solo()))
    monkeypatch.setattr(examination, "_seconds_of_step", lambda parts: (0.0, 450.0))
    monkeypatch.setattr(examination, "_seconds_of_evaluated_image", lambda parts, most: 0.0)
    rate, most = "cost.usd_per_gpu_hour=3", "budget.usd={}"
    words = (*TIMED, f"launcher.ranks={ranks}", "strategy=ddp", rate)
    cost = 4 * 450 / 3600 * ranks * 3.0  # four steps
    for budget, level in ((cost - 0.01, "warning"), (cost, "ok")):
        finding = examination._time(resolved(*words, most.format(budget)), World.solo("cuda:0"))
        assert f", {cost:.2f} USD" in finding.text
        assert ("ends it before" in finding.text, finding.level) == (level == "warning", level)


@pytest.mark.parametrize(
    ("words", "fitting", "level", "text"),
    [
        ((), 1, "ok", "a step in micro-batches of 32 images fits ("),
        ((), 2, "error", "a micro-batch of 32 images does not fit ("),
        (("train.micro_batches=auto",), 2, "ok", "a step in micro-batches of 16 images fits ("),
        (("train.micro_batches=auto",), None, "error", "use a smaller model or dataset.input_size"),
        (("strategy=fsdp", "launcher.ranks=2"), 2, "warning", "=2 fits, where a rank has the whole model"),
    ],
)
def test_a_step_is_said_to_fit_or_what_would(
    words: tuple[str, ...], fitting: int | None, level: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, timed = torch.get_num_threads(), list[int]()
    monkeypatch.setattr(examination, "micro_batches_that_fit", lambda job, world, least: fitting)
    monkeypatch.setattr(examination, "_slow_rate", lambda job, world: None)
    monkeypatch.setattr(examination, "_time", lambda job, world: timed.append(job.train.micro_batches))
    monkeypatch.setattr(examination, "other_settings", lambda job, world: timed.append(job.train.micro_batches))
    try:
        first, *more = examination.step(resolved(*FAKE_JOB, "launcher.threads=1", *words))
    finally:
        torch.set_num_threads(threads)
    assert (first.check, first.level) == ("memory", level)
    assert text in first.text
    assert (len(more), timed) == ((2, [fitting, fitting]) if level == "ok" else (0, []))


@pytest.mark.parametrize(("rate", "is_slow"), [(16.0, False), (15.9, True), (None, False)])
def test_a_step_of_more_than_two_seconds_is_slow_on_a_cpu(
    rate: float | None, is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "training_rate", lambda job, world: rate)
    job = resolved(*FAKE_JOB)
    assert examination._slow_rate(job, World.solo()) == (rate if is_slow else None)
    assert examination._slow_rate(job, World.solo("cuda:0")) is None
    assert examination._slow_rate(replace(job, batch=8), World.solo()) is None, "a few images are tried anyway"


@pytest.mark.parametrize("rate", [40.0, 11.0, 10.9, 10.0, 4.0, None])
def test_lighter_work_is_a_smaller_model_where_it_is_worth_a_change(
    monkeypatch: pytest.MonkeyPatch, rate: float | None
) -> None:
    monkeypatch.setattr(settings, "training_rate", lambda job, world: rate)
    finding = settings.lighter_work(resolved(*FAKE_JOB), World.solo(), 10.0)
    words = {
        40.0: "model=mobilenetv3_small_100 4.0x the images per second (another run), or",
        11.0: "model=mobilenetv3_small_100 1.1x the images per second (another run), or",
    }.get(rate, "use a smaller model or")
    expected = f"the steps take long on this CPU: {words} a GPU"
    assert (finding.check, finding.level, finding.text) == ("speed", "warning", expected)


@pytest.mark.parametrize(
    ("ranks", "threads", "level", "text"),
    [
        (1, 1, "ok", "1 rank with 1 thread, 4 CPU cores"),
        (2, 2, "ok", "2 ranks with 2 threads, 4 CPU cores"),
        (3, 2, "warning", "3 ranks with 2 threads, 4 CPU cores, so ranks wait for others: launcher.threads=auto"),
    ],
)
def test_ranks_with_more_threads_than_cores_wait(
    ranks: int, threads: int, level: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "cores", lambda: 4)
    job: Any = SimpleNamespace(launcher=SimpleNamespace(ranks=ranks, threads=threads), strategy=None, device="cpu")
    (finding,) = examination.devices(job)
    assert (finding.level, finding.text) == (level, text)


@pytest.mark.parametrize(("free", "level"), [(90, "ok"), (89, "warning")])
def test_a_gpu_that_is_nearly_free_is_used_by_nobody(free: int, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (free * 10**9, 100 * 10**9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"GPU of {number}")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    between: list[tuple[int, bool]] = []
    monkeypatch.setattr(
        examination, "_between_gpus", lambda number, *, with_nccl: between.append((number, with_nccl)) or []
    )
    launcher = SimpleNamespace(ranks=2, threads=1, backend="nccl")
    for strategy, gpus in ((None, 2), (examination.DataParallel(), 3)):
        job: Any = SimpleNamespace(launcher=launcher, strategy=strategy, device="cuda")
        _, *findings = examination.devices(job)
        assert [item.level for item in findings] == [level] * gpus
        assert findings[-1].text.startswith(f"GPU {gpus - 1}, GPU of {gpus - 1}, {free}")
        assert findings[0].text.endswith(": another process uses it") == (level == "warning")
    assert between == [(2, True), (3, True)]


NO_RESUME: Any = SimpleNamespace(checkpoint=None)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "32 = 1 rank x 1 micro-batch x 32; 2 steps an epoch, the last of 32, 4 in all"),
        (("epochs=1000",), "32 = 1 rank x 1 micro-batch x 32; 2 steps an epoch, the last of 32, 2,000 in all"),
        (("batch=20",), "20 = 1 rank x 1 micro-batch x 20; 4 steps an epoch, the last of 4, 8 in all"),
        (
            ("batch=30", "train.micro_batches=2", "launcher.ranks=2", "strategy=ddp"),
            "30 = 2 ranks x 2 micro-batches x 8; 3 steps an epoch, the last of 4, 6 in all; devices wait for others, "
            "which batch=28 avoids",
        ),
    ],
)
def test_the_global_batch_is_cut_into_ranks_and_micro_batches(words: tuple[str, ...], text: str) -> None:
    findings = examination.batches(resolved(*FAKE_JOB, *words), NO_RESUME)
    (batch,) = (item for item in findings if item.check == "batch")
    assert (batch.text, batch.level) == (text, "warning" if "wait" in text else "ok")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("batch=21",), "has one image, which counts as much as a whole batch; batch=20 leaves more"),
        (
            ("batch=31", "train.micro_batches=31"),
            "the last batch of an epoch has 2 images for 31 micro-batches; batch=64 leaves more",
        ),
    ],
)
def test_a_last_batch_that_is_too_small_names_the_nearest_one_that_leaves_more(
    words: tuple[str, ...], text: str
) -> None:
    texts = [item.text for item in examination.batches(resolved(*FAKE_JOB, *words), NO_RESUME)]
    assert [line for line in texts if line.endswith(text)] == texts[1:2]


def test_a_batch_that_nobody_typed_is_examined_as_the_run_would_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "step", lambda job: iter([]))
    checkup = Checkup()
    checkup.examine(["device=cpu", "dataset=fake", "dataset.examples=16", "model=linear", "epochs=1"], multirun=False)
    (batch,) = (item for item in checkup.findings if item.check == "batch")
    assert batch.text == "16 = 1 rank x 1 micro-batch x 16; 1 steps an epoch, the last of 16, 1 in all"


def test_a_checkpoint_that_cannot_be_resumed_ends_what_its_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(resume: Any, job: Any, plan: Any) -> None:
        calls.append((resume, job, plan.total_steps))
        raise InputError("nothing is left to do")

    calls: list[Any] = []
    monkeypatch.setattr(examination, "check_resumable", refuse)
    job = resolved(*FAKE_JOB)
    with pytest.raises(InputError, match="nothing is left to do"):
        next(examination.batches(job, NO_RESUME))
    assert calls == [(NO_RESUME, job, 4)]


@pytest.mark.parametrize("resumed", [None, Path("checkpoint")])
@pytest.mark.parametrize("pretrained", [True, False])
def test_weights_that_a_start_would_fetch_are_told_and_a_resume_has_them(
    pretrained: bool, resumed: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = resolved("device=cpu", *SIXTEEN, "dataset.examples=64", "batch=32", "model=test_resnet")
    job = replace(job, model=replace(job.model, pretrained=pretrained))
    monkeypatch.setattr(examination, "check_resumable", lambda *_: None)
    monkeypatch.setattr(examination, "sizes_of_checkpoints", lambda job, model: (1.0, 5e6))
    resume: Any = SimpleNamespace(checkpoint=resumed)
    items = {item.check: item for item in examination.batches(job, resume)}
    assert ("weights" in items) == (pretrained and resumed is None)
    assert "weights" not in items or items["weights"].level == "warning"
    assert (items["files"].amount, items["files"].text) == (15e6, "the run takes up to 15 MB"), "with 10 MB of logs"


@pytest.mark.parametrize(("until", "last"), [("1ep", 2), ("3", 3), ("50%", 2), (None, 4)])
def test_single_examples_are_judged_by_what_is_frozen_at_the_end(
    until: str | None, last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Any] = []
    monkeypatch.setattr(examination, "check_single_examples", lambda *facts: checked.append(facts))
    words = ("model=digitnet", "model.width=8", "train.freeze=[backbone]", f"train.freeze_until={until or 'null'}")
    [*examination.batches(resolved(*FAKE_JOB, *words), NO_RESUME)]
    ((model, (blank,), plan, _, ranks, freezing),) = checked
    assert [step for step in range(1, 5) if freezing.frozen(step)] == [*range(1, last + 1)]
    assert freezing.numbers > 0
    assert (blank.device.type, len(blank), ranks, plan.batch) == ("meta", 2, 1, 32)
    assert next(model.parameters()).is_meta


def test_single_examples_are_judged_in_the_numbers_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []
    monkeypatch.setattr(examination, "check_single_examples", lambda *facts: checked.append(facts))
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.float32), ("bf16_pure", torch.bfloat16)):
        [*examination.batches(resolved(*FAKE_JOB, f"precision={precision}"), NO_RESUME)]
        model, (blank,), *_ = checked.pop()
        assert (next(model.parameters()).dtype, blank.dtype) == (dtype, dtype), precision


def test_the_stages_of_a_pipeline_have_the_same_images() -> None:
    words = ("model=digitnet", "strategy=pipeline", "launcher.ranks=2", "launcher=spawn")
    texts = [item.text for item in examination.batches(resolved(*FAKE_JOB, *words), NO_RESUME)]
    assert texts[0].startswith("32 = 1 rank x ")


@pytest.mark.parametrize(("skew", "level"), [(2.0, "ok"), (2.25, "warning"), (-2.0, "ok"), (-2.25, "warning")])
def test_two_seconds_between_the_clocks_are_too_few_to_tell(
    skew: float, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def new_folder(**options: Any) -> Iterator[str]:
        (folder := options["dir"] / f"{options['prefix']}x").mkdir()
        os.utime(folder, (0, 1000))
        yield str(folder)

    monkeypatch.setattr(examination.tempfile, "TemporaryDirectory", new_folder)
    monkeypatch.setattr(examination.time, "time", lambda: 1000.0 - skew)
    _, clock = examination.folder(tmp_path, 0.0, lambda path: 1.0)
    assert (clock.check, clock.level) == ("clock", level)
    shown = (
        f" is {skew:+.0f} s off this machine's: synchronise them (NTP)"
        if level == "warning"
        else " is this machine's"
    )
    assert clock.text == f"the clock of {tmp_path}{shown}"


ON_TWO_RANKS = ("launcher.ranks=2", "strategy=ddp", "train.micro_batches=2")


@pytest.mark.parametrize(("micro_batches", "passes", "images", "seconds"), [(2, 2, 8, 2), ("auto", 1, 16, 4)])
def test_a_slow_step_is_not_tried_and_lighter_work_is_named(
    micro_batches: int | str, passes: int, images: int, seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def time_of(job: Any, world: World, most: int | None = None) -> inspection.Finding:
        calls.append((job.train.micro_batches, world.size, most))
        return inspection.Finding("time", "long")

    def lighter(job: Any, world: World, rate: float) -> inspection.Finding:
        calls.append((job.train.micro_batches, world.size, world.local_size, rate))
        return inspection.Finding("speed", "a GPU")

    threads = torch.get_num_threads()
    monkeypatch.setattr(examination, "micro_batches_that_fit", None)  # is not called
    monkeypatch.setattr(examination, "free_memory", lambda world: 8.0 / world.local_size)
    monkeypatch.setattr(examination, "_slow_rate", lambda job, world: 2.0 * world.size)
    monkeypatch.setattr(examination, "_time", time_of)
    monkeypatch.setattr(examination, "lighter_work", lighter)
    try:
        words = (*ON_TWO_RANKS, f"train.micro_batches={micro_batches}", "launcher.threads=1")
        memory, *more = examination.step(resolved(*FAKE_JOB, *words))
    finally:
        torch.set_num_threads(threads)
    assert memory == inspection.Finding(
        "memory",
        f"a step in micro-batches of {images} images takes about {seconds} s: it was not tried "
        "(4.0 GB are free for a rank)",
        Level.warning,
    )
    assert [item.check for item in more] == ["time", "speed"]
    assert calls == [(passes, 1, 8), (micro_batches, 2, 2, 4.0)]


@pytest.mark.parametrize("compiles", [True, False])
def test_a_step_is_tried_as_that_of_a_rank_among_all_with_its_threads(
    compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def fits(job: Any, world: World, least: int) -> int:
        assert job.init_from is None, "no weights are read"
        calls.append((world.size, world.local_size, least, torch.get_num_threads(), type(job.strategy).__name__))
        return least

    def noted(job: Any, world: World, *more: Any) -> inspection.Finding:
        calls.append(world.size)
        return inspection.Finding("time", "short")

    threads = torch.get_num_threads()
    monkeypatch.setattr(examination, "micro_batches_that_fit", fits)
    monkeypatch.setattr(examination, "free_memory", lambda world: 8.0 / world.local_size)
    monkeypatch.setattr(examination, "_slow_rate", lambda job, world: None)
    for name in ("_time", "other_settings"):
        monkeypatch.setattr(examination, name, noted)
    machines = ("launcher=elastic", "launcher.nodes=2", "launcher.rendezvous=127.0.0.1:29500", "launcher.threads=3")
    job = resolved(*FAKE_JOB, *ON_TWO_RANKS, *machines)
    try:
        compiled = replace(job, model=replace(job.model, compile=compiles), init_from="start.safetensors")
        memory, *_ = examination.step(compiled)
    finally:
        torch.set_num_threads(threads)
    assert calls == [(4, 2, 2, 3, "Single"), 1, *[4] * (not compiles)]
    assert memory.text == "a step in micro-batches of 4 images fits (4.0 GB are free for a rank)"


def test_the_rank_of_a_slow_step_has_its_share_of_the_batch_and_a_compiled_one_is_not_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, of_two = resolved(*FAKE_JOB), replace(World.solo(), size=2)
    for rate, slow in ((8.0, None), (7.9, 7.9)):
        monkeypatch.setattr(examination, "training_rate", lambda job, world, rate=rate: rate)
        assert examination._slow_rate(job, of_two) == slow
    compiled = replace(job, model=replace(job.model, compile=True))
    assert examination._slow_rate(compiled, of_two) is None
    nine, eight = (replace(job, batch=batch) for batch in (9, 8))
    monkeypatch.setattr(examination, "training_rate", lambda job, world: 1.0)
    assert (examination._slow_rate(nine, World.solo()), examination._slow_rate(eight, World.solo())) == (1.0, None)
    assert examination._slow_rate(nine, of_two) is None, "a rank has five of them"


def timed(monkeypatch: pytest.MonkeyPatch, job: Any, device: str = "cpu", *, reading: float = 0.0) -> Any:
    """The finding for a job whose steps take half a second, and an evaluated image a quarter, on two cores."""
    for name in ("build_data", "configure_torch"):
        build = getattr(examination, name)
        monkeypatch.setattr(examination, name, lambda job, world, build=build: build(job, World.solo()))
    monkeypatch.setattr(examination, "build_parts", lambda job: job)
    monkeypatch.setattr(examination, "cores", lambda: 2)
    monkeypatch.setattr(examination, "_seconds_of_step", lambda parts: (reading, 0.5))
    monkeypatch.setattr(examination, "_seconds_of_evaluated_image", lambda parts, most: 0.25)
    return examination._time(job, World.solo(device))


@pytest.mark.parametrize(
    ("words", "steps", "evaluations"),
    [
        ((), 4 * 0.5, 2),
        (("train.micro_batches=2",), 4 * 2 * 0.5, 2),
        (("train.eval_every=3",), 4 * 0.5, 2),
        (("train.eval_every=4",), 4 * 0.5, 1),
        (("train.eval_views=2",), 4 * 0.5, 2 * 2),
        (("train.ema=0.9",), 4 * 0.5, 2 * 2),
    ],
)
def test_the_time_of_a_run_counts_its_micro_batches_its_views_and_its_averages(
    words: tuple[str, ...], steps: float, evaluations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = resolved(*TIMED, *words)
    finding = timed(monkeypatch, job, reading=9.0)
    assert finding.amount == pytest.approx(steps + evaluations * 0.25 * len(job.dataset.eval()))


@pytest.mark.parametrize(
    ("words", "device", "seconds"),
    [
        # An image takes 16 s / 4 images / 2 cores = 2 s. Nine steps of four images, three evaluations of twelve.
        (("loader=streaming",), "cpu", 9 * (0.5 + 8) + 3 * 3),
        (("loader=streaming",), "cuda:0", 9 * 8 + 3 * 3),
        (("loader=resident",), "cpu", 24 * 2 + 9 * 0.5 + 3 * 3),
        (("loader=resident",), "cuda:0", 24 * 2 + 9 * 0.5 + 3 * 3),
    ],
)
def test_the_time_of_a_run_has_that_of_reading_its_images(
    words: tuple[str, ...], device: str, seconds: float, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = resolved(*JOB, "dataset=folder", f"dataset.path={photos}", SIZE, "epochs=3", "train.eval_every=1ep", *words)
    finding = timed(monkeypatch, job, device, reading=16.0)
    assert finding.amount == pytest.approx(seconds)
    assert finding.text.endswith("3.0 s an evaluation")


def test_two_machines_read_at_the_same_time(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reads two of the four images of a step, of which one takes 16 s / 2 images / 2 cores."""
    machines = ("launcher=elastic", "launcher.nodes=2", "launcher.rendezvous=127.0.0.1:29500", "launcher.ranks=1")
    words = (
        *JOB,
        "strategy=ddp",
        "dataset=folder",
        f"dataset.path={photos}",
        SIZE,
        "train.eval_every=1ep",
        "loader=streaming",
    )
    finding = timed(monkeypatch, resolved(*words, *machines), reading=16.0)
    assert finding.amount == pytest.approx(6 * (0.5 + 2 * 4) + 2 * 0.25 * 12 / 2)


def test_all_budgets_that_end_a_run_are_named_and_a_model_that_is_not_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = resolved(*TIMED, "cost.usd_per_gpu_hour=3600", "budget.hours=1e-6", "budget.usd=0.01")
    compiled = replace(job, model=replace(job.model, compile=True))
    finding = timed(monkeypatch, compiled, "cuda:0")
    usd = finding.amount  # a dollar a second
    assert finding.text.endswith(
        f" s an evaluation, not compiled, {usd:,.2f} USD; budget.hours=1e-06 and budget.usd=0.01 ends it before"
    )
    assert "USD" not in timed(monkeypatch, job).text, "no GPU is paid for"


@pytest.mark.parametrize(("most", "seconds"), [(None, 0.5), (2, 1.0), (9, 0.5)])
def test_an_evaluated_image_takes_its_share_of_the_second_pass(
    most: int | None, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, passes, model = 0.0, iter([50.0, 2.0]), torch.nn.Linear(1, 1)

    def outputs(model: torch.nn.Module, images: torch.Tensor, *formats: Any, views: int) -> torch.Tensor:
        nonlocal now
        assert (model.training, torch.is_inference_mode_enabled(), formats, views) == (
            False,
            True,
            ("fp32", "last"),
            1,
        )
        now += next(passes)
        return images

    monkeypatch.setattr(examination.time, "perf_counter", lambda: now)
    monkeypatch.setattr(examination, "outputs_of", outputs)
    parts: Any = SimpleNamespace(
        loader=SimpleNamespace(eval=lambda: iter([(torch.ones(4, 1, 2, 2), torch.zeros(4))])),
        transforms=SimpleNamespace(eval=lambda images: images, memory_format="last"),
        model=model.train(),
        job=SimpleNamespace(precision="fp32"),
    )
    assert examination._seconds_of_evaluated_image(parts, most) == seconds


def test_smaller_images_are_lighter_work_where_files_are_enlarged(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = resolved(*JOB, "dataset=folder", f"dataset.path={photos}", "dataset.decode_size=64")
    monkeypatch.setattr(Folder, "enlarged_side", lambda source: 32)
    variants: list[Any] = []
    for rate_of_model, shown in ((30.0, "model=mobilenetv3_small_100 3.0x, "), (5.0, ""), (None, "")):

        def rate(other: Any, world: World, rate_of_model: float | None = rate_of_model) -> float | None:
            variants.append(other)
            return rate_of_model if other.dataset == job.dataset else 20.0

        monkeypatch.setattr(settings, "training_rate", rate)
        text = settings.lighter_work(job, World.solo(), 10.0).text
        smaller = "dataset.input_size=32 dataset.decode_size=32 2.0x the images per second (another run), or a GPU"
        assert text == f"the steps take long on this CPU: {shown}{smaller}"
    smaller_model, smaller_images = variants[:2]
    assert smaller_model == replace(job, model=smaller_model.model)
    assert smaller_images.model == job.model
    assert smaller_images.dataset == replace(job.dataset, input_size=32, decode_size=32)


def test_other_settings_have_five_seconds_in_all_and_the_cores_of_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def tried(job: Any, variants: dict[str, Any], world: World, *, seconds: float) -> dict[str, Gain]:
        calls.append(([word for word in variants if "threads" in word], world.size, seconds))
        return {}

    calls: list[Any] = []
    monkeypatch.setattr(settings, "tried", tried)
    monkeypatch.setattr(settings, "cores", lambda: 8)
    settings.other_settings(resolved(*FAKE_JOB, "launcher.threads=2"), replace(World.solo(), size=2, local_size=2))
    assert calls == [(["launcher.threads=1", "launcher.threads=4"], 2, 5.0)]


@pytest.mark.parametrize(
    ("device", "backend", "strategy", "between"),
    [
        ("cuda", "nccl", None, [(2, True)]),
        ("cuda", "gloo", None, [(2, False)]),
        ("cuda", "nccl", examination.DataParallel(), [(3, True)]),
        ("cpu", "gloo", examination.DataParallel(), []),
    ],
)
def test_the_paths_of_the_gpus_of_a_job_are_tried_with_its_backend(
    device: str, backend: str, strategy: Any, between: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: ((60 + number) * 10**9, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "H100")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    calls: list[Any] = []
    monkeypatch.setattr(
        examination, "_between_gpus", lambda number, *, with_nccl: calls.append((number, with_nccl)) or []
    )
    launcher = SimpleNamespace(ranks=2, threads=1, backend=backend)
    job: Any = SimpleNamespace(launcher=launcher, strategy=strategy, device=device)
    texts = [item.text for item in examination.devices(job)][1:]
    numbers = range(between[0][0] if between else 0)
    assert texts == [f"GPU {n}, H100, {60 + n}.0 GB of 80.0 GB free: another process uses it" for n in numbers]
    assert calls == between


@pytest.mark.parametrize(("value", "level"), [("0", "error"), ("1", "warning"), (None, "error")])
def test_broken_copies_are_a_warning_only_where_p2p_is_off(
    value: str | None, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "_copies", lambda *values: False)
    monkeypatch.setattr(examination, "name_in_nvml", str)
    monkeypatch.setattr(examination, "path_between", lambda first, second: "NVLink")
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    if value is not None:
        monkeypatch.setenv("NCCL_P2P_DISABLE", value)
    _, copies = examination._between_gpus(2, with_nccl=False)
    assert copies.level == level
    assert copies.text.startswith(
        "numbers that are copied from GPU 0 to 1, 1 to 0 arrive changed: set NCCL_P2P_DISABLE=1"
    )


@pytest.mark.parametrize(
    ("word", "steps", "devices"),
    [
        ("seed=1,2", 1, 1),
        ("name=a,b", 1, 1),
        ("epochs=2,3", 2, 1),
        ("steps=5,6", 2, 1),
        ("budget.hours=1,2", 2, 1),
        ("train.eval_batch=8,16", 2, 1),
        ("augment=none,shift", 2, 1),
        ("dataset.examples=32,48", 2, 1),
        ("launcher.threads=1,2", 2, 2),
    ],
)
def test_a_step_is_tried_once_for_jobs_whose_steps_take_the_same(
    word: str, steps: int, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def noted(name: str) -> Callable[[Any], Iterator[Any]]:
        def check(job: Any) -> Iterator[Any]:
            calls.append(name)
            yield inspection.Finding(name, "seen")

        return check

    for name in ("step", "devices"):
        monkeypatch.setattr(examination, name, noted(name))

    def look(source: Any, seconds: float) -> list[Any]:
        sources.append((source, seconds))
        return [inspection.Finding("images", "seen")]

    sources: list[Any] = []
    monkeypatch.setattr("lockstep.diagnostics.doctor.inspect", look)
    checkup = examined("dataset=fake", "dataset.examples=64", word, multirun=True, look_s=9.0)
    assert (calls.count("step"), calls.count("devices")) == (steps, devices)
    examples = [32, 48] if "dataset" in word else [64]
    assert [(source.examples, seconds) for source, seconds in sources] == [(number, 9.0) for number in examples]
    assert [jobs for item, jobs in checkup.findings.items() if item.check == "step"] == [[0, 1]]


def test_a_line_needs_the_seconds_and_the_bytes_of_all_its_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, places = iter([60.0, 5000.0]), list[Any]()
    monkeypatch.setattr(
        examination, "step", lambda job: iter([inspection.Finding("time", f"{job.seed}", amount=next(seconds))])
    )
    monkeypatch.setattr(
        examination, "batches", lambda job, resume: iter([inspection.Finding("files", "some", amount=5.0)])
    )
    monkeypatch.setattr(examination, "folder", lambda *facts: places.append(facts) or iter([]))
    words = ("dataset=fake", f"output_root={tmp_path}")
    checkup = examined(*words, "epochs=1,2", multirun=True, free=len)
    total = inspection.Finding("time", "1:24:20 for the jobs that were tried, one after another", amount=5060.0)
    assert checkup.findings[total] == [0, 1]
    assert places == [(tmp_path, 10.0, len)]
    seconds = iter([60.0])
    assert not [item for item in examined(*words).findings if "for the jobs" in item.text], "one job has its own time"


@pytest.mark.parametrize(("everything", "look_s"), [(False, 16.0), (True, math.inf)])
@pytest.mark.parametrize("form", ["table", "json"])
def test_findings_are_shown_with_their_jobs_and_their_errors_are_counted(
    form: str,
    everything: bool,
    look_s: float,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = inspection.Finding("disk", "it is full", Level.error, 3.0, ("a.jpg",))
    calls: list[Any] = []

    def examine(checkup: Checkup, words: Any, *, multirun: bool) -> None:
        calls.append((words, multirun, checkup.look_s))
        checkup.jobs = [["seed=1"], ["seed=2"]]
        checkup.findings = {inspection.Finding("keys", "they fit"): [0, 1], error: [1]}
        checkup.findings |= {inspection.Finding("time", "long", Level.warning): [0, 1]}
        checkup.findings |= {inspection.Finding("port", "in use", Level.error): [0, 1]} if everything else {}

    monkeypatch.setattr(Checkup, "examine", examine)
    errors = "2 errors" if everything else "1 error"
    with pytest.raises(InputError, match=rf"^a run would not start: {errors}$"):
        doctor(["seed=1,2"], multirun=True, everything=everything, form=form)
    assert calls == [(["seed=1,2"], True, look_s)]
    out = capsys.readouterr().out
    if form == "json":
        shown = json.loads(out)
        assert shown["jobs"] == [["seed=1"], ["seed=2"]]
        facts = {
            "check": "disk",
            "text": "it is full",
            "level": "error",
            "amount": 3.0,
            "paths": ["a.jpg"],
            "jobs": [1],
        }
        assert shown["findings"][1] == facts
        assert len(shown["findings"]) == 3 + everything
    else:
        assert out.splitlines()[:3] == [
            "ok       keys     they fit",
            "error    disk     it is full (job 1: seed=2)",
            "warning  time     long",
        ]


def test_an_error_is_red_a_warning_yellow_and_what_is_right_green(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[Any] = []
    monkeypatch.setattr("lockstep.core.console.terminal.print", lambda line, **_: lines.append(line))
    levels = [Level.ok, Level.warning, Level.error]

    def examine(checkup: Checkup, words: Any, *, multirun: bool) -> None:
        checkup.jobs = [["seed=1"]]
        checkup.findings = {inspection.Finding("disk", "some", level): [0] for level in levels}

    monkeypatch.setattr(Checkup, "examine", examine)
    with pytest.raises(InputError):
        doctor([], multirun=False, everything=False, form="table")
    spans = [(line.plain[span.start : span.end], span.style) for line in lines for span in line.spans]
    assert spans == [("ok", "green"), ("warning", "yellow"), ("error", "red")]


def test_a_long_finding_is_continued_below_its_own_column(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[Any] = []
    monkeypatch.setattr("lockstep.core.console.terminal.print", lambda line, **_: lines.append(line))
    monkeypatch.setattr("lockstep.core.log.has_terminal", lambda stream="stdout": True)
    monkeypatch.setattr("lockstep.core.log.width", lambda: 40)

    def examine(checkup: Checkup, words: Any, *, multirun: bool) -> None:
        checkup.jobs = [["seed=1"]]
        checkup.findings = {inspection.Finding("disk", "there is room for all of the files"): [0]}

    monkeypatch.setattr(Checkup, "examine", examine)
    doctor([], multirun=False, everything=False, form="table")
    assert lines[0].plain.splitlines() == [
        "ok       disk     there is room for all",
        "                  of the files",
    ]


@pytest.mark.parametrize("lacking", [None, "train", "val"])
def test_all_classes_are_said_to_have_images_only_where_every_split_has_all(lacking: str | None) -> None:
    train, val = Images("train", b"a", b"b", b"c"), Images("val", b"d", b"e")
    for split in (train, val):
        split.labels = torch.tensor([0, 1, 1][: len(split)])
        if split.prefix == lacking:
            split.labels[:] = 1
    facts = {"targets": "classes", "train": lambda: train, "eval": lambda: val, "test": lambda: None}
    source: Any = Source(**facts, notes=list)
    texts = [item.text for item in inspection.inspect(source, 60) if (item.check, item.level) == ("classes", "ok")]
    assert texts == ["all 2 have images in every split: 3 to train on, 2 to evaluate"] * (lacking is None)


@pytest.mark.parametrize(("downloads", "level"), [(True, "warning"), (False, "error")])
def test_data_that_are_missing_are_an_error_unless_a_run_would_fetch_them(downloads: bool, level: str) -> None:
    def missing() -> Any:
        raise InputError("no data")

    source: Any = Source(train=missing, downloads=downloads)
    assert [(item.check, item.level, item.text) for item in inspection.inspect(source, 60)] == [
        ("data", level, "no data")
    ]


def test_half_of_the_time_is_for_decoding_and_half_for_images_that_are_there_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(inspection, "_broken", lambda splits, seconds: calls.append(seconds) or [])
    monkeypatch.setattr(inspection, "_repeated", lambda images, seconds: calls.append(seconds) or [])
    [*inspection.inspect(Source(), 7.0)]  # type: ignore[arg-type]
    assert calls == [3.5, 3.5]
